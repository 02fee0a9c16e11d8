"""The values of arguments: their AMQP types, and a check for each form. Texts are RabbitMQ's, then advice.

Not here: which argument has which form (``table.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal

from broker_core.core.errors import OptionError, PreconditionFailed
from broker_core.message.field_table import Timestamp

MAX_TEXT_BYTES = 255
MAX_TIME_MS = 315_360_000_000  # ten years, RabbitMQ's limit
MAX_PRIORITY = 255
_SIGNED_32 = range(-(1 << 31), 1 << 31)
LEAST, MOST = -(1 << 63), (1 << 63) - 1

# of, name, value; ``of``: what has the argument, as texts name it: "queue 'orders' in vhost '/'"
Check = Callable[[str, str, object], None]


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


def invalid(of: str, name: str, what: str, advice: str) -> PreconditionFailed:
    return PreconditionFailed(f"invalid arg '{name}' for {of}: {what}", advice)


def unacceptable(of: str, name: str, value: object, advice: str) -> PreconditionFailed:
    return invalid(of, name, f"{{unacceptable_type,{type_name(value)}}}", advice)


# -- forms ---------------------------------------------------------------------------------------------------
def anything(_of: str, _name: str, _value: object) -> None:
    """Belongs to no one here: any value is taken."""


def whole(least: int = 0, most: int = MOST, above: str = "value_too_large") -> Check:
    """A whole number, which AMQP has in 8 bytes at most."""

    def check(of: str, name: str, value: object) -> None:
        if isinstance(value, (bool, Timestamp)) or not isinstance(value, int):
            raise invalid(of, name, f'"expected integer, got {type_name(value)}"', "give a whole number")
        if value < least:
            wrong = "value_negative" if value < 0 else "value_zero"
            raise invalid(of, name, f"{{{wrong},{value}}}", f"give {least} or more")
        if value > most:
            raise invalid(of, name, f"{{{above},{value}}}", f"give at most {most}")

    return check


def choice(*choices: str | int, wrong: str) -> Check:
    """``wrong``: what RabbitMQ says of another value, with ``{}`` for it."""
    kind = type(choices[0])

    def check(of: str, name: str, value: object) -> None:
        advice = f"give {' or '.join(map(str, choices))}"
        if kind is int:
            whole(LEAST)(of, name, value)
        elif not isinstance(value, str):
            raise unacceptable(of, name, value, advice)
        if value not in choices:
            raise invalid(of, name, wrong.format(value), advice)

    return check


def flag(of: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise unacceptable(of, name, value, "give true or false")


def text(of: str, name: str, value: object) -> None:
    if not isinstance(value, str):
        raise unacceptable(of, name, value, "give text")


def exchange(of: str, name: str, value: object) -> None:
    """The name of one, or text in its place."""
    if not isinstance(value, str):
        raise PreconditionFailed(f"invalid type '{type_name(value)}' for arg '{name}' in {of}", "give text")


def short(form: Check) -> Check:
    """Text that a dead letter has in a short string of AMQP."""

    def check(of: str, name: str, value: object) -> None:
        form(of, name, value)
        try:
            check_text(f"arg '{name}'", value)
        except OptionError as error:
            raise PreconditionFailed(f"invalid arg '{name}' for {of}", error.message) from None

    return check
