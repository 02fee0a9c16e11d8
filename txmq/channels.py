"""``txmq connections``, ``channels``, ``consumers``, ``transactions``, ``prepared`` and ``close``: who holds
what, and how it gets free.

Not here: what a channel holds (``broker_core/node/held_channels.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from broker_core.admin import (
    LISTED,
    ChannelInfo,
    ClientInfo,
    LedgerInfo,
    MessageLife,
    PreparedInfo,
    TransactionInfo,
)
from broker_core.client.admin import RemoteAdmin, connections
from broker_core.core.errors import OptionError, UnknownTransaction
from txmq.address import BROKER, admin_at, client_at, queue_names
from txmq.admin.history import batch_lines, message_lines, transaction_lines, transaction_row
from txmq.command.declare import WATCH, YES, Options, argument, command, one_of, option
from txmq.command.values import count, positive
from txmq.output import Row, confirm, done, print_json, print_lines, show

LAST = 20  # commits that a list shows


def _listed(options: Options, found: Sequence[object], rows: Iterable[Row]) -> int:
    if len(found) >= LISTED:
        print_lines(f"txmq: the oldest {LISTED} were looked at; there may be more", error=True)
    return show(options, rows)


@command("connections", "list connections of AMQP and Spark", *BROKER, WATCH)
def _connections(options: Options) -> int:
    found = connections(client_at(options))
    return _listed(options, found, map(dataclasses.asdict, found))


@command(
    "consumers",
    "list AMQP consumers",
    *BROKER,
    WATCH,
    option("--queue", "QUEUE", "only those of this queue", shell_complete=queue_names),
)
def _consumers(options: Options) -> int:
    found = RemoteAdmin(client_at(options)).consumers()
    shown = [each for each in found if options.queue in (None, each.queue)]
    return _listed(options, found, map(dataclasses.asdict, shown))


@command(
    "channels",
    "list open channels and the messages that they hold",
    *BROKER,
    WATCH,
    option(
        "--queue", "QUEUE", "only those that hold messages of it, or consume it", shell_complete=queue_names
    ),
    option("--open", text="only those with an open transaction"),
)
def _channels(options: Options) -> int:
    found = client_at(options).channels()
    return _listed(options, found, map(dataclasses.asdict, _chosen(options, found)))


def _chosen(options: Options, found: list[ChannelInfo]) -> list[ChannelInfo]:
    if options.queue is not None:
        found = [each for each in found if options.queue in (*each.unacknowledged, *each.consumes)]
    if options.open:
        found = [each for each in found if each.publishes or each.acks]
    return found


@command(
    "transactions",
    "list the last committed transactions, or those that are open",
    *BROKER,
    WATCH,
    *one_of(
        option("--last", "N", "how many committed ones; default 20", type=positive),
        option("--open", text="those that are open instead, with the channel of each"),
    ),
    option(
        "--queue", "QUEUE", "with --open: only those that hold messages of it", shell_complete=queue_names
    ),
)
def _transactions(options: Options) -> int:
    if options.open:
        return _channels(options)
    if options.queue is not None:
        raise OptionError(
            "--queue is for --open", "`txmq message QUEUE OFFSET` says which commits touched a message"
        )
    return show(options, map(transaction_row, admin_at(options).history(options.last or LAST)))


@command(
    "prepared",
    "list prepared transactions, which wait for commit or rollback",
    *BROKER,
    WATCH,
    option(
        "--queue",
        "QUEUE",
        "only those that publish to it, or hold messages of it",
        shell_complete=queue_names,
    ),
)
def _prepared(options: Options) -> int:
    found = client_at(options).prepared()
    shown = [each for each in found if options.queue is None or options.queue in (*each.to, *each.acked)]
    return show(options, map(_prepared_row, shown))


@command(
    "transaction",
    "show what a committed transaction did",
    *BROKER,
    argument("N", "its commit sequence number, or APP/SEQUENCE: a batch in the ledger of an app"),
)
def _transaction(options: Options) -> int:
    app_id, slash, sequence = options.n.rpartition("/")
    number = int(positive(sequence))
    admin, found = admin_at(options), None
    if slash:
        found = next(iter(admin.ledger(app_id, number - 1, 1)), None)
        if found is None or (found.app_id, found.sequence) != (app_id, number):
            raise UnknownTransaction(
                f"the ledger of app {app_id!r} has no batch {number} that you may see",
                "list its batches with `txmq ledger APP`",
            )
        number = found.transaction
    if found is not None and not number:
        return _printed(options, found, batch_lines(found))
    done = admin.transaction(number)
    return _printed(options, done, transaction_lines(done))


def _printed(options: Options, found: LedgerInfo | TransactionInfo | MessageLife, text: Iterable[str]) -> int:
    if options.json:
        print_json(dataclasses.asdict(found))
    else:
        print_lines(*text)
    return 0


@command(
    "message",
    "show what happened to a message",
    *BROKER,
    argument("QUEUE", shell_complete=queue_names),
    argument("OFFSET", type=count),
)
def _message(options: Options) -> int:
    found = admin_at(options).message(options.queue, options.offset)
    return _printed(options, found, message_lines(found))


def _prepared_row(found: PreparedInfo) -> Row:
    row = dataclasses.asdict(found)
    row["first"] = [body.decode(errors="replace") for body in found.first]
    return row


@command(
    "close",
    "close a channel or an AMQP connection",
    *BROKER,
    argument("ID", "as `txmq channels` or `txmq connections` lists it"),
    YES,
)
def _close(options: Options) -> int:
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
