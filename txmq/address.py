"""The broker that a command is for: ``--url`` or ``--data``, ``--settings``, and a login."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from broker_core.admin import Admin
from broker_core.client.admin import RemoteAdmin
from broker_core.client.broker import BrokerClient
from broker_core.client.broker import connect as connect_client
from broker_core.engine import Engine
from broker_core.engines import check_settings, connect, connect_admin, is_kafka
from broker_core.errors import DataDirectoryInvalid, OptionError
from txmq.login import credentials

URL_VARIABLE = "TXMQ_URL"  # the broker of a command that names none


def client_at(options: argparse.Namespace) -> BrokerClient:
    """The embedded broker, for what only it has."""
    require_directory(options)
    check_settings(options.url, _settings(options))
    return _client(options)


def _client(options: argparse.Namespace) -> BrokerClient:
    """The client of this process for the broker: the first call of it waits as ``--timeout`` says."""
    return connect_client(
        url=options.url,
        data=options.data,
        credentials=credentials(options),
        vhost=options.vhost,
        connect_s=options.timeout,
    )


def engine_at(options: argparse.Namespace) -> Engine:
    require_directory(options)
    if not is_kafka(options.url):
        return client_at(options)
    return connect(options.url, options.data, _settings(options), credentials(options), vhost=options.vhost)


def admin_at(options: argparse.Namespace, *, create: bool = False) -> Admin:
    if not create:
        require_directory(options)
    if not is_kafka(options.url):
        check_settings(options.url, _settings(options))
        return RemoteAdmin(_client(options))
    return connect_admin(
        options.url, options.data, _settings(options), credentials(options), vhost=options.vhost
    )


def _settings(options: argparse.Namespace) -> dict[str, str]:
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


def require_directory(options: argparse.Namespace) -> None:
    if options.data is not None and not os.path.isdir(options.data):
        raise DataDirectoryInvalid(
            f"there is no data directory {options.data}",
            "create it with `txmq serve` or `txmq declare`",
        )
