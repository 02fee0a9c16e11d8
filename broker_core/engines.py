"""Opens the engine of an address: the embedded broker over its client, or Kafka.

The code of the Kafka engine, and the packages that it needs, are imported when a url first begins with
``kafka://``.
Invariant: no text of an error shows the value of a setting; one may be a password.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from broker_core.admin import Admin
from broker_core.client.admin import RemoteAdmin
from broker_core.client.broker import connect as connect_client
from broker_core.core.address import VHOST
from broker_core.core.credentials import Credentials
from broker_core.core.errors import OptionError
from broker_core.engine import Engine

KAFKA = "kafka://"
SETTING = "kafka."  # the prefix of a setting's name


def connect(
    url: str | None = None,
    data: str | os.PathLike[str] | None = None,
    settings: Mapping[str, str] | None = None,
    credentials: Credentials | None = None,
    *,
    vhost: str | None = None,
    reached: bool = False,
) -> Engine:
    """Returns the engine of this process for an address: one, made once, connected when first used.

    ``settings``: of the connections to Kafka, by their full names (``kafka.sasl.username``).
    ``credentials``, ``vhost``, ``reached``: as :func:`broker_core.client.broker.connect`. Raises OptionError.
    """
    check_settings(url, settings or {})
    check_credentials(url, credentials)
    check_vhost_option(url, vhost)
    if url is not None and data is None and is_kafka(url):
        engine: Engine = _kafka("engine").connect(url, dict(settings or {}))
        return engine
    return connect_client(url=url, data=data, credentials=credentials, vhost=vhost, reached=reached)


def connect_admin(
    url: str | None = None,
    data: str | os.PathLike[str] | None = None,
    settings: Mapping[str, str] | None = None,
    credentials: Credentials | None = None,
    *,
    vhost: str | None = None,
) -> Admin:
    """Returns the operator's port of the same address. Raises OptionError."""
    check_settings(url, settings or {})
    check_credentials(url, credentials)
    check_vhost_option(url, vhost)
    if url is not None and data is None and is_kafka(url):
        admin: Admin = _kafka("admin").connect(url, dict(settings or {}))
        return admin
    return RemoteAdmin(connect_client(url=url, data=data, credentials=credentials, vhost=vhost))


def is_kafka(url: str | None) -> bool:
    return (url or "").lower().startswith(KAFKA)


def check_settings(url: str | None, settings: Mapping[str, str]) -> None:
    """Raises OptionError for settings of an address that is not Kafka's. Kafka's engine knows their names."""
    if settings and not is_kafka(url):
        raise OptionError(
            f"option {min(settings)!r} is for connections to Kafka",
            "leave it out, or give a url that begins with kafka://",
        )


def check_credentials(url: str | None, credentials: Credentials | None) -> None:
    """Raises OptionError for a login of txmq at an address of Kafka."""
    if is_kafka(url) and credentials not in (None, Credentials()):
        raise OptionError(
            "options of a login or of TLS are given with a url of Kafka",
            "use kafka.sasl.username, kafka.sasl.password and kafka.ssl.ca.location",
        )


def check_vhost_option(url: str | None, vhost: str | None) -> None:
    """Raises OptionError for a virtual host other than ``/`` at an address of Kafka."""
    if is_kafka(url) and vhost not in (None, VHOST):
        raise OptionError(
            f"option 'vhost' is {vhost!r}, and a cluster of Kafka has no virtual hosts",
            "leave it out; the names of topics of one app may have a prefix",
        )


def _kafka(part: str) -> Any:
    name = f"broker_core.kafka.{part}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            raise OptionError(
                f"the {part} of Kafka is not part of this version", "use txmq://host:port or data=DIR"
            ) from None
        raise OptionError(
            f"url {KAFKA} needs the Python package {error.name!r}", "pip install '.[kafka]' in a checkout"
        ) from None
