"""AMQP 0-9-1 with RabbitMQ's extensions, as values and bytes: methods, decoder, encoder, state tables, the
connection, SASL responses.

Not here: a socket, a clock, a broker.
Invariant: every module is a function of what it is given.
"""

from broker_core.amqp.v0_9_1.decoder import Decoder
from broker_core.amqp.v0_9_1.encoder import (
    HEARTBEAT,
    PROTOCOL_HEADER,
    DeliverEncoder,
    encode_ack,
    encode_content,
    encode_method,
    encode_nack,
)
from broker_core.amqp.v0_9_1.events import (
    Command,
    ContentTooLarge,
    Decoded,
    Event,
    Heartbeat,
    ProtocolHeader,
    Publishes,
    Violation,
)
from broker_core.amqp.v0_9_1.methods import METHODS, Method

__all__ = [
    "HEARTBEAT",
    "METHODS",
    "PROTOCOL_HEADER",
    "Command",
    "ContentTooLarge",
    "Decoded",
    "Decoder",
    "DeliverEncoder",
    "Event",
    "Heartbeat",
    "Method",
    "ProtocolHeader",
    "Publishes",
    "Violation",
    "encode_ack",
    "encode_content",
    "encode_method",
    "encode_nack",
]
