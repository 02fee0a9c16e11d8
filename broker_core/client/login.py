"""What a client of Flight sends with every call, so that the broker knows who calls, and in which virtual
host.
"""

from __future__ import annotations

from urllib.parse import quote

import pyarrow.flight

from broker_core.core.address import VHOST
from broker_core.core.endpoint import client_name
from broker_core.flight import authorization


class SendHeader(pyarrow.flight.ClientMiddlewareFactory):  # type: ignore[misc]  # pyarrow has no types
    """``header``: the value of ``authorization``, of ``Basic`` or ``Bearer``; "": none. ``vhost``: where the
    calls are made.
    """

    def __init__(self, header: str = "", vhost: str = VHOST) -> None:
        super().__init__()
        self._vhost = vhost
        self.send(header)

    def send(self, header: str) -> None:
        """From the next call on."""
        self._middleware = _Header(header, self._vhost)

    def start_call(self, _info: object) -> _Header:
        return self._middleware


class _Header(pyarrow.flight.ClientMiddleware):  # type: ignore[misc]
    def __init__(self, header: str, vhost: str) -> None:
        super().__init__()
        self._headers = {authorization.HEADER: header} if header else {}
        self._headers[authorization.CLIENT_HEADER] = quote(client_name(), safe="")
        if vhost != VHOST:
            self._headers[authorization.VHOST_HEADER] = quote(vhost, safe="")

    def sending_headers(self) -> dict[str, str]:
        return self._headers
