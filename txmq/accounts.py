"""``txmq user`` and ``txmq permission``: who may use the broker, and for what.

Not here: the rules (``broker_core/broker/access/users.py``). A password is read from the terminal, from
standard input or from a file, never from an argument: others see the arguments of a process.
"""

from __future__ import annotations

import getpass
import sys
from contextlib import suppress
from pathlib import Path

from broker_core.client.accounts import RemoteAccounts
from broker_core.core.errors import AccessRefused, OptionError
from txmq.address import BROKER, app_names, client_at
from txmq.command.declare import YES, Options, argument, command, option
from txmq.output import confirm, done, list_command

ADMINISTRATOR = "administrator"
TAGS = "administrator, operator, monitoring, management, impersonator"
NAME, OF = argument("NAME"), argument("NAME", value="USER")
PASSWORD = option(
    "--password-file", "FILE", "its first line is the password; - for standard input; default: ask for it"
)
PATTERNS = [
    argument(name, f"a regular expression: names that may be {of}")
    for name, of in (("CONFIGURE", "declared and deleted"), ("WRITE", "published to"), ("READ", "read"))
]


def _read_password(options: Options) -> str:
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


def _accounts(options: Options) -> RemoteAccounts:
    return RemoteAccounts(client_at(options))


def require_user(options: Options, name: str | None) -> None:
    """Raises OptionError if there is no such user, where this one may see that."""
    with suppress(AccessRefused):
        if name is not None and all(each.name != name for each in _accounts(options).users()):
            raise OptionError(f"user '{name}' does not exist", "list the users with `txmq user list`")


TAG = option("--tag", "TAG", TAGS, multiple=True)


@command("user add", "add a user without permissions", *BROKER, NAME, TAG, PASSWORD)
def _add(options: Options) -> int:
    accounts = _accounts(options)
    first = all(user.source == "default" for user in accounts.users())
    accounts.add_user(options.name, _read_password(options), options.tag)
    text = f"added user {options.name}, without permissions: `txmq permission set` gives some"
    if first and ADMINISTRATOR not in options.tag:
        text += f"; no user is an administrator: `txmq user tag {options.name} {ADMINISTRATOR} --data DIR`"
    return done(options, text, user=options.name, tags=options.tag)


list_command("user list", "list the users", lambda options: _accounts(options).users(), *BROKER)


@command("user delete", "delete a user and close its connections", *BROKER, NAME, YES)
def _delete(options: Options) -> int:
    confirm(options, f"delete ends user {options.name}, its permissions and its connections")
    _accounts(options).delete_user(options.name)
    return done(options, f"deleted user {options.name}", user=options.name)


@command("user passwd", "change the password of a user", *BROKER, NAME, PASSWORD)
def _passwd(options: Options) -> int:
    _accounts(options).set_password(options.name, _read_password(options))
    return done(options, f"user {options.name} has another password", user=options.name)


@command(
    "user tag",
    "replace the tags of a user",
    *BROKER,
    NAME,
    argument("TAGS", f"{TAGS}; none: no tag", "[TAG]", nargs=-1),
)
def _tag(options: Options) -> int:
    _accounts(options).set_tags(options.name, options.tags)
    return done(options, f"user {options.name}: {', '.join(options.tags) or 'no tags'}", user=options.name)


list_command(
    "permission list", "list the permissions", lambda options: _accounts(options).permissions(), *BROKER
)


@command("permission set", "set the permissions of a user", *BROKER, OF, *PATTERNS)
def _set(options: Options) -> int:
    patterns = {name: getattr(options, name) for name in ("configure", "write", "read")}
    _accounts(options).set_permissions(options.name, **patterns)
    return done(options, f"set the permissions of user {options.name}", user=options.name, **patterns)


@command("permission clear", "remove all permissions of a user", *BROKER, OF, YES)
def _clear(options: Options) -> int:
    confirm(options, f"clear takes all permissions of user {options.name} in this virtual host")
    _accounts(options).clear_permissions(options.name)
    return done(options, f"user {options.name} has no permissions", user=options.name)


@command(
    "permission set-topic",
    "limit the routing keys of a user",
    *BROKER,
    OF,
    argument("EXCHANGE", "a topic exchange"),
    argument("WRITE", "a regular expression: keys that may be published"),
    argument("READ", "a regular expression: keys that may be bound"),
)
def _set_topic(options: Options) -> int:
    name, exchange = options.name, options.exchange
    _accounts(options).set_topic_permissions(name, exchange, options.write, options.read)
    text = f"set the topic permissions of user {name} for exchange {exchange}"
    return done(options, text, user=name, exchange=exchange)


@command(
    "app chown",
    "give an app to another user, even before its first run",
    *BROKER,
    argument("APP", shell_complete=app_names),
    argument("OWNER", value="USER"),
)
def _give_app(options: Options) -> int:
    app, user, accounts = options.app, options.owner, _accounts(options)
    ran = accounts.client.app(app) is not None
    accounts.give_app(app, user)
    text = f"app {app} belongs to user {user}" + ("" if ran else ": no such app has run so far")
    return done(options, text, app=app, user=user, ran=ran)


@command(
    "permission clear-topic",
    "remove the limits on the routing keys of a user",
    *BROKER,
    OF,
    argument("EXCHANGE", "default: all", "[EXCHANGE]", default=""),
)
def _clear_topic(options: Options) -> int:
    accounts, name, exchange = _accounts(options), options.name, options.exchange
    of = name, accounts.client.address.vhost
    mine = [each.exchange for each in accounts.permissions() if (each.user, each.vhost) == of]
    cleared = [each for each in mine if each and exchange in ("", each)]
    accounts.clear_topic_permissions(name, exchange)
    text = f"cleared the topic permissions of user {name} for {', '.join(cleared)}"
    if not cleared:
        text = f"user {name} had no topic permissions" + (f" for exchange {exchange}" if exchange else "")
    return done(options, text, user=name, exchanges=cleared)
