"""What the product relies on in Kafka: one suite over FakeKafka and over a real node, through the same
client.

Not here: what a client does when nodes fail (``tests/kafka/cluster/test_client.py``), which only FakeKafka
can show at will.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pytest

from broker_core.core import errors
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.cluster.connection import Settings
from broker_core.kafka.cluster.wire import SocketWire
from broker_core.kafka.protocol.port import (
    EARLIEST,
    LATEST,
    ApiVersions,
    Isolation,
    NodeAddress,
    Producer,
    TopicPartition,
)
from broker_core.kafka.protocol.sasl import MECHANISMS, SaslLogin
from broker_core.kafka.record.decode import decode
from broker_core.kafka.record.encode import encode, encode_headers, stamp
from broker_core.kafka.record.record_batch import Codec
from tests.kafka.bench.batches import checked_again
from tests.kafka.bench.fake_kafka import FakeKafka
from tests.kafka.bench.real_node import PASSWORD, USER, RealNode
from tests.progress import wait_until

WAIT_S = 120.0
EVERYTHING = 1 << 62
_names = itertools.count()


@dataclass
class Bench:
    """``grow``: a topic to so many partitions; ``position``: what a group has committed, -1 for nothing."""

    client: Client
    prefix: str
    grow: Callable[[str, int], None]
    position: Callable[[str, TopicPartition], int]

    def topic(self, partitions: int = 1, **configs: str) -> str:
        name = f"{self.prefix}-{next(_names)}"
        self.client.create_topic(
            name,
            partitions,
            replication=1,
            configs={key.replace("_", "."): value for key, value in configs.items()},
        )
        return name

    def log(self, **configs: str) -> TopicPartition:
        return TopicPartition(self.topic(**configs), 0)

    def id(self) -> str:
        return f"{self.prefix}-id-{next(_names)}"

    def append(self, log: TopicPartition, *bodies: bytes, timestamp: int | None = None) -> int:
        return self.client.produce({log: batch(*bodies, timestamp=timestamp)})[log]

    def end(self, log: TopicPartition, isolation: Isolation = Isolation.READ_COMMITTED) -> int:
        return self.client.offsets({log: LATEST}, isolation)[log]

    def read(self, log: TopicPartition, isolation: Isolation = Isolation.READ_COMMITTED) -> list[bytes]:
        """Bodies from the begin to the end."""
        position, end = self.client.offsets({log: EARLIEST})[log], self.end(log, isolation)
        found: list[bytes] = []
        while position < end:
            fetched = self.client.fetch({log: position}, isolation=isolation)[log]
            decoded = decode(fetched.records, position, end, fetched.aborted, log=str(log))
            found += decoded.records.values.to_pylist()
            position = decoded.position
        return found


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.slow)])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    if request.param == "fake":
        kafka = FakeKafka()
        client = Client(kafka.wire(), [kafka.nodes[1]], reconnect_s=WAIT_S)
        grow, position = kafka.grow, kafka.position
    else:
        node: RealNode = request.getfixturevalue("real")
        client = Client(SocketWire(Settings(request_s=WAIT_S)), [node.plain], reconnect_s=WAIT_S)
        grow, position = node.grow, node.position
    yield Bench(client, f"{request.param}-{os.getpid()}", grow, position)
    client.close()


def batch(
    *bodies: bytes, timestamp: int | None = None, transactional: bool = False, codec: Codec = Codec.NONE
) -> bytes:
    timestamp = now_ms() if timestamp is None else timestamp
    return encode(
        pa.array(bodies, pa.binary()), timestamp=timestamp, transactional=transactional, codec=codec
    )


def now_ms() -> int:
    return time.time_ns() // 1_000_000


# -- topics --------------------------------------------------------------------------------------------------


def test_a_topic_is_made_once_and_grows(bench: Bench) -> None:
    name = bench.topic(2, cleanup_policy="compact")
    made = bench.client.topic(name)
    assert sorted(made.partitions) == [0, 1] and all(each.leader > 0 for each in made.partitions.values())
    assert bench.client.create_topic(name, 5).id == made.id and len(bench.client.topic(name).partitions) == 2
    assert bench.client.configs(name, "cleanup.policy") == {"cleanup.policy": "compact"}
    bench.grow(name, 3)
    wait_until(lambda: len(bench.client.create_topic(name).partitions) == 3)
    assert bench.client.topic(name).id == made.id and bench.client.topics()[name].id == made.id


def test_what_is_no_topic_is_refused_by_name(bench: Bench) -> None:
    missing = f"{bench.prefix}-missing"
    for question in (
        lambda: bench.client.topic(missing),
        lambda: bench.client.delete_topic(missing),
        lambda: bench.client.configs(missing),
        lambda: bench.client.fetch({TopicPartition(missing, 0): 0}),
        lambda: bench.append(TopicPartition(missing, 0), b"x"),
    ):
        with pytest.raises(errors.QueueNotFound, match=missing):
            question()
    name = bench.topic()
    with pytest.raises(errors.QueueNotFound, match=f"log {name}/7: topic {name} has 1 partitions"):
        bench.client.offsets({TopicPartition(name, 7): LATEST})
    with pytest.raises(errors.KafkaError, match="INVALID_TOPIC_EXCEPTION"):
        bench.client.create_topic("no/topic")
    with pytest.raises(errors.KafkaError, match="INVALID_CONFIG"):
        bench.client.create_topic(f"{bench.prefix}-unmade", configs={"no.such.setting": "1"})


def test_a_topic_that_is_made_again_is_another_one(bench: Bench) -> None:
    log = bench.log()
    old = bench.client.topic(log.topic).id
    bench.append(log, b"old")
    bench.client.delete_topic(log.topic)

    def made() -> bool:
        return bench.client.create_topic(log.topic, 1, replication=1).id != old

    wait_until(made)
    bench.append(log, b"new")
    with pytest.raises(errors.QueueNotFound, match="UNKNOWN_TOPIC_ID"):
        bench.client.fetch({log: 0}, ids={log.topic: old})
    assert bench.read(log) == [b"new"]


# -- records -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", list(Codec))
def test_a_batch_comes_back_as_it_was_written(bench: Bench, codec: Codec) -> None:
    """A broker inflates what it appends, so this also says that Kafka's own code reads every codec."""
    log = bench.log()
    values = pa.array(
        [None if number % 7 == 3 else b"body-%d" % number * 9 for number in range(3000)], pa.binary()
    )
    keys = pa.array([None if number % 2 else b"key-%d" % number for number in range(3000)], pa.binary())
    headers = pa.array(
        [encode_headers([("number", b"%d" % (number % 5)), ("none", None)]) for number in range(3000)],
        pa.binary(),
    )
    written = now_ms()
    data = encode(values, timestamp=written, keys=keys, headers=headers, codec=codec)
    assert bench.client.produce({log: data}) == {log: 0}
    fetched = bench.client.fetch({log: 0}, ids={log.topic: bench.client.topic(log.topic).id})[log]
    assert (fetched.high_watermark, fetched.last_stable, fetched.start, fetched.aborted) == (
        3000,
        3000,
        0,
        (),
    )
    found = decode(fetched.records, 0, EVERYTHING, fetched.aborted, log=str(log)).records
    assert found.values.equals(values) and found.keys is not None and found.keys.equals(keys)
    assert found.headers is not None and found.headers.to_pylist() == headers.to_pylist()
    assert set(found.timestamps.tolist()) == {written} and found.offsets.tolist() == list(range(3000))


