"""A restored copy that is older than a checkpoint: what a pipeline finds there (docs/backup.md)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from broker_core.client.backup import backup
from broker_core.client.broker import BrokerClient
from broker_core.core.address import parse_address
from broker_core.core.errors import BatchGap, CheckpointMismatch, TxmqError
from broker_core.engine import START, Limit, Origin
from broker_core.launcher import Broker
from tests.server.conftest import MicroBatch, bodies, fill

Later = Callable[[BrokerClient, dict[str, int]], dict[str, int]]


def _restored(tmp_path: Path, later: Later) -> tuple[Broker, dict[str, int]]:
    """A broker on a copy that was made behind batch 0, and where the checkpoint is after ``later``."""
    with Broker.open(tmp_path / "data") as broker, BrokerClient(broker.url) as client:
        fill(client, "in", 5)
        fill(client, "out", 0)
        end = MicroBatch(client, "in", "out").run()
        backup(parse_address(broker.url), tmp_path / "copy")
        end = later(client, end)
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "copy").rename(tmp_path / "data")
    return Broker.open(tmp_path / "data"), end


def _one_more(client: BrokerClient, end: dict[str, int]) -> dict[str, int]:
    fill(client, "in", 5)
    return MicroBatch(client, "in", "out", batch_id=1).run(end)


def test_a_checkpoint_of_the_moment_of_the_copy_goes_on(tmp_path: Path) -> None:
    broker, end = _restored(tmp_path, lambda _client, end: end)
    with broker, BrokerClient(broker.url) as client:
        fill(client, "in", 3)
        MicroBatch(client, "in", "out", batch_id=1).run(end)
        assert len(bodies(client, "out")) == 5 + 3


def test_a_checkpoint_that_is_ahead_of_the_copy_stops_before_anything_is_consumed(tmp_path: Path) -> None:
    broker, end = _restored(tmp_path, _one_more)
    with broker, BrokerClient(broker.url) as client:
        fill(client, "in", 20)  # others under the offsets that the checkpoint has passed
        with pytest.raises(TxmqError) as source:
            client.claim("app", ["in"], end, Limit(), Origin(), "fail")
        with pytest.raises(BatchGap, match="an older data directory was restored") as sink:
            client.open_batch("app", "query", 2, "fail")
        assert "which is not the end of a range that this broker ga" in str(source.value), sink
        assert client.available(["in"])["in"].rows == 20 and len(bodies(client, "out")) == 5


@pytest.mark.parametrize("arrive", [0, 3])
def test_row_21_a_backup_of_a_claimed_batch_is_restored_and_its_messages_are_not_acknowledged(
    tmp_path: Path, arrive: int
) -> None:
    """The error says that nothing was done, and what it tells to do brings each message once."""
    with Broker.open(tmp_path / "data") as broker, BrokerClient(broker.url) as client:
        fill(client, "in", 5)
        fill(client, "out", 0)
        end = MicroBatch(client, "in", "out").run()
        fill(client, "in", 5)
        client.claim("app", ["in"], end, Limit(), Origin(), "fail", ran=True)
        backup(parse_address(broker.url), tmp_path / "copy")
        end = MicroBatch(client, "in", "out", batch_id=1).run(end)
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "copy").rename(tmp_path / "data")
    with Broker.open(tmp_path / "data") as broker, BrokerClient(broker.url) as client:
        fill(client, "in", arrive)
        for call in (
            lambda: client.claim("app", ["in"], end, Limit(), Origin(), "fail"),
            lambda: client.claim("app", ["in"], end, Limit(), Origin(), "fail", ran=True),
            lambda: client.ack("app", end),
        ):
            with pytest.raises(CheckpointMismatch, match=r"Nothing was done, .* onNewCheckpoint=resume"):
                call()
        assert len(bodies(client, "in")) == 5 + arrive and len(bodies(client, "out")) == 5
        new = client.claim("app", ["in"], {"in": START}, Limit(), Origin(), "resume")
        client.open_batch("app", "another", 0, "resume")
        MicroBatch(client, "in", "out", query="another").run()
        assert new == {"in": 10 + arrive}
        assert bodies(client, "in") == [] and len(bodies(client, "out")) == 10 + arrive


def test_a_new_checkpoint_goes_on_where_the_copy_was(tmp_path: Path) -> None:
    broker, _ = _restored(tmp_path, _one_more)
    with broker, BrokerClient(broker.url) as client:
        fill(client, "in", 20)
        end = client.claim("app", ["in"], {"in": START}, Limit(), Origin(), "resume")
        ranges = client.resolve("app", {"in": START}, end)
        assert client.open_batch("app", "another", 0, "resume").token
        assert client.count("app", ranges)["in"].rows == 20


def test_what_was_committed_after_the_copy_did_not_take_place_there(tmp_path: Path) -> None:
    def later(client: BrokerClient, end: dict[str, int]) -> dict[str, int]:
        with client.channel() as channel:
            for token, queue in (("after", "out"),):
                channel.tx_select()
                channel.publish(b"1", routing_key=queue)
                channel.tx_commit(token=token)
        assert client.committed("after")
        return end

    broker, _ = _restored(tmp_path, later)
    with broker, BrokerClient(broker.url) as client:
        assert not client.committed("after") and len(bodies(client, "out")) == 5
