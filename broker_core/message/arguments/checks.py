"""Arguments of queues, exchanges, consumers and bindings: whether they can be declared, and when two
declarations are equivalent.

Not here: which there are and what they mean (``table.py``), the forms of their values
(``values.py``), acting on them. Texts are RabbitMQ's, followed by our advice.
Invariant: an argument whose name starts with ``x-`` and that has no effect is shown as such wherever its
queue, exchange or consumer is shown; a strict broker refuses it. Other names belong to the client and are
kept as they are.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import islice
from math import isfinite
from typing import Any

from broker_core.core.errors import AccessRefused, PreconditionFailed
from broker_core.message.arguments.policy import NO_POLICY, Policy, effective
from broker_core.message.arguments.table import COMPARED, CONSUMER, EXCHANGE, NEEDS, QUEUE, ArgumentRule
from broker_core.message.arguments.values import invalid, type_name
from broker_core.message.deduplication import COST_BYTES, Deduplication
from broker_core.message.field_table import MAX_NESTING

ARGUMENT_BYTES = 128 * 1024  # of all arguments together
_LISTED = {id(table): ", ".join(table) for table in (QUEUE, EXCHANGE, CONSUMER)}


def check_reserved(name: str, names: Container[str]) -> None:
    """Checks the name of a queue that a client declares. Raises AccessRefused for a new ``amq.`` name."""
    if name.startswith("amq.") and name not in names:
        raise AccessRefused(f"queue name '{name}' contains reserved prefix 'amq.*'")


def same(one: object, other: object) -> bool:
    """Compares value and kind: true is not 1, 1.0 is not 1, all whole numbers are of one kind."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return one == other and all(isinstance(one, kind) == isinstance(other, kind) for kind in (float, Decimal))


def _check_kept(what: str, arguments: Mapping[str, object]) -> None:
    """Raises PreconditionFailed for a value that cannot be stored as it is, or for more than a frame of AMQP
    has: other listeners take larger requests.
    """
    if _size(arguments, ARGUMENT_BYTES, 0) > ARGUMENT_BYTES:
        raise PreconditionFailed(
            f"the arguments of {what} are larger than {ARGUMENT_BYTES} bytes, or nested deeper than "
            f"{MAX_NESTING}: "
            "give smaller ones"
        )
    for name, value in arguments.items():
        if not _is_kept(value):
            raise PreconditionFailed(
                f"invalid arg '{name}' for {what}: {{unacceptable_type,{type_name(value)}}}",
                "give text, bytes, a number, true or false, nothing, or a table or an array of these",
            )


def _size(value: object, most: int, depth: int) -> int:
    """Returns about how many bytes a value has in AMQP; more than ``most`` if it has more, or is nested too
    deep.
    """
    if isinstance(value, Mapping):
        items = [item for pair in islice(value.items(), most + 1) for item in pair]
        return _size(items, most, depth)
    if isinstance(value, (str, bytes, bytearray)):
        return 1 + len(value)
    size = 1
    if isinstance(value, (list, tuple)):
        for item in value:
            if size > most or depth > MAX_NESTING:
                return most + 1
            size += _size(item, most - size, depth + 1)
    return size


