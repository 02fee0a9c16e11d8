"""Arguments of queues, exchanges and bindings: their names and values, and when two declarations are
equivalent.

Not here: acting on them (``message/overflow.py``, ``message/expiry.py``, ``message/dispatch.py``,
``topology/topology.py``). Texts are RabbitMQ's, followed by our advice.
Invariant: no queue and no exchange has an argument whose name starts with ``x-`` and that has no effect,
except those that only choose how RabbitMQ stores a queue (x-queue-type, -mode, -version), and the mark of its
federation (x-internal-purpose). Other names belong to the client and are kept as they are.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import islice
from math import isfinite
from typing import Any

from broker_core.core.errors import AccessRefused, OptionError, PreconditionFailed
from broker_core.message.field_table import MAX_NESTING, Timestamp

MAX_TEXT_BYTES = 255
ARGUMENT_BYTES = 128 * 1024  # of all arguments together
MAX_TIME_MS = 315_360_000_000  # ten years, RabbitMQ's limit
MAX_PRIORITY = 255

_TIMES = ("x-expires", "x-message-ttl")
_INTEGERS = (
    *_TIMES,
    "x-max-length",
    "x-max-length-bytes",
    "x-max-priority",
    "x-queue-version",
    "x-delivery-limit",
)
_CHOICES = {
    "x-overflow": ("drop-head", "reject-publish", "reject-publish-dlx"),
    "x-queue-mode": ("default", "lazy"),
    "x-queue-type": ("classic", "quorum"),
}
_NOT_QUORUM = ("x-max-priority", "x-queue-mode", "x-queue-version")
ALLOWED = (
    "x-expires",
    "x-message-ttl",
    "x-dead-letter-exchange",
    "x-dead-letter-routing-key",
    "x-max-length",
    "x-max-length-bytes",
    "x-max-priority",
    "x-overflow",
    "x-queue-mode",
    "x-queue-version",
    "x-single-active-consumer",
    "x-delivery-limit",
    "x-queue-type",
    "x-internal-purpose",
)
EXCHANGE_ARGUMENTS = ("alternate-exchange", "x-internal-purpose")
_SIGNED_32 = range(-(1 << 31), 1 << 31)


def check_reserved(name: str, known: Container[str]) -> None:
    """Checks the name of a queue that a client declares. Raises AccessRefused for a new ``amq.`` name."""
    if name.startswith("amq.") and name not in known:
        raise AccessRefused(f"queue name '{name}' contains reserved prefix 'amq.*'")


def check_text(kind: str, text: object) -> None:
    """Checks a name, a routing key or an xid: AMQP's short string, which is UTF-8 of at most 255 bytes.
    Raises OptionError.
    """
    if not isinstance(text, str):
        raise OptionError(f"{kind} must be a str, not {type(text).__name__}")
    try:
        length = len(text.encode())
    except UnicodeEncodeError:
        raise OptionError(
            f"{kind} {text!r} cannot be encoded as UTF-8: give it without lone surrogates"
        ) from None
    if length > MAX_TEXT_BYTES:
        raise OptionError(f"{kind} {text[:40]!r}... has {length} bytes, allowed are {MAX_TEXT_BYTES}")


def type_name(value: object) -> str:
    """Returns the AMQP type of a value, by RabbitMQ's names."""
    match value:
        case None:
            return "void"
        case bool():
            return "bool"
        case Timestamp():
            return "timestamp"
        case int():
            return "signedint" if value in _SIGNED_32 else "long"
        case float():
            return "double"
        case str():
            return "longstr"
        case bytes() | bytearray():
            return "binary"
        case Decimal():
            return "decimal"
        case Mapping():
            return "table"
        case list() | tuple():
            return "array"
    return type(value).__name__


