"""``txmq channels`` and ``close``: who holds what, and how it gets free.

Not here: what a channel holds (``broker_core/node/held_channels.py``).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable

from broker_core.admin import ChannelInfo
from broker_core.errors import OptionError
from txmq.address import client_at
from txmq.output import confirm, done, show
from txmq.topology import yes

Add = Callable[..., argparse.ArgumentParser]


def arguments(commands: object, add: Add) -> None:
    """``add``: as ``cli._command``."""
    channels = add(commands, "channels", _channels, "list the open channels and what they hold", address=True)
    channels.add_argument(
        "--queue", metavar="QUEUE", help="only those that hold messages of it, or consume it"
    )
    channels.add_argument("--open", action="store_true", help="only those with an open transaction")
    close = add(commands, "close", _close, "end a channel, or a connection of AMQP", address=True)
    close.add_argument("id", metavar="ID", help="as `txmq channels` lists it; without ` (N)`: the connection")
    yes(close)


def _channels(options: argparse.Namespace) -> int:
    found = client_at(options).channels()
    if options.queue is not None:
        found = [each for each in found if options.queue in (*each.unacknowledged, *each.consumes)]
    if options.open:
        found = [each for each in found if each.publishes or each.acks]
    return show(options, map(dataclasses.asdict, found))


def _close(options: argparse.Namespace) -> int:
    client = client_at(options)
    ended = [each for each in client.channels() if options.id in (each.id, each.id.rpartition(" (")[0])]
    if ended:
        confirm(options, f"close ends {_summary(ended)}")
    if not client.close_channel(options.id):
        raise OptionError(
            f"no channel or connection has the id {options.id!r}", "list them with `txmq channels`"
        )
    return done(options, f"closed {options.id}", id=options.id)


def _summary(ended: list[ChannelInfo]) -> str:
    held = sum(sum(each.unacknowledged.values()) for each in ended)
    publishes = sum(each.publishes for each in ended)
    who = f"user {ended[0].user!r} at {ended[0].address or 'this host'}"
    return (
        f"{len(ended)} channels of {who}: {held} messages go back to their queues, and {publishes} publishes "
        "of open transactions are dropped"
    )
