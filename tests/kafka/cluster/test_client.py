"""What a client does when nodes are away, answers are lost, and leaders and coordinators move: over
FakeKafka, with a clock by hand.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pytest

from broker_core.core import errors
from broker_core.core.backoff import Time
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.cluster.cluster import REFRESH_S
from broker_core.kafka.protocol import port
from broker_core.kafka.protocol.codes import MOVED, UNCLEAR, Code
from broker_core.kafka.protocol.port import LATEST, Isolation, Producer, Request, TopicPartition, Unanswered
from broker_core.kafka.record.decode import decode
from broker_core.kafka.record.encode import encode, stamp
from tests.kafka.bench.batches import EVERYTHING
from tests.kafka.bench.fake_kafka import LOST, REFUSED, UNANSWERED, FakeKafka
from tests.kafka.bench.fake_log import FakeLog

RECONNECT_S = 30.0
LOG = TopicPartition("orders", 0)


class Cluster:
    """A FakeKafka whose clock moves by the client's own pauses, and a client of it."""

    def __init__(self, seed: int = 0) -> None:
        self.now = 1000.0
        self.kafka = FakeKafka(3, now=lambda: self.now)
        self.wire = self.kafka.wire()
        self.client = Client(
            self.wire,
            list(self.kafka.nodes.values()),
            reconnect_s=RECONNECT_S,
            time=Time(lambda: self.now, self._sleep),
        )
        self.client.create_topic(LOG.topic, 3)
        self.asked: list[tuple[int, Request[Any]]] = []
        self.kafka.fault = self._note

    def _sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds

    def _note(self, node: int, request: Request[Any]) -> str | None:
        self.asked.append((node, request))
        return None

    def log(self, log: TopicPartition = LOG) -> FakeLog:
        found = self.kafka.log(log)
        assert found is not None
        return found

    def failing(
        self, faults: Sequence[str | Code | Callable[[], None] | None], *kinds: type[Request[Any]]
    ) -> None:
        """The next requests of these kinds fail so, one by one; a function changes the cluster before its
        request is done.
        """
        left = list(faults)

        def fault(node: int, request: Request[Any]) -> str | Code | None:
            self.asked.append((node, request))
            if not left or not isinstance(request, kinds):
                return None
            each = left.pop(0)
            if callable(each):
                each()
                return None
            return each

        self.kafka.fault = fault

    def count(self, kind: type[Request[Any]]) -> int:
        return sum(isinstance(request, kind) for _, request in self.asked)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def batch(*bodies: bytes) -> bytes:
    return encode(pa.array(bodies, pa.binary()), timestamp=1)


def transactional(producer: Producer, body: bytes, sequence: int = 0) -> bytes:
    data = bytearray(encode(pa.array([body], pa.binary()), timestamp=1, transactional=True))
    stamp(data, producer_id=producer.id, epoch=producer.epoch, sequence=sequence, timestamp=1)
    return bytes(data)


# -- leaders -------------------------------------------------------------------------------------------------


def test_a_leader_that_moved_is_found_again(cluster: Cluster) -> None:
    assert cluster.client.produce({LOG: batch(b"a")}) == {LOG: 0}
    for turn in (1, 2, 3, 1):
        cluster.kafka.move_leader(LOG, turn)
        before = cluster.log().end
        assert cluster.client.offsets({LOG: LATEST}) == {LOG: before}
        assert cluster.client.produce({LOG: batch(b"b")}) == {LOG: before}
    assert cluster.log().end == 5


def test_a_log_without_a_leader_is_asked_for_until_it_has_one(cluster: Cluster) -> None:
    cluster.kafka.move_leader(LOG, -1)
    cluster.client.cluster.forget(LOG.topic)
    cluster.failing([None, None, lambda: cluster.kafka.move_leader(LOG, 3)], port.Metadata)
    assert cluster.client.produce({LOG: batch(b"a")}) == {LOG: 0}
    assert cluster.asked[-1][0] == 3


def test_all_leaders_are_asked_before_an_answer_is_read(cluster: Cluster) -> None:
    logs = [TopicPartition(LOG.topic, number) for number in range(3)]
    assert len({cluster.log(log).leader for log in logs}) == 3
    cluster.client.topic(LOG.topic)
    order: list[str] = []
    wire = cluster.wire
    send = wire.send

    class Reading:
        def __init__(self, pending: port.Pending[Any]) -> None:
            self._pending = pending

        def answer(self) -> Any:
            order.append("answer")
            return self._pending.answer()

    def noted(*arguments: Any) -> Reading:
        order.append("send")
        return Reading(send(*arguments))

    wire.send = noted  # type: ignore[method-assign]
    assert cluster.client.produce({log: batch(b"x") for log in logs}) == dict.fromkeys(logs, 0)
    assert order == ["send"] * 3 + ["answer"] * 3


