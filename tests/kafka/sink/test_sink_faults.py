"""Every single request of a micro-batch fails, is lost, or is the driver's last, and one driver overtakes
another before each of them: what is published is there exactly once, with one ledger entry.
"""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from broker_core.arrow import parts
from broker_core.core import errors
from broker_core.core.backoff import Time
from broker_core.engine import BranchHeader
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.protocol import port
from broker_core.kafka.protocol.codes import Code
from broker_core.kafka.protocol.port import Fetch, ListOffsets, Produce, Request, TopicPartition
from broker_core.kafka.record.record_batch import Codec
from broker_core.kafka.sink import encoded_batches as published
from broker_core.kafka.sink import staged_branches, staging
from broker_core.kafka.sink.encoded_batches import BATCH_BYTES
from tests.kafka.bench.fake_kafka import LATE, LOST, REFUSED, UNANSWERED
from tests.kafka.bench.sink_bench import APP, QUERY, Cluster, Driver, nothing_open, rows

BODIES = [b"%d" % number for number in range(6)]
pytestmark = [pytest.mark.slow, pytest.mark.product]

ENOUGH = 400  # requests; a micro-batch has fewer


class Killed(BaseException):
    pass


@pytest.fixture(params=[1, 2], ids=["tv1", "tv2"])
def version(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


def batch(driver: Driver, number: int, query: str = QUERY) -> None:
    """A micro-batch that publishes to two queues, from two tasks, and appends."""
    opened = driver.open(number, query)
    if opened.already:
        driver.commit(number, "", [], query)
        return
    tagged = [b"%d:%s" % (number, body) for body in BODIES]
    branches = [
        driver.stage(opened.token, tagged[:3], batch=number, query=query, partition=0),
        driver.stage(
            opened.token,
            tagged[3:],
            batch=number,
            query=query,
            partition=1,
            target={"exchange": "", "routing_key": "paid"},
        ),
        driver.stage(
            opened.token,
            [b"row"],
            batch=number,
            query=query,
            kind="append",
            target={"table": "t"},
            partition=2,
        ),
        driver.stage(opened.token, [], batch=number, query=query, partition=3),
    ]
    # a speculative attempt of the first task, which is not named
    driver.stage(opened.token, tagged[:3], batch=number, query=query, partition=0)
    driver.commit(number, opened.token, branches, query)


def require_once(cluster: Cluster, *batches: int) -> None:
    published = {number: [b"%d:%s" % (number, body) for body in BODIES] for number in batches}
    assert sorted(cluster.bodies("orders")) == sorted(
        body for each in published.values() for body in each[:3]
    )
    assert sorted(cluster.bodies("paid")) == sorted(body for each in published.values() for body in each[3:])
    assert cluster.entries() == [(sequence, number) for sequence, number in enumerate(batches, 1)]
    fresh = cluster.driver()
    unapplied = fresh.sink.unapplied(APP)
    assert [entry.batch_id for entry in unapplied] == list(batches)
    for entry in unapplied:
        (to_apply,) = entry.to_apply
        found = [
            row for rows in fresh.sink.read_branches(to_apply.branches) for row in rows["body"].to_pylist()
        ]
        assert found == [b"row"]


def at(cluster: Cluster, number: int, act: Callable[[Request[Any]], str | Code | None]) -> Callable[[], int]:
    """Acts before the request with this number. Returns how many there have been."""
    count = 0

    def fault(node: int, request: Request[Any]) -> str | Code | None:
        nonlocal count
        count += 1
        return act(request) if count == number else None

    cluster.kafka.fault = fault
    return lambda: count


def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_branches, "PIECE_BYTES", 35_000)
    for module in (published, staging):
        monkeypatch.setattr(module, "BATCH_BYTES", 30_000)


def without_faults(cluster: Cluster) -> None:
    cluster.kafka.fault = lambda node, request: None


@pytest.mark.parametrize("fault", [REFUSED, LOST, UNANSWERED])
@pytest.mark.parametrize("warm", [False, True], ids=["first", "later"])
def test_c4_whatever_request_fails_a_batch_is_decided_once(version: int, fault: str, warm: bool) -> None:
    for number in range(1, ENOUGH):
        cluster = Cluster(version)
        driver = cluster.driver()
        if warm:
            batch(driver, 0)
        count = at(cluster, number, lambda request: fault)
        batch(driver, int(warm))
        reached = count() >= number
        without_faults(cluster)
        batch(driver, int(warm) + 1)
        require_once(cluster, *range(int(warm) + 2))
        if not reached:
            return
    raise AssertionError("it never ended")


