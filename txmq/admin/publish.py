"""``txmq message publish``: messages by hand, with properties and headers.

Not here: what a property means (``broker_core/message/properties.py``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

import click

from broker_core.core.errors import LocalProtocolError, OptionError
from broker_core.message.properties import NAMES, Properties
from txmq.address import BROKER, admin_at, queue_names
from txmq.command.declare import Options, argument, command, option
from txmq.command.values import Misuse, key_and_value
from txmq.output import done

NUMBERS = ("delivery_mode", "priority", "timestamp")
GIVEN = tuple(name for name in NAMES if name != "headers")


def _property(text: str) -> tuple[str, str | int]:
    name, equals, value = text.partition("=")
    name = name.replace("-", "_")
    if name not in GIVEN or not equals:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE with one of {', '.join(GIVEN)}")
    if name not in NUMBERS:
        return name, value
    if not (value.isascii() and value.isdecimal()):
        raise click.BadParameter(f"{name} must be a number, not {value!r}")
    return name, int(value)


@command(
    "message publish",
    "publish messages, all in one transaction",
    *BROKER,
    option("--exchange", "EXCHANGE", "default: the default exchange", default=""),
    option("--routing-key", "ROUTING_KEY", "default: empty", default=""),
    option("--queue", "QUEUE", "the default exchange and this routing key", shell_complete=queue_names),
    option("--transient", text="not written to the disk (delivery mode 1)"),
    option(
        "--property",
        "NAME=VALUE",
        "content_type, correlation_id, expiration and so on; may be repeated",
        type=_property,
        multiple=True,
    ),
    option(
        "--header",
        "KEY=VALUE",
        "a number (64 bits), true, false, or a list in JSON; all else is text; may be repeated",
        type=key_and_value,
        multiple=True,
    ),
    argument("BODY", "one message each; - reads one per line", "BODY...", nargs=-1, required=True),
)
def _publish(options: Options) -> int:
    if options.queue is not None and (options.exchange or options.routing_key):
        raise Misuse(
            "--queue was given with --exchange or --routing-key",
            "use --queue alone, for the default exchange and this routing key",
        )
    routing_key = options.queue if options.queue is not None else options.routing_key
    bodies: Iterable[bytes] = (os.fsencode(body) for body in options.body)
    if options.body == ["-"]:
        bodies = (line.rstrip(b"\r\n") for line in sys.stdin.buffer)
    count = admin_at(options).publish(bodies, options.exchange, routing_key, _properties(options))
    return done(options, f"published {count}", published=count)


def _properties(options: Options) -> bytes:
    """Raises OptionError."""
    fields: dict[str, Any] = dict(options.property)
    if options.transient and fields.get("delivery_mode", 1) != 1:
        raise Misuse("--transient was given with another delivery_mode", "give one of them")
    fields.setdefault("delivery_mode", 1 if options.transient else 2)
    try:
        return Properties(headers=dict(options.header), **fields).encode()
    except LocalProtocolError as error:
        raise OptionError(f"a property does not fit: {error}") from error