def test_offsets_are_ends_begins_and_first_ones_of_a_time(bench: Bench) -> None:
    logs = [TopicPartition(bench.topic(2), number) for number in range(2)]
    logs[1] = TopicPartition(logs[0].topic, 1)
    assert bench.client.offsets(dict.fromkeys(logs, LATEST)) == dict.fromkeys(logs, 0)
    early, late = now_ms() - 60_000, now_ms() - 1_000
    assert bench.append(logs[0], b"a", b"b", timestamp=early) == 0
    assert bench.append(logs[0], b"c", timestamp=late) == 2
    assert bench.client.offsets(dict.fromkeys(logs, LATEST)) == {logs[0]: 3, logs[1]: 0}
    assert bench.client.offsets(dict.fromkeys(logs, EARLIEST)) == dict.fromkeys(logs, 0)
    assert [
        bench.client.offsets({logs[0]: time})[logs[0]] for time in (early, early + 1, late, late + 1)
    ] == [0, 2, 2, -1]
    assert bench.client.sizes(logs)[logs[0]] >= 2 * 61 and bench.client.sizes(logs)[logs[1]] == 0


def test_a_fetch_gives_whole_batches_and_the_first_one_always(bench: Bench) -> None:
    log = bench.log()
    for number in range(4):
        bench.append(log, *(b"%d-%d" % (number, each) * 50 for each in range(5)))
    fetched = bench.client.fetch({log: 7}, max_bytes=1)[log]
    found = decode(fetched.records, 7, EVERYTHING, log=str(log))
    assert found.records.offsets.tolist() == [7, 8, 9] and found.position == 10
    with pytest.raises(errors.DataLoss, match=f"log {log}: Kafka answers OFFSET_OUT_OF_RANGE"):
        bench.client.fetch({log: 21})
    assert len(bench.client.fetch({log: 20})[log].records) == 0


