"""What a session does with each method of a client: one module for each class of AMQP, one function for each
method.

Not here: the rules (``broker/``), and when a command waits for another (``session.py``).
"""

from broker_core.server.amqp.commands import basic, channel, confirm, delivery, exchange, queue, tx
from broker_core.server.amqp.commands.registry import COMMANDS

__all__ = ["COMMANDS", "basic", "channel", "confirm", "delivery", "exchange", "queue", "tx"]
