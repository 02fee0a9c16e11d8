"""TLS of a client: the arguments of its connection, and why a connection failed.

gRPC only says that a peer is unavailable, so a handshake of Python's finds the reason.
Invariant: the reason never has the content of a file.
"""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import NamedTuple

from broker_core.core.address import Address
from broker_core.core.errors import OptionError

HANDSHAKE_S = 5.0
# what OpenSSL calls the first bytes of another protocol
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE")


def arguments(address: Address) -> dict[str, object]:
    """For ``pyarrow.flight.connect``. Raises OptionError if a file cannot be used."""
    if not address.tls:
        return {}
    found: dict[str, object] = {}
    context(address)
    own = address.credentials
    if own.tls_ca:
        found["tls_root_certs"] = _read("tlsCa", own.tls_ca)
    if own.tls_cert:
        found["cert_chain"] = _read("tlsCert", own.tls_cert)
        found["private_key"] = _read("tlsKey", own.tls_key)
    return found


def context(address: Address) -> ssl.SSLContext:
    """For sockets of Python. Raises OptionError."""
    own = address.credentials
    try:
        ssl_context = ssl.create_default_context(cafile=own.tls_ca or None)
    except (OSError, ValueError) as error:
        raise OptionError(
            f"option 'tlsCa' is {own.tls_ca!r}, which cannot be used: {error}",
            "name a readable PEM file with the authority of the broker's certificate",
        ) from None
    ssl_context.minimum_version = ssl.TLSVersion.TLSv1_2
    ssl_context.set_alpn_protocols(["h2"])
    if own.tls_cert:
        try:
            ssl_context.load_cert_chain(own.tls_cert, own.tls_key, lambda: "")
        except (OSError, ValueError) as error:
            raise OptionError(
                f"options 'tlsCert' {own.tls_cert!r} and 'tlsKey' {own.tls_key!r} cannot be used: {error}",
                "name readable PEM files, without a password",
            ) from None
    return ssl_context


class Refusal(NamedTuple):
    """Why the two sides cannot agree, with advice; "" if they can, or if nothing listens.

    ``certain``: another attempt would end like this one.
    """

    why: str
    certain: bool = True


def refusal(address: Address) -> Refusal:
    """What a handshake with the broker shows."""
    try:
        plain = socket.create_connection((address.host, address.port), HANDSHAKE_S)
    except OSError:
        return Refusal("")
    with plain:
        try:
            if not address.tls:
                return _without_tls(plain)
            with context(address).wrap_socket(plain, server_hostname=address.host) as encrypted:
                encrypted.settimeout(HANDSHAKE_S)
                # an HTTP/2 server speaks first; one that refuses a certificate closes the socket
                return Refusal("") if encrypted.recv(1) else _CLOSED
        except ssl.SSLCertVerificationError as error:
            return Refusal(
                f"the certificate of the broker does not match: {error.verify_message.rstrip('.')}: give "
                "option 'tlsCa' the authority that signed it, and use the name of the host that it is for"
            )
        except (ssl.SSLEOFError, ConnectionResetError):
            return _CLOSED
        except TimeoutError:
            return _SILENT
        except ssl.SSLError as error:
            reason = error.reason or str(error)
            if reason in _NO_TLS:
                return Refusal("it does not speak TLS: use txmq://, or start the broker with --tls-cert")
            return Refusal(f"TLS cannot be agreed on: {reason.lower().replace('_', ' ')}", certain=False)
        except OSError:
            return Refusal("")


_CLOSED = Refusal(
    "it closes the connection after the handshake: if it verifies its clients, give options 'tlsCert' and "
    "'tlsKey' a certificate that it trusts, which has at most 7 kB with its chain",
    certain=False,  # a broker that ends does it too
)


_SILENT = Refusal("it accepts connections and answers nothing: try again, or restart it", certain=False)


def _without_tls(plain: socket.socket) -> Refusal:
    """Asks whether the other side has TLS. Nothing is sent but the handshake."""
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    try:
        anybody.wrap_socket(plain).close()
    except TimeoutError:
        return _SILENT
    except OSError as error:
        why = "no broker answers there: give the port of --listen, not of --amqp or --http, or try again"
        return Refusal(why if getattr(error, "reason", "") in _NO_TLS else "", certain=False)
    return Refusal("it speaks TLS: use txmqs:// and, for an authority of your own, option 'tlsCa'")


def _read(option: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise OptionError(
            f"option {option!r} is {path!r}, which cannot be read: {error.strerror}",
            "name a readable PEM file",
        ) from None
