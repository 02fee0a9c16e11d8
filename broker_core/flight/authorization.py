"""The header of every Flight call that says who calls: ``authorization``, as gRPC and Arrow Flight have it.

``Basic base64(user:password)``, or ``Bearer token``. Not here: who sends it (``client/``), who checks it
(``server/flight/login.py``).

Before a client sends the token of a directory, the broker proves that it has it (:func:`proof`): another
process may have bound the port of a broker that was killed.

Invariant: a text of an error never has the password or the token.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import NamedTuple

from broker_core.core.errors import LoginRefused

HEADER = "authorization"
CHALLENGE_HEADER = "txmq-challenge"  # of ``prove``, in hexadecimal: its answer needs no body, and no wait
CHALLENGE_BYTES = 32
CLIENT_HEADER = "txmq-client"  # percent-encoded: program, host and process, for an operator
RUN_HEADER = "txmq-run"  # of the broker that has said hello; gRPC connects again by itself, to any other
VHOST_HEADER = "txmq-vhost"  # percent-encoded; without it the call is for "/"


class Basic(NamedTuple):
    """What a user proves itself with."""

    user: str
    password: str

    @property
    def header(self) -> str:
        pair = base64.b64encode(f"{self.user}:{self.password}".encode(errors="surrogateescape"))
        return f"Basic {pair.decode()}"


class Bearer(NamedTuple):
    """What a process of the data directory's owner proves itself with: the token of ``endpoint.json``."""

    token: str

    @property
    def header(self) -> str:
        return f"Bearer {self.token}"


def parse(header: str) -> Basic | Bearer:
    """What ``header`` carries. Raises LoginRefused."""
    scheme, _, value = header.strip().partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return Bearer(value.strip())
    if scheme.lower() == "basic":
        try:
            user, colon, password = base64.b64decode(value.strip(), validate=True).decode().partition(":")
        except ValueError:  # no base64, no ASCII or no UTF-8
            user = colon = password = ""
        if colon:
            return Basic(user, password)
    raise LoginRefused(
        f"the header {HEADER!r} is not understood", "it must be Basic base64(user:password), or Bearer token"
    )


def proof(token: str, challenge: bytes) -> bytes:
    """What only a holder of ``token`` can answer to a random challenge, in ASCII, which does not tell it."""
    return hmac.new(token.encode(), b"txmq broker " + challenge, hashlib.sha256).hexdigest().encode()
