"""The engine as the connector uses it: whole micro-batches from queue to queue, over one FakeKafka."""

from __future__ import annotations

import os
import pickle
import threading
import time
from typing import Any

import pyarrow as pa
import pytest

from broker_core.core import errors
from broker_core.engine import START, BranchHeader, Engine, Limit, Origin, ReadTicket, Vector
from broker_core.kafka import names
from broker_core.kafka.admin import KafkaAdmin
from broker_core.kafka.engine import KafkaEngine, connect
from broker_core.kafka.protocol import port
from tests.kafka.bench.fake_kafka import UNANSWERED, FakeKafka
from tests.kafka.bench.source_bench import APP, SourceBench

URL = "kafka://fake:1,fake:2,fake:3"
FROM, TO = "orders", "done"


class Bench(SourceBench):
    def __init__(self) -> None:
        super().__init__()
        self.client.create_topic(TO, 2)

    def engine(self) -> Engine:
        """Of another process."""
        return KafkaEngine(URL, None, lambda settings: self.kafka.wire())

    def bodies(self, queue: str) -> list[bytes]:
        engine = self.engine()
        slices = [(log, 0, found.end) for log, found in engine.available(engine.logs([queue])).items()]
        return sorted(body for rows in engine.browse(slices) for body in rows.column("body").to_pylist())


@pytest.fixture
def bench() -> Bench:
    return Bench()


def header(token: str, batch: int, task: int = 0) -> BranchHeader:
    return BranchHeader(
        token, os.urandom(16).hex(), "publish", {"exchange": "", "routing_key": TO}, APP, "q", batch, task
    )


def micro_batch(
    driver: Engine,
    task: Engine,
    batch: int,
    start: Vector,
    offsets: dict[int, Vector] | None = None,
    *,
    limit: Limit | None = None,
) -> Vector:
    """One as Spark runs it: claim, read, stage, decide. Returns its end. ``offsets`` is Spark's offset log: a
    batch that stands there is not claimed again.
    """
    offsets = {} if offsets is None else offsets
    if batch not in offsets:
        end = driver.claim(APP, [FROM], start, limit or Limit(), Origin(), "fail")
        if end == start:
            return end
        offsets.setdefault(batch, end)
    end = offsets[batch]
    opened = driver.open_batch(APP, "q", batch, "fail")
    ranges = driver.resolve(APP, start, end)
    slices = tuple((log, first, last) for log, (first, last) in ranges.items())
    if opened.already:
        driver.commit_batch(APP, "q", batch, "", [])
        return end
    read = list(task.read(ReadTicket(APP, "q", batch, ranges, slices)))
    rows = [pa.record_batch({"body": found.column("body")}) for found in read]
    branch = task.stage(header(opened.token, batch), rows)
    committed = driver.commit_batch(APP, "q", batch, opened.token, [branch])
    assert committed.entry.ranges == ranges
    return end


def test_every_row_goes_through_once(bench: Bench) -> None:
    driver, task = bench.engine(), bench.engine()
    start: Vector = {FROM: START}
    for batch in range(4):
        bench.send(batch % 2, *(b"%d-%d" % (batch, row) for row in range(10)))
        start = micro_batch(driver, task, batch, start)
    assert bench.bodies(TO) == bench.bodies(FROM) and len(bench.bodies(TO)) == 40
    info = bench.engine().app(APP)
    assert info is not None and (info.queues, info.sequence, info.batch_id, info.lag) == ((FROM,), 4, 3, 0)
    assert [each.app_id for each in bench.engine().apps()] == [APP]


@pytest.mark.parametrize("kind", [port.Produce, port.EndTransaction, port.Fetch])
@pytest.mark.parametrize("at", range(6))
def test_a_driver_that_lost_an_answer_and_its_successor_decide_once(
    bench: Bench, kind: type[port.Request[Any]], at: int
) -> None:
    bench.send(0, b"a", b"b")
    bench.send(1, b"c")
    bench.failing([*[None] * at, UNANSWERED], kind)
    offsets: dict[int, Vector] = {}
    end = micro_batch(bench.engine(), bench.engine(), 0, {FROM: START}, offsets)
    micro_batch(bench.engine(), bench.engine(), 0, {FROM: START}, offsets)  # Spark runs it again
    assert bench.bodies(TO) == [b"a", b"b", b"c"]
    bench.failing([])  # the test's own producer would send a row twice
    bench.send(0, b"d")
    micro_batch(bench.engine(), bench.engine(), 1, end)
    assert bench.bodies(TO) == [b"a", b"b", b"c", b"d"]


