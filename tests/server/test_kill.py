"""A broker that is killed, or whose reply is lost: the client goes on, and the result is there exactly
once.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from broker_core.client.broker import BrokerClient
from broker_core.core import errors
from broker_core.engine import REFUSED_ROWS, BranchHeader, StagedBranch
from broker_core.store.salvage.verify import verify
from tests.progress import GUARD_S, wait_until
from tests.server.conftest import MicroBatch, Served, bodies, end_broker, fill

pytestmark = pytest.mark.crash

ROWS = 3_000


def _numbers(count: int) -> Counter[bytes]:
    return Counter(str(number).encode() for number in range(count))


def patient(served: Served, **options: Any) -> BrokerClient:
    """A client that waits for a restart however slow the machine is."""
    return BrokerClient(served.url, reconnect_s=GUARD_S, **options)


def _restart_when_killed(served: Served) -> threading.Thread:
    """What an operator does, on the same port."""

    def restart() -> None:
        served.wait()
        served.start()

    thread = threading.Thread(target=restart)
    thread.start()
    return thread


# every reply of a micro-batch, lost once
REPLIES = ["hello", "claim", "resolve", "count", "read", "open_batch", "stage", "commit_batch", "ack"]


@pytest.mark.parametrize("reply", REPLIES)
def test_micro_batch_takes_effect_once_when_a_reply_is_lost(served: Served, reply: str) -> None:
    served.start(f"server.reply.{reply}=drop")
    with patient(served) as client:
        fill(client, "in", 100)
        fill(client, "out", 0)
        MicroBatch(client, "in", "out").run()
        assert Counter(bodies(client, "out")) == _numbers(100)
        assert [queue.messages for queue in client.queues()] == [0, 100]


KILLS = [
    "engine.read.recorded",
    "engine.open.durable",
    "server.stage.part",
    "engine.stage.appended",
    "engine.stage.durable",
    "server.reply.stage",
    "engine.commit.received",
    "engine.commit.decided",
    "server.reply.commit_batch",
    "server.reply.ack",
]


@pytest.mark.parametrize("step", KILLS)
def test_micro_batch_takes_effect_once_when_the_embedded_broker_is_killed(served: Served, step: str) -> None:
    """The client finds the broker gone and starts it again; nobody else does."""
    served.start()
    with patient(served) as client:
        fill(client, "in", ROWS)
        fill(client, "out", 0)
    served.terminate()
    served.start(f"{step}=kill")
    try:
        with BrokerClient(data=served.directory) as client:
            MicroBatch(client, "in", "out").run()
            assert served.wait() == -9
            assert Counter(bodies(client, "out")) == _numbers(ROWS)
    finally:
        end_broker(served.directory)


REFUSED_STEPS = [
    "engine.refused.received",
    "engine.refused.planned",
    "engine.refused.published",
    "server.reply.publish_refused",
]


@pytest.mark.parametrize("step", REFUSED_STEPS)
def test_rows_that_a_table_refuses_are_published_once_when_the_broker_is_killed(
    served: Served, step: str
) -> None:
    def letters(client: BrokerClient, token: str, body: bytes) -> list[StagedBranch]:
        header = BranchHeader(token, token, "publish", {"exchange": "", "routing_key": "out"})
        return [client.stage(header, [pa.record_batch({"body": [body]})])]

    served.start()
    with patient(served) as client:
        fill(client, "out", 0)
        opened = client.open_batch("app", "query", 0, "fail")
        rows = BranchHeader(opened.token, "rows", "append", {"table": "t"}, "app", "query", 0)
        staged = client.stage(rows, [pa.record_batch({"v": ["a", "b"]})])
        branches = client.commit_batch("app", "query", 0, opened.token, [staged]).entry.to_apply[0].branches
        mine = letters(client, "mine", b"b")
    served.terminate()
    served.start(f"{step}=kill")
    restarting = _restart_when_killed(served)
    with patient(served) as client:
        assert client.publish_refused("app", 1, branches, "[1]", "mine", mine) == "[1]"
        restarting.join()
        others = letters(client, "others", b"a")
        assert client.publish_refused("app", 1, branches, "[0]", "others", others) == "[1]"
        assert bodies(client, "out") == [b"b"] and client.staged_batches() == []
        (part,) = client.unapplied("app")[0].to_apply
        assert part.target[REFUSED_ROWS][1] == "[1]"
    served.terminate()
    assert verify(served.directory).problems == []


def test_read_goes_on_at_the_next_row_when_the_broker_is_killed(served: Served) -> None:
    served.start()
    with patient(served) as client:
        fill(client, "in", 60_000)
        fill(client, "out", 0)
    served.kill()
    served.start("server.read.batch@3=kill")
    restarting = _restart_when_killed(served)
    with patient(served, map_files=False) as client:
        MicroBatch(client, "in", "out").run()
        restarting.join()
        assert Counter(bodies(client, "out")) == _numbers(60_000)


# the steps of staging by sent parts, and by files on the broker's host
PART_STEPS = [
    (False, step) for step in ("server.stage.part@3", "engine.stage.durable@3", "server.reply.part@2")
]
FILE_STEPS = [
    (True, step)
    for step in (
        "server.stage.file@2",
        "store.adopt.linked@2",
        "engine.stage.durable@2",
        "server.reply.adopt@2",
    )
]


@pytest.mark.parametrize(("by_files", "step"), PART_STEPS + FILE_STEPS)
def test_stage_resends_only_what_is_not_acknowledged_when_the_broker_is_killed(
    served: Served, by_files: bool, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker_core.client.stage.FILE_BYTES", 2 * 1024 * 1024)
    served.start()
    with patient(served) as client:
        fill(client, "out", 0)
    served.kill()
    served.start(f"{step}=kill")
    restarting = _restart_when_killed(served)
    batches = [
        pa.record_batch({"body": [str(first + row).encode() for row in range(50_000)]})
        for first in range(0, 300_000, 50_000)
    ]
    pulled: list[int] = []

    def rows() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches):
            pulled.append(number)
            yield batch

    with patient(served, map_files=by_files) as client:
        staged = client.stage(
            BranchHeader("token", "branch", "publish", {"exchange": "", "routing_key": "out"}), rows()
        )
        restarting.join()
        assert pulled == list(range(6)), "the rows are pulled once, whatever breaks"
        assert staged.rows == 300_000
        assert client.commit_branches("token", [staged]) == 300_000
        assert client.commit_branches("token", [staged]) == 300_000
        assert Counter(bodies(client, "out")) == _numbers(300_000)


@pytest.mark.parametrize(
    ("by_files", "reply"), [(False, "server.reply.part@2"), (True, "server.reply.adopt@1")]
)
def test_lost_receipt_stages_the_part_once(served: Served, by_files: bool, reply: str) -> None:
    served.start(f"{reply}=drop")
    with patient(served, map_files=by_files) as client:
        fill(client, "out", 0)
        batch = pa.record_batch({"body": [b"x" * 100] * 60_000})
        staged = client.stage(
            BranchHeader("token", "branch", "publish", {"exchange": "", "routing_key": "out"}), [batch] * 4
        )
        assert client.commit_branches("token", [staged]) == 240_000
        assert client.available(["out"])["out"].rows == 240_000
    served.terminate()
    assert verify(served.directory).problems == []


def test_channel_commit_is_found_by_its_token_when_the_broker_dies_after_it(served: Served) -> None:
    served.start()
    with patient(served) as client:
        fill(client, "q", 0)
    served.terminate()
    served.start("server.reply.tx_commit=kill")
    restarting = _restart_when_killed(served)
    with patient(served) as client, client.channel() as channel:
        channel.tx_select()
        channel.publish(b"once", routing_key="q")
        channel.tx_commit(token="mine")
        restarting.join()
        assert client.committed("mine")
        with pytest.raises(errors.ConnectionFailed, match="open another") as raised:
            channel.publish(b"next", routing_key="q")
        assert raised.value.retriable, "it is no mistake of the caller"
        assert bodies(client, "q") == [b"once"]


@pytest.mark.parametrize("committed", [True, False])
def test_a_prepare_is_found_by_the_number_of_its_call_when_the_broker_dies(
    served: Served, committed: bool
) -> None:
    served.start()
    with patient(served) as client:
        fill(client, "q", 0)
    served.terminate()
    served.start("server.reply.prepare=kill" if committed else "store.commit.begin=kill")
    restarting = _restart_when_killed(served)
    with patient(served) as client, client.channel() as channel:
        channel.tx_select()
        channel.publish(b"once", routing_key="q")
        if committed:
            assert channel.prepare("xa") == "prepared"
        else:
            with pytest.raises(errors.ConnectionFailed):
                channel.prepare("xa")
        restarting.join()
        assert [info.xid for info in client.prepared()] == (["xa"] if committed else [])


def test_channel_of_a_killed_broker_is_rolled_back_and_says_so(served: Served) -> None:
    served.start()
    with patient(served) as client:
        fill(client, "q", 1)
        with client.channel() as channel:
            channel.tx_select()
            delivery = channel.get("q")
            assert delivery is not None
            channel.ack(delivery.tag)
            channel.publish(b"never", routing_key="q")
            served.kill()
            served.start()
            with pytest.raises(errors.ConnectionFailed, match="is gone: its broker was restarted"):
                channel.tx_commit()
        with client.channel() as channel:
            again = channel.get("q")
            assert again is not None
            assert again.redelivered
            assert again.body == b"0"


@pytest.mark.parametrize("reply", ["publish", "get", "ack", "tx_commit", "publish_all", "open"])
def test_channel_call_is_done_once_when_its_reply_is_lost(served: Served, reply: str) -> None:
    served.start(f"server.reply.{reply}=drop")
    with patient(served) as client, client.channel() as channel:
        channel.queue_declare("q")
        channel.publish(b"a", routing_key="q")
        channel.tx_select()
        channel.publish(b"b", routing_key="q")
        channel.tx_commit()
        tags = []
        while (delivery := channel.get("q")) is not None:
            tags.append(delivery.tag)
            channel.ack(delivery.tag)
        channel.tx_commit()
        assert tags == [1, 2]
        assert [queue.messages for queue in client.queues()] == [0]


def test_channel_ends_with_its_lease_when_its_client_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from broker_core.launcher import Broker
    from broker_core.server.flight import channels

    monkeypatch.setattr(channels, "LEASE_S", 0.2)
    monkeypatch.setattr(channels, "LOOK_S", 0.05)
    with Broker.open(tmp_path / "data") as broker, BrokerClient(broker.url) as client:
        fill(client, "q", 1)
        channel = client.channel()
        assert channel.get("q") is not None
        assert [queue.unacknowledged for queue in client.queues()] == [1]
        wait_until(lambda: [queue.unacknowledged for queue in client.queues()] == [0])
        with pytest.raises(errors.ConnectionFailed, match="its lease"):
            channel.get("q")
        channel.close()


@pytest.mark.parametrize(
    ("fault", "text"),
    [("raise", "failpoint store.commit.synced"), ("enospc", "TXMQ_DISK_FULL.*free some space")],
)
def test_broker_whose_disk_failed_says_so_and_ends_and_the_next_one_has_what_was_committed(
    served: Served, fault: str, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    served.start()
    with patient(served) as client:
        fill(client, "q", 3)
    served.terminate()
    served.start(f"store.commit.synced={fault}")
    with patient(served) as client:
        with pytest.raises(errors.StoreFailed, match=text):  # of this commit, or of one on the broker's own
            client.channel().publish(b"not stored", routing_key="q")
        assert served.wait() == 1
        assert "the store has failed" in capfd.readouterr().err
        served.start()
        assert len(bodies(client, "q")) == 3
