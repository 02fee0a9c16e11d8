"""Jars by Ivy, for the JVMs of benchmarks and tests.

Not here: what is started with them. Needs only a JDK.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import util
from pathlib import Path

RESOLVE = """
import sys
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
builder = builder.config("spark.jars.packages", sys.argv[1])
if sys.argv[2]:
    builder = builder.config("spark.jars.excludes", sys.argv[2])
spark = builder.getOrCreate()
print("jars " + spark.sparkContext.getConf().get("spark.jars"))
spark.stop()
"""
_SPARK = util.find_spec("pyspark")
assert _SPARK is not None and _SPARK.origin is not None
SPARK_JARS = Path(_SPARK.origin).parent / "jars"  # pyspark itself is slow to import


def resolve(coordinates: Sequence[str], excludes: str = "") -> list[str]:
    """Paths of the jars of ``coordinates`` and of their dependencies. Raises SystemExit if one is not found.

    They are kept beside the interpreter, because asking Ivy starts a session.
    """
    asked = [",".join(coordinates), excludes]
    key = hashlib.sha256(" ".join(asked).encode()).hexdigest()[:12]
    known = Path(sys.prefix) / f"jars-{key}.txt"
    jars = known.read_text().splitlines() if known.exists() else []
    if not jars or not all(map(os.path.exists, jars)):
        jars = _ask_ivy(asked)
        mine = known.with_suffix(f".{os.getpid()}")
        mine.write_text("\n".join(jars))
        mine.replace(known)
    return jars


def _ask_ivy(asked: Sequence[str]) -> list[str]:
    plain = {name: value for name, value in os.environ.items() if name != "PYSPARK_SUBMIT_ARGS"}
    done = subprocess.run([sys.executable, "-c", RESOLVE, *asked], capture_output=True, text=True, env=plain)
    found = [line for line in done.stdout.splitlines() if line.startswith("jars ")]
    if not found:
        raise SystemExit(f"cannot resolve {asked[0]}:\n{done.stderr[-3000:]}")
    return [path.removeprefix("file://") for path in found[0].removeprefix("jars ").split(",")]


def missing_in_spark(jars: Iterable[str]) -> list[str]:
    """Those of ``jars`` that Spark does not have itself, in any version."""
    own = {_artifact(path.name) for path in SPARK_JARS.glob("*.jar")}
    # Ivy puts the organisation in front: org.apache.kafka_kafka-clients-4.3.1.jar
    return [path for path in jars if _artifact(Path(path).name.partition("_")[2]) not in own]


def _artifact(name: str) -> str:
    return re.sub(r"-\d.*", "", name)