def test_a_fetch_at_the_end_waits_for_the_next_record(bench: Bench) -> None:
    log = bench.log()
    bench.append(log, b"before")
    found: list[bytes] = []

    def wait() -> None:
        fetched = bench.client.fetch({log: 1}, max_wait_ms=int(WAIT_S * 1000), lane="wait")[log]
        found.extend(decode(fetched.records, 1, EVERYTHING, log=str(log)).records.values.to_pylist())

    waiting = threading.Thread(target=wait)
    began = time.monotonic()
    waiting.start()
    bench.append(log, b"after")
    waiting.join(WAIT_S)
    assert found == [b"after"] and time.monotonic() - began < WAIT_S / 2


def test_what_a_log_does_not_take_is_refused(bench: Bench) -> None:
    log = bench.log(max_message_bytes="1000")
    with pytest.raises(errors.TransactionTooLarge, match=f"log {log}: Kafka answers MESSAGE_TOO_LARGE"):
        bench.append(log, bytes(1000))
    damaged = bytearray(batch(b"some body"))
    damaged[-3] ^= 1
    with pytest.raises(errors.KafkaError, match="CORRUPT_MESSAGE"):
        bench.client.produce({log: damaged})
    with pytest.raises(errors.KafkaError, match=r"INVALID_RECORD|CORRUPT_MESSAGE"):
        bench.client.produce(
            {log: checked_again(batch(b"x")[:57] + b"\0\0\0\0" + batch(b"x")[61:])}, repeat=False
        )
    assert bench.read(log) == []


def test_deleted_records_are_gone(bench: Bench) -> None:
    log = bench.log()
    for number in range(3):
        bench.append(log, b"%d" % number)
    assert bench.client.delete_records({log: 2}) == {log: 2}
    assert bench.client.delete_records({log: 1}) == {log: 2}, "a begin never moves back"
    assert bench.read(log) == [b"2"]
    with pytest.raises(errors.DataLoss, match="OFFSET_OUT_OF_RANGE"):
        bench.client.fetch({log: 1})
    with pytest.raises(errors.DataLoss, match="OFFSET_OUT_OF_RANGE"):
        bench.client.delete_records({log: 4})


def test_a_group_keeps_its_position(bench: Bench) -> None:
    log = bench.log()
    group = bench.id()
    assert bench.position(group, log) == -1
    bench.client.commit_offsets(group, {log: 12})
    bench.client.commit_offsets(group, {log: 7})
    assert bench.position(group, log) == 7


# -- transactions --------------------------------------------------------------------------------------------


@dataclass
class Transactions:
    """Transactions of one id, as version 1 or 2 does them."""

    bench: Bench
    version: int
    id: str

    def fence(self, timeout_ms: int = 60_000) -> Producer:
        return self.bench.client.fence(self.id, timeout_ms)

    def write(
        self, producer: Producer, log: TopicPartition, *bodies: bytes, sequence: int = 0, join: bool = True
    ) -> int:
        data = bytearray(batch(*bodies, transactional=True))
        stamp(data, producer_id=producer.id, epoch=producer.epoch, sequence=sequence, timestamp=now_ms())
        if self.version < 2 and join:
            self.bench.client.add_partitions(self.id, producer, [log])
        return self.bench.client.produce({log: data}, transactional_id=self.id, implicit=self.version >= 2)[
            log
        ]

    def end(self, producer: Producer, *, commit: bool = True) -> Producer:
        """The producer of the next transaction."""
        after = self.bench.client.end_transaction(self.id, producer, commit=commit, bump=self.version >= 2)
        return after if self.version >= 2 else self.fence()

    def state(self) -> str:
        found = self.bench.client.transaction(self.id)
        return found.state if found is not None else "unknown"


