"""What an entry of Spark's offset log says: whose offsets it has, and that a batch which is planned anew is another one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker_core.client.broker import BrokerClient
from broker_core.core.errors import OptionError
from broker_core.engine import START, UNKNOWN_OFFSETS, Limit, Origin
from broker_core.launcher import Broker
from connector.options import AddressOptions, write_options
from connector.stream import offset_log
from connector.stream.offset_log import OffsetLog

QUERY = "the query"


@pytest.fixture
def address(tmp_path: Path) -> Iterator[AddressOptions]:
    """Of an engine where ``app`` has a queue, and ``other`` none."""
    with Broker.open(tmp_path / "broker") as broker:
        with broker.channel() as channel:
            channel.queue_declare("orders")
            channel.queue_declare("logOffset")
        broker.engine.claim("app", ["orders"], {"orders": START}, Limit(), Origin(), "fail")
        yield write_options({"url": broker.url, "appId": "app"}, "stream write").address


def entry(scratch: Path, *offsets: str, version: str = "v1", planned: int = 1, query: str = QUERY) -> str:
    """The checkpoint of a query whose batch 7 has ``offsets``."""
    checkpoint = scratch / "checkpoint [1]"
    (checkpoint / "offsets").mkdir(parents=True, exist_ok=True)
    (checkpoint / "metadata").write_text(json.dumps({"id": query}))
    metadata = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": planned, "conf": {}})
    (checkpoint / "offsets" / "7").write_text("\n".join([version, metadata, *offsets]))
    return str(checkpoint)


OWN = {
    "one": ('{"orders":5}',),
    "symbolic": ('{"orders":"start"}',),
    "idle": ('{"orders":5}', "-"),
    "named": ('src:{"orders":5}',),
    "named and idle": ('0:{"orders":5}', "1:-"),
}
OTHERS = {
    "files": ('{"logOffset":3}',),  # the name of a queue of nobody
    "rate": ("5",),
    "kafka": ('{"orders":{"0":5}}',),
    "delta": ('{"sourceVersion":1,"reservoirId":"x","reservoirVersion":3,"index":-1,"isStartingVersion":false}',),
    "nothing": ("{}",),
    "text": ("orders",),
    "beside": ('{"orders":5}', '{"logOffset":3}'),
    "named": ('src:{"orders":5}', "files:{\"logOffset\":3}"),
}  # fmt: skip


@pytest.mark.parametrize("offsets", OWN.values(), ids=OWN)
def test_offsets_of_queues_of_the_app_have_no_digest(
    address: AddressOptions, tmp_path: Path, offsets: tuple[str, ...]
) -> None:
    checkpoint = entry(tmp_path, *offsets, version="v2" if ":{" in offsets[0] else "v1")
    assert OffsetLog(address, "app", checkpoint).digest(7, QUERY) == ""
    assert OffsetLog(address, "app", f"file://{checkpoint}").digest(7, QUERY) == ""
    assert OffsetLog(address, "other", checkpoint).digest(7, QUERY) != "", "the queue of another app"


@pytest.mark.parametrize("offsets", OTHERS.values(), ids=OTHERS)
def test_an_entry_with_offsets_of_other_sources_is_another_one_whenever_it_is_planned_anew(
    address: AddressOptions, tmp_path: Path, offsets: tuple[str, ...]
) -> None:
    def digest(planned: int) -> str:
        return OffsetLog(address, "app", entry(tmp_path, *offsets, planned=planned)).digest(7, QUERY)

    assert digest(1) == digest(1) != "" and digest(1) != digest(2) != ""


@pytest.mark.parametrize("app_id", ["app", "none"])
def test_the_engine_is_asked_once_whether_a_source_of_a_query_is_txmqs(
    address: AddressOptions, tmp_path: Path, app_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an app that has nothing there yet, or some of what is named, it is asked again: more may be its own."""
    calls: list[str] = []
    app = BrokerClient.app
    monkeypatch.setattr(BrokerClient, "app", lambda self, name: calls.append(name) or app(self, name))

    def asks(offset: str, query: str = QUERY) -> int:
        """How often, for two batches."""
        calls.clear()
        for planned in range(2):
            checkpoint = entry(tmp_path, offset, planned=planned, query=query)
            assert OffsetLog(address, app_id, checkpoint).digest(7, query) != ""
        return len(calls)

    assert asks('{"logOffset":"start"}') == 2
    assert [asks(f'{{"logOffset":{number}}}') for number in (3, 4)] == [1, 0]
    assert asks('{"orders":1,"another":1}') == (2 if app_id == "app" else 1)
    assert asks('{"logOffset":3}', "another query") == 1


def test_what_a_source_names_anew_in_each_batch_is_not_remembered_for_ever(
    address: AddressOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offset_log, "MOST_OTHERS", 3)
    monkeypatch.setattr(offset_log, "_OTHERS", set())
    for number in range(9):
        assert OffsetLog(address, "app", entry(tmp_path, f'{{"shard {number}":1}}')).digest(7, QUERY) != ""
        assert 0 < len(offset_log._OTHERS) <= 3


def test_what_a_sink_does_not_know_is_refused_unless_the_app_reads_a_queue(
    address: AddressOptions, tmp_path: Path
) -> None:
    lost = entry(tmp_path, "5")
    (Path(lost) / "offsets" / "7").unlink()
    for checkpoint in (None, lost, "s3a://bucket/checkpoint"):
        assert OffsetLog(address, "app", checkpoint).digest(7, QUERY) == UNKNOWN_OFFSETS
        with pytest.raises(OptionError, match="give transactional checkpoint="):
            OffsetLog(address, "other", checkpoint).digest(7, QUERY)


def test_the_checkpoint_of_another_query_is_refused(address: AddressOptions, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="is of query another, and this is query the query"):
        OffsetLog(address, "app", entry(tmp_path, "5", query="another")).digest(7, QUERY)
