"""Opens the listener of HTTP, whose packages may be missing.

Invariant: this module imports none of them before it is asked to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from broker_core.core.errors import OptionError
from broker_core.server.tls import TlsFiles

if TYPE_CHECKING:
    from broker_core.server.http.server import HttpServer


def started(
    addresses: Sequence[str], open_metrics: bool, tls: TlsFiles | None, *parts: Any, **more: Any
) -> HttpServer | None:
    """The server that listens on ``addresses``, and does not serve yet; None for none. ``parts`` and
    ``more``: of ``Backend``. Raises OptionError: a package is missing, or an address cannot be used.
    """
    if not addresses:
        return None
    try:
        from broker_core.server.http.backend import Backend
        from broker_core.server.http.options import HttpOptions
        from broker_core.server.http.server import HttpServer
    except ModuleNotFoundError as error:
        raise OptionError(
            f"--http is given, and the package {error.name} is not installed",
            "pip install '.[http]' in a checkout",
        ) from error
    backend = Backend(*parts, **{**more, "certificate": tls})
    options = HttpOptions(open_metrics=open_metrics)
    server = HttpServer(backend, addresses, options=options, tls=tls)
    server.start(serves=False)
    return server
