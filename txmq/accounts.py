"""``txmq users`` and ``txmq permissions``: who may use the broker, and for what.

Not here: the rules (``broker_core/broker/access/users.py``). A password is read from the terminal, from
standard input or from a file, never from an argument: others see the arguments of a process.
"""

from __future__ import annotations

import argparse
import dataclasses
import getpass
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from broker_core.client.accounts import RemoteAccounts
from broker_core.errors import OptionError
from txmq.address import client_at
from txmq.output import done, show

Add = Callable[..., argparse.ArgumentParser]
_TAGS = "administrator, operator, monitoring, management, impersonator"


def arguments(commands: Any, add: Add) -> None:
    """``add``: as ``cli._command``."""
    users = commands.add_parser("users", help="add, list and delete users", description="Users of a broker.")
    words = users.add_subparsers(metavar="WORD", required=True)
    adding = _named(add(words, "add", _add, "add a user, without permissions", address=True))
    adding.add_argument("--tag", metavar="TAG", action="append", default=[], help=_TAGS)
    _password(adding)
    add(words, "list", _users, "list the users", address=True)
    _named(add(words, "delete", _delete, "delete a user and close its connections", address=True))
    _password(_named(add(words, "passwd", _passwd, "give a user another password", address=True)))
    tagging = _named(add(words, "tag", _tag, "give a user these tags, and no others", address=True))
    tagging.add_argument("tags", metavar="TAG", nargs="*", help=f"{_TAGS}; none: no tag")
    permissions = commands.add_parser(
        "permissions", help="set, clear and list permissions", description="Permissions of users."
    )
    words = permissions.add_subparsers(metavar="WORD", required=True)
    add(words, "list", _permissions, "list the permissions", address=True)
    setting = _named(add(words, "set", _set, "set the permissions of a user", address=True))
    for name, of in (("CONFIGURE", "declared and deleted"), ("WRITE", "published to"), ("READ", "read")):
        setting.add_argument(name.lower(), metavar=name, help=f"a regular expression: names that may be {of}")
    _named(add(words, "clear", _clear, "take all permissions of a user", address=True))
    topic = _named(add(words, "set-topic", _set_topic, "limit the routing keys of a user", address=True))
    topic.add_argument("exchange", metavar="EXCHANGE", help="a topic exchange")
    topic.add_argument("write", metavar="WRITE", help="a regular expression: keys that may be published")
    topic.add_argument("read", metavar="READ", help="a regular expression: keys that may be bound")
    free = _named(add(words, "clear-topic", _clear_topic, "free the routing keys of a user", address=True))
    free.add_argument("exchange", metavar="EXCHANGE", nargs="?", default="", help="default: all")


def _named(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("name", metavar="NAME")
    return parser


def _password(parser: argparse.ArgumentParser) -> None:
    parser.allow_abbrev = False  # --password would be taken for --password-file
    parser.add_argument(
        "--password-file",
        metavar="FILE",
        help="its first line is the password; - for standard input; default: ask for it",
    )


def _read_password(options: argparse.Namespace) -> str:
    """Raises OptionError."""
    if options.password_file == "-" or (options.password_file is None and not sys.stdin.isatty()):
        return sys.stdin.readline().rstrip("\r\n")
    if options.password_file is None:
        password = getpass.getpass(f"password of {options.name}: ")
        if getpass.getpass("again: ") != password:
            raise OptionError("the two passwords differ")
        return password
    try:
        return Path(options.password_file).read_text("utf-8").partition("\n")[0].rstrip("\r")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--password-file {options.password_file} cannot be read: {error}") from error


def _accounts(options: argparse.Namespace) -> RemoteAccounts:
    return RemoteAccounts(client_at(options))


def _add(options: argparse.Namespace) -> int:
    _accounts(options).add_user(options.name, _read_password(options), options.tag)
    text = f"added user {options.name}, without permissions: txmq permissions set gives some"
    return done(options, text, user=options.name, tags=options.tag)


def _users(options: argparse.Namespace) -> int:
    return show(options, map(dataclasses.asdict, _accounts(options).users()))


def _delete(options: argparse.Namespace) -> int:
    _accounts(options).delete_user(options.name)
    return done(options, f"deleted user {options.name}", user=options.name)


def _passwd(options: argparse.Namespace) -> int:
    _accounts(options).set_password(options.name, _read_password(options))
    return done(options, f"user {options.name} has another password", user=options.name)


def _tag(options: argparse.Namespace) -> int:
    _accounts(options).set_tags(options.name, options.tags)
    return done(options, f"user {options.name}: {', '.join(options.tags) or 'no tags'}", user=options.name)


def _permissions(options: argparse.Namespace) -> int:
    return show(options, map(dataclasses.asdict, _accounts(options).permissions()))


def _set(options: argparse.Namespace) -> int:
    patterns = {name: getattr(options, name) for name in ("configure", "write", "read")}
    _accounts(options).set_permissions(options.name, **patterns)
    return done(options, f"set the permissions of user {options.name}", user=options.name, **patterns)


def _clear(options: argparse.Namespace) -> int:
    _accounts(options).clear_permissions(options.name)
    return done(options, f"user {options.name} has no permissions", user=options.name)


def _set_topic(options: argparse.Namespace) -> int:
    name, exchange = options.name, options.exchange
    _accounts(options).set_topic_permissions(name, exchange, options.write, options.read)
    text = f"set the topic permissions of user {name} for exchange {exchange}"
    return done(options, text, user=name, exchange=exchange)


def give_app(options: argparse.Namespace, app: str, user: str) -> int:
    _accounts(options).give_app(app, user)
    return done(options, f"app {app} belongs to user {user}", app=app, user=user)


def _clear_topic(options: argparse.Namespace) -> int:
    _accounts(options).clear_topic_permissions(options.name, options.exchange)
    return done(options, f"cleared the topic permissions of user {options.name}", user=options.name)
