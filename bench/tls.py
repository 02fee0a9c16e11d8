"""source_rows_tls, sink_rows_tls: a stream from and to a broker on another host, with TLS beside without.

Both listeners are of one broker. A client that cannot read the id of its data directory takes it for one of
another host, so no file is mapped or handed over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from bench.broker import fanout, fill, serving
from bench.certificates import Authority
from bench.reference import CountingSink
from bench.report import Figure, against
from bench.streams import REPETITIONS, SINK_ROWS, SOURCE_ROWS, open_spark, rate, ready, run
from broker_core.core import endpoint
from txmq import BrokerClient


@contextlib.contextmanager
def remote(data: Path) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """The options of a client with TLS, and of one without."""
    authority = Authority(data.parent, f"{data.name}-ca")
    pair = authority.sign(f"{data.name}-broker")
    more = ("--tls-cert", pair.cert, "--tls-key", pair.key, "--amqps", "none")
    with serving(data, *more) as served:
        near = endpoint.read_endpoint(str(data))
        assert near is not None
        (data / endpoint.ID).unlink()
        encrypted = {"url": served.url, "tlsCa": authority.ca, "token": near.token}
        plain = {"url": f"txmq://{near.host}:{near.port}", "token": near.token}
        with BrokerClient(plain["url"]) as client:
            assert not client._connection.live().local, "the files of the broker are still used"
        yield encrypted, plain


def source_rows_tls(folder: Path) -> list[Figure]:
    """Beside the same queue read without TLS."""
    queues = [f"orders-{number}" for number in range(2 * REPETITIONS + 2)]
    with remote(folder / "source-tls") as (encrypted, plain), open_spark() as spark:
        with BrokerClient(plain["url"]) as client:
            fanout(client, "orders", queues)
            fill(client, "orders", "", SOURCE_ROWS)
        found: list[float] = []
        references: list[float] = []
        for number, queue in enumerate(queues):
            rates, options = ((found, encrypted), (references, plain))[number % 2]
            source = (
                spark.readStream.format("txmq")
                .options(**options, queue=queue, appId=f"bench-{queue}", minPartitions=2)
                .load()
            )
            rates.append(rate(run(source.writeStream.format("noop"), folder, SOURCE_ROWS)))
        return [against("source_rows_tls", found[1:], references[1:], "rows/s")]


def sink_rows_tls(folder: Path) -> list[Figure]:
    """Beside the same rows written without TLS."""
    with remote(folder / "sink-tls") as (encrypted, plain), open_spark() as spark:
        spark.dataSource.register(CountingSink)
        with BrokerClient(plain["url"]) as client, client.channel() as channel:
            channel.queue_declare("orders")
        found: list[float] = []
        references: list[float] = []
        for number in range(2 * REPETITIONS + 2):
            rates, options = ((found, encrypted), (references, plain))[number % 2]
            rows = ready(spark, SINK_ROWS, SINK_ROWS, 2).select("body")
            writer = rows.writeStream.format("txmq").options(**options, queue="orders", appId=f"b-{number}")
            rates.append(rate(run(writer, folder, SINK_ROWS)))
        return [against("sink_rows_tls", found[1:], references[1:], "rows/s")]
