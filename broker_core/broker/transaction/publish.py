"""A publish: a message and its queues."""

from __future__ import annotations

from typing import NamedTuple

from broker_core.broker.queue import Queues
from broker_core.message.message import Message


class Publish(NamedTuple):
    """A message and the queues that it was routed to when it was published."""

    message: Message
    queues: Queues
    mandatory: bool = False
