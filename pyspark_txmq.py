"""Spark looks for modules named ``pyspark_*`` and takes their ``DefaultSource``: so ``format("txmq")`` works with nothing registered."""

from connector.datasource import TxmqDataSource as DefaultSource

__all__ = ["DefaultSource"]
