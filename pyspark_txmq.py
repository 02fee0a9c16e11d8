"""Spark takes ``DefaultSource`` from modules named ``pyspark_*``: ``format("txmq")`` works at once."""

from connector.datasource import TxmqDataSource as DefaultSource

__all__ = ["DefaultSource"]