def test_only_what_was_refused_is_asked_again(cluster: Cluster) -> None:
    logs = [TopicPartition(LOG.topic, number) for number in range(3)]
    cluster.client.topic(LOG.topic)
    cluster.kafka.move_leader(logs[1], cluster.log(logs[0]).leader)
    assert cluster.client.produce({log: batch(b"x") for log in logs}, repeat=True) == dict.fromkeys(logs, 0)
    assert [cluster.log(log).end for log in logs] == [1, 1, 1]


def test_an_end_that_a_new_leader_does_not_know_yet_is_waited_for(cluster: Cluster) -> None:
    """KIP-207: without it, records that were acknowledged would be missed."""
    cluster.client.produce({LOG: batch(b"a", b"b")})
    cluster.kafka.move_leader(LOG, 2, ends_unknown=4)
    assert cluster.client.offsets({LOG: LATEST}) == {LOG: 2}
    assert cluster.count(port.ListOffsets) >= 5


def test_new_partitions_are_seen_after_a_while(cluster: Cluster) -> None:
    assert len(cluster.client.topic(LOG.topic).partitions) == 3
    cluster.kafka.grow(LOG.topic, 5)
    cluster.now += REFRESH_S - 1
    assert len(cluster.client.topic(LOG.topic).partitions) == 3
    cluster.now += 1
    assert len(cluster.client.topic(LOG.topic).partitions) == 5
    cluster.kafka.grow(LOG.topic, 6)
    assert cluster.client.offsets({TopicPartition(LOG.topic, 5): LATEST}) == {
        TopicPartition(LOG.topic, 5): 0
    }, "one that is asked for is seen at once"


# -- answers that do not come --------------------------------------------------------------------------------


def test_a_request_that_was_not_sent_is_sent_again(cluster: Cluster) -> None:
    cluster.failing([REFUSED, REFUSED], port.Produce)
    assert cluster.client.produce({LOG: batch(b"a")}) == {LOG: 0}
    assert cluster.log().end == 1


@pytest.mark.parametrize(("fault", "stands"), [(LOST, 0), (UNANSWERED, 1)])
def test_an_append_without_an_answer_is_not_sent_again_unasked(
    cluster: Cluster, fault: str, stands: int
) -> None:
    cluster.failing([fault], port.Produce)
    with pytest.raises(Unanswered):
        cluster.client.produce({LOG: batch(b"a")})
    assert cluster.log().end == stands and cluster.count(port.Produce) == 1
    cluster.failing([fault], port.Produce)
    cluster.client.produce({LOG: batch(b"a")}, repeat=True)
    assert cluster.log().end == 2 * stands + 1


@pytest.mark.parametrize("code", sorted(UNCLEAR))
def test_an_answer_that_leaves_it_open_is_none(cluster: Cluster, code: Code) -> None:
    """REQUEST_TIMED_OUT and its like: the record may stand there."""
    cluster.failing([code], port.Produce)
    with pytest.raises(Unanswered, match=code.name):
        cluster.client.produce({LOG: batch(b"a")})
    assert cluster.log().end == 1 and cluster.count(port.Produce) == 1
    cluster.failing([code], port.Produce)
    cluster.client.produce({LOG: batch(b"a")}, repeat=True)
    assert cluster.log().end == 3
    producer = cluster.client.fence("t")
    cluster.client.produce({LOG: transactional(producer, b"x")}, transactional_id="t", implicit=True)
    cluster.failing([code], port.EndTransaction)
    with pytest.raises(Unanswered, match=code.name):
        cluster.client.end_transaction("t", producer, commit=True, bump=True)
    cluster.failing([code], port.CreateTopic, port.DeleteTopic)
    cluster.client.create_topic("new")
    cluster.failing([code], port.DeleteTopic)
    cluster.client.delete_topic("new")


def test_questions_are_asked_again(cluster: Cluster) -> None:
    cluster.client.produce({LOG: batch(b"a")})
    questions: list[tuple[type[Request[Any]], Callable[[], object]]] = [
        (port.ListOffsets, lambda: cluster.client.offsets({LOG: LATEST})),
        (port.Fetch, lambda: cluster.client.fetch({LOG: 0})),
        (port.Metadata, lambda: cluster.client.topics()),
        (port.ApiVersions, lambda: cluster.client.transaction_version()),
        (port.DescribeTopic, lambda: cluster.client.configs(LOG.topic)),
        (port.LogSizes, lambda: cluster.client.sizes([LOG])),
        (port.DeleteRecords, lambda: cluster.client.delete_records({LOG: 1})),
        (port.DescribeTransaction, lambda: cluster.client.transaction("t")),
        (port.FindCoordinator, lambda: cluster.client.commit_offsets("g", {LOG: 1})),
        (port.CommitOffsets, lambda: cluster.client.commit_offsets("g", {LOG: 1})),
        (port.InitProducer, lambda: cluster.client.fence("t")),
    ]
    for kind, question in questions:
        cluster.failing([REFUSED, LOST, UNANSWERED], kind)
        question()
        assert cluster.count(kind) >= 4, kind.__name__
        cluster.asked.clear()


