"""Spark Structured Streaming on the engine port."""
