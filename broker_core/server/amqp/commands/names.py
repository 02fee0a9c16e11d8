"""Names of queues and exchanges, as clients write them."""

from __future__ import annotations


def one_line(name: str) -> str:
    """A name without CR and LF, as in RabbitMQ, where it is declared, bound or deleted."""
    return name.replace("\r", "").replace("\n", "")
