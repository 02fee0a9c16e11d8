"""The broker that a command is for: ``--url`` or ``--data``, ``--settings``, and a login; names of it for a
shell that completes words.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import click

from broker_core.admin import Admin
from broker_core.client import starter
from broker_core.client.admin import RemoteAdmin
from broker_core.client.broker import BrokerClient
from broker_core.client.broker import connect as connect_client
from broker_core.core.address import DEFAULT_PORT
from broker_core.core.errors import DataDirectoryInvalid, OptionError
from broker_core.engine import Engine
from broker_core.engines import check_settings, connect, connect_admin, is_kafka
from txmq.command.declare import CommandOption, Options, one_of, option
from txmq.command.values import seconds
from txmq.login import LOGIN, STDIN, credentials

URL_VARIABLE = "TXMQ_URL"  # the broker of a command that names none


def _broker(needed: bool) -> tuple[CommandOption, ...]:
    return (
        *one_of(
            option(
                "--url",
                "URL",
                f"a running broker: txmq[s]://host:{DEFAULT_PORT}[/VHOST], or kafka://host:9092; "
                f"default: {URL_VARIABLE} of the environment",
                envvar=URL_VARIABLE,
            ),
            option("--data", "DIR", "the broker of this directory; started if none runs, but not by status"),
            needed=needed,
        ),
        option("--vhost", "NAME", "with --data; a url has it as its path"),
        option(
            "--timeout",
            "SECONDS",
            "how long to wait for a broker that does not listen; default: not at all",
            type=seconds,
            default=0.0,
        ),
        option("--settings", "FILE", "lines NAME=VALUE for Kafka: kafka.sasl..."),
        *LOGIN,
    )


BROKER, ANY_BROKER = _broker(needed=True), _broker(needed=False)  # of a command that may go without one
COMPLETION_S = 2.0  # how long a shell waits for names
_SAFE = re.compile(r"[\w.@%+/:][\w.@%+/:-]*")  # no other name: a shell would expand it


def queue_names(context: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    return _names(context, incomplete, lambda client: [queue.name for queue in client.queues()])


def app_names(context: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    return _names(context, incomplete, lambda client: [app.app_id for app in client.apps()])


def _names(context: click.Context, incomplete: str, names: Callable[[BrokerClient], list[str]]) -> list[str]:
    """What a broker has that runs and answers in time. Nothing is started or read from standard input."""
    options, found = Options(**context.params), list[str]()

    def ask() -> None:
        with contextlib.suppress(Exception):
            if options.login_password_file != STDIN and (
                options.data is None or starter.find(options.data, lambda _endpoint: True)
            ):
                found.extend(names(client_at(options)))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(COMPLETION_S)
    return [name for name in found if name.startswith(incomplete) and _SAFE.fullmatch(name)]


def client_at(options: Options) -> BrokerClient:
    """The embedded broker, for what only it has."""
    require_directory(options)
    check_settings(options.url, settings_of(options))
    return _client(options)


def _client(options: Options) -> BrokerClient:
    """The client of this process for the broker: the first call of it waits as ``--timeout`` says."""
    return connect_client(
        url=options.url,
        data=options.data,
        credentials=credentials(options),
        vhost=options.vhost,
        connect_s=options.timeout,
    )


def engine_at(options: Options) -> Engine:
    require_directory(options)
    if not is_kafka(options.url):
        return client_at(options)
    return connect(options.url, options.data, settings_of(options), credentials(options), vhost=options.vhost)


def admin_at(options: Options, *, create: bool = False) -> Admin:
    if not create:
        require_directory(options)
    if not is_kafka(options.url):
        check_settings(options.url, settings_of(options))
        return RemoteAdmin(_client(options))
    return connect_admin(
        options.url, options.data, settings_of(options), credentials(options), vhost=options.vhost
    )


def settings_of(options: Options) -> dict[str, str]:
    """The lines NAME=VALUE of the file of ``--settings``; a line that begins with # is a comment."""
    if options.settings is None:
        return {}
    try:
        lines = Path(options.settings).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--settings is {options.settings!r}, which cannot be read: {error}") from error
    settings = {}
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            name, equals, value = line.partition("=")
            if not equals:
                raise OptionError(f"line {number} of {options.settings} is not NAME=VALUE")
            settings[name.strip()] = value.strip()
    return settings


def require_directory(options: Options) -> None:
    if options.data is not None and not os.path.isdir(options.data):
        raise DataDirectoryInvalid(
            f"there is no data directory {options.data}",
            "create it with `txmq serve` or `txmq queue declare`",
        )
