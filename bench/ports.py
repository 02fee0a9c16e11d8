"""Ports of loopback for servers that are started later, or again."""

from __future__ import annotations

import contextlib
import random
import socket

# below those that systems give to outgoing connections, which could take one while its server is down
LOWEST, HIGHEST = 10_240, 32_767


def free_ports(count: int) -> list[int]:
    """Returns ports on which nothing listens."""
    chosen = random.SystemRandom()  # two processes that share a seed must not choose the same
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            port = chosen.randint(LOWEST, HIGHEST)
            one = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind(("127.0.0.1", port))
                found.append(port)
        return found
