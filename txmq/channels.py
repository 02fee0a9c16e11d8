"""``txmq connection``, ``txmq tx list``, ``txmq history`` and ``txmq message show``: who holds what, how to
release it, and what commits did.

Not here: what a channel holds (``broker_core/node/open_channels.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from broker_core.admin import LISTED, ChannelInfo, ClientInfo, PreparedInfo
from broker_core.client.admin import RemoteAdmin, connections
from broker_core.core.errors import OptionError, UnknownTransaction
from txmq.accounts import require_user
from txmq.address import BROKER, admin_at, client_at, queue_names
from txmq.admin.history import batch_lines, message_lines, transaction_lines, transaction_row
from txmq.command.declare import WATCH, YES, Options, argument, command, option
from txmq.command.values import count, positive
from txmq.output import Row, confirm, done, list_command, print_lines, report, show
from txmq.topology import require_queue


def _print_list(options: Options, found: Sequence[object], rows: Sequence[object]) -> int:
    if not rows and getattr(options, "queue", None) is not None:
        require_queue(options, options.queue)
    if len(found) >= LISTED:
        print_lines(f"txmq: the oldest {LISTED} were looked at; there may be more", error=True)
    return show(options, rows)


@command("connection list", "list connections of AMQP and Spark", *BROKER, WATCH)
def _connections(options: Options) -> int:
    found = connections(client_at(options))
    return _print_list(options, found, found)


@command(
    "connection consumers",
    "list AMQP consumers",
    *BROKER,
    WATCH,
    option("--queue", "QUEUE", "only those of this queue", shell_complete=queue_names),
)
def _consumers(options: Options) -> int:
    found = RemoteAdmin(client_at(options)).consumers()
    rows = [each for each in found if options.queue in (None, each.queue)]
    return _print_list(options, found, rows)


@command(
    "connection channels",
    "list open channels and the messages that they hold",
    *BROKER,
    WATCH,
    option(
        "--queue", "QUEUE", "only those that hold its messages, or consume it", shell_complete=queue_names
    ),
    option("--open", text="only those with an open transaction"),
)
def _channels(options: Options) -> int:
    found = rows = client_at(options).channels()
    if options.queue is not None:
        rows = [each for each in rows if options.queue in (*each.unacknowledged, *each.consumes)]
    if options.open:
        rows = [each for each in rows if each.publishes or each.acks]
    return _print_list(options, found, rows)


list_command(
    "history list",
    "list the last committed transactions",
    lambda options: map(transaction_row, admin_at(options).history(options.last)),
    *BROKER,
    WATCH,
    option("--last", "N", "how many transactions; default 20", type=positive, default=20),
)


@command(
    "tx list",
    "list prepared transactions, which wait for commit or rollback",
    *BROKER,
    WATCH,
    option(
        "--queue", "QUEUE", "only those that publish to it or hold its messages", shell_complete=queue_names
    ),
)
def _prepared(options: Options) -> int:
    found = client_at(options).prepared()
    rows = [each for each in found if options.queue is None or options.queue in (*each.to, *each.acked)]
    return _print_list(options, (), [_prepared_row(each) for each in rows])


@command(
    "tx recover",
    "list transactions that a manager has to end: prepared, or decided by hand",
    *BROKER,
    option("--of", "USER", "the user who named it; default: you"),
)
def _recover(options: Options) -> int:
    found = client_at(options).recover(of=options.of)
    if not found:
        require_user(options, options.of)
    return show(options, found)


@command(
    "history show",
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
                "list its batches with `txmq app ledger APP`",
            )
        number = found.transaction
    if found is not None and not number:
        return report(options, found, batch_lines(found))
    done = admin.transaction(number)
    return report(options, done, transaction_lines(done))


@command(
    "message show",
    "show what happened to a message",
    *BROKER,
    argument("QUEUE", shell_complete=queue_names),
    argument("OFFSET", type=count),
)
def _message(options: Options) -> int:
    found = admin_at(options).message(options.queue, options.offset)
    return report(options, found, message_lines(found))


def _prepared_row(found: PreparedInfo) -> Row:
    row = dataclasses.asdict(found)
    row["first"] = [body.decode(errors="replace") for body in found.first]
    return row


@command(
    "connection close",
    "close a channel or an AMQP connection",
    *BROKER,
    argument("ID", "as `txmq connection channels` or `txmq connection list` lists it"),
    YES,
)
def _close(options: Options) -> int:
    client = client_at(options)
    channels = [each for each in client.channels() if options.id in (each.id, each.id.rpartition(" (")[0])]
    there = [each for each in connections(client) if each.id == options.id and each.listener == "amqp"]
    if there or channels:
        confirm(options, f"close ends {_summary(there, channels)}")
    if not client.close_channel(options.id):
        raise OptionError(
            f"no channel or connection has the id {options.id!r}",
            "list them with `txmq connection channels` or `txmq connection list`; of Flight only a "
            "channel can be closed",
        )
    return done(options, f"closed {options.id}", id=options.id)


def _summary(connections: list[ClientInfo], channels: list[ChannelInfo]) -> str:
    unacked = sum(sum(each.unacknowledged.values()) for each in channels)
    publishes = sum(each.publishes for each in channels)
    first: ClientInfo | ChannelInfo = connections[0] if connections else channels[0]
    what = "the connection and " if connections else ""
    return (
        f"{what}{len(channels)} channels of user {first.user!r} at {first.address or 'this host'}: {unacked} "
        f"messages go back to their queues, and {publishes} publishes of open transactions are dropped"
    )
