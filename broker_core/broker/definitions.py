"""Definitions, in the form of RabbitMQ 3.10: users, permissions, virtual hosts, exchanges, queues, bindings;
no messages.

``read`` checks a document and says what has no counterpart; ``apply`` makes the rest true, in one work.

Not here: the document of a broker (``export.py``).

Invariant: what a document has is applied, or listed as skipped, or the whole document is refused and nothing
is changed. What is applied twice is as if it were applied once. Nothing is deleted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from broker_core.admin import Imported, Skipped
from broker_core.broker.access.permission import check_pattern
from broker_core.broker.access.users import DEFAULT_USER, TAGS
from broker_core.broker.arguments.table import EXCHANGE, QUEUE, ArgumentRule, without_effect
from broker_core.broker.broker import BrokerState
from broker_core.broker.routing.exchange import EXCHANGE_TYPES
from broker_core.broker.topology.topology import PREDECLARED, Topology
from broker_core.broker.topology.virtual_hosts import NO_LIMIT
from broker_core.core import password as passwords
from broker_core.core.address import VHOST, check_vhost
from broker_core.core.change import Change
from broker_core.core.errors import OptionError
from broker_core.core.records import UserRecord

Row = Mapping[str, Any]
_LIMITS = {"max-queues": "max_queues", "max-connections": "max_connections", "max-messages": "max_messages"}
_WRITTEN = (
    "users", "vhosts", "permissions", "topic_permissions", "parameters", "global_parameters", "policies",
    "exchanges", "queues", "bindings",
)  # fmt: skip
_ABOUT = (
    "rabbit_version",
    "rabbitmq_version",
    "product_name",
    "product_version",
    "rabbitmq_definition_format",
)
_NO_END = "its source or destination is not there: RabbitMQ exports no internal exchanges"
_NO_POLICIES = (
    "txmq has no policies: give the queues these arguments, x-message-ttl for message-ttl and so on"
)


@dataclass
class Definitions:
    """What is to be applied, in this order."""

    vhosts: dict[str, dict[str, int]] = field(default_factory=dict)  # name -> limits
    users: list[UserRecord] = field(default_factory=list)
    permissions: list[Row] = field(default_factory=list)
    topic_permissions: list[Row] = field(default_factory=list)
    exchanges: list[Row] = field(default_factory=list)
    queues: list[Row] = field(default_factory=list)
    bindings: list[Row] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    strict: bool = False

    def skip(self, kind: str, row: Row, why: str, name: str = "") -> None:
        shown = name or str(row.get("name") or row.get("user") or "")
        self.skipped.append(Skipped(kind, shown, str(row.get("vhost") or ""), why))


# -- reading -------------------------------------------------------------------------------------------------
def read(document: object, vhost: str = VHOST, strict: bool = False) -> Definitions:
    """``vhost``: of what names none, as in the definitions of one virtual host. ``strict``: the broker
    refuses arguments without effect. Raises OptionError.
    """
    if not isinstance(document, Mapping):
        raise OptionError(f"definitions must be a JSON object, not {type(document).__name__}")
    found = Definitions(strict=strict)
    for name in document.keys() - {*_WRITTEN, *_ABOUT}:
        found.skip(name, {}, "txmq does not know it", name=name)
    rows = {kind: list(_rows(document, kind, vhost)) for kind in _WRITTEN}
    for row in rows["vhosts"]:
        _read_vhost(found, row)
    for row in rows["users"]:
        _read_user(found, row)
    _read_parameters(found, rows)
    users = {str(row["name"]) for row in rows["users"]} - {user.name for user in found.users}
    for kind, patterns in (
        ("permissions", ("configure", "write", "read")),
        ("topic_permissions", ("write", "read")),
    ):
        for row in rows[kind]:
            _read_permission(found, kind, row, patterns, users)
    gone = _read_exchanges(found, rows["exchanges"]) | _read_queues(found, rows["queues"])
    for row in rows["bindings"]:
        _read_binding(found, row, gone)
    found.skipped.sort(key=lambda each: (each.kind, each.vhost, each.name))
    return found


_TEXTS = {
    "users": ("name",), "vhosts": ("name",), "permissions": ("user", "vhost", "configure", "write", "read"),
    "topic_permissions": ("user", "vhost", "exchange", "write", "read"),
    "exchanges": ("name", "vhost", "type"), "queues": ("name", "vhost"),
    "bindings": ("source", "vhost", "destination", "destination_type", "routing_key"),
}  # fmt: skip
_FLAGS = {"exchanges": ("durable", "auto_delete", "internal"), "queues": ("durable", "auto_delete")}


def _rows(document: Row, kind: str, vhost: str) -> Iterator[Row]:
    """The entries of a list, with the types that they must have. Raises OptionError."""
    rows = document.get(kind, [])
    if not isinstance(rows, list):
        raise OptionError(f"{kind} of the definitions must be an array, not {type(rows).__name__}")
    for number, row in enumerate(rows):
        of = f"{kind}[{number}] of the definitions"
        if not isinstance(row, Mapping):
            raise OptionError(f"{of} must be an object, not {type(row).__name__}")
        row = {"vhost": vhost, **row} if "vhost" in _TEXTS.get(kind, ()) else dict(row)
        for name in _TEXTS.get(kind, ()):
            if not isinstance(row.get(name), str):
                raise OptionError(f"{of} must have {name!r}, a text, and has {row.get(name)!r}")
        for name in _FLAGS.get(kind, ()):
            if not isinstance(row.setdefault(name, name == "durable"), bool):
                raise OptionError(f"{name!r} of {of} must be true or false, not {row[name]!r}")
        if kind in ("exchanges", "queues", "bindings") and not isinstance(
            row.get("arguments") or {}, Mapping
        ):
            raise OptionError(f"'arguments' of {of} must be an object, not {row['arguments']!r}")
        yield row


def _read_vhost(found: Definitions, row: Row) -> None:
    check_vhost(row["name"])
    limits = row.get("limits") or {}
    if isinstance(limits, list):  # of pairs, as RabbitMQ 3.10 writes them
        if not all(isinstance(each, list) and len(each) == 2 for each in limits):
            raise OptionError(f"limits of virtual host {row['name']!r} must be pairs, not {limits!r}")
        limits = {str(name): value for name, value in limits}
    if "max_messages" in row:
        limits = {**limits, "max-messages": row["max_messages"]}
    found.vhosts[row["name"]] = _limits(found, row["name"], limits)


def _limits(found: Definitions, vhost: str, limits: object) -> dict[str, int]:
    known = {}
    for name, value in limits.items() if isinstance(limits, Mapping) else ():
        if name not in _LIMITS:
            found.skip("limit", {"vhost": vhost}, "txmq has no such limit of a virtual host", name=str(name))
        elif type(value) is not int or not NO_LIMIT <= value < 1 << 63:
            raise OptionError(f"limit {name} of virtual host {vhost!r} is {value!r}", "give a whole number")
        else:
            known[_LIMITS[name]] = value
    return known


def _read_user(found: Definitions, row: Row) -> None:
    name, tags = row["name"], row.get("tags") or []
    if not name or ":" in name:
        return found.skip("user", row, "a name with a colon cannot log in: give the user another one")
    tags = [tag.strip() for tag in tags.split(",")] if isinstance(tags, str) else tags
    if not isinstance(tags, list):
        raise OptionError(f"the tags of user {name!r} must be an array, not {tags!r}")
    for tag in tags:
        if tag not in TAGS and tag:
            found.skip("tag", row, f"tag {tag!r} means nothing here; txmq has {', '.join(TAGS)}")
    for limit in row.get("limits") or ():
        found.skip(
            "limit", row, f"{limit!r} of one user: serve has --user-connections and --user-channels for each"
        )
    algorithm, text = row.get("hashing_algorithm") or "", row.get("password_hash") or ""
    try:
        if algorithm == "scrypt" and passwords.is_hash(str(text)):
            passwords.check_hash(kept := str(text))
        else:
            kept = passwords.of_rabbitmq(str(algorithm), str(text))
    except OptionError as error:
        why = error.summary if text else "there is none"
        found.skip("password", row, f"{why}: nobody logs in until `txmq users passwd {name}` sets one")
        kept = passwords.unmatched()
    if name == DEFAULT_USER and passwords.is_right(DEFAULT_USER, kept):
        why = "everybody knows it, and RabbitMQ lets it in from its own host alone"
        found.skip(
            "password", row, f"{why}: nobody logs in until `txmq users passwd {name}` sets another one"
        )
        kept = passwords.unmatched()
    found.users.append(UserRecord(name, kept, sorted(set(tags) & set(TAGS))))
    return None


def _read_parameters(found: Definitions, rows: Mapping[str, list[Row]]) -> None:
    for row in rows["parameters"]:
        if row.get("component") == "vhost-limits" and row.get("vhost") in found.vhosts:
            found.vhosts[str(row["vhost"])] |= _limits(found, str(row["vhost"]), row.get("value"))
        else:
            found.skip(f"{row.get('component')} parameter", row, "txmq has none of this kind")
    for row in rows["global_parameters"]:
        found.skip("global parameter", row, "txmq has none")
    for row in rows["policies"]:
        found.skip("policy", row, f"{_NO_POLICIES}: {json.dumps(row.get('definition'), default=str)}")


def _read_permission(
    found: Definitions, kind: str, row: Row, patterns: tuple[str, ...], without: set[str]
) -> None:
    if row["user"] in without:
        return found.skip(kind, row, "its user was skipped")
    for name in patterns:
        try:
            check_pattern(row[name])
        except OptionError as error:
            return found.skip(kind, row, f"{name}: {error}; the user has none until it is set by hand")
    getattr(found, kind).append(row)
    return None


Names = set[tuple[str, str, str]]  # (kind, vhost, name)


def _read_exchanges(found: Definitions, rows: list[Row]) -> Names:
    gone: Names = set()
    for row in rows:
        if row["name"] in ("", *PREDECLARED):
            continue  # there is one in every virtual host
        if row["type"] not in EXCHANGE_TYPES:
            found.skip("exchange", row, f"txmq has no exchanges of type {row['type']!r}")
            gone.add(("exchange", row["vhost"], row["name"]))
            continue
        found.exchanges.append({**row, "arguments": _arguments(found, "exchange", row, EXCHANGE)})
    return gone


def _read_queues(found: Definitions, rows: list[Row]) -> Names:
    gone: Names = set()
    for row in rows:
        kind = (row.get("arguments") or {}).get("x-queue-type", "classic")
        if kind not in ("classic", "quorum"):
            found.skip("queue", row, f"txmq has no queues of type {kind!r}")
            gone.add(("queue", row["vhost"], row["name"]))
            continue
        found.queues.append({**row, "arguments": _arguments(found, "queue", row, QUEUE)})
    return gone


def _arguments(found: Definitions, kind: str, row: Row, table: Mapping[str, ArgumentRule]) -> Row:
    """Those that its program can declare again; a strict broker leaves out those without effect."""
    arguments = dict(row.get("arguments") or {})
    for name, why in without_effect(table, arguments).items():
        if name in table and table[name].strict:
            continue
        how = "is left out: with --strict, clients must not declare it" if found.strict else "has no effect"
        found.skip(f"argument of {kind}", row, f"{name} {how}: {why}")
        if found.strict:
            del arguments[name]
    for name in [name for name in arguments if name in table and table[name].refused]:
        del arguments[name]
        found.skip(f"argument of {kind}", row, f"{name} is refused, also of clients: {table[name].refused}")
    return arguments


def _read_binding(found: Definitions, row: Row, gone: Names) -> None:
    ends = (("exchange", row["source"]), (row["destination_type"], row["destination"]))
    if row["destination_type"] not in ("queue", "exchange"):
        raise OptionError(f"a binding of {row['source']!r} leads to a {row['destination_type']!r}")
    for kind, name in ends:
        if (kind, row["vhost"], name) in gone:
            return found.skip("binding", row, f"{kind} {name!r} was skipped", name=binding_name(row))
    if row["source"]:  # the default exchange reaches every queue by its name
        found.bindings.append(row)
    return None


# -- applying ------------------------------------------------------------------------------------------------
def apply(definitions: Definitions, state: BrokerState, change: Change) -> Imported:
    """Raises OptionError, PreconditionFailed and others that name what is wrong: then nothing is changed."""
    hosts, users = state.virtual_hosts, state.users
    for name, limits in definitions.vhosts.items():
        if name not in hosts.by_name:
            hosts.add(change, name, **limits)
        elif limits:
            hosts.limit(change, name, limits)
    for user in definitions.users:
        if user.name in users.by_name:
            users.set_password(change, user.name, user.password_hash)
            users.set_tags(change, user.name, user.tags)
        else:
            users.add(change, user.name, user.password_hash, user.tags)
    for row in definitions.permissions:
        hosts.require(row["vhost"])
        users.permit(change, row["user"], row["configure"], row["write"], row["read"], row["vhost"])
    for row in definitions.topic_permissions:
        hosts.require(row["vhost"])
        users.permit_topic(change, row["user"], row["exchange"], row["write"], row["read"], row["vhost"])
    _each(definitions.exchanges, state, lambda topology, row: _declare_exchange(topology, row, change))
    _each(definitions.queues, state, lambda topology, row: _declare_queue(topology, row, change))
    bound, skipped = [], list(definitions.skipped)
    for row in definitions.bindings:
        if _has_ends(state, row):
            bound.append(row)
        else:
            skipped.append(Skipped("binding", binding_name(row), row["vhost"], _NO_END))
    _each(bound, state, lambda topology, row: _bind(topology, row, change))
    kinds = ("vhosts", "users", "permissions", "topic_permissions", "exchanges", "queues", "bindings")
    counts = {kind: len(getattr(definitions, kind)) for kind in kinds}
    return Imported({**counts, "bindings": len(bound)}, tuple(skipped))


def _has_ends(state: BrokerState, row: Row) -> bool:
    state.virtual_hosts.require(row["vhost"])
    topology = state.virtual_hosts.by_name[row["vhost"]]
    names = topology.queues if row["destination_type"] == "queue" else topology.exchanges
    return row["source"] in topology.exchanges and row["destination"] in names


def binding_name(row: Row) -> str:
    return f"{row['source']} -> {row['destination']}"


def _each(rows: list[Row], state: BrokerState, do: Callable[[Topology, Row], None]) -> None:
    for row in rows:
        state.virtual_hosts.require(row["vhost"])
        do(state.virtual_hosts.by_name[row["vhost"]], row)


def _declare_exchange(topology: Topology, row: Row, change: Change) -> None:
    topology.declare_exchange(
        change,
        row["name"],
        row["type"],
        durable=row["durable"],
        auto_delete=row["auto_delete"],
        internal=row["internal"],
        arguments=row["arguments"],
    )


def _declare_queue(topology: Topology, row: Row, change: Change) -> None:
    topology.declare_queue(
        change,
        row["name"],
        durable=row["durable"],
        auto_delete=row["auto_delete"],
        arguments=row["arguments"],
    )


def _bind(topology: Topology, row: Row, change: Change) -> None:
    arguments = dict(row.get("arguments") or {})
    if row["destination_type"] == "queue":
        topology.bind(change, row["destination"], row["source"], row["routing_key"], arguments)
    else:
        topology.bind_exchange(change, row["destination"], row["source"], row["routing_key"], arguments)