@pytest.mark.parametrize("fault", [REFUSED, LOST, UNANSWERED, Code.NOT_LEADER_OR_FOLLOWER])
def test_c4_what_is_under_way_behind_a_request_that_fails_keeps_its_order(
    version: int, fault: str | Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a branch of several requests, which are sent, fetched and published while the next is prepared."""
    small_batches(monkeypatch)
    bodies = [b"%d" % number + bytes(30_000) for number in range(6)]
    for number in range(1, ENOUGH):
        cluster = Cluster(version)
        driver = cluster.driver()
        count = at(cluster, number, lambda request: fault if _about_logs(request) else None)
        opened = driver.open(0)
        branch = driver.stage(opened.token, bodies)
        driver.commit(0, opened.token, [branch])
        logs = [cluster.read(TopicPartition("orders", partition)) for partition in range(2)]
        assert sorted(itertools.chain(*logs)) == bodies
        assert all(found == sorted(found) for found in logs)
        if count() < number:
            return
    raise AssertionError("it never ended")


def test_c4_a_transaction_is_not_ended_while_one_of_its_batches_may_still_come(
    version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One log refuses its batch, that of another one is late. Before Kafka 3.6 it would open a transaction
    that nobody ends, so a fence is what ends this one.
    """
    small_batches(monkeypatch)
    cluster = Cluster(version)
    driver = cluster.driver()
    driver.run(0, [b"before"])
    seen, ended = Counter[TopicPartition](), []
    faults: list[str | Code] = [LATE, Code.MESSAGE_TOO_LARGE]

    def fault(node: int, request: Request[Any]) -> str | Code | None:
        if isinstance(request, port.EndTransaction):
            ended.append(request)
        if not isinstance(request, Produce) or not request.transactional_id:
            return None
        seen.update(request.batches.keys())
        return faults.pop() if faults and 2 in (seen[log] for log in request.batches) else None

    opened = driver.open(1)
    branch = driver.stage(opened.token, [b"%d" % number + bytes(30_000) for number in range(6)], batch=1)
    cluster.kafka.fault = fault
    with pytest.raises(errors.TransactionTooLarge):
        driver.commit(1, opened.token, [branch])
    assert cluster.kafka.late and not ended
    without_faults(cluster)
    cluster.kafka.deliver_late()
    driver.run(1, [b"after"])
    assert sorted(cluster.bodies()) == [b"after", b"before"] and nothing_open(cluster)


def test_a_leader_may_move_while_a_task_waits_for_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes: the time to try again begins when the answer is wanted."""
    monkeypatch.setattr(parts, "PART_BYTES", BATCH_BYTES)
    cluster, now_s = Cluster(), 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    client = Client(
        cluster.kafka.wire(), [cluster.kafka.nodes[1]], reconnect_s=30, time=Time(lambda: now_s, sleep)
    )
    driver = Driver(cluster, client, clean_every_bytes=0, codec=Codec.NONE)
    faults: list[str | Code] = []
    cluster.kafka.fault = lambda node, request: (
        faults.pop() if faults and isinstance(request, Produce) else None
    )

    def slowly() -> Iterator[pa.RecordBatch]:
        faults.extend([Code.NOT_LEADER_OR_FOLLOWER, Code.NOT_LEADER_OR_FOLLOWER, LOST])
        for number in range(5):
            yield rows(b"%d" % number + bytes(BATCH_BYTES))
            sleep(60)

    token = driver.open(0).token
    header = BranchHeader(token, "b", "publish", {"exchange": "", "routing_key": "orders"}, APP, QUERY, 0)
    driver.commit(0, token, [driver.sink.stage(header, slowly())])
    assert not faults
    assert len(cluster.bodies("orders")) == 5


def _about_logs(request: Request[Any]) -> bool:
    return isinstance(request, Produce | Fetch | ListOffsets)


def test_row_3_whatever_request_was_the_drivers_last_the_next_one_decides_once(version: int) -> None:
    def kill(request: Request[Any]) -> None:
        raise Killed

    for number in range(1, ENOUGH):
        cluster = Cluster(version)
        count = at(cluster, number, kill)
        try:
            batch(cluster.driver(), 0)
        except Killed:
            pass
        reached = count() >= number
        without_faults(cluster)
        successor = cluster.driver()
        batch(successor, 0)
        batch(successor, 1)
        require_once(cluster, 0, 1)
        if not reached:
            return
    raise AssertionError("it never ended")


@pytest.mark.parametrize("ahead", [1, 2])
def test_row_11_a_driver_that_is_overtaken_before_any_request_sees_one_decision(
    version: int, ahead: int
) -> None:
    """The other one decides the same batch, or also the next one, while this one is suspended."""
    for number in range(1, ENOUGH):
        cluster = Cluster(version)
        suspended, other = cluster.driver(), cluster.driver()

        count = at(cluster, number, lambda _: overtake(cluster, other, ahead))  # noqa: B023
        batch(suspended, 0)
        reached = count() >= number
        without_faults(cluster)
        if not reached:
            return
        batch(suspended, ahead)  # neither takes the other's decisions for a gap
        batch(other, ahead)
        batch(other, ahead + 1)
        require_once(cluster, *range(ahead + 2))
    raise AssertionError("it never ended")


def overtake(cluster: Cluster, other: Driver, ahead: int) -> None:
    fault, cluster.kafka.fault = cluster.kafka.fault, lambda node, request: None
    for each in range(ahead):
        batch(other, each)
    cluster.kafka.fault = fault


def refuse(driver: Driver) -> None:
    """Publishes what a table has refused of the first batch, as ``txmq app skip --refused --queue`` lets a driver
    do.
    """
    entry = driver.sink.unapplied(APP)[0]
    token = uuid.uuid4().hex
    header = BranchHeader(token, f"{token}-0", "publish", {"exchange": "", "routing_key": "refused"})
    staged = [driver.sink.stage(header, [rows(b"row")])]
    assert driver.sink.publish_refused(APP, 1, entry.to_apply[0].branches, "0", token, staged) == "0"


@pytest.mark.parametrize("fault", [REFUSED, LOST, UNANSWERED, "killed"])
def test_c5_whatever_request_fails_or_was_the_drivers_last_refused_rows_are_published_once(
    version: int, fault: str
) -> None:
    def act(request: Request[Any]) -> str:
        if fault == "killed":
            raise Killed
        return fault

    for number in range(1, ENOUGH):
        cluster = Cluster(version)
        cluster.reader.create_topic("refused", 2)
        batch(cluster.driver(), 0)
        driver = cluster.driver()
        count = at(cluster, number, act)
        with contextlib.suppress(Killed):
            refuse(driver)
        reached = count() >= number
        without_faults(cluster)
        for each in (driver, cluster.driver()) if fault != "killed" else (cluster.driver(), cluster.driver()):
            refuse(each)
        assert cluster.bodies("refused") == [b"row"] and nothing_open(cluster)
        batch(cluster.driver(), 1)
        assert cluster.entries() == [(1, 0), (1, 0), (2, 1)], "the entry, its one note, and the next entry"
        if not reached:
            return
    raise AssertionError("it never ended")


def test_two_drivers_in_turn_decide_every_batch_once(version: int) -> None:
    cluster = Cluster(version)
    drivers = [cluster.driver(), cluster.driver()]
    for number in range(6):
        batch(drivers[number % 2], number)
        batch(drivers[(number + 1) % 2], number)
    require_once(cluster, *range(6))


@pytest.mark.parametrize(
    "request_type",
    [port.InitProducer, port.AddPartitions, port.Produce, port.EndTransaction, port.Fetch, port.ListOffsets],
)
def test_the_coordinator_and_every_leader_move_before_any_request_of_a_kind(
    version: int, request_type: type[Request[Any]]
) -> None:
    cluster = Cluster(version)
    driver, moves = cluster.driver(), 0

    def move(node: int, request: Request[Any]) -> None:
        nonlocal moves
        if isinstance(request, request_type) and moves < 40:
            moves += 1
            cluster.kafka.move_coordinator(f"txmq.{APP}", 1 + moves % 3)
            for name, topic in cluster.kafka.topics.items():
                for log in topic.logs:
                    cluster.kafka.move_leader(
                        TopicPartition(name, log.log.partition), 1 + (moves + log.log.partition) % 3
                    )

    cluster.kafka.fault = move
    for number in range(3):
        batch(driver, number)
    assert moves or (version == 2 and request_type is port.AddPartitions)
    without_faults(cluster)
    require_once(cluster, 0, 1, 2)


def test_a_kafka_that_stays_away_is_a_connection_that_failed_and_the_replay_decides_once(
    version: int,
) -> None:
    for number in range(1, ENOUGH):
        cluster = Cluster(version)
        driver = cluster.driver(reconnect_s=0.05)
        requests = itertools.count(1)
        cluster.kafka.fault = lambda *_: REFUSED if next(requests) >= number else None  # noqa: B023
        try:
            batch(driver, 0)
            reached = False
        except errors.ConnectionFailed:
            reached = True
        without_faults(cluster)
        batch(driver, 0)
        batch(driver, 1)
        require_once(cluster, 0, 1)
        if not reached:
            return
    raise AssertionError("it never ended")