def same(one: object, other: object) -> bool:
    """Compares value and kind: true is not 1, 1.0 is not 1, all whole numbers are of one kind."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return one == other and all(isinstance(one, kind) == isinstance(other, kind) for kind in (float, Decimal))


def _check_kept(what: str, arguments: Mapping[str, object]) -> None:
    """Raises PreconditionFailed for a value that cannot be stored as it is, or for more than a frame of AMQP
    has: other doors take larger requests.
    """
    if _size(arguments, ARGUMENT_BYTES, 0) > ARGUMENT_BYTES:
        raise PreconditionFailed(
            f"the arguments of {what} are larger than {ARGUMENT_BYTES} bytes, or nested deeper than "
            f"{MAX_NESTING}: "
            "give smaller ones",
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
# -- queues --------------------------------------------------------------------------------------------------


def check_known(of: str, arguments: Mapping[str, object]) -> None:
    """Raises PreconditionFailed for the name of an argument that would have no effect."""
    for name in arguments:
        if name.startswith("x-") and name not in ALLOWED:
            raise PreconditionFailed(_not_of_type(of, name, arguments), f"txmq knows {', '.join(ALLOWED)}")


def check_arguments(
    of: str,
    arguments: Mapping[str, object],
    *,
    durable: bool = True,
    exclusive: bool = False,
    auto_delete: bool = False,
) -> None:
    """Checks a new queue. Raises PreconditionFailed that names the argument, or the property that a quorum
    queue cannot have.
    """
    check_known(of, arguments)
    _check_kept(of, arguments)
    if "x-queue-type" in arguments:
        _check_choice(of, "x-queue-type", arguments["x-queue-type"])
    if arguments.get("x-queue-type") == "quorum":
        _check_quorum(of, arguments, durable, exclusive, auto_delete)
    for name, value in arguments.items():
        if name in _INTEGERS:
            _check_integer(of, name, value)
        elif name in _CHOICES:
            _check_choice(of, name, value)
        elif name == "x-dead-letter-exchange":
            if not isinstance(value, str):
                raise PreconditionFailed(
                    f"invalid type '{type_name(value)}' for arg '{name}' in {of}", "give text"
                )
            _check_short(of, name, value)
        elif name == "x-internal-purpose" and not isinstance(value, str):
            raise _unacceptable(of, name, value, "give text")
        elif name == "x-dead-letter-routing-key":
            if not isinstance(value, str):
                raise _unacceptable(of, name, value, "give text")
            _check_short(of, name, value)
            if "x-dead-letter-exchange" not in arguments:
                raise _invalid(
                    of, name, "routing_key_but_no_dlx_defined", "it needs x-dead-letter-exchange too"
                )
        elif name == "x-single-active-consumer" and not isinstance(value, bool):
            raise _unacceptable(of, name, value, "give true or false")


@dataclass(frozen=True, slots=True)
class QueueArguments:
    """Arguments of one queue, parsed once. ``declared`` is what the client gave; it is recorded, and compared
    with later declarations.
    """

    declared: dict[str, object] = field(default_factory=dict)
    expires_ms: int | None = None
    ttl_ms: int | None = None
    dead_letter_exchange: str = ""  # of a queue that ``dead_letters``
    dead_letter_routing_key: str | None = None
    max_length: int | None = None
    max_bytes: int | None = None
    overflow: str = "drop-head"
    max_priority: int | None = None
    single_active_consumer: bool = False
    delivery_limit: int | None = None
    counts_deliveries: bool = False
    limited: bool = False  # it has a maximum length
    refuses: bool = False  # it accepts nothing when full
    dead_letters: bool = False

    @classmethod
    def parse(cls, declared: Mapping[str, Any]) -> QueueArguments:
        """Parses arguments that ``check_arguments`` accepted when they were declared."""
        get = declared.get
        limited = not declared.keys().isdisjoint(("x-max-length", "x-max-length-bytes"))
        overflow = str(get("x-overflow", "drop-head"))
        return cls(
            dict(declared),
            expires_ms=get("x-expires"),
            ttl_ms=get("x-message-ttl"),
            dead_letter_exchange=str(get("x-dead-letter-exchange", "")),
            dead_letter_routing_key=get("x-dead-letter-routing-key"),
            max_length=get("x-max-length"),
            max_bytes=get("x-max-length-bytes"),
            overflow=overflow,
            max_priority=get("x-max-priority"),
            single_active_consumer=bool(get("x-single-active-consumer")),
            delivery_limit=get("x-delivery-limit"),
            counts_deliveries=get("x-delivery-limit") is not None or get("x-queue-type") == "quorum",
            limited=limited,
            refuses=limited and overflow.startswith("reject-publish"),
            dead_letters="x-dead-letter-exchange" in declared,
        )


def _check_short(of: str, name: str, value: str) -> None:
    """Checks text that every dead letter has in a short string of AMQP."""
    try:
        check_text(f"arg '{name}'", value)
    except OptionError as error:
        raise PreconditionFailed(f"invalid arg '{name}' for {of}", error.message) from None


def _check_integer(of: str, name: str, value: object) -> None:
    if isinstance(value, (bool, Timestamp)) or not isinstance(value, int):
        raise _invalid(of, name, f'"expected integer, got {type_name(value)}"', "give a whole number")
    if name == "x-queue-version":
        if value not in (1, 2):
            raise _invalid(of, name, f"\"unsupported queue version '{value}'\"", "give 1 or 2")
    elif value < 0:
        raise _invalid(of, name, f"{{value_negative,{value}}}", "give 0 or more")
    elif value == 0 and name == "x-expires":
        raise _invalid(of, name, "{value_zero,0}", "give 1 or more milliseconds")
    elif name in _TIMES and value > MAX_TIME_MS:
        raise _invalid(of, name, f"{{value_too_large,{value}}}", f"give at most {MAX_TIME_MS} milliseconds")
    elif name == "x-max-priority" and value > MAX_PRIORITY:
        raise _invalid(of, name, f"{{max_value_exceeded,{value}}}", f"give at most {MAX_PRIORITY}")


def _check_choice(of: str, name: str, value: object) -> None:
    choices = _CHOICES[name]
    advice = f"give {' or '.join(choices)}"
    if not isinstance(value, str):
        raise _unacceptable(of, name, value, advice)
    if value not in choices:
        kind = name.removeprefix("x-").replace("-", " ")
        what = "invalid_overflow" if name == "x-overflow" else f"\"unsupported {kind} '{value}'\""
        raise _invalid(of, name, what, advice)


def _check_quorum(
    of: str, arguments: Mapping[str, object], durable: bool, exclusive: bool, auto_delete: bool
) -> None:
    for name in _NOT_QUORUM:
        if name in arguments:
            raise PreconditionFailed(_not_of_type(of, name, arguments))
    for name, wrong in (
        ("non-durable", not durable),
        ("auto-delete", auto_delete),
        ("exclusive-owner", exclusive),
    ):
        if wrong:
            raise PreconditionFailed(
                f"invalid property '{name}' for {of}",
                "a quorum queue is durable, not exclusive, not auto-delete",
            )


def _not_of_type(of: str, name: str, arguments: Mapping[str, object]) -> str:
    kind = "quorum" if arguments.get("x-queue-type") == "quorum" else "classic"
    return f"invalid arg '{name}' for {of} of queue type rabbit_{kind}_queue"


def _invalid(of: str, name: str, what: str, advice: str) -> PreconditionFailed:
    return PreconditionFailed(f"invalid arg '{name}' for {of}: {what}", advice)


def _unacceptable(of: str, name: str, value: object, advice: str) -> PreconditionFailed:
    return _invalid(of, name, f"{{unacceptable_type,{type_name(value)}}}", advice)


# -- exchanges -----------------------------------------------------------------------------------------------


def check_exchange_arguments(of: str, arguments: Mapping[str, object]) -> None:
    """Raises PreconditionFailed that names the argument."""
    _check_kept(of, arguments)
    for name, value in arguments.items():
        if name in EXCHANGE_ARGUMENTS:
            if not isinstance(value, str):
                raise PreconditionFailed(
                    f"invalid type '{type_name(value)}' for arg '{name}' in {of}", "give text"
                )
        elif name.startswith("x-"):
            raise PreconditionFailed(
                f"invalid arg '{name}' for {of}: unknown argument",
                f"txmq knows {', '.join(EXCHANGE_ARGUMENTS)}",
            )


# -- declared again ------------------------------------------------------------------------------------------


def inequivalent(of: str, wanted: Mapping[str, object], current: Mapping[str, object]) -> None:
    """Compares properties. Raises PreconditionFailed if a declaration differs from what exists."""
    for argument, value in wanted.items():
        if value != current[argument]:
            raise _inequivalent(
                of, argument, f"'{_shown(value)}' but current is '{_shown(current[argument])}'"
            )


def inequivalent_arguments(
    of: str, wanted: Mapping[str, object], current: Mapping[str, object], compared: Sequence[str] = ALLOWED
) -> None:
    """Checks that each argument of ``compared`` is equal or missing in both. Raises PreconditionFailed."""
    for argument in compared:
        missing = "classic" if argument == "x-queue-type" else None
        value, existing = wanted.get(argument, missing), current.get(argument, missing)
        if same(value, existing):
            continue
        if argument in wanted and argument in current:
            text = f"'{_shown(value)}' but current is '{_shown(existing)}'"
        elif argument in wanted:
            text = f"the value '{_shown(value)}' of type '{type_name(value)}' but current is none"
        else:
            text = f"none but current is the value '{_shown(existing)}' of type '{type_name(existing)}'"
        raise _inequivalent(of, argument, text)


def _inequivalent(of: str, argument: str, text: str) -> PreconditionFailed:
    return PreconditionFailed(f"inequivalent arg '{argument}' for {of}: received {text}")


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
