"""Definitions, in the forms of RabbitMQ 3.6 to 4.2: users, permissions, virtual hosts, exchanges, queues and
bindings; no messages.

``read`` checks a document and says what has no counterpart; ``apply`` makes the rest true, in one work.

Not here: the document of a broker (``export.py``).

Invariant: every member of every row is applied, or listed as skipped, or the whole document is refused and
nothing is changed. What is applied twice is as if it were applied once. Nothing is deleted; a queue or an
exchange that is there in another form stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from broker_core.admin import Imported, Skipped
from broker_core.broker.access.permission import check_pattern
from broker_core.broker.access.users import DEFAULT_USER, TAGS
from broker_core.broker.broker import BrokerState
from broker_core.broker.topology.policies import APPLY_TO, OPERATOR, POLICY
from broker_core.broker.topology.topology import PREDECLARED, Topology
from broker_core.broker.topology.virtual_hosts import NO_LIMIT
from broker_core.core import password as passwords
from broker_core.core.address import VHOST, check_vhost
from broker_core.core.change import Change
from broker_core.core.errors import OptionError, PreconditionFailed, ResourceLocked
from broker_core.core.records import PolicyRecord, UserRecord
from broker_core.message.arguments.policy import SETTINGS, settings_without_effect
from broker_core.message.arguments.table import EXCHANGE, QUEUE, QUEUE_TYPES, ArgumentRule, without_effect
from broker_core.routing.exchange_types import EXCHANGE_TYPES, check_type_arguments

Row = Mapping[str, Any]
_ALGORITHM = "rabbit_password_hashing_sha256"  # of a hash that names none, since RabbitMQ 3.6
_LIMITS = {"max-queues": "max_queues", "max-connections": "max_connections", "max-messages": "max_messages"}
_WRITTEN = (
    "users", "vhosts", "permissions", "topic_permissions", "parameters", "global_parameters", "policies",
    "exchanges", "queues", "bindings",
)  # fmt: skip
_ABOUT = (
    "explanation", "original_cluster_name", "original_vhost_name", "rabbit_version", "rabbitmq_version",
    "product_name", "product_version", "rabbitmq_definition_format",
)  # fmt: skip
_STAYS = "it is there in another form, which stays, as in RabbitMQ"
_NO_END = "its source or destination is not there: RabbitMQ exports no internal exchanges"

PASSWORDS = 1_000  # in one document: each takes tens of milliseconds


@dataclass(frozen=True, slots=True)
class ImportTarget:
    """Where a document is to go. ``vhost``: of what names none. ``strict``: the broker refuses arguments
    without effect. ``hashes``: user -> hash of its password.
    """

    vhost: str = VHOST
    strict: bool = False
    vhosts: Collection[str] = (VHOST,)
    hashes: Mapping[str, str] = field(default_factory=dict)


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
    policies: list[PolicyRecord] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    target: ImportTarget = field(default_factory=ImportTarget)
    plain: int = 0  # passwords that were hashed

    def skip(self, kind: str, row: Row, why: str, name: str = "") -> None:
        label = name or str(row.get("name") or row.get("user") or "")
        self.skipped.append(Skipped(kind, label, str(row.get("vhost") or ""), why))


# -- reading -------------------------------------------------------------------------------------------------
def read(document: object, target: ImportTarget) -> Definitions:
    """Takes as long as its passwords; needs no lock. Raises OptionError."""
    if not isinstance(document, Mapping):
        raise OptionError(f"definitions must be a JSON object, not {type(document).__name__}")
    found = Definitions(target=target)
    for name in document.keys() - {*_WRITTEN, *_ABOUT}:
        found.skip(name, {}, "txmq does not know it", name=name)
    rows = {kind: list(_rows(document, kind, target.vhost)) for kind in _WRITTEN}
    for kind, members in _MEMBERS.items():
        _read_members(found, kind, rows[kind], members)
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
_MEMBERS: dict[str, tuple[str, ...]] = {
    **_TEXTS,
    "users": ("name", "password", "password_hash", "hashing_algorithm", "tags", "limits"),
    "vhosts": ("name", "limits", "max_messages"),
    "exchanges": (*_TEXTS["exchanges"], "durable", "auto_delete", "internal", "arguments"),
    "queues": (*_TEXTS["queues"], "durable", "auto_delete", "arguments"),
    "bindings": (*_TEXTS["bindings"], "arguments", "properties_key"),
}
_NOTHING: tuple[object, ...] = ("", None, False, "undefined", [], {}, "Default virtual host")
_TYPE_OF_QUEUE = "as in RabbitMQ, it is x-queue-type of its arguments that says it"
_DEFAULT_TYPE = "a queue without x-queue-type is classic, which is as durable here as a quorum queue"
_WHY = {
    ("queues", "type"): _TYPE_OF_QUEUE,
    ("vhosts", "default_queue_type"): _DEFAULT_TYPE,
    **{("vhosts", name): "txmq keeps no texts about a virtual host" for name in ("description", "tags")},
}
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
            if row.get(name) in ("undefined", None):  # RabbitMQ exports what an import did not say
                row[name] = name == "durable"
            if not isinstance(row[name], bool):
                raise OptionError(f"{name!r} of {of} must be true or false, not {row[name]!r}")
        if kind in ("exchanges", "queues", "bindings") and not isinstance(
            row.get("arguments") or {}, Mapping
        ):
            raise OptionError(f"'arguments' of {of} must be an object, not {row['arguments']!r}")
        yield row


def _read_members(found: Definitions, kind: str, rows: list[Row], members: tuple[str, ...]) -> None:
    """Lists members of rows that nothing reads: each once, with the first row that has it."""
    first: dict[str, Row] = {}
    for row in rows:
        own = dict(row)
        if kind == "vhosts" and isinstance(row.get("metadata"), Mapping):
            own.update((each, value) for each, value in own.pop("metadata").items() if value not in _NOTHING)
        for name in own.keys() - {*members}:
            if own[name] not in _NOTHING and not (name == "type" and _queue_type(row) == own[name]):
                first.setdefault(name, row)
    for name, row in first.items():
        label = binding_name(row) if kind == "bindings" else str(row.get("name") or row.get("user"))
        why = _WHY.get((kind, name), "nothing here reads it")
        found.skip(f"{name} of {kind}", row, f"{why} (the first that has it)", label)


def _queue_type(row: Row) -> object:
    return (row.get("arguments") or {}).get("x-queue-type", "classic")


def _read_vhost(found: Definitions, row: Row) -> None:
    check_vhost(row["name"])
    limits = _table_of(row.get("limits"), f"limits of virtual host {row['name']!r}")
    if "max_messages" in row:
        limits = {**limits, "max-messages": row["max_messages"]}
    found.vhosts[row["name"]] = _limits(found, row["name"], limits)


def _table_of(value: object, of: str) -> dict[str, object]:
    """Of an object, or of pairs, as RabbitMQ 3.10 writes them. Raises OptionError."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value or []
    if not isinstance(pairs, list) or not all(
        isinstance(each, (list, tuple)) and len(each) == 2 for each in pairs
    ):
        raise OptionError(f"{of} must be pairs, not {value!r}")
    return {str(name): item for name, item in pairs}


