"""The official Go client, unmodified, from the module proxy: the program in ``go/``, one group of checks at a
time.

Skipped without Go 1.20 or later, and where the module is neither cached nor to be had.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pika
import pytest

from tests.interop.conftest import REFUSED, Encrypted
from tests.interop.programs import Programs, checks_of, programs, run

pytestmark = pytest.mark.soak  # of another language: minutes to build and run

SOURCES = Path(__file__).parent / "go"
GROUPS = ("transactions", "confirms", "consumers", "errors", "routing", "restart")
CHECKS = {group: checks_of(SOURCES / f"{group}.go") for group in GROUPS}
SETTINGS = {"GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly", "GOWORK": "off"}
MODULE = "github.com/rabbitmq/amqp091-go"


def go(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["go", *arguments], cwd=SOURCES, env=os.environ | SETTINGS, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the compiled programs ``checks`` and ``example``. Skips where the machine cannot build
    them.
    """
    if not shutil.which("go"):
        pytest.skip("there is no Go on this machine: install version 1.20 or later")
    fetched = go("mod", "download", MODULE)
    if "requires go >=" in fetched.stderr:
        pytest.skip(f"the Go of this machine is too old: {fetched.stderr.strip()}")
    if fetched.returncode and "checksum mismatch" not in fetched.stderr:
        pytest.skip(
            f"the Go module proxy cannot be reached and {MODULE} is not cached: "
            f"{fetched.stderr.strip()[-300:]}"
        )
    folder = tmp_path_factory.mktemp("binaries")
    for name, source in (("checks", "."), ("example", "example.go")):
        # without optimizing, which is most of the time to build Go's own library once
        built = go("build", "-gcflags=all=-N -l", "-o", str(folder / name), source)
        assert built.returncode == 0, fetched.stderr + built.stderr
    return folder


@pytest.fixture(scope="module")
def program(binaries: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Programs, str]]:
    """The groups, and the program that runs them."""
    with programs(binaries, tmp_path_factory.mktemp("go") / "data") as found:
        yield found, str(binaries / "checks")


@pytest.mark.parametrize(
    ("group", "check"),
    [
        pytest.param(group, check, id=check, marks=[pytest.mark.crash] if group == "restart" else [])
        for group, checks in CHECKS.items()
        for check in checks
    ],
)
def test_go_client(program: tuple[Programs, str], group: str, check: str) -> None:
    found, binary = program
    found.ended(group, [binary, group], kills=group == "restart").verdict(check)


@pytest.mark.parametrize("group", GROUPS)
def test_go_program_comes_to_all_its_checks_and_no_others(program: tuple[Programs, str], group: str) -> None:
    found, binary = program
    found.ended(group, [binary, group], kills=group == "restart").complete(CHECKS[group])


def test_go_example_consumes_publishes_acks_and_commits(
    program: tuple[Programs, str], binaries: Path
) -> None:
    found, _ = program
    with pika.BlockingConnection(pika.URLParameters(found.url)) as connection:
        for queue in ("orders", "invoices"):
            connection.channel().queue_delete(queue)
    ended = run([str(binaries / "example"), found.url], binaries)
    assert (ended.lines, ended.code) == (["10 invoices"], 0), ended.words


@pytest.mark.txmq_only
def test_go_over_amqps_does_what_its_permissions_allow(binaries: Path, encrypted: Encrypted) -> None:
    """Go takes the authorities of the machine from SSL_CERT_FILE."""
    example = str(binaries / "example")
    trusting = ["env", f"SSL_CERT_FILE={encrypted.ca}", example]
    with pika.BlockingConnection(encrypted.parameters("clerk")) as connection:
        for queue in ("orders", "invoices"):
            connection.channel().queue_purge(queue)
    ended = run([*trusting, encrypted.url("clerk")], binaries)
    assert (ended.lines, ended.code) == (["10 invoices"], 0), ended.words
    refused = run([*trusting, encrypted.url("guard")], binaries)
    assert refused.code == 1 and REFUSED.format("queue 'invoices'", "guard") in refused.errors, refused.words
    stranger = run(["env", f"SSL_CERT_FILE={encrypted.other}", example, encrypted.url("clerk")], binaries)
    assert stranger.code == 1 and "certificate signed by unknown authority" in stranger.errors, stranger.words
