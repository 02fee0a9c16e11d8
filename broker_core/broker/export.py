"""The definitions of a broker as a document, in the form that ``definitions.py`` reads.

1. under the lock: what exists, as references, which one step of C copies
2. without it: the document, in the order of names

Invariant: the document is that of one moment. What is referred to does not change: a record is replaced, and
what a queue, an exchange or a binding was declared with stays. Exclusive queues are of their connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

from broker_core.admin import Exported, Skipped
from broker_core.broker.broker import BrokerState
from broker_core.broker.definitions import Row, binding_name
from broker_core.broker.queue import Queue
from broker_core.broker.topology.policies import OPERATOR
from broker_core.broker.topology.topology import PREDECLARED, Topology
from broker_core.broker.topology.virtual_hosts import NO_LIMIT
from broker_core.core import password as passwords
from broker_core.core.pieces import in_order
from broker_core.core.records import (
    PermissionRecord,
    PolicyRecord,
    TopicPermissionRecord,
    UserRecord,
    VhostRecord,
)
from broker_core.routing.exchange import Binding, Exchange

_NAME = itemgetter(0)


@dataclass(frozen=True, slots=True)
class Host:
    """What a virtual host has."""

    limits: VhostRecord
    queues: list[tuple[str, Queue]]
    exchanges: list[tuple[str, Exchange[Queue]]]
    bindings: list[tuple[str, list[Binding]]]  # by exchange
    policies: list[PolicyRecord]


@dataclass(frozen=True, slots=True)
class Definable:
    """What definitions can say of a broker. ``file_users``: of ``--users``."""

    file_users: list[str]
    users: list[tuple[str, UserRecord]]
    permissions: list[tuple[tuple[str, str], PermissionRecord]]
    topics: list[tuple[tuple[str, str], list[TopicPermissionRecord]]]
    vhosts: list[tuple[str, Host]]


def definable(state: BrokerState) -> Definable:
    """Under the lock."""
    users, hosts = state.users, state.virtual_hosts
    return Definable(
        list(users.file_users - users.by_name.keys()),
        list(users.by_name.items()),
        list(users.permissions.items()),
        [(key, list(topics.values())) for key, topics in users.topics.items()],
        [(name, _host(hosts.limits(name), topology)) for name, topology in hosts.by_name.items()],
    )


def _host(limits: VhostRecord, topology: Topology) -> Host:
    exchanges = list(topology.exchanges.items())
    return Host(
        limits,
        list(topology.queues.items()),
        exchanges,
        [(name, exchange.bindings) for name, exchange in exchanges if name and exchange.bound],
        list(topology.policies.by_key.values()),
    )


def document(found: Definable, version: str) -> Exported:
    """Needs no lock."""
    skipped = [
        Skipped("user", name, "", "it is in the file of serve --users") for name in sorted(found.file_users)
    ]
    vhosts = sorted(found.vhosts, key=_NAME)
    written: dict[str, Any] = {"product_name": "txmq", "product_version": version}
    written["users"] = [_user(record) for _, record in in_order(found.users, _NAME)]
    written["vhosts"] = [{"name": name, **_messages(host.limits)} for name, host in vhosts]
    written["permissions"] = [
        {"user": user, "vhost": vhost, "configure": each.configure, "write": each.write, "read": each.read}
        for (user, vhost), each in in_order(found.permissions, _NAME)
    ]
    topics = in_order(
        chain.from_iterable(topics for _, topics in found.topics),
        lambda each: (each.user, each.vhost, each.exchange),
    )
    written["topic_permissions"] = [
        {
            "user": each.user,
            "vhost": each.vhost,
            "exchange": each.exchange,
            "write": each.write,
            "read": each.read,
        }
        for each in topics
    ]
    limits = [_vhost_limits(name, host.limits) for name, host in vhosts]
    written["parameters"] = [each for each in limits if each["value"]]
    policies = in_order(
        chain.from_iterable(host.policies for _, host in vhosts), lambda each: (each.vhost, each.name)
    )
    for policy in policies:
        if policy.kind == OPERATOR:
            value = {name: item for name, item in policy_row(policy).items() if name not in ("vhost", "name")}
            where = {"component": OPERATOR, "name": policy.name, "vhost": policy.vhost}
            written["parameters"].append({**where, "value": value})
    written["global_parameters"] = []
    written["policies"] = [policy_row(each) for each in policies if each.kind != OPERATOR]
    for kind, rows in (("queue", _queues), ("exchange", _exchanges), ("binding", _bindings)):
        written[f"{kind}s"] = []
        for vhost, host in vhosts:
            for row in rows(host):
                if _is_json(row["arguments"]):
                    written[f"{kind}s"].append({"vhost": vhost, **row})
                    continue
                name = row.get("name") or binding_name(row)
                skipped.append(Skipped(kind, name, vhost, "JSON cannot express a value of its arguments"))
    return Exported(written, tuple(skipped))


def _user(record: UserRecord) -> Row:
    algorithm, text = passwords.to_rabbitmq(record.password_hash)
    return {
        "name": record.name,
        "password_hash": text,
        "hashing_algorithm": algorithm,
        "tags": list(record.tags),
        "limits": {},
    }


def _messages(limits: VhostRecord) -> dict[str, int]:
    """RabbitMQ has no such limit, and ignores the name."""
    return {"max_messages": limits.max_messages} if limits.max_messages != NO_LIMIT else {}


def _vhost_limits(vhost: str, found: VhostRecord) -> Row:
    limits = {"max-queues": found.max_queues, "max-connections": found.max_connections}
    value = {name: limit for name, limit in limits.items() if limit != NO_LIMIT}
    return {"component": "vhost-limits", "name": "limits", "vhost": vhost, "value": value}


def policy_row(policy: PolicyRecord) -> dict[str, object]:
    """In RabbitMQ's form."""
    return {
        "vhost": policy.vhost,
        "name": policy.name,
        "pattern": policy.pattern,
        "apply-to": policy.apply_to,
        "definition": policy.definition,
        "priority": policy.priority,
    }


def _queues(host: Host) -> list[Row]:
    return [
        {
            "name": name,
            "durable": queue.durable,
            "auto_delete": queue.auto_delete,
            "arguments": dict(queue.arguments.declared),
        }
        for name, queue in in_order(host.queues, _NAME)
        if not queue.replies and not queue.exclusive
    ]


def _exchanges(host: Host) -> list[Row]:
    return [
        {
            "name": name,
            "type": exchange.type,
            "durable": exchange.durable,
            "auto_delete": exchange.auto_delete,
            "internal": exchange.internal,
            "arguments": dict(exchange.arguments),
        }
        for name, exchange in in_order(host.exchanges, _NAME)
        if name and name not in PREDECLARED
    ]


def _bindings(host: Host) -> list[Row]:
    found = [
        {
            "source": name,
            "destination": each.destination.name,
            "destination_type": "exchange" if isinstance(each.destination, Exchange) else "queue",
            "routing_key": each.routing_key,
            "arguments": dict(each.arguments),
        }
        for name, bindings in host.bindings
        for each in bindings
        if isinstance(each.destination, Exchange) or not each.destination.exclusive
    ]
    names = ("source", "destination_type", "destination", "routing_key")
    return in_order(found, lambda row: [str(row[name]) for name in names])


def _is_json(value: object) -> bool:
    """Whether it comes back as it is: JSON has no bytes, decimals and times."""
    if isinstance(value, Mapping):
        return all(_is_json(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(map(_is_json, value))
    return value is None or type(value) in (str, int, float, bool)
