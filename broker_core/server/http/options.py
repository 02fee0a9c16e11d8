"""The options of the HTTP listener. Not here: those of the broker (``launcher.py``)."""

from __future__ import annotations

from dataclasses import dataclass

from broker_core.server.quotas import UserLimit

KiB, MiB = 1024, 1024 * 1024
CONNECTIONS, REQUESTS = UserLimit(256, 64), UserLimit(64, 16)


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """``connections`` and ``requests``: of all users, and of each; ``requests`` are those in progress."""

    connections: UserLimit = CONNECTIONS
    requests: UserLimit = REQUESTS
    head_bytes: int = 16 * KiB  # of the first line and the headers of a request
    headers: int = 100  # of a request: each costs much more than its bytes
    body_bytes: int = 8 * MiB
    head_s: float = 10.0  # until the headers of a request are there
    body_s: float = 30.0  # and its body
    send_s: float = 30.0  # a client that reads none of its answer for so long is disconnected
    idle_s: float = 60.0  # between two requests
    open_metrics: bool = False  # /metrics needs no login
    max_unauthenticated: int = 64  # connections that have not logged in; one more ends the oldest
