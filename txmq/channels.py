"""``txmq connections``, ``channels``, ``consumers``, ``transactions`` and ``close``: who holds what, and how
it gets free.

Not here: what a channel holds (``broker_core/node/held_channels.py``).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Sequence

from broker_core.admin import LISTED, ChannelInfo, ClientInfo, PreparedInfo
from broker_core.client.admin import connections, consumers, history, message, transaction
from broker_core.errors import OptionError
from txmq.address import client_at
from txmq.admin.history import message_lines, transaction_lines, transaction_row
from txmq.limits import count, positive
from txmq.output import Row, confirm, done, print_json, print_lines, show
from txmq.topology import yes

Add = Callable[..., argparse.ArgumentParser]


def arguments(commands: object, add: Add) -> None:
    """``add``: as ``cli._command``."""
    add(commands, "connections", _connections, "list the connections of AMQP and Flight", address=True)
    channels = add(commands, "channels", _channels, "list the open channels and what they hold", address=True)
    channels.add_argument(
        "--queue", metavar="QUEUE", help="only those that hold messages of it, or consume it"
    )
    channels.add_argument("--open", action="store_true", help="only those with an open transaction")
    listed = add(commands, "consumers", _consumers, "list the consumers", address=True)
    listed.add_argument("--queue", metavar="QUEUE", help="only those of this queue")
    transactions = add(
        commands, "transactions", _transactions, "list the prepared transactions", address=True
    )
    transactions.add_argument(
        "--queue", metavar="QUEUE", help="only those that publish to it, or hold messages of it"
    )
    transactions.add_argument(
        "--open", action="store_true", help="those that are open instead, with the channel of each"
    )
    transactions.add_argument(
        "--last", metavar="N", type=positive, help="the last N that were committed instead"
    )
    did = add(commands, "transaction", _transaction, "what a committed transaction did", address=True)
    did.add_argument("sequence", metavar="N", type=positive, help="its commit sequence number")
    life = add(commands, "message", _message, "what happened to a message", address=True)
    life.add_argument("queue", metavar="QUEUE")
    life.add_argument("offset", metavar="OFFSET", type=count)
    close = add(commands, "close", _close, "end a channel, or a connection of AMQP", address=True)
    close.add_argument("id", metavar="ID", help="as `txmq channels` or `txmq connections` lists it")
    yes(close)


def _listed(options: argparse.Namespace, found: Sequence[object], rows: Iterable[Row]) -> int:
    if len(found) >= LISTED:
        print_lines(f"txmq: the oldest {LISTED} were looked at; there may be more", error=True)
    return show(options, rows)


def _connections(options: argparse.Namespace) -> int:
    found = connections(client_at(options))
    return _listed(options, found, map(dataclasses.asdict, found))


def _consumers(options: argparse.Namespace) -> int:
    found = consumers(client_at(options))
    shown = [each for each in found if options.queue in (None, each.queue)]
    return _listed(options, found, map(dataclasses.asdict, shown))


def _channels(options: argparse.Namespace) -> int:
    found = client_at(options).channels()
    return _listed(options, found, map(dataclasses.asdict, _chosen(options, found)))


def _chosen(options: argparse.Namespace, found: list[ChannelInfo]) -> list[ChannelInfo]:
    if options.queue is not None:
        found = [each for each in found if options.queue in (*each.unacknowledged, *each.consumes)]
    if options.open:
        found = [each for each in found if each.publishes or each.acks]
    return found


def _transactions(options: argparse.Namespace) -> int:
    if options.open:
        return _channels(options)
    if options.last is not None:
        return show(options, map(transaction_row, history(client_at(options), options.last)))
    found = client_at(options).prepared()
    shown = [each for each in found if options.queue is None or options.queue in (*each.to, *each.acked)]
    return show(options, map(_prepared, shown))


def _transaction(options: argparse.Namespace) -> int:
    found = transaction(client_at(options), options.sequence)
    if options.json:
        print_json(dataclasses.asdict(found))
    else:
        print_lines(*transaction_lines(found))
    return 0


def _message(options: argparse.Namespace) -> int:
    found = message(client_at(options), options.queue, options.offset)
    if options.json:
        print_json(dataclasses.asdict(found))
    else:
        print_lines(*message_lines(found))
    return 0


def _prepared(found: PreparedInfo) -> Row:
    row = dataclasses.asdict(found)
    row["first"] = [body.decode(errors="replace") for body in found.first]
    return row


def _close(options: argparse.Namespace) -> int:
    client = client_at(options)
    channels = [each for each in client.channels() if options.id in (each.id, each.id.rpartition(" (")[0])]
    there = [each for each in connections(client) if each.id == options.id and each.door == "amqp"]
    if there or channels:
        confirm(options, f"close ends {_summary(there, channels)}")
    if not client.close_channel(options.id):
        raise OptionError(
            f"no channel or connection has the id {options.id!r}",
            "list them with `txmq channels` or `txmq connections`; of Flight a channel can be closed",
        )
    return done(options, f"closed {options.id}", id=options.id)


def _summary(connections: list[ClientInfo], channels: list[ChannelInfo]) -> str:
    held = sum(sum(each.unacknowledged.values()) for each in channels)
    publishes = sum(each.publishes for each in channels)
    first: ClientInfo | ChannelInfo = connections[0] if connections else channels[0]
    what = "the connection and " if connections else ""
    return (
        f"{what}{len(channels)} channels of user {first.user!r} at {first.address or 'this host'}: {held} "
        f"messages go back to their queues, and {publishes} publishes of open transactions are dropped"
    )
