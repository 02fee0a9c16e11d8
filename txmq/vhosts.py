"""``txmq vhosts``: the virtual hosts of a broker.

Not here: the rules (``broker_core/broker/topology/virtual_hosts.py``).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from broker_core.client.vhosts import RemoteVhosts
from txmq.address import client_at
from txmq.output import done, show

Add = Callable[..., argparse.ArgumentParser]
LIMITS = {
    "max_queues": "queues that may be declared",
    "max_connections": "AMQP connections at one time",
    "max_messages": "messages kept in all queues together",
}


def arguments(commands: Any, add: Add) -> None:
    """``add``: as ``cli._command``."""
    vhosts = commands.add_parser(
        "vhosts", help="add, list, limit and delete virtual hosts", description="Virtual hosts of a broker."
    )
    words = vhosts.add_subparsers(metavar="WORD", required=True)
    _limits(_named(add(words, "add", _add, "add a virtual host", address=True)))
    add(words, "list", _list, "list the virtual hosts with their limits", address=True)
    _limits(_named(add(words, "limit", _limit, "change limits; -1 for none", address=True)))
    _named(add(words, "delete", _delete, "delete a virtual host with all that is in it", address=True))


def _named(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("name", metavar="NAME")
    return parser


def _limits(parser: argparse.ArgumentParser) -> None:
    for name, meaning in LIMITS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="N", type=int, help=meaning)


def _given(options: argparse.Namespace) -> dict[str, int | None]:
    return {name: getattr(options, name) for name in LIMITS}


def _vhosts(options: argparse.Namespace) -> RemoteVhosts:
    return RemoteVhosts(client_at(options))


def _add(options: argparse.Namespace) -> int:
    _vhosts(options).add_vhost(options.name, **_given(options))
    text = f"added virtual host {options.name}: txmq permissions set lets users in"
    return done(options, text, vhost=options.name)


def _list(options: argparse.Namespace) -> int:
    return show(options, map(dataclasses.asdict, _vhosts(options).vhosts()))


def _limit(options: argparse.Namespace) -> int:
    _vhosts(options).limit_vhost(options.name, **_given(options))
    return done(options, f"changed the limits of virtual host {options.name}", vhost=options.name)


def _delete(options: argparse.Namespace) -> int:
    _vhosts(options).delete_vhost(options.name)
    return done(options, f"deleted virtual host {options.name}", vhost=options.name)
