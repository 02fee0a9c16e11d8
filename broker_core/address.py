"""The address of a broker, as a user gives it: a url, a data directory, HOST:PORT.

Not here: the file with the address of a data directory's broker (``endpoint.py``), and starting it
(``client/starter.py``).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from broker_core import errors

DEFAULT_PORT = 5673
DEFAULT_AMQP = "127.0.0.1:5672"
NO_AMQP = "none"


@dataclass(frozen=True, slots=True)
class Address:
    """A broker: a host and port, or a data directory (absolute path)."""

    host: str = ""
    port: int = 0
    directory: str = ""
    user: str = ""
    password: str = field(default="", repr=False)

    def __str__(self) -> str:
        if self.directory:
            return f"data={self.directory}"
        return f"txmq://{bracketed(self.host)}:{self.port}"


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def parse_address(url: str | None = None, data: str | os.PathLike[str] | None = None) -> Address:
    """Returns the address. Raises OptionError unless exactly one argument is given and valid."""
    if (url is None) == (data is None):
        wrong = (
            "both options 'url' and 'data' are given"
            if url is not None
            else "neither option 'url' nor 'data' is given"
        )
        raise errors.OptionError(
            f"{wrong}; give one: url=txmq://host:{DEFAULT_PORT} for a broker that runs elsewhere, or data=DIR"
        )
    if data is not None:
        text = os.fspath(data)
        if not text:
            raise errors.OptionError("option 'data' is empty; it must name a directory")
        return Address(directory=os.path.abspath(text))
    assert url is not None
    return _parse_url(url)


def _parse_url(url: str) -> Address:
    scheme = url.partition("://")[0].lower()
    if scheme == "txmqs":
        raise errors.OptionError(
            f"option 'url' is {_shown(url)!r}, but TLS (txmqs://) is not supported by this version; use "
            "txmq://host:port"
        )
    if scheme == "kafka":
        raise errors.OptionError(
            f"option 'url' is {_shown(url)!r}, but Kafka has no channels and no prepared transactions; use a "
            "Kafka client, or txmq://host:port"
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise errors.OptionError(
            f"option 'url' is {_shown(url)!r}; its port must be a number from 1 to 65535"
        ) from None
    if (
        parts.scheme != "txmq"
        or not parts.hostname
        or parts.path not in ("", "/")
        or parts.query
        or parts.fragment
        or port == 0
    ):
        raise errors.OptionError(
            f"option 'url' is {_shown(url)!r}; it must be txmq://[user:password@]host:port, for example "
            f"txmq://localhost:{DEFAULT_PORT}"
        )
    return Address(
        host=parts.hostname,
        port=port or DEFAULT_PORT,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
    )


def _shown(url: str) -> str:
    """Returns ``url`` without its password."""
    head, at, tail = url.rpartition("@")
    if not at:
        return url
    scheme, _, login = head.partition("://")
    return f"{scheme}://{login.partition(':')[0]}:***@{tail}"


def parse_listen(listen: str) -> tuple[str, int]:
    """Returns host and port of ``serve --listen``, HOST:PORT. Raises OptionError."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise errors.OptionError(
            f"--listen is {listen!r}; it must be HOST:PORT, for example 127.0.0.1:{DEFAULT_PORT}, or port 0 "
            "for a free one"
        )
    return host.strip("[]"), int(port)
