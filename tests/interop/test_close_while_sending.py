"""A client that asks to close its connection while frames of its channels are still on their way, as amqplib
of Node.js does.

Its connection.close overtakes the publishes that it had queued. A broker that then closes its socket with
bytes unread resets the connection, and the client never sees connection.close-ok. Specification: after
connection.close-ok, what still comes is dropped.
"""

from __future__ import annotations

import os
import socket

from pamqp import commands

from tests.amqp_peer import content, encoded, peer
from tests.progress import GUARD_S

PUBLISHES = 20_000


def test_a_client_that_still_sends_after_its_connection_close_gets_close_ok_and_no_reset(url: str) -> None:
    late = content(1, commands.Basic.Publish(routing_key="nowhere"), b"late")
    close = encoded(0, commands.Connection.Close(200, "Goodbye", 0, 0))
    with peer(url, 1) as client, socket.socket(fileno=os.dup(client.fileno())) as out:
        out.settimeout(GUARD_S)
        out.sendall(close + late * PUBLISHES)  # a reset would be an error here
        client.expect(commands.Connection.CloseOk, 0)
        for _ in range(10):
            out.sendall(late)
