"""``txmq queues``, ``exchanges``, ``bindings``, ``declare``, ``bind``, ``unbind``, ``purge`` and ``delete``.

Not here: the rules (``broker_core/broker/topology/topology.py``).
Invariant: what drops messages or a name is done only with ``--yes``, or after a person has read what it drops
and agreed.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from broker_core.admin import QueueInfo
from broker_core.errors import AccessRefused, QueueNotFound
from txmq.address import admin_at, client_at
from txmq.output import confirm, done, show

Add = Callable[..., argparse.ArgumentParser]


def arguments(commands: object, add: Add) -> None:
    """``add``: as ``cli._command``."""
    for name, command in (("queues", _queues), ("exchanges", _exchanges), ("bindings", _bindings)):
        add(commands, name, command, f"list the {name}", address=True)
    declare = _kinds(commands, "declare", "declare a queue or an exchange")
    queue = add(declare, "queue", _declare_queue, "declare a queue", address=True)
    queue.add_argument("name", metavar="NAME")
    queue.add_argument("--transient", action="store_true", help="not kept over a restart")
    _given(queue, "for example x-max-length=1000; may be repeated")
    exchange = add(declare, "exchange", _declare_exchange, "declare an exchange", address=True)
    exchange.add_argument("name", metavar="NAME")
    exchange.add_argument("type", metavar="TYPE", help="direct, fanout, topic or headers")
    for name, command, text in (
        ("bind", _bind, "bind a queue to an exchange"),
        ("unbind", _unbind, "remove a binding of a queue"),
    ):
        binding = add(commands, name, command, text, address=True)
        binding.add_argument("exchange", metavar="EXCHANGE")
        binding.add_argument("queue", metavar="QUEUE")
        binding.add_argument("key", metavar="KEY", nargs="?", default="")
        _given(binding, "for a headers exchange; may be repeated")
        if name == "unbind":
            yes(binding)
    purge = add(
        commands, "purge", _purge, "drop the messages of a queue that no consumer holds", address=True
    )
    purge.add_argument("name", metavar="QUEUE")
    yes(purge)
    delete = _kinds(commands, "delete", "delete a queue with its messages, or an exchange")
    for name, command in (("queue", _delete_queue), ("exchange", _delete_exchange)):
        parser = add(
            delete, name, command, f"delete {'a queue' if name == 'queue' else 'an exchange'}", address=True
        )
        parser.add_argument("name", metavar="NAME")
        yes(parser)


def yes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="do it without asking, for scripts")


def _kinds(commands: Any, name: str, text: str) -> Any:
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    return parser.add_subparsers(metavar="KIND", required=True)


def _given(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument(
        "--argument", metavar="KEY=VALUE", type=key_and_value, action="append", default=[], help=text
    )


def key_and_value(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, int(value)
    except ValueError:
        return key, value


# -- lists ---------------------------------------------------------------------------------------------------
def _queues(options: argparse.Namespace) -> int:
    return show(options, map(dataclasses.asdict, admin_at(options).queues()))


def _exchanges(options: argparse.Namespace) -> int:
    return show(options, map(dataclasses.asdict, admin_at(options).exchanges()))


def _bindings(options: argparse.Namespace) -> int:
    return show(options, map(dataclasses.asdict, admin_at(options).bindings()))


# -- declare and bind ----------------------------------------------------------------------------------------
def _declare_queue(options: argparse.Namespace) -> int:
    admin_at(options, create=True).declare_queue(
        options.name, durable=not options.transient, arguments=dict(options.argument)
    )
    return done(options, f"queue {options.name}", queue=options.name)


def _declare_exchange(options: argparse.Namespace) -> int:
    admin_at(options, create=True).declare_exchange(options.name, options.type)
    return done(
        options, f"exchange {options.name} of type {options.type}", exchange=options.name, type=options.type
    )


def _bind(options: argparse.Namespace) -> int:
    admin_at(options).bind(options.queue, options.exchange, options.key, dict(options.argument))
    text = f"bound {options.exchange} to {options.queue} by {options.key!r}"
    return done(options, text, exchange=options.exchange, queue=options.queue, key=options.key)


def _unbind(options: argparse.Namespace) -> int:
    confirm(
        options,
        f"unbind removes the binding of {options.exchange} to {options.queue} by {options.key!r}: what is "
        "published so reaches the queue no more",
    )
    admin_at(options).unbind(options.queue, options.exchange, options.key, dict(options.argument))
    text = f"unbound {options.exchange} from {options.queue} by {options.key!r}"
    return done(options, text, exchange=options.exchange, queue=options.queue, key=options.key)


# -- purge and delete ----------------------------------------------------------------------------------------
def _purge(options: argparse.Namespace) -> int:
    with client_at(options).channel() as channel:
        channel.queue_declare(options.name, passive=True)
        confirm(options, f"purge drops {_messages(options)} of queue {options.name}")
        dropped = channel.queue_purge(options.name)
    return done(options, f"purged {dropped} from {options.name}", queue=options.name, messages=dropped)


def _delete_queue(options: argparse.Namespace) -> int:
    confirm(options, f"delete drops queue {options.name} with {_messages(options)}, and its bindings")
    admin_at(options).delete_queue(options.name)
    return done(options, f"deleted queue {options.name}", queue=options.name)


def _delete_exchange(options: argparse.Namespace) -> int:
    confirm(options, f"delete drops exchange {options.name} and its bindings")
    admin_at(options).delete_exchange(options.name)
    return done(options, f"deleted exchange {options.name}", exchange=options.name)


def _messages(options: argparse.Namespace) -> str:
    """How many messages a queue has, where this user may see that. Raises QueueNotFound."""
    try:
        found = [queue for queue in admin_at(options).queues() if queue.name == options.name]
    except AccessRefused:
        return "its messages"
    if not found:
        raise QueueNotFound(f"there is no queue {options.name!r}", "list the queues with `txmq queues`")
    return _counted(found[0])


def _counted(queue: QueueInfo) -> str:
    consumers = f" (it has {queue.consumers} consumers)" if queue.consumers else ""
    owner = f" (app {queue.owner} reads it)" if queue.owner else ""
    return f"{queue.messages} messages{consumers}{owner}"
