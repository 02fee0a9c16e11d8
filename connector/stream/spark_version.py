"""What differs between the versions of Spark. Nothing else reads the version of Spark in this process.

Not here: how it asks a stream for an end (``with_admission_control.py``, ``without_admission_control.py``).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pyspark

from broker_core.core.errors import OptionError

if TYPE_CHECKING:
    from connector.options import ReadOptions
    from connector.stream.source import StreamReader


def stream_reader(options: ReadOptions) -> StreamReader:
    """The reader of a stream for this Spark."""
    if has_admission_control():
        from connector.stream.with_admission_control import AdmittedReader

        return AdmittedReader(options)
    from connector.stream.without_admission_control import UnadmittedReader

    return UnadmittedReader(options)


def require() -> None:
    """Raises OptionError before Spark 4.1, whose Python sources and sinks have no record batches."""
    from pyspark.sql import datasource

    if not hasattr(datasource, "DataSourceStreamArrowWriter"):
        raise OptionError(
            f"format('txmq') needs Spark 4.1 or later, and this is Spark {pyspark.__version__}",
            "use pyspark 4.1 or 4.2",
        )


def input_partition(partition: Any) -> Any:
    """The input partition of a partition of ``DataSourceRDD``, as an Option of Scala."""
    if has_admission_control():
        return partition.inputPartition()
    return partition.inputPartitions().headOption()


def has_admission_control() -> bool:
    return find_spec("pyspark.sql.streaming.datasource") is not None
