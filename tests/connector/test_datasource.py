"""What the processes of Spark import of txmq: one looks up the data sources for every job of Spark, and each
process of a query imports the reader.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

ARROW = ("numpy", "pandas", "pyarrow", "pyarrow.compute", "pyarrow.parquet")
READER = "import connector.stream.spark_version as v; from connector.options import read_options;" + (
    " v.stream_reader(read_options({'url': 'txmq://h:1', 'queue': 'q', 'appId': 'a'}, 'stream read'))"
)


@pytest.mark.parametrize(
    ("program", "loaded"),
    [("from pyspark_txmq import DefaultSource", []), (READER, ["numpy", "pyarrow"])],
    ids=["lookup", "reader"],
)
def test_a_process_of_spark_loads_of_arrow_what_it_needs(program: str, loaded: list[str]) -> None:
    found = f"import sys; {program}; print([name for name in {ARROW} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", found], capture_output=True, text=True, check=True)
    assert done.stdout == f"{loaded}\n"
