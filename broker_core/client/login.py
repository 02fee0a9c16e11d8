"""What a client of Flight sends with every call, so that the broker knows who calls."""

from __future__ import annotations

from typing import Any

import pyarrow.flight

from broker_core.flight import authorization


class SendHeader(pyarrow.flight.ClientMiddlewareFactory):  # type: ignore[misc]  # pyarrow has no types
    """``header``: the value of ``authorization``, of ``Basic`` or ``Bearer``."""

    def __init__(self, header: str) -> None:
        super().__init__()
        self._middleware = _Header(header)

    def start_call(self, _info: Any) -> _Header:
        return self._middleware


class _Header(pyarrow.flight.ClientMiddleware):  # type: ignore[misc]
    def __init__(self, header: str) -> None:
        super().__init__()
        self._headers = {authorization.HEADER: header}

    def sending_headers(self) -> dict[str, str]:
        return self._headers
