"""The official Java client, unmodified, from Maven Central: the programs in ``java/``, and its automatic
recovery from a kill.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pika
import pytest

from tests.interop.conftest import REFUSED, Encrypted
from tests.interop.jdk import class_path, compiled
from tests.interop.programs import Programs, checks_of, programs, run

pytestmark = pytest.mark.soak  # of another language: minutes to build and run

SOURCES = Path(__file__).parent / "java"
PROGRAMS = ("Transactions", "Confirms", "Consumers", "Errors", "Routing", "Recovery")
CHECKS = {program: checks_of(SOURCES / f"{program}.java") for program in PROGRAMS}
CLIENT = ("com.rabbitmq:amqp-client:5.37.0", "org.slf4j:slf4j-nop:2.0.17")


@pytest.fixture(scope="module")
def jars() -> str:
    """The class path of the client."""
    return class_path(CLIENT)


@pytest.fixture(scope="module")
def java(jars: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Programs, str]]:
    """The programs, and the class path with which they run."""
    classpath = compiled(SOURCES.glob("*.java"), jars, tmp_path_factory.mktemp("classes"))
    with programs(SOURCES, tmp_path_factory.mktemp("java") / "data") as found:
        yield found, classpath


@pytest.mark.parametrize(
    ("program", "check"),
    [
        pytest.param(program, check, id=check, marks=[pytest.mark.crash] if program == "Recovery" else [])
        for program, checks in CHECKS.items()
        for check in checks
    ],
)
def test_java_client(java: tuple[Programs, str], program: str, check: str) -> None:
    found, classpath = java
    found.ended(program, ["java", "-cp", classpath, program], kills=program == "Recovery").verdict(check)


@pytest.mark.parametrize("program", PROGRAMS)
def test_java_program_comes_to_all_its_checks_and_no_others(java: tuple[Programs, str], program: str) -> None:
    found, classpath = java
    found.ended(program, ["java", "-cp", classpath, program], kills=program == "Recovery").complete(
        CHECKS[program]
    )


def test_java_example_consumes_publishes_acks_and_commits(java: tuple[Programs, str], jars: str) -> None:
    found, _ = java
    with pika.BlockingConnection(pika.URLParameters(found.url)) as connection:
        for queue in ("orders", "invoices"):
            connection.channel().queue_delete(queue)
    ended = run(["java", "-cp", jars, "Example.java", found.url], SOURCES)
    assert (ended.lines, ended.code) == (["0 orders, 10 invoices"], 0), ended.words


@pytest.mark.txmq_only
def test_java_over_amqps_does_what_its_permissions_allow(
    java: tuple[Programs, str], encrypted: Encrypted
) -> None:
    _, classpath = java
    files = [encrypted.ca, encrypted.other]
    ended = run(["java", "-cp", classpath, "Encrypted", encrypted.url("clerk"), *files], SOURCES)
    said = ["10 orders", REFUSED.format("queue 'mine'", "clerk"), "another authority is refused"]
    assert (ended.lines, ended.code) == (said, 0), ended.words
