"""SASL responses that hold a user and a password: PLAIN (RFC 4616) and AMQPLAIN (a field table without its
length).

Not here: the login.
Invariant: a response is a user and a password or one MethodSyntaxError, whose text never has either.
"""

from __future__ import annotations

import struct

from broker_core.core.errors import MethodSyntaxError, RemoteProtocolError
from broker_core.message.field_table import decode_table

_U32 = struct.Struct(">I")


def plain(response: bytes) -> tuple[str, str]:
    """User and password of ``NUL user NUL password``. Raises MethodSyntaxError, also for an authzid."""
    parts = response.split(b"\0")
    if len(parts) != 3 or parts[0]:
        raise MethodSyntaxError(
            "PLAIN response invalid", "it must be a zero octet, the user, a zero octet, the password"
        )
    return _text(parts[1], "PLAIN", "user"), _text(parts[2], "PLAIN", "password")


def amqplain(response: bytes) -> tuple[str, str]:
    """User and password of the fields LOGIN and PASSWORD, long strings. Raises MethodSyntaxError."""
    try:
        table = decode_table(_U32.pack(len(response)) + response)
    except RemoteProtocolError:
        raise MethodSyntaxError(
            "AMQPLAIN response invalid", "it must be a field table without its length"
        ) from None
    if "LOGIN" not in table or "PASSWORD" not in table:
        raise MethodSyntaxError("AMQPLAIN auth info is missing LOGIN or PASSWORD field")
    return _text(table["LOGIN"], "AMQPLAIN", "LOGIN"), _text(table["PASSWORD"], "AMQPLAIN", "PASSWORD")


def _text(value: object, mechanism: str, what: str) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise MethodSyntaxError(f"{mechanism} {what} is not UTF-8") from None
    if not isinstance(value, str):
        raise MethodSyntaxError(f"AMQPLAIN auth info uses unsupported type for {what} field")
    return value