@pytest.mark.parametrize("fault", [REFUSED, LOST, UNANSWERED])
def test_topics_are_made_and_deleted_although_an_answer_is_lost(cluster: Cluster, fault: str) -> None:
    cluster.failing([fault], port.CreateTopic)
    assert len(cluster.client.create_topic("new", 4).partitions) == 4
    cluster.failing([fault], port.DeleteTopic)
    cluster.client.delete_topic("new")
    assert "new" not in cluster.kafka.topics
    cluster.failing([REFUSED], port.DeleteTopic)
    with pytest.raises(errors.QueueNotFound):
        cluster.client.delete_topic("new")


def test_a_topic_is_made_when_its_leaders_know_that_they_are(cluster: Cluster) -> None:
    """Else the first batch of a fresh partition is refused with a code that may also mean "appended"."""
    cluster.failing([Code.NOT_LEADER_OR_FOLLOWER] * 3, port.ListOffsets, port.Produce)
    cluster.client.create_topic("new", 1)
    fresh = TopicPartition("new", 0)
    assert cluster.client.produce({fresh: batch(b"a")}) == {fresh: 0}


def test_a_cluster_that_is_away_fails_after_its_time(cluster: Cluster) -> None:
    cluster.client.topic(LOG.topic)
    cluster.kafka.down |= set(cluster.kafka.nodes)
    for question in (
        lambda: cluster.client.offsets({LOG: LATEST}),
        lambda: cluster.client.produce({LOG: batch(b"a")}),
        lambda: cluster.client.topics(),
        lambda: cluster.client.fence("t"),
        lambda: cluster.client.create_topic("new"),
    ):
        began = cluster.now
        with pytest.raises(errors.ConnectionFailed, match="cannot connect to fake:"):
            question()
        assert RECONNECT_S <= cluster.now - began <= RECONNECT_S + 0.01
    cluster.kafka.down.clear()
    assert cluster.client.produce({LOG: batch(b"a")}) == {LOG: 0}


def test_a_node_that_is_away_hinders_only_its_own_logs(cluster: Cluster) -> None:
    leader = cluster.log().leader
    other = next(
        TopicPartition(LOG.topic, number)
        for number in range(3)
        if cluster.log(TopicPartition(LOG.topic, number)).leader != leader
    )
    cluster.kafka.down.add(leader)
    assert cluster.client.produce({other: batch(b"a")}) == {other: 0}
    with pytest.raises(errors.ConnectionFailed):
        cluster.client.produce({LOG: batch(b"a")})
    cluster.kafka.move_leader(LOG, cluster.log(other).leader)
    assert cluster.client.produce({LOG: batch(b"a")}) == {LOG: 0}


def test_pauses_grow_and_do_not_beat_in_step(cluster: Cluster) -> None:
    cluster.kafka.down |= set(cluster.kafka.nodes)
    pauses: list[float] = []
    client = Client(
        cluster.kafka.wire(),
        [cluster.kafka.nodes[1]],
        reconnect_s=5.0,
        time=Time(lambda: sum(pauses), pauses.append),
    )
    with pytest.raises(errors.ConnectionFailed):
        client.topics()
    assert pauses[0] < 0.01 < 0.4 < max(pauses) <= 1.5 and len(pauses) < 30
    assert len(set(pauses)) == len(pauses)


# -- transactions --------------------------------------------------------------------------------------------


def test_a_coordinator_that_moved_is_found_again(cluster: Cluster) -> None:
    producer = cluster.client.fence("t")
    for node in (1, 2, 3):
        cluster.kafka.move_coordinator("t", node)
        cluster.client.produce({LOG: transactional(producer, b"x")}, transactional_id="t", implicit=True)
        producer = cluster.client.end_transaction("t", producer, commit=True, bump=True)
    assert cluster.log().end == 6


def test_a_coordinator_that_is_away_is_waited_for(cluster: Cluster) -> None:
    cluster.kafka.move_coordinator("t", 2)
    cluster.kafka.down.add(2)
    cluster.failing([None] * 5 + [lambda: cluster.kafka.move_coordinator("t", 3)], port.FindCoordinator)
    assert cluster.client.fence("t").epoch == 0
    assert cluster.asked[-1][0] == 3


