"""table_latency_*_ms: from the send of a row to its commit in a Delta table, at several rates; beside Spark's
Kafka source and Delta's streaming sink, in the same session.

Both are exactly once. Rows come from a process of their own, in groups every 10 ms, and wait for no answer; a
row has the time when it was sent. A commit is at the time of its file in Delta's log.
Not here: from one stream to another (kafka.py, ``chain``).
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow.parquet as pq
from kafka import KafkaProducer

from bench.broker import serving
from bench.floods import LOGIN, OPEN
from bench.kafka_rig import Rig
from bench.report import PERCENTS, RATES, Figure, note
from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.decoder import PROTOCOL_HEADER
from broker_core.amqp.v0_9_1.encoder import encode_content, encode_method
from txmq import BrokerClient, Properties, transactional

SECONDS, WARM_S = 25, 10
EVERY_S = 0.01
LIMIT_S = 300
SENT = struct.Struct(">q")  # nanoseconds since the epoch
NAME = "latency-{}"  # of a queue and a topic


def table_latency(rig: Rig) -> Iterator[Figure]:
    with serving(rig.folder / "latency", amqp=True) as served:
        assert served.amqp is not None
        for rate in RATES:
            name = NAME.format(rate)
            with BrokerClient(served.url) as client, client.channel() as channel:
                channel.queue_declare(name)
            rig.topics(name)
            ours, theirs = (str(rig.folder / f"{side}-{rate}") for side in ("ours", "theirs"))
            for table in (ours, theirs):
                rig.spark.createDataFrame([], "body binary").write.format("delta").save(table)
            reference = rig.theirs(name).selectExpr("value AS body").writeStream.format("delta")
            theirs_ms = _waits_ms(reference, theirs, send_kafka, rig.bootstrap, rate, path=theirs)
            source = (
                rig.spark.readStream.format("txmq").options(url=served.url, queue=name, appId=name).load()
            )
            writer = source.writeStream.foreachBatch(_append(served.url, name, ours))
            ours_ms = _waits_ms(writer, ours, send_amqp, served.amqp, rate)
            for percent in PERCENTS:
                value, other = (
                    statistics.quantiles(each, n=100)[percent - 1] for each in (ours_ms, theirs_ms)
                )
                figure = f"table_latency_{rate}_p{percent}_ms"
                yield Figure(figure, round(value, 1), "ms", round(other, 1), round(value / other, 3))


def _append(url: str, app: str, table: str) -> Any:
    return transactional(lambda batch, tx: tx.append(batch.select("body"), table), url=url, app_id=app)


def _waits_ms(
    writer: Any, table: str, send: Callable[[str, str, int], None], address: str, rate: int, **options: str
) -> list[float]:
    """Of the rows that were sent when the stream was warm."""
    query = writer.options(**options, checkpointLocation=f"{table}-checkpoint").start()
    sender = multiprocessing.get_context("spawn").Process(
        target=send, args=(address, NAME.format(rate), rate)
    )
    sender.start()
    times: list[tuple[int, list[int]]] = []  # of each commit, and of its rows
    seen = 0
    try:
        deadline = time.monotonic() + LIMIT_S
        while sum(len(sent) for _, sent in times) < rate * SECONDS:
            if not query.isActive or time.monotonic() > deadline:
                raise query.exception() or TimeoutError(f"not all rows came to {table}")
            time.sleep(0.5)
            files = sorted(Path(table, "_delta_log").glob("*.json"))
            times += [_commit(table, file) for file in files[seen:]]
            seen = len(files)
    finally:
        sender.join()
        query.stop()
    first = min(ns for _, sent in times for ns in sent) + WARM_S * 10**9
    waits = [(at - ns) / 1e6 for at, sent in times for ns in sent if ns >= first]
    note(f"{Path(table).name}: {sum(max(sent, default=0) >= first for _, sent in times)} commits")
    return waits


def _commit(table: str, file: Path) -> tuple[int, list[int]]:
    """When it was, and when its rows were sent."""
    actions = map(json.loads, file.read_text().splitlines())
    paths = [Path(table, unquote(each["add"]["path"])) for each in actions if "add" in each]
    bodies = [body for path in paths for body in pq.read_table(path)["body"].to_pylist()]
    return file.stat().st_mtime_ns, [SENT.unpack_from(body)[0] for body in bodies]


# -- the senders: a process of their own ---------------------------------------------------------------------


def _paced(rate: int, send: Callable[[list[bytes]], object]) -> None:
    began, sent = time.monotonic(), 0
    while sent < rate * SECONDS:
        wanted = min(int((time.monotonic() - began) * rate) + 1, rate * SECONDS)
        send([SENT.pack(time.time_ns()) + bytes(92) for _ in range(wanted - sent)])
        sent = wanted
        time.sleep(EVERY_S)


def send_kafka(bootstrap: str, topic: str, rate: int) -> None:
    producer = KafkaProducer(bootstrap_servers=bootstrap, acks="all")
    _paced(rate, lambda bodies: [producer.send(topic, body) for body in bodies])
    producer.close()


def send_amqp(uri: str, queue: str, rate: int) -> None:
    """With confirms, which are read and not waited for."""
    at = urlsplit(uri)
    begin = encode_method(1, m.ChannelOpen()) + encode_method(1, m.ConfirmSelect(False))
    properties, publish = Properties(delivery_mode=2).encode(), m.BasicPublish("", queue)
    with socket.create_connection((at.hostname or "", at.port or 0)) as stream:
        stream.sendall(PROTOCOL_HEADER + LOGIN + OPEN + begin)
        answers = threading.Thread(target=lambda: all(iter(lambda: stream.recv(65_536), b"")), daemon=True)
        answers.start()
        _paced(
            rate,
            lambda bodies: stream.sendall(
                b"".join(encode_content(1, publish, properties, body, 0) for body in bodies)
            ),
        )
        stream.sendall(encode_method(0, m.ConnectionClose(200, "", 0, 0)))
        answers.join()
