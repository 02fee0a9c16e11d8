"""Overview, nodes, who the caller is, and lists that are always empty here."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import time
from typing import Any

import psutil

from broker_core import __version__
from broker_core.routing.exchange_types import EXCHANGE_TYPES
from broker_core.server.http.backend import NODE, Backend
from broker_core.server.http.call import HttpCall
from broker_core.server.http.gate import Need, looks, visible
from broker_core.server.http.management import rabbitmq_rows
from broker_core.server.http.refusal import not_found
from broker_core.server.http.route import read, read_list

API_VERSION = "3.10.8"  # of RabbitMQ, whose API this is: tools choose their calls by it
_STARTED = time.monotonic()


def exchange_types() -> list[dict[str, object]]:
    return [
        {"name": name, "description": f"AMQP {name} exchange", "enabled": True} for name in EXCHANGE_TYPES
    ]


def _listeners(backend: Backend) -> list[dict[str, object]]:
    return [
        {
            "node": NODE,
            "protocol": each.protocol,
            "ip_address": each.host,
            "port": each.port,
            "socket_opts": {},
        }
        for each in backend.listening()
    ]


def _overview(call: HttpCall) -> dict[str, object]:
    backend, caller = call.backend, call.caller
    topologies = visible(backend, caller)
    counts, rate = backend.rates.of_hosts([each.vhost for each in topologies])
    messages = unacked = queues = exchanges = 0
    for topology in topologies:
        found = list(topology.queues.values())
        messages += topology.tally.total
        unacked += sum(queue.unacknowledged for queue in found)
        queues += sum(not queue.replies for queue in found)
        exchanges += len(topology.exchanges)
    all_ = looks(caller)
    connections = [each for each in backend.connections() if all_ or each.user == call.user]
    channels = [
        channel
        for channel, holder in backend.broker.open_channels.all()
        if not channel.closed and (all_ or holder.user == call.user)
    ]
    overview: dict[str, object] = {
        "management_version": API_VERSION,
        "rates_mode": "basic",
        "exchange_types": exchange_types(),
        "product_name": "txmq",
        "product_version": __version__,
        "rabbitmq_version": API_VERSION,
        "cluster_name": backend.cluster,
        "erlang_version": f"Python {platform.python_version()}",
        "disable_stats": False,
        "enable_queue_totals": False,
        "message_stats": rabbitmq_rows.stats(counts, rate, unacked),
        "queue_totals": rabbitmq_rows.totals(messages, unacked, rate),
        "object_totals": {
            "queues": queues,
            "exchanges": exchanges,
            "channels": len(channels),
            "connections": len(connections),
            "consumers": sum(len(channel.consumers) for channel in channels),
        },
        "statistics_db_event_queue": 0,
        "node": NODE,
    }
    if all_:
        overview |= {"listeners": _listeners(backend), "contexts": []}
    return overview


def _node(backend: Backend) -> dict[str, Any]:
    process = psutil.Process()
    with process.oneshot():
        used, files, threads = process.memory_info().rss, process.num_fds(), process.num_threads()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    alarm = backend.quotas.alarm
    shortage = alarm.now() if alarm is not None else None
    reason = shortage.reason if shortage is not None else ""
    limits = alarm.limits if alarm is not None else None
    return {
        "name": NODE,
        "type": "disc",
        "running": True,
        "os_pid": str(os.getpid()),
        "uptime": int((time.monotonic() - _STARTED) * 1000),
        "processors": os.cpu_count() or 1,
        "run_queue": 0,
        "rates_mode": "basic",
        "mem_used": used,
        "mem_limit": limits.memory_bytes if limits is not None else 0,
        "mem_alarm": "memory" in reason,
        "disk_free": shutil.disk_usage(backend.directory).free if backend.directory else 0,
        "disk_free_limit": limits.disk_free_bytes if limits is not None else 0,
        "disk_free_alarm": "disk" in reason,
        "fd_used": files,
        "fd_total": soft,
        "sockets_used": len(backend.connections()),
        "sockets_total": backend.quotas.connections.most.total or 0,
        "proc_used": threads,
        "proc_total": 0,
        "partitions": [],
        "exchange_types": exchange_types(),
        "auth_mechanisms": [
            {"name": "PLAIN", "description": "SASL PLAIN", "enabled": True},
            {"name": "AMQPLAIN", "description": "AMQPLAIN", "enabled": True},
        ],
        "applications": [{"name": "txmq", "description": "txmq", "version": __version__}],
        "contexts": [],
        "enabled_plugins": [],
        "being_drained": False,
    }


def _one_node(call: HttpCall) -> dict[str, Any]:
    if call.params["node"] != NODE:
        raise not_found()
    return _node(call.backend)


def _memory(call: HttpCall) -> dict[str, Any]:
    used = int(_one_node(call)["mem_used"])
    return {"memory": {"strategy": "rss", "total": {"rss": used, "allocated": used, "erlang": used}}}


def _whoami(call: HttpCall) -> dict[str, object]:
    return {"name": call.user, "tags": sorted(call.caller.tags)}


_NONE: dict[Need, tuple[str, ...]] = {
    "management": (
        *("extensions", "parameters", "parameters/{component}", "global-parameters", "feature-flags"),
        *("deprecated-features", "deprecated-features/used", "federation-links", "shovels"),
    ),
    "vhost": ("parameters/{component}/{vhost}", "federation-links/{vhost}", "shovels/{vhost}"),
}
ROUTES = (
    read_list("/api/overview", "management", _overview, "Totals of the virtual hosts that a caller may see"),
    read("/api/cluster-name", "management", lambda at: {"name": at.backend.cluster}, "The cluster's name"),
    read("/api/nodes", "monitoring", lambda call: [_node(call.backend)], "The broker as a node of RabbitMQ"),
    read("/api/nodes/{node}", "monitoring", _one_node, "The same"),
    read("/api/nodes/{node}/memory", "monitoring", _memory, "The memory of its process"),
    read("/api/whoami", "management", _whoami, "The caller and its tags"),
    read(
        "/api/auth",
        "nobody",
        lambda _call: {"enable_uaa": False, "uaa_client_id": "", "uaa_location": ""},
        "Which other logins there are: none",
    ),
    *(
        read(f"/api/{name}", need, lambda _call: [], f"There are no {name.partition('/')[0]}: an empty list")
        for need, names in _NONE.items()
        for name in names
    ),
)
