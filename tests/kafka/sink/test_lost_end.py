"""A transaction whose end Kafka has lost in some of its logs, because it took a log without a leader for a deleted
one (4.3.1): it is ended as the coordinator has ended it, whatever request is the driver's last meanwhile.

Not here: real nodes that are killed (``tests/crash/test_kafka_requests.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

import pytest

from broker_core.core import errors
from broker_core.engine import BranchHeader
from broker_core.kafka import names
from broker_core.kafka.protocol import port
from broker_core.kafka.protocol.codes import Code
from broker_core.kafka.protocol.port import LATEST, Request, TopicPartition
from broker_core.kafka.topics import entry as topic_entry
from tests.kafka.bench.fake_kafka import REFUSED, UNANSWERED
from tests.kafka.bench.sink_bench import APP, Cluster, Driver, rows
from tests.kafka.sink.test_sink_faults import ENOUGH, Killed, at, batch, require_once, version, without_faults

pytestmark = [pytest.mark.slow, pytest.mark.product]
__all__ = ["version"]

DECISIONS = TopicPartition(names.app_topic(APP), names.DECISIONS)
ORDERS, PAID = ([TopicPartition(queue, part) for part in range(2)] for queue in ("orders", "paid"))
LOST = {
    "everywhere": [DECISIONS, *ORDERS, *PAID],
    "decisions": [DECISIONS],
    "one queue": ORDERS,
    "queues": [*ORDERS, *PAID],
    "decisions and a queue": [DECISIONS, *PAID],
}


@pytest.fixture(params=LOST)
def lost(request: pytest.FixtureRequest) -> list[TopicPartition]:
    return LOST[request.param]


@pytest.fixture(params=["everywhere", "one queue"])
def lost_there(request: pytest.FixtureRequest) -> list[TopicPartition]:
    """Of a test that asks at each request."""
    return LOST[request.param]


@pytest.fixture(params=[True, False], ids=["committed", "aborted"])
def committed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def open_logs(cluster: Cluster) -> set[TopicPartition]:
    cluster.kafka.write_markers()
    logs = [each.log for topic in cluster.kafka.topics.values() for each in topic.logs]
    ends = [cluster.reader.offsets(dict.fromkeys(logs, LATEST), isolation) for isolation in port.Isolation]
    return {log for log in logs if ends[0][log] != ends[1][log]}


def lose(cluster: Cluster, logs: Collection[TopicPartition], *, committed: bool) -> Driver:
    """The second batch, whose end these logs do not get: it is committed, or its driver dies and somebody
    else will abort it.
    """
    driver = cluster.driver(reconnect_s=0.05)
    batch(driver, 0)
    cluster.kafka.write_markers()
    if committed:
        cluster.kafka.taken_for_deleted = set(logs)
        batch(driver, 1)
        cluster.kafka.write_markers()
        cluster.kafka.taken_for_deleted = set()
    else:
        die(cluster, driver, port.EndTransaction)
        cluster.kafka.taken_for_deleted = set(logs) & open_logs(cluster)
    assert open_logs(cluster)
    return driver


def die(cluster: Cluster, driver: Driver, last: type[Request[Any]], number: int = 1) -> None:
    """The driver dies in the batch with this number, at the first request of a kind."""

    def kill(node: int, request: Request[Any]) -> None:
        if isinstance(request, last):
            raise Killed

    cluster.kafka.fault = kill
    with pytest.raises(Killed):
        batch(driver, number)
    without_faults(cluster)


def hang(cluster: Cluster, *, state: str) -> None:
    """As ``lose`` everywhere, and the coordinator says ``state`` of it."""
    die_in = cluster.driver(reconnect_s=0.05)
    batch(die_in, 0)
    die(cluster, die_in, port.EndTransaction)
    known = cluster.kafka.transactions.all[f"txmq.{APP}"]
    known.state, known.committing, known.logs = state, state == "CompleteCommit", set()
    if cluster.reader.transaction_version() == 2:
        known.producer = known.producer._replace(epoch=known.producer.epoch + 1)


def test_a_transaction_whose_end_kafka_has_lost_is_ended_as_kafka_has_ended_it(
    version: int, lost: list[TopicPartition], committed: bool
) -> None:
    cluster = Cluster(version)
    lose(cluster, lost, committed=committed)
    driver = cluster.driver(reconnect_s=0.05)
    opened = driver.open(1)
    assert opened.already == committed
    if DECISIONS in lost:
        assert not open_logs(cluster)
    batch(driver, 1)
    assert committed or not open_logs(cluster)
    batch(driver, 2)
    assert not open_logs(cluster)
    require_once(cluster, 0, 1, 2)


def test_a_driver_that_dies_while_it_ends_a_transaction_again_leaves_every_row_once(
    version: int, lost_there: list[TopicPartition], committed: bool
) -> None:
    """At each request of the batch in which it does."""

    def kill(request: Request[Any]) -> None:
        raise Killed

    for number in range(1, ENOUGH):
        cluster = Cluster(version)
        lose(cluster, lost_there, committed=committed)
        count = at(cluster, number, kill)
        with contextlib.suppress(Killed):
            batch(cluster.driver(reconnect_s=0.05), 1 + committed)
        reached = count() >= number
        without_faults(cluster)
        driver = cluster.driver(reconnect_s=0.05)
        for each in (1, 2) if not committed else (2,):
            batch(driver, each)
        assert not open_logs(cluster), number
        require_once(cluster, 0, 1, 2)
        if not reached:
            return
    raise AssertionError("it never ended")


@pytest.mark.soak
@pytest.mark.parametrize("fault", [REFUSED, UNANSWERED])
def test_a_driver_whose_requests_fail_while_it_ends_a_transaction_again_leaves_every_row_once(
    version: int, lost_there: list[TopicPartition], committed: bool, fault: str
) -> None:
    for number in range(1, ENOUGH):
        cluster = Cluster(version)
        lose(cluster, lost_there, committed=committed)
        driver = cluster.driver()
        count = at(cluster, number, lambda request: fault)
        for each in (1, 2) if not committed else (2,):
            batch(driver, each)
        reached = count() >= number
        without_faults(cluster)
        assert not open_logs(cluster), number
        require_once(cluster, 0, 1, 2)
        if not reached:
            return
    raise AssertionError("it never ended")


def test_a_driver_that_has_lost_a_node_looks_what_hangs_before_it_decides_again(
    version: int, lost: list[TopicPartition]
) -> None:
    """Otherwise an abort of its next transaction takes back the rows of the one before."""
    cluster = Cluster(version)
    driver = lose(cluster, lost, committed=True)
    lost_nodes = [REFUSED]
    cluster.kafka.fault = lambda node, request: (
        lost_nodes.pop() if isinstance(request, port.ListOffsets) and lost_nodes else None
    )
    opened = driver.open(2)
    # its batch is refused, and aborted
    branches = [
        driver.stage(opened.token, [b"too large"], batch=2, target={"exchange": "", "routing_key": queue})
        for queue in ("orders", "paid")
    ]
    limited = [each for queue in ("orders", "paid") for each in cluster.kafka.topics[queue].logs]
    for log in limited:
        log.max_message_bytes = 10
    with pytest.raises(errors.TransactionTooLarge):
        driver.commit(2, opened.token, branches)
    assert not lost_nodes
    for log in limited:
        log.max_message_bytes = 1_048_588
    batch(driver, 2)
    assert not open_logs(cluster)
    require_once(cluster, 0, 1, 2)


@pytest.mark.parametrize("of_older_version", [False, True])
def test_a_transaction_whose_end_kafka_has_lost_and_forgotten_is_one_error_that_names_it(
    version: int, of_older_version: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that did not remember it has fenced, or it has not named the logs. Nothing is decided before
    somebody has ended it in the logs.
    """
    cluster = Cluster(version)
    if of_older_version:
        monkeypatch.setattr(topic_entry, "logs_header", lambda logs: ())
    hang(cluster, state="CompleteCommit" if of_older_version else "Empty")
    stable = cluster.reader.offsets({DECISIONS: LATEST})[DECISIONS]
    driver = cluster.driver(reconnect_s=0.05)
    for ask in (lambda: driver.open(1), lambda: driver.commit(1, "", []), lambda: driver.sink.decided(APP)):
        with pytest.raises(
            errors.KafkaError, match=rf"hangs in {DECISIONS} at offset {stable}: .*--start-offset {stable};"
        ):
            ask()


