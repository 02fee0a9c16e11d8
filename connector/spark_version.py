"""Which way the Spark of this process asks a stream for the end of its next micro-batch. Nothing else asks
for its version.

Not here: the ways (``admitted.py``, ``unadmitted.py``).
"""

from __future__ import annotations

from importlib.util import find_spec

import pyspark

from broker_core.errors import OptionError
from connector.options import ReadOptions
from connector.source import StreamReader


def stream_reader(options: ReadOptions) -> StreamReader:
    """The reader of a stream for this Spark."""
    if _has_admission_control():
        from connector.admitted import AdmittedReader

        return AdmittedReader(options)
    from connector.unadmitted import UnadmittedReader

    return UnadmittedReader(options)


def require() -> None:
    """Raises OptionError before Spark 4.1, whose Python sources and sinks have no record batches."""
    if not _has_record_batches():
        raise OptionError(
            f"format('txmq') needs Spark 4.1 or later, and this is Spark {pyspark.__version__}",
            "use pyspark 4.1 or 4.2",
        )


def _has_admission_control() -> bool:
    return find_spec("pyspark.sql.streaming.datasource") is not None


def _has_record_batches() -> bool:
    from pyspark.sql import datasource

    return hasattr(datasource, "DataSourceStreamArrowWriter")
