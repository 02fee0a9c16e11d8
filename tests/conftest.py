"""What every test shares: the seed, the soak switch, the Spark session, the guard against reads under a lock,
and the check that no process outlives the run.

Not here: brokers or data; each folder brings its own. A process has one Spark context, and a second fixture
that starts a session would get the same one, and stop it under the tests of the first: so it is here, once,
for all folders.
Invariant: every process that a test starts inherits ``TXMQ_TEST_RUN``, so what is left at the end can be
found and fails the run.
"""

from __future__ import annotations

import os
import random
import sys
import time
import uuid
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests import durations, forked, gates, jvm, reading

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LEFTOVER_GRACE_S = 20.0
# fixtures of which many tests of a file ask something: in the soak one worker makes each, once
OUTCOMES = {"outcome", "outcomes", "on_kafka", "embedded", "recovered"}

# The file system is the one without checksums: for each file and its checksum, the other one runs processes that read
# a link and set a mode. The sessions of a notebook, of the demo and of test_embedded.py are as those of users.
SESSION_CONF = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "1",  # the tasks of a VACUUM: 10,000 by default
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.hadoop.fs.AbstractFileSystem.file.impl": "org.apache.hadoop.fs.local.RawLocalFs",
    "spark.log.level": "OFF",
}

# A run starts hundreds of processes: none of them compiles the sources again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
jvm.use_startup()
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads cost more than all that a test multiplies
os.environ.setdefault("TXMQ_TEST_RUN", uuid.uuid4().hex)
jvm.use_archive()

# No example is too slow on a machine that is busy with something else.
QUIET = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed", type=int, default=None, help="repeat a run with random choices (printed with every failure)"
    )
    parser.addoption(
        "--soak-rounds", type=int, default=0, help="run the tests marked soak with so many rounds"
    )


def pytest_configure(config: pytest.Config) -> None:
    # The gate says whether a change is good, so it draws the same examples each time; the soak draws others.
    gates.load_profile(config.getoption("--soak-rounds"), QUIET)
    if config.getoption("--seed") is None:
        inherited = getattr(config, "workerinput", {}).get("txmq_seed")
        config.option.seed = inherited if inherited is not None else random.SystemRandom().randrange(2**32)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: object) -> None:  # xdist: all workers share the seed of the controller
    node.workerinput["txmq_seed"] = node.config.option.seed  # type: ignore[attr-defined]


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.getoption('--seed')} (repeat with --seed)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with Spark and with crashes are long and busy, those others wait more than they work; those with ``slow``
    are the longest of their kind. So both kinds run at the same time, and at the end only short ones (with xdist's ``--no-loadscope-reorder``).
    """
    gates.thin_out(items)
    slow_first = sorted(items, key=lambda item: item.get_closest_marker("slow") is None)
    long = {
        item.path: None
        for item in slow_first
        if item.get_closest_marker("spark") or item.get_closest_marker("crash")
    }
    short = {item.path: None for item in slow_first if item.path not in long}
    place = {path: number / len(long) for number, path in enumerate(long)}
    place |= {path: 1.25 * number / len(short) for number, path in enumerate(short)}
    items.sort(key=lambda item: place[item.path])
    if config.getoption("--soak-rounds"):
        for item in items:
            if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
                item.add_marker("soak")
            if not OUTCOMES.isdisjoint(getattr(item, "fixturenames", ())):
                item.add_marker(pytest.mark.xdist_group(str(item.path)))
        return
    skip = pytest.mark.skip(reason="only in `make soak`")
    for item in items:
        if item.get_closest_marker("soak"):  # a keyword is also the name of a directory
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and "seed" in getattr(item, "fixturenames", ()):
        report.sections.append(("seed", f"repeat with --seed {item.config.getoption('--seed')}"))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [
        report
        for found in terminalreporter.stats.values()
        for report in found
        if isinstance(report, pytest.TestReport)
    ]
    for line in durations.lines(reports):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session", autouse=True)
def watched() -> Iterator[None]:
    """No broker of this process reads the disk under the lock of its state (``reading.py``)."""
    with pytest.MonkeyPatch.context() as patch:
        reading.guard(patch)
        yield


@pytest.fixture(autouse=True)
def no_read_under_a_lock(watched: None) -> Iterator[None]:
    yield
    found, reading.found[:] = list(reading.found), []
    assert not found


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this run; print nothing, a failure names it."""
    value: int = request.config.getoption("--seed")
    return value


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> int:
    """How many rounds a soak test runs."""
    value: int = request.config.getoption("--soak-rounds")
    return value


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The session of this process: two tasks at a time, each tried four times as in a cluster, and it knows Delta."""
    from tests.spark.jobs import PLANNED_ONCE
    from tests.spark.sessions import CONNECT, start

    settings = {**SESSION_CONF, "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse"))}
    settings |= {"spark.master": "local[2,4]", **(PLANNED_ONCE if CONNECT else {})}
    with forked.spark_forks():
        session = start("txmq tests", settings)
    yield session
    session.stop()


@pytest.fixture(scope="session")
def kafka_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Kafka of this process, one node; tests make topics of their own."""
    from tests.kafka.bench.real_node import real_cluster

    with real_cluster(tmp_path_factory.mktemp("kafka"), heap="512m") as started:
        yield f"kafka://{started.bootstrap}"


def _leftovers() -> list[psutil.Process]:
    """Processes of this run that are brokers, or that nobody of this run will end."""
    mine = {process.pid for process in psutil.Process().children(recursive=True)} | {os.getpid()}
    mine |= {process.pid for process in psutil.Process().parents()}
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.status() == psutil.STATUS_ZOMBIE
                or process.environ().get("TXMQ_TEST_RUN") != os.environ["TXMQ_TEST_RUN"]
            ):
                continue
            command = process.cmdline()
            if process.pid not in mine or ("serve" in command and any("txmq" in word for word in command)):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput") or os.environ.get("PYTEST_XDIST_WORKER"):
        return  # the controller looks, once, when the workers are gone
    deadline = time.monotonic() + LEFTOVER_GRACE_S
    while (left := _leftovers()) and time.monotonic() < deadline:
        time.sleep(0.2)
    if not left:
        return
    for process in left:
        print(
            f"\nleft behind by the tests: pid {process.pid}: {' '.join(process.cmdline())[:200]}",
            file=sys.stderr,
        )
        process.kill()
    session.exitstatus = pytest.ExitCode.TESTS_FAILED
