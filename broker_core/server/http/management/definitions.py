"""Definitions, read only: what there is to declare again, in RabbitMQ's format.

Not here: passwords, which leave the broker by no door, and the import.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from broker_core import __version__
from broker_core.broker.topology.topology import PREDECLARED, Topology
from broker_core.server.http.call import HttpCall
from broker_core.server.http.gate import visible, within
from broker_core.server.http.management import exchanges, hosts
from broker_core.server.http.management.overview import API_VERSION
from broker_core.server.http.route import read

Row = dict[str, Any]
_QUEUE = ("name", "durable", "auto_delete")
_EXCHANGE = ("name", "type", "durable", "auto_delete", "internal", "arguments")
_BINDING = ("source", "destination", "destination_type", "routing_key", "arguments")


def _only(row: Row, names: Iterable[str], vhost: str | None) -> Row:
    found = {name: row[name] for name in names}
    return found if vhost is None else {**found, "vhost": vhost}


def _topology(call: HttpCall, topologies: Iterable[Topology], *, named: bool) -> dict[str, list[Row]]:
    """``named``: each row names its virtual host."""
    found: dict[str, list[Row]] = {"queues": [], "exchanges": [], "bindings": []}
    for topology in topologies:
        vhost = topology.vhost if named else None
        lasting = {queue.name for queue in list(topology.queues.values()) if not queue.exclusive}
        for name in sorted(lasting):
            queue = topology.queues.get(name)
            if queue is not None and not queue.replies:
                row = {each: getattr(queue, each) for each in _QUEUE}
                row["arguments"] = dict(queue.arguments.declared)
                found["queues"].append(_only(row, row, vhost))
        for row in exchanges.exchange_rows(topology):
            if row["name"] and row["name"] not in PREDECLARED:
                found["exchanges"].append(_only(row, _EXCHANGE, vhost))
        for row in exchanges.binding_rows(call, topology):
            if row["source"] and (row["destination_type"] == "exchange" or row["destination"] in lasting):
                found["bindings"].append(_only(row, _BINDING, vhost))
    return found


_HEAD = {
    "rabbit_version": API_VERSION,
    "rabbitmq_version": API_VERSION,
    "product_name": "txmq",
    "product_version": __version__,
}


def _all(call: HttpCall) -> Row:
    topologies = visible(call.served, call.caller)
    return {
        **_HEAD,
        "users": hosts.user_rows(call),
        "vhosts": [{"name": topology.vhost} for topology in topologies],
        "permissions": hosts.permission_rows(call),
        "topic_permissions": hosts.permission_rows(call, topic=True),
        "parameters": [],
        "global_parameters": [],
        "policies": [],
        **_topology(call, topologies, named=True),
    }


def _of_one(call: HttpCall) -> Row:
    seen = within(call.served, call.caller, call.params["vhost"])
    found = _topology(call, [seen.state.topology], named=False)
    return {**_HEAD, "parameters": [], "policies": [], **found}


ROUTES = (
    read("/api/definitions", "administrator", _all, "All that can be declared, without passwords"),
    read("/api/definitions/{vhost}", "administrator", _of_one, "The same of a virtual host"),
)