def _is_kept(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(
            isinstance(name, str) and name[:1] != "\0" and _is_kept(item) for name, item in value.items()
        )
    if isinstance(value, (list, tuple)):
        return all(map(_is_kept, value))
    if isinstance(value, (float, Decimal)):
        return isfinite(value)
    return value is None or isinstance(value, (str, int, bytes))


def check_binding(destination: str, arguments: Mapping[str, object]) -> None:
    """Raises PreconditionFailed for a value that cannot be stored. ``destination``: like ``of`` below."""
    _check_kept(f"a binding of {destination}", arguments)


# ``of``: what has the arguments, as texts name it: "queue 'orders' in vhost '/'".
def _check(
    of: str,
    table: Mapping[str, ArgumentRule],
    arguments: Mapping[str, object],
    strict: bool,
    kind: str = "classic",
    ending: str = "",
) -> None:
    """Raises PreconditionFailed for an argument that is not taken. ``kind``: of the queue."""
    for name, value in arguments.items():
        argument = table.get(name)
        if argument is None and not (strict and name.startswith("x-")):
            continue
        if argument is not None and (argument.refused or kind not in argument.types):
            advice = argument.refused or f"queues of type {' or '.join(sorted(argument.types))} have it"
            raise PreconditionFailed(f"invalid arg '{name}' for {of}{ending}", advice)
        if argument is None or (strict and argument.void and not argument.strict):
            why = argument.void if argument is not None else f"with --strict, txmq takes {_LISTED[id(table)]}"
            raise PreconditionFailed(f"invalid arg '{name}' for {of}{ending}", why)
        argument.value(of, name, value)


# -- queues --------------------------------------------------------------------------------------------------


def check_arguments(of: str, arguments: Mapping[str, object], *, strict: bool) -> None:
    """Checks the arguments of a queue. Raises PreconditionFailed that names the argument."""
    _check_kept(of, arguments)
    if "x-queue-type" in arguments:  # first: it decides which others there are
        QUEUE["x-queue-type"].value(of, "x-queue-type", arguments["x-queue-type"])
    kind = _queue_type(arguments)
    _check(of, QUEUE, arguments, strict, kind, f" of queue type rabbit_{kind}_queue")
    for name, (other, wrong) in NEEDS.items():
        if name in arguments and other not in arguments:
            raise invalid(of, name, wrong, f"it needs {other} too")


def check_properties(
    of: str, arguments: Mapping[str, object], durable: bool, exclusive: bool, auto_delete: bool
) -> None:
    """Raises PreconditionFailed for a property that a quorum queue cannot have."""
    for name, wrong in (
        ("non-durable", not durable),
        ("auto-delete", auto_delete),
        ("exclusive-owner", exclusive),
    ):
        if wrong and _queue_type(arguments) == "quorum":
            raise PreconditionFailed(
                f"invalid property '{name}' for {of}",
                "a quorum queue is durable, not exclusive, not auto-delete",
            )


def _queue_type(arguments: Mapping[str, object]) -> str:
    return "quorum" if arguments.get("x-queue-type") == "quorum" else "classic"


@dataclass(frozen=True, slots=True)
class QueueArguments:
    """What one queue obeys: its arguments and a policy, parsed once. ``declared`` is what the client gave; it
    is recorded, and compared with later declarations.
    """

    declared: dict[str, object] = field(default_factory=dict)
    policy: Policy = NO_POLICY
    expires_ms: int | None = None
    ttl_ms: int | None = None
    dead_letter_exchange: str = ""  # of a queue that ``dead_letters``
    dead_letter_routing_key: str | None = None
    max_length: int | None = None
    max_bytes: int | None = None
    overflow: str = "drop-head"
    max_priority: int | None = None
    single_active_consumer: bool = False
    queue_type: str = "classic"
    delivery_limit: int | None = None
    consumer_timeout_ms: int | None = None
    counts_deliveries: bool = False
    limited: bool = False  # it has a maximum length
    refuses: bool = False  # it accepts nothing when full
    dead_letters: bool = False
    deduplication: Deduplication | None = None  # None: it takes duplicates

    @classmethod
    def parse(cls, declared: Mapping[str, Any], policy: Policy = NO_POLICY) -> QueueArguments:
        """Parses arguments that ``check_arguments`` accepted when they were declared, and a policy that
        ``check_definition`` accepted.
        """
        holds = declared
        if policy.settings:
            holds = effective(declared, policy, QUEUE)
        get = holds.get
        limited = not holds.keys().isdisjoint(("x-max-length", "x-max-length-bytes"))
        overflow = str(get("x-overflow", "drop-head"))
        return cls(
            dict(declared),
            policy,
            expires_ms=get("x-expires"),
            ttl_ms=get("x-message-ttl"),
            dead_letter_exchange=str(get("x-dead-letter-exchange", "")),
            dead_letter_routing_key=get("x-dead-letter-routing-key"),
            max_length=get("x-max-length"),
            max_bytes=get("x-max-length-bytes"),
            overflow=overflow,
            max_priority=get("x-max-priority"),
            single_active_consumer=bool(get("x-single-active-consumer")),
            queue_type=_queue_type(declared),
            delivery_limit=_limit(get("x-delivery-limit")),
            consumer_timeout_ms=get("x-consumer-timeout"),
            counts_deliveries=get("x-delivery-limit") is not None or _queue_type(declared) == "quorum",
            limited=limited,
            refuses=limited and overflow.startswith("reject-publish"),
            dead_letters="x-dead-letter-exchange" in holds,
            deduplication=Deduplication.parse(holds),
        )

    @property
    def id_bytes(self) -> int:
        """Returns how much memory the ids of messages may take, about."""
        return 0 if self.deduplication is None else COST_BYTES * self.deduplication.size


def _limit(declared: int | None) -> int | None:
    return None if declared is None or declared < 0 else declared


# -- exchanges and consumers ---------------------------------------------------------------------------------


def check_exchange_arguments(of: str, arguments: Mapping[str, object], *, strict: bool) -> None:
    """Raises PreconditionFailed that names the argument."""
    _check_kept(of, arguments)
    _check(of, EXCHANGE, arguments, strict, ending=": unknown argument")


def check_consumer_arguments(
    queue: str, vhost: str, arguments: Mapping[str, object], kind: str = "classic", *, strict: bool = False
) -> None:
    """``kind``: of the queue. Raises PreconditionFailed that names the argument."""
    of = f"queue '{queue}' in vhost '{vhost}'"
    _check(of, CONSUMER, arguments, strict, kind, f" of queue type rabbit_{kind}_queue")


# -- declared again ------------------------------------------------------------------------------------------


def inequivalent(of: str, new: Mapping[str, object], current: Mapping[str, object]) -> None:
    """Compares properties. Raises PreconditionFailed if a declaration differs from what exists."""
    for argument, value in new.items():
        if value != current[argument]:
            raise _inequivalent(of, argument, f"'{_text(value)}' but current is '{_text(current[argument])}'")


def inequivalent_arguments(
    of: str, new: Mapping[str, object], current: Mapping[str, object], compared: Sequence[str] = COMPARED
) -> None:
    """Checks that each argument of ``compared`` is equal or missing in both. Raises PreconditionFailed."""
    for argument in compared:
        missing = "classic" if argument == "x-queue-type" else None
        value, existing = new.get(argument, missing), current.get(argument, missing)
        if same(value, existing):
            continue
        if argument in new and argument in current:
            text = f"'{_text(value)}' but current is '{_text(existing)}'"
        elif argument in new:
            text = f"the value '{_text(value)}' of type '{type_name(value)}' but current is none"
        else:
            text = f"none but current is the value '{_text(existing)}' of type '{type_name(existing)}'"
        raise _inequivalent(of, argument, text)


def _inequivalent(of: str, argument: str, text: str) -> PreconditionFailed:
    return PreconditionFailed(f"inequivalent arg '{argument}' for {of}: received {text}")


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
