"""``tx.reject`` does not read again what an append or a publish of the good rows has parsed, if that was surely all."""

from __future__ import annotations

import random
from typing import Any

import pytest
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from connector.batch.foreach_batch import BatchTransaction
from connector.reject import rejected_metrics
from connector.typed.decode import Decoded, decode
from tests.spark.test_decode import declare_with_dead_letters, messages_of
from tests.spark.test_foreach_batch import run

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]

SCHEMA = "id bigint not null, name string"
SURE = {
    "all": lambda good, batch: good,
    "some rows": lambda good, batch: good.where("id > 3 AND offset % 2 = 0").select("name"),
    "more rows": lambda good, batch: good.withColumn("each", F.explode(F.array(F.lit(1), F.lit(2)))),
    "a shuffle": lambda good, batch: good.repartition(3, "id"),
}
UNSURE = {
    "nothing": lambda good, batch: None,
    "limit": lambda good, batch: good.limit(1),
    "sample": lambda good, batch: good.sample(0.5, 7),
    "false": lambda good, batch: good.where("false"),
    "union": lambda good, batch: good.union(good),
    "function": lambda good, batch: good.mapInArrow(lambda each: (next(each) for _ in range(1)), good.schema),
}
PIECES = [b"{", b"}", b'"', b",", b"\xff", b"\0", b"", b"[1]", b"null", b'{"id":', b"\n", b"'"]


def publish(rig: Any, *bodies: bytes) -> None:
    with rig.broker.channel() as channel:
        channel.tx_select()
        for body in bodies:
            channel.publish(body, routing_key="in")
        channel.tx_commit()


def rejected(decoded: Decoded) -> list[tuple[Any, ...]]:
    """What reading and parsing the batch again finds."""
    rows = decoded.rejected.select("queue", "partition", "offset", "reason", F.crc32("body")).collect()
    return sorted(map(tuple, rows), key=str)


def known(tx: BatchTransaction, decoded: Decoded) -> list[tuple[Any, ...]] | None:
    found = tx._seen.broken(decoded.rejected)
    return None if found is None else sorted((tuple(row.values()) for row in found.to_pylist()), key=str)


def test_broken_rows_are_known_only_if_the_whole_batch_was_executed(
    rig: Any, tmp_path: Any, seed: int
) -> None:
    """Bodies that nobody would send, in several partitions."""
    choice = random.Random(seed)
    declare_with_dead_letters(rig)
    bodies = [b'{"id": %d, "name": "a"}' % number for number in range(40)]
    for number in choice.sample(range(40), 25):
        at = choice.randrange(len(bodies[number]))
        bodies[number] = (
            bodies[number][:at] + choice.choice(PIECES) + bodies[number][at + choice.randrange(3) :]
        )
    publish(rig, *bodies)
    found: dict[str, Any] = {}

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        for name, shape in {**SURE, **UNSURE}.items():
            decoded = decode(batch, SCHEMA, keep=["offset"])
            rows = shape(decoded.good, batch)
            if rows is not None:
                tx.publish(rows.select(F.lit("x").alias("body")), queue="out")
            found[name] = known(tx, decoded), rejected(decoded) if name in SURE else None
        cached = decode(batch, SCHEMA)
        cached.good.persist().count()
        tx.publish(cached.good.select(F.lit("x").alias("body")), queue="out")
        found["cached"] = known(tx, cached), None
        cached.good.unpersist()
        early = decode(batch.repartition(2), SCHEMA)
        tx.publish(early.good.select(F.lit("x").alias("body")), queue="out")
        found["a shuffle before"] = known(tx, early), None
        shuffled = decode(batch, SCHEMA)
        tx.append(shuffled.good.repartition(2), str(tmp_path / "shuffled"))
        found["shuffled files"] = known(tx, shuffled), rejected(shuffled)
        nowhere = decode(batch.withColumn("queue", F.expr("IF(offset = 3, NULL, queue)")), SCHEMA)
        tx.publish(nowhere.good.select(F.lit("x").alias("body")), queue="out")
        read = rejected(nowhere)
        found["nowhere"] = known(tx, nowhere), None if any(row[0] is None for row in read) else read

    run(rig, fn, options={"minPartitions": 3})
    for name, (seen, read) in found.items():  # what is not certain is not known
        assert seen == read, name
    assert 0 < len(found["all"][1]) <= 25


def test_each_message_is_appended_or_rejected_once_also_if_it_is_not_read_again(
    rig: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more broken rows than metrics hold, with a batch that is cached, and with the frame of the rejected."""
    declare_with_dead_letters(rig)
    publish(rig, *(b'{"id": %d}' % number if number % 3 else b"%d" % number for number in range(12)))
    good = [{"id": number} for number in range(12) if number % 3]
    dead = {b"%d" % number for number in range(12) if not number % 3}

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        for number, most in enumerate((10_000, 3)):
            monkeypatch.setattr(rejected_metrics, "_MOST", most)
            rows, broken = decode(batch, "id bigint not null")
            tx.append(rows, str(tmp_path / f"lake-{number}"))
            assert (tx._seen.broken(broken) is None) == (most == 3)
            tx.reject(broken, reason=f"try {number}")

    run(rig, fn, persist=True, options={"minPartitions": 2})
    for number in range(2):
        assert sorted(rig.rows_in(str(tmp_path / f"lake-{number}")), key=lambda row: row["id"]) == good
        reason = f"try {number}"
        letters = [
            body for body, died in messages_of(rig, "dead") if died.headers["x-reject-reason"] == reason
        ]
        assert set(letters) == dead and len(letters) == len(dead)


def flaky(address: Any) -> Any:
    """The address of an engine at which the first attempt of each task fails behind its last row."""

    class Failing:  # local, so that it is sent to tasks as it is
        def stage(self, header: Any, batches: Any) -> Any:
            raise OSError(f"{sum(batch.num_rows for batch in batches)} rows were read")

    class Flaky:
        def engine(self) -> Any:
            context = TaskContext.get()
            return Failing() if context and context.attemptNumber() == 0 else address.engine()

    return Flaky()


def test_what_a_task_has_seen_before_it_was_retried_counts_once(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare_with_dead_letters(rig)
    publish(rig, b"x", b'{"id": 1}', b"y", b'{"id": 2}')

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        decoded = decode(batch, "id bigint not null")
        with monkeypatch.context() as patch:
            patch.setattr(tx._owner, "address", flaky(tx._owner.address))
            tx.publish(decoded.good.selectExpr("CAST(id AS STRING) AS body"), queue="out")
        assert known(tx, decoded) == rejected(decoded)
        tx.reject(decoded)

    run(rig, fn, options={"minPartitions": 2})
    assert sorted(rig.bodies("out")) == ["1", "2"] and sorted(rig.bodies("dead")) == ["x", "y"]
