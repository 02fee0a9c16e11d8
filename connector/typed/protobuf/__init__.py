"""Protobuf: types of message as types of Spark, and bodies both ways."""
