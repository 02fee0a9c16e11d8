"""What the Python processes of tests do at their start: Python runs this file, because its folder is on PYTHONPATH
(``tests/conftest.py``). A query of a test starts half a dozen of them, each for a moment.

- They import the installed pyspark. Spark puts ``pyspark.zip`` in front of their path, and a module from an archive
  is compiled in each process: a second of CPU for each query.
- Those of Spark are forks of a process that has imported what they need, if a test says so.
- ``spark-pipelines`` finds its server at the port that its test has chosen. Spark's own client knows a fixed one.
- They collect garbage less often: most of it is found while modules are imported, where there is none.
"""

from __future__ import annotations

import gc
import os
import sys

sys.path[:] = [entry for entry in sys.path if not entry.endswith(("pyspark.zip", "-src.zip"))]
gc.set_threshold(50_000, 20, 20)

if (
    sys.orig_argv[1:2] == ["-m"]
    and sys.orig_argv[2].startswith("pyspark.")
    and "TXMQ_TEST_FORKS" in os.environ
):
    from standing_in import stand_in

    stand_in(os.environ["TXMQ_TEST_FORKS"])

if (
    sys.orig_argv[1:]
    and sys.orig_argv[1].endswith("pipelines/cli.py")
    and "TXMQ_TEST_CONNECT_PORT" in os.environ
):
    from pyspark.sql.connect.client import DefaultChannelBuilder

    DefaultChannelBuilder.default_port = staticmethod(lambda: int(os.environ["TXMQ_TEST_CONNECT_PORT"]))  # type: ignore[method-assign]