def _limits(found: Definitions, vhost: str, limits: Mapping[str, object]) -> dict[str, int]:
    numbers = {}
    for name, value in limits.items():
        if name not in _LIMITS:
            found.skip("limit", {"vhost": vhost}, "txmq has no such limit of a virtual host", name=str(name))
        elif type(value) is not int or not NO_LIMIT <= value < 1 << 63:
            raise OptionError(f"limit {name} of virtual host {vhost!r} is {value!r}", "give a whole number")
        else:
            numbers[_LIMITS[name]] = value
    return numbers


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
    for limit in _table_of(row.get("limits"), f"limits of user {name!r}"):
        found.skip(
            "limit", row, f"{limit!r} of one user: serve has --user-connections and --user-channels for each"
        )
    try:
        hashed = _hash(found, row)
    except OptionError as error:
        found.skip(
            "password", row, f"{error.summary}: nobody logs in until `txmq user passwd {name}` sets one"
        )
        hashed = passwords.unmatched()
    if name == DEFAULT_USER and passwords.is_right(DEFAULT_USER, hashed):
        why = "everybody knows it, and RabbitMQ lets it in from its own host alone"
        found.skip("password", row, f"{why}: nobody logs in until `txmq user passwd {name}` sets another one")
        hashed = passwords.unmatched()
    if found.plain > PASSWORDS:
        raise OptionError(f"definitions have more than {PASSWORDS} passwords without a hash", "divide them")
    found.users.append(UserRecord(name, hashed, sorted(set(tags) & set(TAGS))))
    return None


