"""A program that books orders by the recipe of docs/commit_tokens.md until there are none, and kills itself.

Arguments: URL of the broker, connection string of PostgreSQL, and before which line of ``book`` or ``recover`` it kills
itself, counted from the first that it reaches.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any

from broker_core.client.broker import BrokerClient
from tests.page_blocks import code

FILE = "<recipe>"


def recipe(database: str) -> dict[str, Any]:
    """The names of the page."""
    names: dict[str, Any] = {"POSTGRES": database}
    exec(compile(code("docs/commit_tokens.md", "def book("), FILE, "exec"), names)
    return names


def main(url: str, database: str, kill_at: int) -> None:
    names = recipe(database)
    reached = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal reached
        if frame.f_code.co_filename != FILE:
            return None
        if event == "line":
            reached += 1
            if reached == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    with BrokerClient(url) as broker, broker.channel() as channel:
        channel.tx_select()
        sys.settrace(trace)
        names["recover"](broker)
        while (order := channel.get("orders")) is not None:
            names["book"](broker, channel, order)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
