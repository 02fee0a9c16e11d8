"""The Python of this process, the one that Spark runs, and the versions of the packages."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from importlib import metadata, util

from packaging.requirements import Requirement

from connector.workers import workers
from txmq.doctor.finding import Finding, hint, ok, problem

OLDEST = (3, 10)
EXTRAS = ("kafka", "connect", "fast")  # of users; what an extra needs may be absent
_MODULES = {"delta-spark": "delta"}  # where it is not the name of the package


def python() -> Iterator[Finding]:
    found = f"{sys.version.split()[0]} ({sys.executable})"
    if sys.version_info[:2] < OLDEST:
        yield problem("python", found, "use Python {}.{} or later".format(*OLDEST))
    elif not sys.platform.startswith("linux"):
        yield hint("python", f"{found} on {sys.platform}", "txmq is tested on Linux only")
    else:
        yield ok("python", found)


def spark_python() -> Iterator[Finding]:
    """The Python of data sources and tasks."""
    for worker in workers():
        if worker.problem:
            yield problem(
                "worker",
                f"Spark runs {worker}, which {worker.problem}",
                f"before Spark starts, {worker.advice()}",
            )
        else:
            yield ok("worker", f"Spark runs {worker}, which has txmq")


def packages() -> Iterator[Finding]:
    """What txmq requires, compared with what is installed."""
    try:
        required = [Requirement(text) for text in metadata.requires("txmq") or ()]
    except metadata.PackageNotFoundError:
        yield hint("packages", "txmq is found by PYTHONPATH and is not installed", "pip install it")
        return
    needs = ("", "spark") if util.find_spec("pyspark") else ("",)
    fitting = []
    for each in required:
        if not _is_of(each, (*needs, *EXTRAS)):
            continue
        version = installed(each.name)
        if version is not None and each.specifier.contains(version, prereleases=True):
            fitting.append(f"{each.name} {version}")
        elif version is not None:
            yield problem(
                "packages", f"{each.name} {version} is not {each.specifier}", f"pip install '{_plain(each)}'"
            )
        elif _is_of(each, needs) and not _brought_by_platform(each):
            yield problem("packages", f"{each.name} is not installed", f"pip install '{_plain(each)}'")
    if fitting:
        yield ok("packages", ", ".join(fitting))


def _is_of(requirement: Requirement, extras: Iterable[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)


def _brought_by_platform(requirement: Requirement) -> bool:
    """Whether this is a package of Spark that is importable without being installed."""
    return requirement.marker is not None and bool(
        util.find_spec(_MODULES.get(requirement.name, requirement.name))
    )


def installed(name: str) -> str | None:
    """The version of a package, None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _plain(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"
