"""A worker that moves messages from one queue to another with pika: get 100, publish 100, ack, commit; again
and again.

Run as ``python amqp_relay.py HOST PORT SOURCE SINK BATCH``; it ends when its input ends. Each body is
``NUMBER:HOPS``; a move adds one hop. Prints ``moved N`` after each commit-ok.
Invariant: it forgets a batch whose commit-ok did not come, and asks the queue again.
"""

from __future__ import annotations

import select
import sys
import time

import pika
from pika.exceptions import AMQPError

RETRY_S = 0.05
IDLE_S = 0.01


def ended() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def relay(connection: pika.BlockingConnection, source: str, sink: str, batch: int) -> None:
    """Moves batches until the input ends or the connection breaks."""
    channel = connection.channel()
    channel.tx_select()
    while not ended():
        moved = 0
        tag = 0
        while moved < batch:
            method, _, body = channel.basic_get(source)
            if method is None:
                break
            tag = method.delivery_tag
            number, _, hops = body.decode().partition(":")
            channel.basic_publish(
                "", sink, f"{number}:{int(hops) + 1}".encode(), pika.BasicProperties(delivery_mode=2)
            )
            moved += 1
        if not moved:
            time.sleep(IDLE_S)
            continue
        channel.basic_ack(tag, multiple=True)
        channel.tx_commit()
        print(f"moved {moved}", flush=True)


def main(host: str, port: str, source: str, sink: str, batch: str) -> None:
    parameters = pika.ConnectionParameters(host, int(port), socket_timeout=10, blocked_connection_timeout=600)
    while not ended():
        try:
            connection = pika.BlockingConnection(parameters)
        except (AMQPError, OSError):
            time.sleep(RETRY_S)  # the broker is not there; it comes back
            continue
        try:
            relay(connection, source, sink, int(batch))
            connection.close()
        except (AMQPError, OSError):
            time.sleep(RETRY_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
