"""``txmq publish``: messages by hand, with properties and headers.

Not here: what a property means (``broker_core/message/properties.py``).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from broker_core.errors import LocalProtocolError, OptionError
from broker_core.message.properties import NAMES, Properties
from txmq.address import admin_at
from txmq.output import done
from txmq.topology import key_and_value

Add = Callable[..., argparse.ArgumentParser]
NUMBERS = ("delivery_mode", "priority", "timestamp")
GIVEN = tuple(name for name in NAMES if name != "headers")


def arguments(commands: Any, add: Add) -> None:
    """``add``: as ``cli._command``."""
    publish = add(commands, "publish", _publish, "publish messages, all in one transaction", address=True)
    publish.add_argument("--exchange", default="", help="default: the default exchange")
    publish.add_argument("--routing-key", default="")
    publish.add_argument("--queue", help="the default exchange and this routing key")
    publish.add_argument("--transient", action="store_true", help="not written to the disk (delivery mode 1)")
    publish.add_argument(
        "--property",
        metavar="NAME=VALUE",
        type=_property,
        action="append",
        default=[],
        help="content_type, correlation_id, expiration and so on; may be repeated",
    )
    publish.add_argument(
        "--header",
        metavar="KEY=VALUE",
        type=key_and_value,
        action="append",
        default=[],
        help="a number is one of 64 bits, all else is text; may be repeated",
    )
    publish.add_argument("body", metavar="BODY", nargs="+", help="one message each; - reads one per line")


def _property(text: str) -> tuple[str, str | int]:
    name, equals, value = text.partition("=")
    name = name.replace("-", "_")
    if name not in GIVEN or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE with one of {', '.join(GIVEN)}")
    if name not in NUMBERS:
        return name, value
    if not (value.isascii() and value.isdecimal()):
        raise argparse.ArgumentTypeError(f"{name} must be a number, not {value!r}")
    return name, int(value)


def _publish(options: argparse.Namespace) -> int:
    if options.queue is not None and (options.exchange or options.routing_key):
        raise OptionError(
            "--queue was given with --exchange or --routing-key",
            "use --queue alone, for the default exchange and this routing key",
        )
    routing_key = options.queue if options.queue is not None else options.routing_key
    bodies: Iterable[bytes] = (os.fsencode(body) for body in options.body)
    if options.body == ["-"]:
        bodies = (line.rstrip(b"\r\n") for line in sys.stdin.buffer)
    count = admin_at(options).publish(bodies, options.exchange, routing_key, _properties(options))
    return done(options, f"published {count}", published=count)


def _properties(options: argparse.Namespace) -> bytes:
    """Raises OptionError."""
    given: dict[str, Any] = dict(options.property)
    if options.transient and given.get("delivery_mode", 1) != 1:
        raise OptionError("--transient was given with another delivery_mode", "give one of them")
    given.setdefault("delivery_mode", 1 if options.transient else 2)
    try:
        return Properties(headers=dict(options.header), **given).encode()
    except LocalProtocolError as error:
        raise OptionError(f"a property does not fit: {error}") from error