def test_a_driver_that_may_not_read_a_queue_goes_on(version: int) -> None:
    """Whose transaction is open there it cannot know; the next one that is committed there ends it."""
    cluster = Cluster(version, partitions=1)
    lose(cluster, ORDERS[:1], committed=True)

    def refuse(node: int, request: Request[Any]) -> Code | None:
        is_queue = isinstance(request, port.Fetch) and any(log in ORDERS for log in request.offsets)
        return Code.TOPIC_AUTHORIZATION_FAILED if is_queue else None

    cluster.kafka.fault = refuse
    batch(cluster.driver(reconnect_s=0.05), 2)
    without_faults(cluster)
    require_once(cluster, 0, 1, 2)


def test_what_hangs_and_is_older_than_all_that_is_kept_is_one_error(
    version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing says any more whether it was committed."""
    monkeypatch.setattr("broker_core.micro_batch.ledger.KEPT_ENTRIES", 2)
    cluster = Cluster(version)
    lose(cluster, PAID, committed=True)
    driver = cluster.driver(reconnect_s=0.05)
    for sequence in (1, 2):
        driver.sink.mark_applied(APP, sequence)
    monkeypatch.setattr(driver.sink._app(APP).decider.fenced.lost_ends, "_led", lambda topics: set())
    for number in range(2, 6):
        opened = driver.open(number)
        branch = driver.stage(opened.token, [b"x"], batch=number)
        driver.commit(number, opened.token, [branch])
    cluster.kafka.compact(DECISIONS)
    with pytest.raises(errors.KafkaError, match=r"hangs in paid/\d at offset"):
        batch(cluster.driver(reconnect_s=0.05), 6)


# -- batch writes --------------------------------------------------------------------------------------------


def write(driver: Driver, token: str) -> None:
    header = BranchHeader(token, f"{token}-0", "publish", {"exchange": "", "routing_key": "orders"})
    staged = [driver.sink.stage(header, [rows(b"a", b"b", b"c")])]
    assert driver.sink.commit_branches(token, staged) == 3


@pytest.mark.parametrize("fault", [None, REFUSED, UNANSWERED])
def test_a_batch_write_whose_end_kafka_has_lost_is_ended_before_it_returns(
    version: int, fault: str | None
) -> None:
    """Whatever request fails meanwhile: an abort of its first transaction is lost too."""
    for number in range(1, ENOUGH):
        cluster = Cluster(version)
        cluster.kafka.taken_for_deleted = set(ORDERS)
        count = at(cluster, number, lambda request: fault)
        write(cluster.driver(), "w")
        reached = count() >= number
        without_faults(cluster)
        assert not open_logs(cluster), number
        assert sorted(cluster.bodies()) == [b"a", b"b", b"c"]
        assert cluster.kafka.taken_for_deleted != set(ORDERS), "nothing was lost"
        if not reached or fault is None:
            return
    raise AssertionError("it never ended")


def test_a_batch_write_whose_driver_dies_while_it_ends_it_again_can_be_repeated(version: int) -> None:
    def kill(request: Request[Any]) -> None:
        raise Killed

    for number in range(1, ENOUGH):
        cluster = Cluster(version)
        cluster.kafka.taken_for_deleted = set(ORDERS)
        count = at(cluster, number, kill)
        with contextlib.suppress(Killed):
            write(cluster.driver(), "w")
        reached = count() >= number
        without_faults(cluster)
        write(cluster.driver(), "w")
        assert not open_logs(cluster), number
        assert sorted(cluster.bodies()) == [b"a", b"b", b"c"]
        if not reached:
            return
    raise AssertionError("it never ended")
