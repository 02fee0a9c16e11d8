"""Brokers that run as processes of their own, and a micro-batch driven through a client.

Invariant: a broker that a test started, or had started, has ended when the test has.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from broker_core.client.broker import BrokerClient
from broker_core.core import endpoint
from broker_core.engine import START, BranchHeader, Limit, Origin, ReadTicket, Vector
from tests.amqp_server import Process
from tests.progress import GUARD_S


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Served(Process):
    """``txmq serve`` on a directory. ``failpoints`` are of the next start only."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = 0
        self.amqp_urls: list[str] = []

    @property
    def url(self) -> str:
        return f"txmq://127.0.0.1:{self.port}"

    def start(self, failpoints: str = "", *more: str) -> Served:
        listen = ["--listen", f"127.0.0.1:{self.port}", "--amqp", "none"]
        words = self.run(["serve", "--data", str(self.directory), *listen, *more], failpoints)
        assert words[:1] == ["ready"] and words[1].startswith(("txmq://127.0.0.1:", "txmqs://127.0.0.1:")), (
            words
        )
        _, flight, *self.amqp_urls = words
        self.port = int(flight.rpartition(":")[2])
        return self

    def end(self) -> None:
        if self.process is not None:
            self.kill()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    broker = Served(tmp_path / "data")
    yield broker
    broker.end()


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[Path]:
    """A data directory whose broker clients start; it is ended afterwards."""
    directory = tmp_path / "embedded"
    yield directory
    end_broker(directory)


def end_broker(directory: Path) -> None:
    found = endpoint.read_endpoint(str(directory))
    if found is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(found.pid)
            process.kill()
            process.wait(GUARD_S)


def fill(client: BrokerClient, queue: str, count: int, *, size: int = 0) -> None:
    """``count`` messages in one transaction; each body is its number, padded to ``size`` bytes."""
    with client.channel() as channel:
        channel.queue_declare(queue)
        channel.tx_select()
        for number in range(count):
            channel.publish(str(number).encode().ljust(size), routing_key=queue)
        channel.tx_commit()


def bodies(client: BrokerClient, queue: str) -> list[bytes]:
    found = client.available([queue])[queue]
    return [
        body
        for batch in client.browse([(queue, found.start, found.end)])
        for body in batch.column("body").to_pylist()
    ]


class MicroBatch:
    """What Spark and the connector do for one batch, from one queue to another; every step may be
    repeated.
    """

    def __init__(
        self,
        client: BrokerClient,
        source: str,
        sink: str,
        *,
        app: str = "app",
        batch_id: int = 0,
        parts: int = 1,
        query: str = "query",
    ) -> None:
        self.client, self.source, self.sink = client, source, sink
        self.app, self.query, self.batch_id, self.parts = app, query, batch_id, parts

    def run(self, start: Vector | None = None) -> Vector:
        """The end vector; the batch is decided and acked."""
        client = self.client
        start = start or {self.source: START}
        end = client.claim(self.app, list(start), start, Limit(), Origin(), "fail")
        ranges = client.resolve(self.app, start, end)
        client.count(self.app, ranges)
        opened = client.open_batch(self.app, self.query, self.batch_id, "fail")
        rows = self.read(end, start)
        header = BranchHeader(
            opened.token, f"branch-{self.batch_id}", "publish", {"exchange": "", "routing_key": self.sink}
        )
        staged = client.stage(header, [batch.select(["body"]) for batch in rows])
        assert staged.rows == sum(batch.num_rows for batch in rows)
        committed = client.commit_batch(self.app, self.query, self.batch_id, opened.token, [staged])
        assert committed.entry.published == staged.rows
        client.ack(self.app, end)
        return end

    def read(self, end: Vector, start: Vector) -> list[pa.RecordBatch]:
        ranges = self.client.resolve(self.app, start, end)
        slices = tuple((log, first, last) for log, (first, last) in ranges.items())
        return list(self.client.read(ReadTicket(self.app, self.query, self.batch_id, ranges, slices)))
