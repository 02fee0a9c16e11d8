"""A notebook as a plain script, but where there is a ``display``: ``python -m tests.spark.displaying_notebook NOTEBOOK``
prints each frame that is displayed as a line of JSON, with DISPLAYED in front.
"""

from __future__ import annotations

import json
import runpy
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a notebook on Spark Connect has no JVM, and says so before Spark is imported
    from pyspark.sql import DataFrame

DISPLAYED = "displayed: "


def display(frame: DataFrame) -> None:
    print(DISPLAYED + json.dumps([row.asDict() for row in frame.collect()]), flush=True)


if __name__ == "__main__":
    runpy.run_path(sys.argv[1], {"display": display}, "__main__")
