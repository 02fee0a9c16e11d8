"""Starts a broker for a benchmark and fills its queues."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from bench.reference import bodies
from broker_core.engine import BranchHeader
from txmq import BrokerClient

FILL_ROWS = 65_536


@dataclass(frozen=True)
class Backend:
    """``amqp``: the URI for guest, or None without an AMQP endpoint; ``http``: where its HTTP listener is."""

    url: str
    pid: int
    amqp: str | None = None
    http: str | None = None


def serve_command(data: Path | str, *more: str, listen: str = "127.0.0.1:0") -> list[str]:
    """Of ``txmq serve`` in this Python. ``more``: of its arguments."""
    return [sys.executable, "-m", "txmq", "serve", "--data", str(data), "--listen", listen, *more]


@contextlib.contextmanager
def serving(data: Path, *more: str, amqp: bool = False) -> Iterator[Backend]:
    """``txmq serve`` on free ports of loopback, with an AMQP endpoint if ``amqp``; ended cleanly.

    ``more``: of its arguments.
    """
    command = serve_command(data, "--amqp", "127.0.0.1:0" if amqp else "none", *more)
    with (data.parent / f"{data.name}.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline().split()
        if not line or line[0] != "ready":
            raise SystemExit(
                f"the broker did not start: {(data.parent / f'{data.name}.log').read_text()[-2000:]}"
            )
        http = next((word for word in line if word.startswith("http")), None)
        yield Backend(line[1], process.pid, _guest(line) if amqp else None, http)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _guest(ready: list[str]) -> str:
    """The URI for guest, from the words of the ready line."""
    for word in ready:
        if word.startswith("amqp://"):
            return f"amqp://guest:guest@{word.removeprefix('amqp://').rstrip('/')}/%2f"
    raise SystemExit(f"the broker has no AMQP endpoint: {' '.join(ready)}")


def fill(client: BrokerClient, exchange: str, routing_key: str, rows: int) -> None:
    """Publish ``rows`` messages of 100 bytes in one transaction."""
    token = uuid.uuid4().hex

    def batches() -> Iterator[pa.RecordBatch]:
        left = rows
        while left:
            count = min(left, FILL_ROWS)
            yield pa.RecordBatch.from_arrays([bodies(count)], names=["body"])
            left -= count

    header = BranchHeader(
        token=token,
        branch=uuid.uuid4().hex,
        kind="publish",
        target={"exchange": exchange, "routing_key": routing_key},
    )
    staged = client.stage(header, batches())
    published = client.commit_branches(token, [staged])
    assert published == rows, f"{published} of {rows} messages were published"


def fanout(client: BrokerClient, exchange: str, queues: list[str]) -> None:
    """A fanout exchange that puts every message into all of ``queues``."""
    with client.channel() as channel:
        channel.exchange_declare(exchange, "fanout")
        for queue in queues:
            channel.queue_declare(queue)
            channel.queue_bind(queue, exchange, "")