@pytest.mark.parametrize("version", [1, 2])
def test_markers_that_come_late_are_waited_for(cluster: Cluster, version: int) -> None:
    cluster.kafka.marker_lag = 6
    producer = cluster.client.fence("t")
    for number in range(3):
        if version == 1:
            cluster.client.add_partitions("t", producer, [LOG])
        cluster.client.produce(
            {LOG: transactional(producer, b"%d" % number)}, transactional_id="t", implicit=version == 2
        )
        after = cluster.client.end_transaction("t", producer, commit=True, bump=version == 2)
        producer = after if version == 2 else cluster.client.fence("t")
    assert cluster.client.offsets({LOG: LATEST}, Isolation.READ_UNCOMMITTED)[LOG] >= 5


@pytest.mark.parametrize(("fault", "state"), [(LOST, "Ongoing"), (UNANSWERED, "CompleteCommit")])
def test_an_end_without_an_answer_says_so(cluster: Cluster, fault: str, state: str) -> None:
    producer = cluster.client.fence("t")
    cluster.client.produce({LOG: transactional(producer, b"x")}, transactional_id="t", implicit=True)
    cluster.failing([fault], port.EndTransaction)
    with pytest.raises(Unanswered):
        cluster.client.end_transaction("t", producer, commit=True, bump=True)
    found = cluster.client.transaction("t")
    assert found is not None and found.state == state and cluster.count(port.EndTransaction) == 1


def test_an_open_transaction_is_aborted_by_the_clock(cluster: Cluster) -> None:
    producer = cluster.client.fence("t", timeout_ms=10_000)
    cluster.client.produce({LOG: transactional(producer, b"x")}, transactional_id="t", implicit=True)
    cluster.now += 10.5
    with pytest.raises(errors.TransactionState, match=r"PRODUCER_FENCED|INVALID_PRODUCER_EPOCH"):
        cluster.client.end_transaction("t", producer, commit=True, bump=True)
    assert cluster.client.offsets({LOG: LATEST}) == {LOG: 2}


# -- any order of failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_whatever_fails_an_acknowledged_append_stands_once(seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster()
    logs = [TopicPartition(LOG.topic, number) for number in range(3)]

    def fault(node: int, request: Request[Any]) -> str | None:
        match rng.randrange(12):
            case 0:
                return rng.choice((REFUSED, LOST, UNANSWERED))
            case 1:
                cluster.kafka.move_leader(
                    rng.choice(logs), rng.choice((1, 2, 3)), ends_unknown=rng.randrange(2)
                )
            case 2:
                cluster.kafka.down = {rng.choice((1, 2, 3))} if rng.random() < 0.5 else set()
        return None

    cluster.kafka.fault = fault
    acknowledged: Counter[bytes] = Counter()
    unclear: Counter[bytes] = Counter()
    for number in range(120):
        log, body = rng.choice(logs), b"%d" % number
        try:
            cluster.client.produce({log: batch(body)})
            acknowledged[body] += 1
        except Unanswered:
            unclear[body] += 1
        except errors.ConnectionFailed:
            pass  # nothing was done: it must stand nowhere
    cluster.kafka.fault = lambda node, request: None
    cluster.kafka.down = set()
    standing: Counter[bytes] = Counter()
    for log in logs:
        fetched = cluster.client.fetch({log: 0}, max_bytes=1 << 30)[log]
        standing.update(decode(fetched.records, 0, EVERYTHING, log=str(log)).records.values.to_pylist())
    assert not acknowledged - standing and not standing - acknowledged - unclear
    assert len(acknowledged) > 60 and unclear


@pytest.mark.parametrize("code", sorted(MOVED))
def test_a_leader_that_lost_its_place_may_have_appended(cluster: Cluster, code: Code) -> None:
    """It waits for replicas, an election comes, and it answers that it is no leader: the new one may have the
    batch. A batch without sequences is not sent again, unless twice is as good as once.
    """
    cluster.failing([code], port.Produce)
    with pytest.raises(Unanswered):
        cluster.client.produce({LOG: batch(b"a")})
    assert cluster.log().end == 1
    cluster.failing([code], port.Produce)
    assert cluster.client.produce({LOG: batch(b"a")}, repeat=True) == {LOG: 2}
    producer = cluster.client.fence("t")
    cluster.failing([code], port.Produce)
    once = transactional(producer, b"x")
    assert cluster.client.produce({LOG: once}, transactional_id="t", implicit=True) == {LOG: 3}
    assert cluster.log().end == 4


def test_settings_are_asked_for_again_while_a_node_is_busy(cluster: Cluster) -> None:
    cluster.failing([Code.REQUEST_TIMED_OUT, Code.THROTTLING_QUOTA_EXCEEDED, LOST], port.DescribeTopic)
    assert cluster.client.configs(LOG.topic, "cleanup.policy") == {"cleanup.policy": "delete"}
    cluster.failing([Code.TOPIC_AUTHORIZATION_FAILED], port.DescribeTopic)
    with pytest.raises(errors.AccessRefused, match="topic orders"):
        cluster.client.configs(LOG.topic)