def _hash(found: Definitions, row: Row) -> str:
    """Raises OptionError that ends with what is wrong, for a user whom nobody can log in as."""
    name, plain = str(row["name"]), row.get("password")
    algorithm, text = row.get("hashing_algorithm") or _ALGORITHM, row.get("password_hash") or ""
    if plain is None:
        if not text:
            raise OptionError("there is none")
        if algorithm == "scrypt" and passwords.is_hash(str(text)):
            passwords.check_hash(str(text))
            return str(text)
        return passwords.of_rabbitmq(str(algorithm), str(text))
    if not isinstance(plain, str):
        raise OptionError("it is no text")
    if text:
        raise OptionError("both password and password_hash are given")
    stored = found.target.hashes.get(name)
    found.plain += 1
    if stored is not None and passwords.is_right(plain, stored):
        return stored  # the same import again changes nothing
    return passwords.hashed(plain)


def _read_parameters(found: Definitions, rows: Mapping[str, list[Row]]) -> None:
    for row in rows["parameters"]:
        vhost = str(row.get("vhost", found.target.vhost))
        if row.get("component") == OPERATOR:
            of = f"operator policy {row.get('name')!r}"
            own = _table_of(row.get("value"), of)
            _read_policy(found, {**own, "vhost": vhost, "name": row.get("name")}, OPERATOR)
        elif row.get("component") != "vhost-limits":
            found.skip(f"{row.get('component')} parameter", row, "txmq has none of this kind")
        elif vhost in found.vhosts or vhost in found.target.vhosts:
            limits = _table_of(row.get("value"), f"vhost-limits of {vhost!r}")
            found.vhosts[vhost] = found.vhosts.get(vhost, {}) | _limits(found, vhost, limits)
        else:
            found.skip("vhost-limits parameter", row, "its virtual host is not there")
    for row in rows["global_parameters"]:
        found.skip("global parameter", row, "txmq has none")
    for row in rows["policies"]:
        _read_policy(found, row, POLICY)


def _read_policy(found: Definitions, row: Row, kind: str) -> None:
    """Leaves out and lists what is no setting here. Raises OptionError."""
    of = f"{kind.replace('_', ' ')} {row.get('name')!r}"
    name, pattern = row.get("name"), row.get("pattern")
    priority, apply_to = row.get("priority") or 0, row.get("apply-to") or "all"
    if not isinstance(name, str) or not isinstance(pattern, str) or type(priority) is not int:
        raise OptionError(
            f"{of} of the definitions must have a name and a pattern, texts, and a whole priority"
        )
    settings = _table_of(row.get("definition"), f"the definition of {of}")
    definition = {each: value for each, value in settings.items() if each in SETTINGS}
    unknown = dict.fromkeys(settings.keys() - definition.keys(), "txmq has no such setting")
    for each, why in (unknown | settings_without_effect(definition)).items():
        found.skip(f"setting of {kind.replace('_', ' ')}", row, f"no effect: {why}", f"{name}: {each}")
    vhost = str(row.get("vhost", found.target.vhost))
    try:
        check_pattern(pattern)
    except OptionError as error:
        found.skip("policy", row, str(error))
    else:
        if apply_to not in APPLY_TO:
            found.skip("policy", row, f"txmq has no {apply_to}")
        elif definition:
            found.policies.append(PolicyRecord(vhost, kind, name, pattern, apply_to, priority, definition))


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
        try:
            check_type_arguments(row["type"], row.get("arguments") or {})
        except PreconditionFailed as error:
            found.skip("exchange", row, error.message)
            gone.add(("exchange", row["vhost"], row["name"]))
            continue
        found.exchanges.append({**row, "arguments": _arguments(found, "exchange", row, EXCHANGE)})
    return gone


