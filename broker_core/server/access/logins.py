"""The authenticator of a running broker."""

from __future__ import annotations

import hmac

from broker_core.errors import LoginRefused
from broker_core.server.access.identity import OWNER, Identity


class Logins:
    """Implements ``identity.Authenticator``. ``token``: of ``endpoint.json``; "": there is none."""

    def __init__(self, token: str = "") -> None:
        self._token = token.encode()

    def basic(self, user: str, password: str, address: str) -> Identity:
        return OWNER

    def bearer(self, token: str, address: str) -> Identity:
        if self._token and hmac.compare_digest(self._token, token.encode(errors="surrogateescape")):
            return OWNER
        raise LoginRefused("the token is not that of this broker", "read it again from endpoint.json")

    def anonymous(self, address: str) -> Identity:
        return OWNER
