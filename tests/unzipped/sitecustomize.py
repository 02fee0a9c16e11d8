"""Spark's Python processes import the installed pyspark, and not the same files in ``pyspark.zip``.

Spark puts the archive in front of their path. A module from an archive is compiled in each process, which is a
second of CPU for each query that a test starts. Python runs this file at its start, because its folder is on
PYTHONPATH (``tests/conftest.py``).
"""

from __future__ import annotations

import sys

sys.path[:] = [entry for entry in sys.path if not entry.endswith(("pyspark.zip", "-src.zip"))]