@pytest.fixture(params=[1, 2], ids=["tv1", "tv2"])
def transactions(request: pytest.FixtureRequest, bench: Bench) -> Transactions:
    if bench.client.transaction_version() < request.param:
        pytest.skip(f"this Kafka has transaction.version {bench.client.transaction_version()}")
    return Transactions(bench, request.param, bench.id())


def test_a_transaction_is_read_when_it_is_committed_and_never_when_it_is_aborted(
    bench: Bench, transactions: Transactions
) -> None:
    log = bench.log()
    producer = transactions.fence()
    assert transactions.write(producer, log, b"a", b"b") == 0
    assert transactions.write(producer, log, b"c", sequence=2) == 2
    bench.append(log, b"plain")
    assert bench.end(log) == 0 and bench.end(log, Isolation.READ_UNCOMMITTED) == 4, (
        "an open transaction pins the last stable offset"
    )
    assert transactions.state() == "Ongoing"
    producer = transactions.end(producer)
    wait_until(lambda: bench.end(log) == 5)
    transactions.write(producer, log, b"lost")
    transactions.end(producer, commit=False)
    wait_until(lambda: bench.end(log) == 7)
    assert bench.read(log) == [b"a", b"b", b"c", b"plain"]
    assert bench.read(log, Isolation.READ_UNCOMMITTED) == [b"a", b"b", b"c", b"plain", b"lost"]


def test_a_fetch_names_the_aborted_transactions_it_overlaps(bench: Bench, transactions: Transactions) -> None:
    log = bench.log()
    producer = transactions.fence()
    transactions.write(producer, log, b"lost")
    bench.append(log, b"kept")
    transactions.end(producer, commit=False)
    wait_until(lambda: bench.end(log) == 3)
    assert bench.client.fetch({log: 0})[log].aborted == ((producer.id, 0),)
    assert bench.client.fetch({log: 1})[log].aborted == ((producer.id, 0),)
    assert bench.client.fetch({log: 3})[log].aborted == ()


def test_a_fence_ends_the_transaction_of_the_one_before(bench: Bench, transactions: Transactions) -> None:
    log = bench.log()
    old = transactions.fence()
    transactions.write(old, log, b"lost")
    new = transactions.fence()
    assert new > old
    for late in (
        lambda: transactions.write(old, log, b"late", sequence=1),
        lambda: bench.client.end_transaction(
            transactions.id, old, commit=True, bump=transactions.version >= 2
        ),
        lambda: bench.client.add_partitions(transactions.id, old, [log]),
    ):
        with pytest.raises(errors.TransactionState, match="Kafka answers"):
            late()
    transactions.write(new, log, b"kept")
    transactions.end(new)
    wait_until(lambda: bench.end(log) == 4)
    assert bench.read(log) == [b"kept"]


def test_a_batch_outside_the_transaction_is_refused(bench: Bench) -> None:
    """Before version 2 a log joins first; the leader asks the coordinator (KIP-890, part 1)."""
    log, transactions = bench.log(), Transactions(bench, 1, bench.id())
    producer = transactions.fence()
    with pytest.raises(errors.TransactionState, match="TRANSACTION_ABORTABLE"):
        transactions.write(producer, log, b"stray", join=False)
    with pytest.raises(errors.QueueNotFound, match="UNKNOWN_TOPIC_OR_PARTITION"):
        bench.client.add_partitions(transactions.id, producer, [log, TopicPartition("no-such-topic", 0)])
    assert bench.end(log, Isolation.READ_UNCOMMITTED) == 0


