"""``txmq queue`` and ``txmq exchange``.

Not here: the rules (``broker_core/broker/topology/topology.py``).
Invariant: what drops messages or a name is done only with ``--yes``, or after a person has read what it drops
and agreed.
"""

from __future__ import annotations

from contextlib import suppress

from broker_core.admin import QueueInfo
from broker_core.core.errors import AccessRefused, ExchangeNotFound, OptionError, QueueNotFound
from broker_core.core.pieces import GivenTwice, once
from txmq.address import BROKER, admin_at, client_at, queue_names
from txmq.command.declare import WATCH, YES, Options, argument, command, option
from txmq.command.values import key_and_value
from txmq.output import confirm, done, list_command

NAME = argument("NAME")
OLD_QUEUE = argument("NAME", shell_complete=queue_names)
ARGUMENT = option(
    "--argument",
    "KEY=VALUE",
    "for example x-max-length=1000, for a binding x-match=all; true and false are booleans; may be repeated",
    type=key_and_value,
    multiple=True,
)
BINDING = (
    argument("EXCHANGE"),
    argument("QUEUE", shell_complete=queue_names),
    argument("KEY", value="[KEY]", default=""),
    ARGUMENT,
)


# -- lists ---------------------------------------------------------------------------------------------------
list_command("queue list", "list the queues", lambda options: admin_at(options).queues(), *BROKER, WATCH)
list_command(
    "exchange list", "list the exchanges", lambda options: admin_at(options).exchanges(), *BROKER, WATCH
)
list_command(
    "exchange bindings", "list the bindings", lambda options: admin_at(options).bindings(), *BROKER, WATCH
)


# -- declare and bind ----------------------------------------------------------------------------------------
def _arguments(options: Options) -> dict[str, object]:
    try:
        return once(list(options.argument))
    except GivenTwice as error:
        raise OptionError(f"of the arguments {error}", "give it once") from None


def require_queue(options: Options, name: str) -> QueueInfo | None:
    """Returns it; None: this user may not see what there is. Raises QueueNotFound."""
    with suppress(AccessRefused):
        for queue in admin_at(options).queues():
            if queue.name == name:
                return queue
        raise QueueNotFound(f"there is no queue {name!r}", "list the queues with `txmq queue list`")
    return None


@command(
    "queue declare",
    "declare a queue",
    *BROKER,
    NAME,
    option("--transient", text="lost when the broker restarts"),
    ARGUMENT,
)
def _declare_queue(options: Options) -> int:
    if not options.name:
        raise OptionError("a queue without a name is one of a connection, which ends with this command")
    admin_at(options, create=True).declare_queue(
        options.name, durable=not options.transient, arguments=_arguments(options)
    )
    return done(options, f"queue {options.name}", queue=options.name)


@command(
    "exchange declare",
    "declare an exchange",
    *BROKER,
    NAME,
    argument(
        "TYPE",
        "direct, fanout, topic, headers, x-consistent-hash, x-delayed-message or x-message-deduplication",
    ),
    ARGUMENT,
)
def _declare_exchange(options: Options) -> int:
    admin_at(options, create=True).declare_exchange(options.name, options.type, _arguments(options))
    return done(
        options, f"exchange {options.name} of type {options.type}", exchange=options.name, type=options.type
    )


@command("exchange bind", "bind a queue to an exchange", *BROKER, *BINDING)
def _bind(options: Options) -> int:
    admin_at(options).bind(options.queue, options.exchange, options.key, _arguments(options))
    text = f"bound {options.exchange} to {options.queue} by {options.key!r}"
    return done(options, text, exchange=options.exchange, queue=options.queue, key=options.key)


@command("exchange unbind", "remove a binding of a queue", *BROKER, *BINDING, YES)
def _unbind(options: Options) -> int:
    arguments, admin = _arguments(options), admin_at(options)
    binding = options.exchange, options.queue, options.key, arguments
    with suppress(AccessRefused):  # this user may not see what there is
        found = [
            (each.exchange, each.destination, each.routing_key, each.arguments) for each in admin.bindings()
        ]
        if binding not in found:
            raise OptionError(
                f"no binding of {options.exchange} to {options.queue} by {options.key!r} has these arguments",
                "list the bindings with `txmq exchange bindings`",
            )
    confirm(
        options,
        f"unbind removes the binding of {options.exchange} to {options.queue} by {options.key!r}: what is "
        "published so reaches the queue no more",
    )
    admin.unbind(options.queue, options.exchange, options.key, arguments)
    text = f"unbound {options.exchange} from {options.queue} by {options.key!r}"
    return done(options, text, exchange=options.exchange, queue=options.queue, key=options.key)


# -- purge and delete ----------------------------------------------------------------------------------------
@command("queue purge", "delete the ready messages of a queue", *BROKER, OLD_QUEUE, YES)
def _purge(options: Options) -> int:
    with client_at(options).channel() as channel:
        channel.queue_declare(options.name, passive=True)
        confirm(options, f"purge drops {_messages(options)} of queue {options.name}")
        dropped = channel.queue_purge(options.name)
    return done(options, f"purged {dropped} from {options.name}", queue=options.name, messages=dropped)


@command("queue delete", "delete a queue", *BROKER, OLD_QUEUE, YES)
def _delete_queue(options: Options) -> int:
    confirm(options, f"delete drops queue {options.name} with {_messages(options)}, and its bindings")
    admin_at(options).delete_queue(options.name)
    return done(options, f"deleted queue {options.name}", queue=options.name)


@command("exchange delete", "delete an exchange", *BROKER, NAME, YES)
def _delete_exchange(options: Options) -> int:
    with suppress(AccessRefused):  # this user may not see what there is
        if all(each.name != options.name for each in admin_at(options).exchanges()):
            raise ExchangeNotFound(f"there is no exchange {options.name!r}")
    confirm(options, f"delete drops exchange {options.name} and its bindings")
    admin_at(options).delete_exchange(options.name)
    return done(options, f"deleted exchange {options.name}", exchange=options.name)


def _messages(options: Options) -> str:
    """How many messages a queue has, where this user may see that. Raises QueueNotFound."""
    queue = require_queue(options, options.name)
    if queue is None:
        return "its messages"
    consumers = f" (it has {queue.consumers} consumers)" if queue.consumers else ""
    owner = f" (app {queue.owner} reads it)" if queue.owner else ""
    return f"{queue.messages} messages{consumers}{owner}"
