"""Arguments of queues: which there are, what values they take, what they mean.

Not here: acting on them (``broker.py``). Invariant: a queue never has an argument that has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from broker_core.errors import OptionError, PreconditionFailed

_NUMBERS = ("x-message-ttl", "x-max-length", "x-max-length-bytes")
_TEXTS = ("x-dead-letter-exchange", "x-dead-letter-routing-key")
_OVERFLOWS = ("drop-head", "reject-publish")
MAX_TEXT_BYTES = 255
ALLOWED = (*_NUMBERS, "x-overflow", *_TEXTS)


def check_text(kind: str, text: object) -> None:
    """A name, a routing key or an xid: AMQP's short string, which is UTF-8 of at most 255 bytes. Raises OptionError."""
    if not isinstance(text, str):
        raise OptionError(f"{kind} must be a str, not {type(text).__name__}")
    try:
        length = len(text.encode())
    except UnicodeEncodeError:
        raise OptionError(f"{kind} {text!r} cannot be encoded as UTF-8: give it without lone surrogates") from None
    if length > MAX_TEXT_BYTES:
        raise OptionError(f"{kind} {text[:40]!r}... has {length} bytes, allowed are {MAX_TEXT_BYTES}")


def check_binding(queue: str, arguments: Mapping[str, Any]) -> None:
    """Raises PreconditionFailed for a value that cannot be kept."""
    for name, value in arguments.items():
        if not isinstance(value, (str, int, float, type(None))):
            raise PreconditionFailed(
                f"invalid arg '{name}' in a binding of queue '{queue}': a {type(value).__name__} cannot be matched; "
                "give text, a number or nothing"
            )


def check_arguments(queue: str, arguments: Mapping[str, Any]) -> None:
    """Raises PreconditionFailed that names the argument."""
    for name, value in arguments.items():
        if name in _NUMBERS:
            valid = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            wanted = "a whole number, 0 or more"
        elif name in _TEXTS:
            valid, wanted = isinstance(value, str), "a string"
        elif name == "x-overflow":
            valid, wanted = value in _OVERFLOWS, " or ".join(_OVERFLOWS)
        else:
            raise PreconditionFailed(f"unknown argument '{name}' for queue '{queue}' in vhost '/': txmq knows {', '.join(ALLOWED)}")
        if not valid:
            raise PreconditionFailed(f"invalid arg '{name}' for queue '{queue}' in vhost '/': {value!r} is not {wanted}")
    if "x-dead-letter-routing-key" in arguments and "x-dead-letter-exchange" not in arguments:
        raise PreconditionFailed(
            f"invalid arg 'x-dead-letter-routing-key' for queue '{queue}' in vhost '/': it needs x-dead-letter-exchange too"
        )


def inequivalent(kind: str, name: str, wanted: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raises PreconditionFailed where a declaration differs from what exists."""
    for argument, value in wanted.items():
        if value != current[argument]:
            raise _inequivalent(argument, kind, name, value, current[argument])


def inequivalent_arguments(kind: str, name: str, wanted: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    for argument in sorted({*wanted, *current}):
        if wanted.get(argument) != current.get(argument):
            raise _inequivalent(argument, kind, name, wanted.get(argument), current.get(argument))


def _inequivalent(argument: str, kind: str, name: str, wanted: Any, current: Any) -> PreconditionFailed:
    return PreconditionFailed(
        f"inequivalent arg '{argument}' for {kind} '{name}' in vhost '/': received {_shown(wanted)} but current is {_shown(current)}"
    )


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return f"'{str(value).lower() if isinstance(value, bool) else value}'"
