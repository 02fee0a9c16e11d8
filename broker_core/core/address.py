"""The address of a broker, as a user gives it: a url, a data directory, HOST:PORT.

Not here: the file with the address of a data directory's broker (``endpoint.py``), and starting it
(``client/starter.py``).
"""

from __future__ import annotations

import os
import re
import unicodedata
from dataclasses import dataclass, replace
from urllib.parse import SplitResult, quote, unquote, urlsplit

from broker_core.core import errors
from broker_core.core.credentials import Credentials

DEFAULT_PORT = 5673
DEFAULT_AMQP = "127.0.0.1:5672"
DEFAULT_AMQPS = "127.0.0.1:5671"
NO_AMQP = "none"
VHOST = "/"  # the virtual host that is always there
MAX_VHOST_BYTES = 255
_NONE = Credentials()
_CONTROLS = ("Cc", "Zl", "Zp")  # of Unicode: control characters, line and paragraph separators


@dataclass(frozen=True, slots=True)
class Address:
    """A broker: a host and port, or a data directory (absolute path); and how a client proves who it is, with
    its password: another process may have neither the environment nor the files.
    """

    host: str = ""
    port: int = 0
    directory: str = ""
    credentials: Credentials = _NONE
    tls: bool = False
    vhost: str = VHOST

    def __str__(self) -> str:
        if self.directory:
            return f"data={self.directory}" + (f", vhost={self.vhost}" if self.vhost != VHOST else "")
        path = f"/{quote(self.vhost, safe='')}" if self.vhost != VHOST else ""
        return f"{'txmqs' if self.tls else 'txmq'}://{bracketed(self.host)}:{self.port}{path}"


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def check_vhost(name: str) -> None:
    """Raises OptionError for what cannot be the name of a virtual host."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise errors.OptionError(
            f"the name of a virtual host {name[:40]!r} cannot be encoded as UTF-8",
            "give it without lone surrogates",
        ) from None
    if not name:
        raise errors.OptionError("the name of a virtual host is empty", "give one, for example: sales")
    if size > MAX_VHOST_BYTES:
        raise errors.OptionError(
            f"the name of a virtual host {name[:40]!r}... has {size} bytes", f"give at most {MAX_VHOST_BYTES}"
        )
    if any(unicodedata.category(letter) in _CONTROLS for letter in name):
        raise errors.OptionError(
            f"the name of a virtual host {name[:60]!r} has control characters", "leave them out"
        )


def parse_address(
    url: str | None = None,
    data: str | os.PathLike[str] | None = None,
    credentials: Credentials | None = None,
    vhost: str | None = None,
) -> Address:
    """Returns the address. ``vhost``: the virtual host at ``data``; a url has it as its path.

    Raises OptionError unless exactly one of ``url`` and ``data`` is given, and all is valid.
    """
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
        if credentials is not None and credentials != _NONE:
            raise errors.OptionError(
                "options of a login or of TLS are given with 'data'",
                "leave them out: a client that may read the directory finds what it needs there",
            )
        if vhost is not None:
            check_vhost(vhost)
        return Address(directory=os.path.abspath(text), vhost=VHOST if vhost is None else vhost)
    assert url is not None
    if vhost is not None:
        raise errors.OptionError(
            f"option 'vhost' is {vhost[:255]!r}, and the virtual host of a url is its path",
            f"give url=txmq://host:{DEFAULT_PORT}/NAME, or data=DIR",
        )
    return _parse_url(url, credentials or _NONE)


def _parse_url(url: str, credentials: Credentials) -> Address:
    scheme = url.partition("://")[0].lower()
    if scheme == "kafka":
        raise errors.OptionError(
            f"option 'url' is {without_password(url)!r}, but Kafka has no channels and no prepared "
            "transactions; use a Kafka client, or txmq://host:port"
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise errors.OptionError(
            f"option 'url' is {without_password(url)!r}; its port must be a number from 1 to 65535"
        ) from None
    if (
        parts.scheme not in ("txmq", "txmqs")
        or not parts.hostname
        or parts.query
        or parts.fragment
        or port == 0
    ):
        raise errors.OptionError(
            f"option 'url' is {without_password(url)!r}; it must be "
            "txmq://[user:password@]host:port[/vhost], or txmqs:// for TLS, for example "
            f"txmq://localhost:{DEFAULT_PORT}"
        )
    vhost = _vhost(parts.path, url)
    tls = parts.scheme == "txmqs"
    if not tls and (credentials.tls_ca or credentials.tls_cert or credentials.tls_key):
        raise errors.OptionError(
            f"option 'url' is {without_password(url)!r}, and an option of TLS is given",
            "use txmqs://host:port, or leave out tlsCa, tlsCert and tlsKey",
        )
    found = _with_login(credentials, parts, url).resolved()
    return Address(parts.hostname, port or DEFAULT_PORT, credentials=found, tls=tls, vhost=vhost)


def _with_login(credentials: Credentials, parts: SplitResult, url: str) -> Credentials:
    """Returns the credentials with the user and the password of a url. Raises OptionError: both have one."""
    if not (parts.username or parts.password):
        return credentials
    password = unquote(parts.password or "")
    if (
        credentials.user
        or credentials.token
        or (password and (credentials.password or credentials.password_file))
    ):
        raise errors.OptionError(
            f"option 'url' is {without_password(url)!r}, and another option has a user, a password or a "
            "token",
            "give each of them once",
        )
    return replace(credentials, user=unquote(parts.username or ""), password=password or credentials.password)


def _vhost(path: str, url: str) -> str:
    """Returns the virtual host of the path of a url, which is percent-encoded. Raises OptionError."""
    name = path[1:]
    if not name:
        return VHOST
    try:
        if "/" in name:
            raise errors.OptionError("its path has several parts", "write / in the name as %2F")
        vhost = unquote(name, errors="strict")
        check_vhost(vhost)
    except (errors.OptionError, UnicodeDecodeError) as error:
        why = error.summary if isinstance(error, errors.OptionError) else "its path is not UTF-8"
        raise errors.OptionError(
            f"option 'url' is {without_password(url)[:300]!r}, and names no virtual host: {why}",
            "write it as txmq://host:port/NAME, with %2F for / in the name",
        ) from None
    return vhost


def without_login(url: str) -> str:
    """Returns a valid ``url`` without the user and the password before its host."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def without_password(url: str) -> str:
    """Returns ``url`` as a text may show it. What is no url may still hold a password."""
    head, at, tail = url.rpartition("@")
    if not at:
        return url
    scheme = re.match(r"[A-Za-z][\w+.-]*://", head)
    login = head[scheme.end() :] if scheme else head
    user, colon, _ = login.partition(":")
    return f"{scheme[0] if scheme else ''}{user}{':***' if colon else ''}@{tail}"


def parse_listen(listen: str, protocol: str = "") -> tuple[str, int]:
    """Returns host and port of an address to listen on, HOST:PORT with IPv6 in brackets. ``protocol``: the
    protocol; "": that of ``serve --listen``. Raises OptionError.
    """
    host, _, number = listen.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if (
        not bare
        or "[" in bare
        or "]" in bare
        or (":" in bare and bare == host)
        or not (number.isascii() and number.isdigit())
        or int(number) > 65_535
    ):
        what = f"{protocol} listener {listen!r}" if protocol else f"--listen is {listen!r}; it"
        example = 5672 if protocol else DEFAULT_PORT
        raise errors.OptionError(
            f"{what} must be HOST:PORT, for example 127.0.0.1:{example} or [::1]:{example}, with port 0 for "
            "a free one"
        )
    return bare, int(number)
