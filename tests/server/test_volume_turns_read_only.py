"""The volume of a running broker turns read-only: every write is refused with one error that says so, an operator still
looks, and what was answered is there when the volume is writable and the broker is started again.

Not here: a volume that is read-only when the broker starts (``test_read_only_volume.py``), and an error of each single
call (``tests/store/test_refused_calls.py``, ``test_native_calls.py``).
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker_core.client import channel as client_channel
from broker_core.client.broker import BrokerClient
from broker_core.core import errors
from broker_core.launcher import Broker
from broker_core.node import upkeep
from broker_core.server.flight import channels
from broker_core.store.salvage.verify import verify
from tests.failing_volume import FailingVolume, failing_volume
from tests.gates import seldom
from tests.server.conftest import MicroBatch, Served, bodies, fill
from tests.server.http.http_client import Api
from tests.server.test_files_run_out import FAILED, PUBLISH, Rig, filled

pytestmark = pytest.mark.slow

STEPS = ("publish", "commit", "call", "ask", "get", "consume", "expire", "lease", "session", "seal")
# only in ``make soak``: before, a client writes first, one that reads, or the broker itself, and then come all steps
SELDOM = {"commit", "call", "ask", "get", "expire", "lease", "session"}
LOOKS = ("/api/overview", "/api/queues", "/api/txmq/store", "/api/txmq/history/%2F", "/metrics")


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[FailingVolume]:
    with failing_volume(tmp_path) as volume:
        yield volume


@pytest.fixture
def rig(volume: FailingVolume, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(channels, "LEASE_S", 0.5)
    monkeypatch.setattr(channels, "LOOK_S", 0.1)
    monkeypatch.setattr(client_channel, "KEEPALIVE_S", 1000.0)
    monkeypatch.setattr(upkeep, "OPEN_BYTES", 1_000)
    with filled(volume.path / "data") as rig:
        yield rig


def require_read_only(text: str, volume: FailingVolume) -> None:
    assert f"the volume of the data directory {volume.path / 'data'} is read-only" in text, text
    assert f"make the file system {volume.path} writable" in text and "then start the broker again" in text, (
        text
    )


def refusals(rig: Rig) -> Iterator[str]:
    """What a publisher, a commit and a micro-batch get at each listener."""
    with pytest.raises(errors.StoreFailed) as refused:
        rig.broker.channel()
    yield str(refused.value)
    with BrokerClient(rig.broker.url, reconnect_s=0) as client:
        with pytest.raises(errors.StoreFailed) as refused:
            client.channel().publish(b"refused", routing_key="in")
        yield str(refused.value)
        with pytest.raises(errors.StoreFailed) as refused:
            MicroBatch(client, "long", "in").run()
        yield str(refused.value)
    with contextlib.closing(Api(rig.broker.http_urls[0])) as api:
        message = {"properties": {}, "routing_key": "in", "payload_encoding": "string", "payload": "refused"}
        answer = api.ask("POST", PUBLISH, message)
        assert answer.status >= 400
        yield str(answer.body)


@pytest.mark.parametrize("first", seldom(STEPS, SELDOM.__contains__))
def test_a_running_broker_says_that_its_volume_is_read_only_and_has_what_it_answered_once_it_is_writable(
    rig: Rig, volume: FailingVolume, first: str
) -> None:
    rig.publish()
    rig.commit()
    volume.turn_read_only()
    rig.patience_s = 0.3
    with contextlib.suppress(*FAILED):
        getattr(rig, first)()
    rig.tolerate()
    require_read_only(str(rig.broker.failure), volume)
    for text in refusals(rig):
        require_read_only(text, volume)
    assert {queue.name for queue in rig.broker.queues()} >= {"in", "long"}
    with BrokerClient(rig.broker.url) as client, contextlib.closing(Api(rig.broker.http_urls[0])) as api:
        assert {queue.name for queue in client.queues()} >= {"in", "long"}
        assert all(api.ask("GET", path).status == 200 for path in LOOKS)
        assert api.ask("GET", "/api/health/checks/alarms").status == 503
    rig.broker.close()
    with pytest.raises(errors.DataDirectoryInvalid, match="Read-only file system"):
        Broker.open(rig.directory)
    assert verify(rig.directory).ok
    volume.repair()
    rig.open()
    rig.check()


def test_a_served_broker_ends_with_one_line_and_goes_on_when_it_is_started_on_a_writable_volume(
    volume: FailingVolume, capfd: pytest.CaptureFixture[str]
) -> None:
    served = Served(volume.path / "data").start()
    try:
        with BrokerClient(served.url, reconnect_s=0) as client:
            fill(client, "q", 3)
            volume.turn_read_only()
            with pytest.raises(errors.StoreFailed) as refused:
                client.channel().publish(b"refused", routing_key="q")
        require_read_only(str(refused.value), volume)
        assert served.wait() == 1
        said = capfd.readouterr().err
        (line,) = [line for line in said.splitlines() if "ERROR" in line]
        require_read_only(line, volume)
        assert "the store has failed" in line and "Traceback" not in said
        command = [sys.executable, "-m", "txmq", "serve", "--data", str(volume.path / "data")]
        again = subprocess.run(
            [*command, "--listen", "127.0.0.1:0", "--amqp", "none"], capture_output=True, text=True
        )
        assert again.returncode != 0 and again.stdout == ""
        (line,) = again.stderr.splitlines()
        assert "Read-only file system" in line
        volume.repair()
        served.start()
        with BrokerClient(served.url) as client:
            assert bodies(client, "q") == [b"0", b"1", b"2"]
    finally:
        served.end()