def test_a_late_end_of_a_used_epoch_ends_nothing(bench: Bench) -> None:
    transactions = Transactions(bench, 2, bench.id())
    if bench.client.transaction_version() < 2:
        pytest.skip("before transaction.version 2 an epoch serves many transactions")
    log = bench.log()
    first = transactions.fence()
    transactions.write(first, log, b"one")
    second = transactions.end(first)
    assert second == Producer(first.id, first.epoch + 1)
    assert transactions.end(first) == second, "the same answer, while nothing was opened since"
    transactions.write(second, log, b"two")
    with pytest.raises(errors.TransactionState):
        transactions.end(first)
    with pytest.raises(errors.TransactionState):
        transactions.write(first, log, b"late", sequence=1)
    assert transactions.state() == "Ongoing"
    transactions.end(second)
    wait_until(lambda: bench.end(log) == 4)
    assert bench.read(log) == [b"one", b"two"]


def test_before_version_2_the_same_end_twice_is_answered_and_another_one_refused(bench: Bench) -> None:
    log, id = bench.log(), bench.id()
    transactions = Transactions(bench, 1, id)
    producer = transactions.fence()
    transactions.write(producer, log, b"x")
    for _ in range(2):
        assert bench.client.end_transaction(id, producer, commit=True, bump=False) == producer
    wait_until(lambda: transactions.state() == "CompleteCommit")
    with pytest.raises(errors.TransactionState, match="INVALID_TXN_STATE"):
        bench.client.end_transaction(id, producer, commit=False, bump=False)


def test_a_batch_that_is_sent_twice_stands_once(bench: Bench, transactions: Transactions) -> None:
    log = bench.log()
    producer = transactions.fence()
    assert [transactions.write(producer, log, b"a", b"b") for _ in range(2)] == [0, 0]
    with pytest.raises(errors.TransactionState, match="OUT_OF_ORDER_SEQUENCE_NUMBER"):
        transactions.write(producer, log, b"gap", sequence=5)
    assert transactions.write(producer, log, b"c", sequence=2) == 2
    transactions.end(producer)
    wait_until(lambda: bench.end(log) == 4)
    assert bench.read(log) == [b"a", b"b", b"c"]


def test_a_transaction_that_is_too_old_is_aborted(bench: Bench, transactions: Transactions) -> None:
    log = bench.log()
    producer = transactions.fence(timeout_ms=1000)
    transactions.write(producer, log, b"lost")
    wait_until(lambda: transactions.state() == "CompleteAbort")
    wait_until(lambda: bench.end(log) == 2)
    with pytest.raises(errors.TransactionState):
        transactions.write(producer, log, b"late", sequence=1)
    assert bench.read(log) == []


@pytest.mark.parametrize("commit", [True, False])
def test_a_transaction_without_records_is_ended_by_another_process_and_keeps_the_timeout_of_its_fence(
    bench: Bench, transactions: Transactions, commit: bool
) -> None:
    """Its end comes into each log that has joined."""
    log, identity = bench.log(), transactions.id
    producer = transactions.fence(timeout_ms=59_001)

    def known() -> tuple[str, int]:
        found = bench.client.transaction(identity)
        return (found.state, found.timeout_ms) if found is not None else ("unknown", 0)

    assert known() == ("Empty", 59_001)
    bench.client.add_partitions(identity, producer, [log])
    assert known() == ("Ongoing", 59_001)
    found = bench.client.transaction(identity)
    assert found is not None
    bench.client.end_transaction(identity, found.producer, commit=commit, bump=False)
    wait_until(lambda: known() == ("CompleteCommit" if commit else "CompleteAbort", 59_001))
    wait_until(lambda: bench.end(log) == 1)
    transactions.fence()
    assert known() == ("Empty", 60_000)


def test_a_transactional_id_that_nobody_used_is_unknown(bench: Bench) -> None:
    assert bench.client.transaction(bench.id()) is None
    with pytest.raises(errors.KafkaError, match="INVALID_TRANSACTION_TIMEOUT"):
        bench.client.fence(bench.id(), timeout_ms=10**9)


# -- listeners that only a real node has -------------------------------------------------------------------------


def token() -> str:
    """A token without a signature (RFC 7515, appendix A.5)."""
    claims = {"sub": USER, "iat": time.time() - 5, "exp": time.time() + 3600}
    parts = [
        base64.urlsafe_b64encode(json.dumps(each).encode()).rstrip(b"=").decode()
        for each in ({"alg": "none"}, claims)
    ]
    return ".".join([*parts, ""])


