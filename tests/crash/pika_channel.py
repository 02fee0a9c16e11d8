"""A channel of pika to a broker that may be killed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pika

from tests.amqp_server import AmqpServed


@contextlib.contextmanager
def connected(served: AmqpServed) -> Iterator[Any]:
    with pika.BlockingConnection(pika.URLParameters(served.amqp_url)) as connection:
        yield connection.channel()
