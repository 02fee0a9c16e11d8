"""Jars by Ivy, for the JVMs of benchmarks and tests.

``python -m bench.jars`` brings those of Delta into the cache; with ``--submit`` it also prints the
PYSPARK_SUBMIT_ARGS of sessions that have them on the class path.
``python -m bench.jars --pin COORDINATE ...`` adds the sums of what these resolve to, for a commit to review.
Not here: what is started with them. Needs only a JDK.
Invariant: each jar that is returned is the one of ``jars.sha256``, whoever has written to the cache.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import util
from importlib.metadata import version
from pathlib import Path

RESOLVE = """
from pyspark.java_gateway import launch_gateway

gateway = launch_gateway()  # Spark asks Ivy before it listens, and nothing here needs a session
print("jars " + gateway.jvm.java.lang.System.getProperty("spark.jars"))
gateway.shutdown()
gateway.proc.stdin.close()
gateway.proc.wait()
"""
_SPARK = util.find_spec("pyspark")
assert _SPARK is not None and _SPARK.origin is not None
SUMS = Path(__file__).with_suffix(".sha256")  # lines as those of sha256sum
SPARK_JARS = Path(_SPARK.origin).parent / "jars"  # pyspark itself is slow to import


def delta() -> str:
    """The coordinate that ``configure_spark_with_delta_pip`` asks for."""
    spark = ".".join(version("pyspark").split(".")[:2])
    return f"io.delta:delta-spark_{spark}_2.13:{version('delta-spark')}"


def resolve(coordinates: Sequence[str], excludes: str = "") -> list[str]:
    """Paths of the jars of ``coordinates`` and of their dependencies. Raises SystemExit if one is not found,
    or is not the one that is pinned.
    """
    jars = _resolved(coordinates, excludes)
    verify(jars, pinned())
    return jars


def pinned(sums: Path = SUMS) -> dict[str, str]:
    """SHA-256 of each jar, by its name in the cache of Ivy."""
    return {name: checksum for checksum, name in map(str.split, sums.read_text().splitlines())}


def verify(jars: Iterable[str], sums: Mapping[str, str]) -> None:
    """Raises SystemExit for a jar that has another sum, or none."""
    for path in map(Path, jars):
        found, expected = _sum(path), sums.get(path.name)
        if expected is None:
            raise SystemExit(
                f"{path} has no checksum in bench/{SUMS.name}: review it, then add it with "
                "python -m bench.jars --pin"
            )
        if found != expected:
            raise SystemExit(
                f"{path} is not the jar that is pinned: its SHA-256 is {found}, bench/{SUMS.name} has "
                f"{expected}. Nothing was started; delete it, and find out who has changed it"
            )


def submit_arguments(java_options: str = "") -> str:
    """The value of PYSPARK_SUBMIT_ARGS of sessions with Delta on the class path: an archive can have its
    classes, and Ivy is not asked again.
    """
    words = ["--conf", "spark.jars.packages="]
    words += ["--driver-class-path", os.pathsep.join(missing_in_spark(resolve([delta()])))]
    if java_options:
        words += ["--driver-java-options", java_options]
    return shlex.join([*words, "pyspark-shell"])


def pin(jars: Iterable[str], sums: Path = SUMS) -> None:
    """Adds the jars that have no sum yet. Raises SystemExit for one that has another."""
    known = pinned(sums)
    added = {path.name: _sum(path) for path in map(Path, jars)}
    verify([path for path in jars if Path(path).name in known], known)
    lines = [f"{checksum}  {name}\n" for name, checksum in sorted((added | known).items())]
    sums.write_text("".join(lines))


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.sha256(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)).hexdigest()


def _resolved(coordinates: Sequence[str], excludes: str) -> list[str]:
    """The paths are kept beside the interpreter, because asking Ivy takes a JVM and seconds."""
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
    packages, excludes = asked
    words = ["--packages", packages, *(["--exclude-packages", excludes] if excludes else []), "pyspark-shell"]
    asking = {**os.environ, "PYSPARK_SUBMIT_ARGS": shlex.join(words)}
    done = subprocess.run([sys.executable, "-c", RESOLVE], capture_output=True, text=True, env=asking)
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


if __name__ == "__main__":
    if sys.argv[1:2] == ["--pin"]:
        pin(_resolved(sys.argv[2:], ""))
    elif sys.argv[1:] == ["--submit"]:
        print(submit_arguments())
    else:
        resolve([delta()])