def opened(node: NodeAddress, settings: Settings) -> tuple[Client, SocketWire]:
    wire = SocketWire(settings)
    return Client(wire, [node], reconnect_s=1.0), wire


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_mechanism_logs_in_and_again_before_the_session_ends(real: RealNode, mechanism: str) -> None:
    tokens: list[str] = []

    def fresh() -> str:
        tokens.append(token())
        return tokens[-1]

    client, wire = opened(real.sasl, Settings(login=SaslLogin(mechanism, USER, PASSWORD, fresh)))
    # a node closes a connection that goes on after its session, so one connection is enough only if it logs
    # in again
    client.transaction_version()
    (connection,) = wire.connections.values()
    expiries = {connection._expires}

    def logged_in_twice_more() -> bool:
        assert wire.send(real.sasl, ApiVersions()).answer().versions
        expiries.add(connection._expires)
        return len(expiries) == 3

    wait_until(logged_in_twice_more)
    assert list(wire.connections.values()) == [connection] and not connection.broken
    assert mechanism != "OAUTHBEARER" or len(tokens) == len(expiries)
    client.close()


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_wrong_password_is_refused_and_not_shown(real: RealNode, mechanism: str) -> None:
    login = SaslLogin(mechanism, USER, "hunter2", lambda: "hunter2")
    client, _ = opened(real.sasl, Settings(login=login))
    with pytest.raises(
        errors.AccessRefused, match=f"by {mechanism}: Kafka answers SASL_AUTHENTICATION_FAILED"
    ) as caught:
        client.transaction_version()
    assert "hunter2" not in str(caught.value) + repr(caught.value) + repr(login)
    client.close()


@pytest.mark.slow
def test_tls_proves_the_node(real: RealNode) -> None:
    client, _ = opened(real.tls, Settings(tls=real.trusted))
    assert client.transaction_version() >= 1
    client.close()
    stranger, _ = opened(real.tls, Settings(tls=ssl.create_default_context()))
    with pytest.raises(errors.ConnectionFailed, match=r"CERTIFICATE_VERIFY_FAILED.*check the certificates"):
        stranger.transaction_version()


@pytest.mark.slow
def test_threads_share_a_connection_of_tls(real: RealNode) -> None:
    wire = SocketWire(Settings(tls=real.trusted))
    client = Client(wire, [real.tls], reconnect_s=WAIT_S)
    log = TopicPartition(f"tls-{os.getpid()}", 0)
    client.create_topic(log.topic, 1, replication=1)
    found: list[int] = []

    def append() -> None:
        found.extend(client.produce({log: batch(bytes(50_000))})[log] for _ in range(20))

    threads = [threading.Thread(target=append) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(found) == list(range(80))
    # the node advertises each listener under its own address, so all went through one connection
    assert len(wire.connections) == 1
    client.close()


@pytest.mark.slow
@pytest.mark.parametrize("codec", list(Codec))
def test_what_kafka_itself_compresses_is_read(real: RealNode, codec: Codec) -> None:
    """The broker writes each batch anew in the codec of the topic, by the libraries of the Java clients."""
    client = Client(SocketWire(Settings()), [real.plain], reconnect_s=WAIT_S)
    log = TopicPartition(f"java-{codec.name}-{os.getpid()}", 0)
    name = "uncompressed" if codec is Codec.NONE else codec.name.lower()
    client.create_topic(log.topic, 1, replication=1, configs={"compression.type": name})
    values = pa.array([b"%d" % number * (number % 50) for number in range(5000)], pa.binary())
    written = Codec.ZSTD if codec is Codec.NONE else Codec.NONE
    client.produce({log: encode(values, timestamp=now_ms(), codec=written)})
    records = client.fetch({log: 0})[log].records
    assert records[22] & 7 == codec
    assert decode(records, 0, EVERYTHING, log=str(log)).records.values.equals(values)
    client.close()


@pytest.mark.slow
def test_the_wrong_listener_is_told(real: RealNode) -> None:
    """Plaintext at a TLS listener, TLS at a plaintext listener, no login at a SASL listener."""
    for node, settings in (
        (real.tls, Settings()),
        (real.plain, Settings(tls=real.trusted, connect_s=5.0)),
        (real.sasl, Settings()),
    ):
        client, _ = opened(node, settings)
        with pytest.raises((errors.ConnectionFailed, errors.RemoteProtocolError)) as caught:
            client.topics()
        assert str(node) in str(caught.value)
        client.close()
