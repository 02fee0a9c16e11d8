"""Metrics for Prometheus.

``/metrics``: of the broker, a fixed number of series, and a few of each of the APPS apps that are behind the
most. ``/metrics/rabbitmq``: what means the same as in RabbitMQ, under its names, so that its dashboards work.
``/metrics/per-object``: of each queue, under RabbitMQ's names; ``?limit=N`` takes those with the most
messages.

Invariant: the number of series does not grow with what clients do, but for per-object, which has its limit.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache
from heapq import nlargest

import psutil
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.responses import Response

from broker_core import __version__
from broker_core.broker.queue import Queue
from broker_core.server.http.backend import NODE, Backend
from broker_core.server.http.call import HttpCall
from broker_core.server.http.gate import visible
from broker_core.server.http.refusal import bad_request
from broker_core.server.http.route import Route, read_all

APPS = 100
OBJECTS = 20_000  # at most, and by default
KEPT_S = 0.5  # an answer: many who scrape cost as much as one
TEXT = "text/plain; version=0.0.4; charset=utf-8"
Families = list[GaugeMetricFamily | CounterMetricFamily]


@cache
def _process() -> psutil.Process:
    return psutil.Process()


class _Once(Collector):
    def __init__(self, families: Families) -> None:
        self._families = families

    def collect(self) -> Families:
        return self._families


def text(families: Families) -> Response:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(families))
    return Response(generate_latest(registry), headers={"content-type": TEXT})


gauge, counter = GaugeMetricFamily, CounterMetricFamily


def info(name: str, text: str, **labels: str) -> GaugeMetricFamily:
    found = gauge(name, text, labels=list(labels))
    found.add_metric(list(labels.values()), 1)
    return found


class _Totals:
    """Of the whole broker."""

    def __init__(self, backend: Backend) -> None:
        hosts = list(backend.broker.state.virtual_hosts.by_name.values())
        queues = [queue for each in hosts for queue in list(each.queues.values())]
        self.duplicates = backend.broker.state.messages.admission.duplicates.total
        self.delayed = sum(queue.messages for each in hosts for _, queue in each.delayed())
        self.messages = sum(topology.tally.total for topology in hosts)
        self.unacked = sum(queue.unacknowledged for queue in queues)
        self.queues = sum(not queue.replies for queue in queues)
        self.consumers = sum(len(queue.consumers) for queue in queues if queue.consumers)
        self.counts, _ = backend.rates.of_hosts([each.vhost for each in hosts])
        channels = backend.broker.open_channels.all()
        self.channels = {
            listener: sum(not channel.closed and holder.listener == listener for channel, holder in channels)
            for listener in ("amqp", "flight")
        }
        self.connections = len(backend.connections())
        self.memory = _process().memory_info().rss
        self.disk_free = shutil.disk_usage(backend.directory).free if backend.directory else 0
        alarm = backend.quotas.alarm
        shortage = alarm.now() if alarm is not None else None
        self.shortage = shortage.reason if shortage is not None else ""
        self.limits = alarm.limits if alarm is not None else None


def _ours(call: HttpCall) -> Response:
    backend, found = call.backend, _Totals(call.backend)
    committer, counts = backend.broker.committer, backend.broker.committer.counts
    families: Families = [
        info("txmq_build_info", "The version", version=__version__),
        gauge("txmq_queues", "Queues", found.queues),
        gauge("txmq_messages", "Messages that are not settled", found.messages),
        gauge("txmq_messages_delayed", "Messages that wait in an exchange that delays", found.delayed),
        gauge("txmq_messages_unacknowledged", "Messages that channels hold", found.unacked),
        gauge("txmq_consumers", "Consumers", found.consumers),
        gauge("txmq_connections", "Connections of AMQP", found.connections),
        gauge("txmq_channels", "Channels, by listener", labels=["listener"]),
        counter("txmq_published", "Messages that queues got since the start", found.counts.published),
        counter("txmq_settled", "Messages acked, expired or dropped since the start", found.counts.settled),
        counter("txmq_duplicates", "Duplicates that queues dropped since the start", found.duplicates),
        counter(
            "txmq_delayed_unroutable",
            "Messages that reached no queue after their delay since the start",
            backend.broker.state.expiry.delays.unroutable.total,
        ),
        counter("txmq_commits", "Changes that are durable, since the start", counts.changes),
        counter("txmq_commit_groups", "Group commits, since the start", counts.groups),
        counter("txmq_commit_seconds", "Seconds that the disk took for them", counts.durable_s),
        gauge("txmq_store_failed", "1: the store takes no more commits", committer.failure is not None),
        gauge(
            "txmq_transaction_bytes",
            "Of open and prepared transactions in memory",
            backend.broker.transaction_bytes(),
        ),
        gauge("txmq_prepared_transactions", "Not decided", len(backend.broker.state.prepared.by_key)),
        gauge(
            "txmq_staged_bytes", "Staged, and neither published nor applied", backend.engines.staged_bytes()
        ),
        gauge("txmq_flight_calls", "Calls of Flight in progress", backend.flight_calls()),
        counter("txmq_logins_refused", "Logins refused since the start", backend.logins.refusals),
        gauge("txmq_memory_bytes", "Resident memory of the process", found.memory),
        gauge("txmq_disk_free_bytes", "Free on the disk of the data directory", found.disk_free),
        gauge("txmq_alarm", "1: publishers wait", labels=["resource"]),
    ]
    by_name = {each.name: each for each in families}
    for listener, count in found.channels.items():
        by_name["txmq_channels"].add_metric([listener], count)
    for resource in ("memory", "disk"):
        by_name["txmq_alarm"].add_metric([resource], resource in found.shortage)
    return text(families + of_apps(backend))


def of_apps(backend: Backend) -> Families:
    labels = ["vhost", "app"]
    lag = gauge("txmq_app_lag", "Messages that an app has not consumed", labels=labels)
    oldest = "At least, since the oldest of these was committed; 0: none"
    lag_s = gauge("txmq_app_lag_seconds", oldest, labels=labels)
    unapplied = gauge("txmq_app_unapplied", "Its batches whose rows are not applied", labels=labels)
    unmirrored = gauge("txmq_app_unmirrored", "Its batches that are not mirrored", labels=labels)
    batch = counter("txmq_app_batches", "Its decided batches", labels=labels)
    at = gauge("txmq_app_last_batch_timestamp_seconds", "When its last batch was decided", labels=labels)
    took = gauge("txmq_app_batch_seconds", "Between its last two batches", labels=labels)
    found = []
    for vhost in list(backend.broker.state.virtual_hosts.by_name):
        found += [(app.lag, vhost, app, last) for app, last in backend.app_ledgers(vhost, 2)]
    for _, vhost, app, last in nlargest(APPS, found, key=lambda each: each[0]):
        names = [vhost, app.app_id]
        lag.add_metric(names, app.lag)
        lag_s.add_metric(names, app.lag_s or 0.0)
        unapplied.add_metric(names, app.unapplied)
        unmirrored.add_metric(names, app.unmirrored)
        batch.add_metric(names, app.sequence)
        if last:
            at.add_metric(names, last[-1].committed_at_us / 1e6)
            took.add_metric(names, (last[-1].committed_at_us - last[0].committed_at_us) / 1e6)
    return [lag, lag_s, unapplied, unmirrored, batch, at, took]


def _rabbitmq(call: HttpCall) -> Response:
    """The names that RabbitMQ's own dashboards read."""
    backend, found = call.backend, _Totals(call.backend)
    limits = found.limits
    disk, memory = (limits.disk_free_bytes, limits.memory_bytes) if limits is not None else (0, 0)
    families: Families = [
        info("rabbitmq_identity_info", "The broker", rabbitmq_node=NODE, rabbitmq_cluster=backend.cluster),
        info("rabbitmq_build_info", "The version", product_name="txmq", product_version=__version__),
        gauge("rabbitmq_queue_messages", "Messages", found.messages),
        gauge("rabbitmq_queue_messages_ready", "Messages that wait", found.messages - found.unacked),
        gauge("rabbitmq_queue_messages_unacked", "Messages that channels hold", found.unacked),
        gauge("rabbitmq_queues", "Queues", found.queues),
        gauge("rabbitmq_consumers", "Consumers", found.consumers),
        gauge("rabbitmq_connections", "Connections", found.connections),
        gauge("rabbitmq_channels", "Channels", sum(found.channels.values())),
        gauge("rabbitmq_process_resident_memory_bytes", "Resident memory", found.memory),
        gauge("rabbitmq_process_open_fds", "Open files", len(os.listdir("/proc/self/fd"))),
        gauge("rabbitmq_disk_space_available_bytes", "Free on the disk", found.disk_free),
        gauge("rabbitmq_disk_space_available_limit_bytes", "Below, publishers wait", disk),
        gauge("rabbitmq_resident_memory_limit_bytes", "Above, publishers wait", memory),
        gauge("rabbitmq_alarms_memory_used_watermark", "1: publishers wait", "memory" in found.shortage),
        gauge("rabbitmq_alarms_free_disk_space_watermark", "1: publishers wait", "disk" in found.shortage),
    ]
    return text(families)


