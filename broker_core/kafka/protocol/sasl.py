"""Authentication by SASL: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 and OAUTHBEARER (KIP-43, KIP-84, KIP-255).

Not here: sockets, and when to authenticate again (``cluster/connection.py``).
Invariant: no error and no repr shows a password or a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from broker_core.core import errors
from broker_core.kafka.protocol.codes import Code
from broker_core.kafka.protocol.frame import RequestCodec
from broker_core.kafka.protocol.library import (
    AbstractTokenProvider,
    Answer,
    LibraryError,
    SaslAuthenticateRequest,
    SaslHandshakeRequest,
    get_sasl_mechanism,
)

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")


@dataclass(frozen=True, slots=True)
class SaslLogin:
    """Who a client is. ``token`` gives a fresh OAUTHBEARER token whenever it is called; the others need user
    and password.
    """

    mechanism: str
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    token: Callable[[], str] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.mechanism not in MECHANISMS:
            raise errors.OptionError(
                f"the SASL mechanism {self.mechanism!r} is not supported",
                f"use one of {', '.join(MECHANISMS)}",
            )
        if self.mechanism == "OAUTHBEARER":
            if self.token is None:
                raise errors.OptionError("OAUTHBEARER needs a function that gives a token")
        elif not self.user or not self.password:
            raise errors.OptionError(f"the SASL mechanism {self.mechanism} needs a user and a password")


class _Token(AbstractTokenProvider):  # type: ignore[misc]  # kafka-python has no types
    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token

    def token(self) -> str:
        return self._token()


class SaslExchange:
    """One authentication: bytes to send, bytes that came back."""

    def __init__(self, login: SaslLogin) -> None:
        self._name = login.mechanism
        self._mechanism = get_sasl_mechanism(login.mechanism)(
            sasl_mechanism=login.mechanism,
            sasl_plain_username=login.user,
            sasl_plain_password=login.password,
            sasl_oauth_token_provider=_Token(login.token) if login.token is not None else None,
        )

    @property
    def done(self) -> bool:
        return bool(self._mechanism.is_done())

    def next(self) -> bytes:
        return bytes(self._mechanism.auth_bytes())

    def receive(self, data: bytes) -> None:
        """Raises AccessRefused where the broker does not prove that it knows the password."""
        try:
            self._mechanism.receive(data)
        except (ValueError, KeyError, LibraryError):
            raise errors.AccessRefused(
                f"the broker's answer to {self._name} does not prove that it knows the password",
                "check the address and the password",
            ) from None
        if self.done and not self._mechanism.is_authenticated():
            raise errors.AccessRefused(
                f"the broker's answer ends {self._name} without accepting it",
                "check the user and the password",
            )


@dataclass(frozen=True, slots=True)
class Challenge:
    """A step of an authentication. ``lifetime_ms`` 0: until the connection ends (KIP-368)."""

    code: Code
    message: str | None
    data: bytes
    lifetime_ms: int


def handshake(mechanism: str) -> RequestCodec:
    def read(answer: Answer) -> tuple[Code, list[str]]:
        return Code(answer.error_code), list(answer.mechanisms)

    return RequestCodec(SaslHandshakeRequest, 1, 1, {"mechanism": mechanism}, read)


def authenticate(data: bytes) -> RequestCodec:
    def read(answer: Answer) -> Challenge:
        return Challenge(
            Code(answer.error_code),
            answer.error_message,
            bytes(answer.auth_bytes),
            answer.session_lifetime_ms,
        )

    return RequestCodec(SaslAuthenticateRequest, 1, 2, {"auth_bytes": data}, read)
