"""The JDK, Spark's jars and Delta's jar: whether their versions fit each other.

Invariant: no JVM is started but ``java -version``; nothing is downloaded.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from importlib import util
from pathlib import Path

from txmq.doctor.finding import Finding, hint, ok, problem
from txmq.doctor.python import installed

OLDEST = 17
INSTALL = f"install a JDK {OLDEST} or later, and set JAVA_HOME to it"
DELTA = re.compile(r"io\.delta:(delta-(?:spark|core)_[\w.]+):([\w.]+)")
# where Spark's Ivy keeps jars, unless spark.jars.ivy says otherwise
IVY = (".ivy2.5.2", ".ivy2")


def java() -> Iterator[Finding]:
    """The java that Spark starts: that of JAVA_HOME, else of the PATH."""
    home = os.environ.get("JAVA_HOME")
    path = shutil.which(os.path.join(home, "bin", "java") if home else "java")
    if path is None:
        where = f"JAVA_HOME={home} has no bin/java" if home else "no java is on the PATH"
        yield problem("java", where, INSTALL)
        return
    try:
        done = subprocess.run(
            [path, "-version"], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
        )
        text = done.stderr + done.stdout
    except (OSError, subprocess.SubprocessError) as error:
        text = str(error)
    version = re.search(r'version "(?:1\.)?(\d+)[^"]*"', text)
    if version is None:
        yield problem("java", f"{path} does not print its version: {' '.join(text.split())[:200]}", INSTALL)
    elif int(version[1]) < OLDEST:
        yield problem("java", f"{path} is JDK {version[1]}", INSTALL)
    else:
        yield ok("java", f"JDK {version[1]} ({path})")


def jars() -> Iterator[Finding]:
    """Nothing if pyspark or delta-spark is missing: the check of the packages says that."""
    home = spark_home()
    if home is None:
        return
    if not (home / "jars").is_dir():
        yield hint("spark", f"{home} has no jars", "this pyspark is a client of Spark Connect alone")
        return
    cores = sorted((home / "jars").glob("spark-core_*.jar"))
    found = [re.fullmatch(r"spark-core_([\d.]+)-(.+)\.jar", path.name) for path in cores]
    versions = [match.groups() for match in found if match is not None]
    pyspark = installed("pyspark")
    if pyspark is None:
        return
    if [version for _, version in versions] != [pyspark]:
        names = ", ".join(path.name for path in cores) or "no spark-core"
        yield problem("spark", f"{home}/jars has {names}, and pyspark is {pyspark}", _same_spark())
        return
    yield ok("spark", f"{pyspark} ({home})")
    version = installed("delta-spark")
    if version is None:
        return
    scala = versions[0][0]
    artifact = f"delta-spark_{'.'.join(pyspark.split('.')[:2])}_{scala}"
    yield from _delta(home, artifact, version)


def spark_home() -> Path | None:
    """The Spark that pyspark starts: SPARK_HOME, else the one in pyspark."""
    chosen = os.environ.get("SPARK_HOME")
    if chosen:
        return Path(chosen)
    spec = util.find_spec("pyspark")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _same_spark() -> str:
    if os.environ.get("SPARK_HOME"):
        return "unset SPARK_HOME, or set it to a Spark of the same version as pyspark"
    return "install pyspark again"


def _delta(home: Path, artifact: str, version: str) -> Iterator[Finding]:
    jar = f"{artifact}-{version}.jar"
    wrong = [
        f"{place} names {name}:{number}"
        for place, text in _settings(home, os.environ).items()
        for name, number in DELTA.findall(text)
        if (name, number) != (artifact, version)
    ]
    own = [
        path.name for pattern in ("delta-spark_*", "delta-core_*") for path in (home / "jars").glob(pattern)
    ]
    wrong += [f"{home}/jars has {name}" for name in own if name != jar]
    cached = [
        path
        for folder in IVY
        for pattern in (f"jars/io.delta_{jar}", f"cache/io.delta/{artifact}/jars/{jar}")
        for path in (Path.home() / folder).glob(pattern)
    ]
    if wrong:
        advice = f"delta-spark {version} and this Spark need {jar} (io.delta:{artifact}:{version})"
        yield problem("delta", "; ".join(wrong), advice)
    elif own:
        yield ok("delta", f"{home}/jars/{jar}")
    elif cached:
        yield ok("delta", f"{cached[0]}, for sessions of delta.configure_spark_with_delta_pip")
    else:
        yield hint(
            "delta",
            f"{jar} is not on this machine yet",
            "the first session of delta.configure_spark_with_delta_pip downloads it from Maven Central; "
            f"without a network, put it and delta-storage-{version}.jar into {home}/jars",
        )


def _settings(home: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The texts that may name packages for every session, by where they stand."""
    folder = Path(environment.get("SPARK_CONF_DIR") or home / "conf")
    found = {"PYSPARK_SUBMIT_ARGS": environment.get("PYSPARK_SUBMIT_ARGS", "")}
    try:
        text = (folder / "spark-defaults.conf").read_text()
    except OSError:
        return found
    entries = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return {**found, str(folder / "spark-defaults.conf"): "\n".join(entries)}