def test_two_drivers_of_one_checkpoint_decide_each_batch_once(bench: Bench) -> None:
    """Each runs its batches as fast as it can; what one has decided the other is told."""
    failed: list[BaseException] = []
    offsets: dict[int, Vector] = {}

    def drive(engine: Engine) -> None:
        start: Vector = {FROM: START}
        batch = 0
        while batch < 6:
            try:
                end = micro_batch(engine, engine, batch, start, offsets, limit=Limit(max_rows=5))
            except errors.TransactionError as error:  # the other came between: Spark runs the batch again
                if batch not in offsets:
                    failed.append(error)
                    return
                continue
            except BaseException as error:
                failed.append(error)
                return
            batch, start = (batch + 1, end) if end != start else (batch, start)

    for row in range(30):
        bench.send(row % 2, b"%02d" % row)
    threads = [threading.Thread(target=drive, args=(bench.engine(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert bench.bodies(TO) == bench.bodies(FROM)


def test_a_topic_that_was_made_again_is_not_decided(bench: Bench) -> None:
    bench.send(0, b"a")
    driver = bench.engine()
    end = driver.claim(APP, [FROM], {FROM: START}, Limit(), Origin(), "fail")
    opened = driver.open_batch(APP, "q", 0, "fail")
    ranges = driver.resolve(APP, {FROM: START}, end)
    slices = tuple((log, first, last) for log, (first, last) in ranges.items())
    rows = [
        pa.record_batch({"body": each.column("body")})
        for each in driver.read(ReadTicket(APP, "q", 0, ranges, slices))
    ]
    branch = driver.stage(header(opened.token, 0), rows)
    bench.client.delete_topic(FROM)
    bench.client.create_topic(FROM, 2)
    with pytest.raises(errors.DataLoss):
        bench.engine().commit_batch(APP, "q", 0, opened.token, [branch])
    assert bench.bodies(TO) == []


@pytest.mark.parametrize("again", [False, True])
def test_the_apps_are_told_though_the_topic_of_one_of_them_is_gone(bench: Bench, again: bool) -> None:
    bench.send(0, b"a", b"b")
    bench.client.create_topic("elsewhere", 1)
    driver, operator = bench.engine(), bench.engine()
    for app, queue in ((APP, FROM), ("left", "elsewhere")):
        driver.claim(app, [queue], {queue: START}, Limit(), Origin(), "fail")
    assert {each.app_id: each.lag for each in operator.apps()} == {APP: 2, "left": 0}
    bench.client.delete_topic(FROM)
    if again:
        bench.client.create_topic(FROM, 2)
        bench.send(0, b"of others")
    for engine in (operator, bench.engine()):  # one that has seen the topic, and one that has not
        assert {each.app_id: each.lag for each in engine.apps()} == {APP: 0, "left": 0}


def test_a_topic_that_is_gone_is_released(bench: Bench) -> None:
    bench.send(0, b"a")
    bench.engine().claim(APP, [FROM], {FROM: START}, Limit(), Origin(), "fail")
    bench.client.delete_topic(FROM)
    with pytest.raises(errors.PreconditionFailed, match="With --force"):
        bench.engine().release(APP, FROM)
    bench.engine().release(APP, FROM, force=True)  # as the error says
    assert bench.engine().apps() == []
    bench.client.create_topic(FROM, 2)
    bench.send(0, b"b")
    end = bench.engine().claim(APP, [FROM], {FROM: START}, Limit(), Origin(), "resume")
    assert sorted(end.values()) == [0, 1]


# -- what an engine is ---------------------------------------------------------------------------------------


def test_nothing_connects_before_the_first_call() -> None:
    engine = connect(
        "kafka://127.0.0.1:1", {"kafka.request.timeout.ms": "100", "kafka.default.api.timeout.ms": "50"}
    )
    assert (
        connect(
            "kafka://127.0.0.1:1", {"kafka.default.api.timeout.ms": "50", "kafka.request.timeout.ms": "100"}
        )
        is engine
    )
    again = pickle.loads(pickle.dumps(engine))
    assert repr(again) == repr(engine)
    with pytest.raises(errors.ConnectionFailed):
        again.logs([FROM])
    engine.close()
    with pytest.raises(errors.ConnectionFailed, match="closed"):
        engine.logs([FROM])
    assert connect("kafka://127.0.0.1:1") is not engine


def test_no_repr_shows_a_password() -> None:
    engine = KafkaEngine(
        "kafka://one",
        {
            "kafka.security.protocol": "SASL_PLAINTEXT",
            "kafka.sasl.username": "u",
            "kafka.sasl.password": "secret",
        },
    )
    assert "secret" not in repr(engine) and "***" in repr(engine)


def test_wrong_arguments_are_refused_before_anything_is_asked(bench: Bench) -> None:
    engine: Any = bench.engine()
    for ask in (
        lambda: engine.logs("orders"),
        lambda: engine.claim(APP, [FROM], {FROM: "now"}, Limit(), Origin(), "fail"),
    ):
        with pytest.raises(errors.OptionError, match="argument"):
            ask()


def test_engines_of_one_cluster_have_one_identity(bench: Bench) -> None:
    assert (
        bench.engine().identity()
        == bench.engine().identity()
        != KafkaEngine(URL, None, lambda _: FakeKafka().wire()).identity()
    )


def test_a_ledger_that_is_made_again_has_a_new_identity_so_that_delta_skips_nothing(bench: Bench) -> None:
    before = bench.engine().identity(APP)
    assert bench.engine().identity(APP) == before != bench.engine().identity("other")
    bench.client.delete_topic(names.app_topic(APP))
    assert bench.engine().identity(APP) not in (before, bench.engine().identity())


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_has_a_memory_of_its_own(bench: Bench) -> None:
    bench.send(0, b"a")
    engine = bench.engine()
    end = engine.claim(APP, [FROM], {FROM: START}, Limit(), Origin(), "fail")
    with engine.source.journal(APP)._lock:  # held by a thread that the child does not have
        child = os.fork()
        if not child:
            code = 1
            try:
                code = (
                    0
                    if engine.resolve(APP, {FROM: START}, end) == {"orders/0": (0, 1), "orders/1": (0, 0)}
                    else 2
                )
            finally:
                os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_an_operator_sees_the_batches_and_what_became_of_a_message(bench: Bench) -> None:
    admin = KafkaAdmin(bench.engine())
    assert admin.history() == [] and admin.ledger() == []
    bench.send(1, b"a", b"b", timestamp=5_000)
    end = micro_batch(bench.engine(), bench.engine(), 0, {FROM: START})
    bench.send(1, b"c", timestamp=6_000)
    (entry,) = admin.ledger()
    assert (entry.app_id, entry.sequence, entry.transaction, entry.published) == (APP, 1, 0, 2)
    assert entry.ranges == {log: (0, at) for log, at in end.items()}
    assert admin.ledger(APP, 1) == [] and admin.ledger(APP, 0) == [entry] and admin.ledger("z") == []
    (batch,) = admin.history(5)
    assert (batch.sequence, batch.app_id, batch.ledger_sequence) == (0, APP, 1)
    assert ("consumed", f"{FROM}/1", 2, ((0, 2),)) in [
        (each.effect, each.queue, each.entries, each.ranges) for each in batch.effects
    ]
    life = admin.message(f"{FROM}/1", 1)
    assert life.state == "ready"
    assert [(each.effect, each.app_id, each.committed_at_us) for each in life.steps] == [
        ("published", "", 5_000_000),
        ("consumed", APP, entry.committed_at_us),
    ]
    assert [each.effect for each in admin.message(f"{FROM}/1", 2).steps] == ["published"]
    assert admin.message(f"{FROM}/1", 3).state == "unknown"
    for queue, error in ((FROM, errors.OptionError), (f"{FROM}/9", errors.QueueNotFound)):
        with pytest.raises(error):
            admin.message(queue, 0)
    for refused in (lambda: admin.transaction(1), admin.consumers):
        with pytest.raises(errors.OptionError):
            refused()


def test_the_lag_in_seconds_is_that_of_the_first_record_that_is_not_consumed(bench: Bench) -> None:
    bench.send(0, b"a", timestamp=1_000)
    micro_batch(bench.engine(), bench.engine(), 0, {FROM: START})
    (app,) = bench.engine().apps()
    assert (app.lag, app.lag_s) == (0, None)
    bench.send(0, b"b", timestamp=4_000)
    bench.send(1, b"c", timestamp=3_000)
    least = time.time() - 3
    (app,) = bench.engine().apps()
    assert app.lag == 2 and app.lag_s is not None and least - 0.1 <= app.lag_s <= time.time() - 3 + 0.1