_OF_QUEUE: tuple[tuple[str, str, Callable[[Queue], int]], ...] = (
    ("rabbitmq_queue_messages", "Messages", lambda queue: queue.messages),
    ("rabbitmq_queue_messages_ready", "That wait", lambda queue: queue.messages - queue.unacknowledged),
    ("rabbitmq_queue_messages_unacked", "That channels hold", lambda queue: queue.unacknowledged),
    ("rabbitmq_queue_consumers", "Consumers", lambda queue: len(queue.consumers)),
)


def _per_object(call: HttpCall) -> Response:
    limit = call.query.get("limit", str(OBJECTS))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 10):
        raise bad_request("limit is not a number")
    queues = [
        queue
        for topology in visible(call.backend, call.caller)
        for queue in list(topology.queues.values())
        if not queue.replies
    ]
    rows = call.backend.broker.map_under_lock(
        queues, lambda queue: ((queue.vhost, queue.name), [value(queue) for _, _, value in _OF_QUEUE])
    )
    chosen = nlargest(min(int(limit), OBJECTS), rows, key=lambda row: row[1][0])
    lines: list[str] = []
    labels = [f'{{vhost="{_escaped(vhost)}",queue="{_escaped(name)}"}}' for (vhost, name), _ in chosen]
    for at, (family, help_, _) in enumerate(_OF_QUEUE):
        lines += [f"# HELP {family} {help_}", f"# TYPE {family} gauge"]
        lines += [f"{family}{label} {values[at]}" for label, (_, values) in zip(labels, chosen, strict=True)]
    return Response("\n".join([*lines, ""]), headers={"content-type": TEXT})


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


ROUTES = (
    Route("GET", "/metrics", "metrics", _ours, "Broker and apps, for Prometheus", kept_s=KEPT_S),
    Route("GET", "/metrics/rabbitmq", "metrics", _rabbitmq, "By RabbitMQ's names", kept_s=KEPT_S),
    read_all("/metrics/per-object", "monitoring", _per_object, "Of each queue, RabbitMQ's names"),
)