def _read_queues(found: Definitions, rows: list[Row]) -> Names:
    gone: Names = set()
    for row in rows:
        kind = _queue_type(row)
        why = f"txmq has no queues of type {kind!r}" if kind not in QUEUE_TYPES else ""
        if kind == "quorum" and (row["auto_delete"] or not row["durable"]):
            why = "a quorum queue is durable and not auto-delete: RabbitMQ does not import it either"
        if why:
            found.skip("queue", row, why)
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
        how = (
            "is left out: with --strict, clients must not declare it"
            if found.target.strict
            else "has no effect"
        )
        found.skip(f"argument of {kind}", row, f"{name} {how}: {why}")
        if found.target.strict:
            del arguments[name]
    for name in [name for name in arguments if name in table]:
        why = _refusal(table[name], name, row, arguments[name]) if kind == "queue" else table[name].refused
        if why:
            del arguments[name]
            found.skip(f"argument of {kind}", row, f"{name} is left out, and refused of clients too: {why}")
    return arguments


def _refusal(rule: ArgumentRule, name: str, row: Row, value: object) -> str:
    """Returns why an argument of a queue is left out, where RabbitMQ takes or has taken it; "": it is not."""
    if rule.refused or _queue_type(row) not in rule.types:
        return rule.refused or f"queues of type {' or '.join(sorted(rule.types))} have it"
    if name in ("x-delivery-limit", "x-consumer-timeout"):  # RabbitMQ does not look at their values
        try:
            rule.value(f"queue {row['name']!r}", name, value)
        except PreconditionFailed as error:
            return error.message
    return ""


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
def apply(definitions: Definitions, state: BrokerState, change: Change, now: int) -> Imported:
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
    for policy in definitions.policies:
        for queue in hosts.require(policy.vhost).policies.put(change, policy):
            state.pending_checks.obey_soon(queue, now)
    skipped = list(definitions.skipped)
    for kind, declare in (("exchange", _declare_exchange), ("queue", _declare_queue)):
        for row in getattr(definitions, f"{kind}s"):
            topology = _topology(state, row)
            there = row["name"] in (topology.queues if kind == "queue" else topology.exchanges)
            try:
                declare(topology, row, change)
            except (PreconditionFailed, ResourceLocked) as error:
                if not there:
                    raise
                skipped.append(Skipped(kind, row["name"], row["vhost"], f"{_STAYS}: {error.summary}"))
    bound = []
    for row in definitions.bindings:
        if _has_ends(state, row):
            bound.append(row)
        else:
            skipped.append(Skipped("binding", binding_name(row), row["vhost"], _NO_END))
    for row in bound:
        _bind(_topology(state, row), row, change)
    return Imported({"bindings": len(bound)}, tuple(skipped))


def _has_ends(state: BrokerState, row: Row) -> bool:
    topology = _topology(state, row)
    names = topology.queues if row["destination_type"] == "queue" else topology.exchanges
    return row["source"] in topology.exchanges and row["destination"] in names


def binding_name(row: Row) -> str:
    return f"{row['source']} -> {row['destination']}"


def _topology(state: BrokerState, row: Row) -> Topology:
    """Raises OptionError: its virtual host is not there."""
    return state.virtual_hosts.require(row["vhost"])


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
