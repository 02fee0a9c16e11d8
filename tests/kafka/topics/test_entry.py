"""Records of the broker in a partition and out of it."""

from __future__ import annotations

from decimal import Decimal

import pytest

from broker_core.core import errors
from broker_core.core.records import ExchangeRecord, LedgerRecord, LineageRecord, Record
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.protocol.port import LATEST, Isolation, TopicPartition
from broker_core.kafka.topics import entry
from broker_core.kafka.topics.entry import Entry
from tests.kafka.bench.fake_kafka import FakeKafka
from tests.kafka.cluster.test_client import Cluster

LOG = TopicPartition("orders", 0)
RECORDS: list[Record] = [
    LedgerRecord(
        "a", 3, "q", 7, "token", {"orders/1": [2, 5]}, 3, 2, 9, 1, [["append", {}, "b", 1]], 4, False, True
    ),
    LineageRecord("é", "query", 1, 0),
    ExchangeRecord(
        "x", "headers", True, False, False, {"a": Decimal("1.20"), "b": b"\xff", "c": [None, True]}
    ),
]


@pytest.fixture
def client() -> Client:
    kafka = FakeKafka()
    client = Client(kafka.wire(), list(kafka.nodes.values()), reconnect_s=1.0)
    client.create_topic(LOG.topic, 1)
    return client


def test_a_record_is_read_as_it_was_put(client: Client) -> None:
    dropped = entry.drop(LineageRecord, ("a", "q", "/"))
    noted = Entry("plain", "7", (("version", b"1"), ("none", None)))
    client.produce({LOG: entry.batch([*map(entry.put, RECORDS), dropped, noted], 17)})
    rows = list(entry.replay(client, LOG, 0, client.offsets({LOG: LATEST})[LOG]))
    assert [row.offset for row in rows] == [0, 1, 2, 3, 4] and {row.timestamp for row in rows} == {17}
    for row, record in zip(rows, RECORDS):
        assert row.key and row.value and entry.parse(row.key, row.value) == record
        assert entry.parse_key(row.key) == (type(record), record.key)
    assert (rows[3].key, rows[3].value) == (dropped.key.encode(), None)
    assert rows[4].headers == noted.headers and rows[4].value == b"7"


def test_a_replay_ends_before_its_end_and_begins_at_its_position(client: Client) -> None:
    for number in range(5):
        client.produce({LOG: entry.batch([Entry("k", str(number)), Entry("k", None)], 0)})
    assert [row.offset for row in entry.replay(client, LOG, 3, 8)] == [3, 4, 5, 6, 7]
    assert list(entry.replay(client, LOG, 8, 8)) == []


def test_a_replay_waits_for_a_leader_that_has_not_caught_up() -> None:
    """After an election a fetch may show less than what ListOffsets says."""
    cluster = Cluster()
    cluster.client.produce({LOG: entry.batch([Entry("k", "1")], 0)})
    end = cluster.client.offsets({LOG: LATEST}, Isolation.READ_UNCOMMITTED)[LOG]
    with cluster.kafka.hidden(LOG):
        with pytest.raises(errors.ConnectionFailed, match="does not show offset 0 yet, of 1"):
            list(entry.replay(cluster.client, LOG, 0, end, isolation=Isolation.READ_UNCOMMITTED))
    assert [row.value for row in entry.replay(cluster.client, LOG, 0, end)] == [b"1"]


@pytest.mark.parametrize("key", [b"[]", b'"ledger"', b'["nothing",1]', b"{}"])
def test_a_key_of_another_version_is_refused(key: bytes) -> None:
    with pytest.raises(errors.KafkaError, match="this version cannot read"):
        entry.parse(key, b"{}")


def test_fields_of_another_version_are_refused() -> None:
    with pytest.raises(errors.KafkaError, match=r"a lineage with the fields \['app_id', 'more'\]"):
        entry.parse(b'["lineage","a","q"]', b'{"app_id":"a","more":1}')
    with pytest.raises(errors.KafkaError, match="is not JSON"):
        entry.parse(b'["lineage","a","q"]', b"\xff")


def test_a_value_without_json_is_refused() -> None:
    with pytest.raises(errors.OptionError, match="cannot be stored on Kafka"):
        entry.dumps({"a": float("nan")})
