"""Which permissions a command needs: RabbitMQ's table, shared by all listeners.

=====================  =====================  ========================  ==========================
command                configure              write                     read
=====================  =====================  ========================  ==========================
exchange.declare       exchange               alternate exchange (new)  exchange (new, with one)
exchange.delete        exchange
exchange.bind, unbind                         destination               source
queue.declare          queue                  dead-letter exchange      queue (new, with one)
queue.delete           queue
queue.bind, unbind                            queue                     exchange
queue.purge                                                             queue
basic.publish                                 exchange
basic.get, consume                                                      queue
=====================  =====================  ========================  ==========================

A passive declare needs none. A topic exchange may limit the routing keys of bind and publish, CC and BCC
too. The default exchange is permitted as ``amq.default``; where it cannot be used, the command itself refuses
it. Every function raises AccessRefused.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from broker_core.broker.access.rights import Kind, Rights
from broker_core.broker.topology.topology import Topology
from broker_core.broker.transaction.transaction import Transaction
from broker_core.core.block import Blocks
from broker_core.core.errors import PreconditionFailed
from broker_core.routing.carbon_copy import carbon_copies, copies_of_rows
from broker_core.routing.column import FREE, Lock, Routed
from broker_core.routing.content import check_rows, check_user_id
from broker_core.routing.exchange_types import EXCHANGE_TYPES, key_type


def publish(
    rights: Rights, topology: Topology, exchange: str, routing_key: str, properties: bytes = b""
) -> None:
    """Each routing key that the message has, those under CC and BCC too."""
    topic = _is_topic(topology, exchange)
    rights.require_publish(exchange, routing_key, topic=topic)
    if topic and rights.limits_topics(exchange):
        for copy in carbon_copies(properties)[0]:
            rights.require_topic("write", exchange, copy)


def publish_again(rights: Rights, topology: Topology, transaction: Transaction, blocks: Blocks) -> None:
    """Before its commit: all that it publishes, unless what was asked then ``holds``. Keys under BCC are not
    kept, and not asked for again. Raises NotLoaded.
    """
    for message, _queues, _mandatory in transaction.publishes:
        publish(rights, topology, message.exchange, message.routing_key, message.properties)
    for spilled in transaction.spilled:
        publish_rows(rights, topology, blocks.read(spilled.block_id))


def read_queue(rights: Rights, queue: str) -> None:
    rights.require("read", "queue", queue)


def delete_queue(rights: Rights, queue: str) -> None:
    rights.require("configure", "queue", queue)


def declare_queue(rights: Rights, topology: Topology, queue: str, arguments: Mapping[str, object]) -> None:
    """Not passive."""
    rights.require("configure", "queue", queue)
    dead_letters = arguments.get("x-dead-letter-exchange")
    if queue not in topology.queues and isinstance(dead_letters, str):
        rights.require("read", "queue", queue)
        rights.require("write", "exchange", dead_letters)


def declare_exchange(
    rights: Rights, topology: Topology, exchange: str, type: str, arguments: Mapping[str, object]
) -> None:
    """Not passive."""
    if not exchange or type not in EXCHANGE_TYPES:
        return
    rights.require("configure", "exchange", exchange)
    alternate = arguments.get("alternate-exchange")
    if exchange not in topology.exchanges and isinstance(alternate, str):
        rights.require("read", "exchange", exchange)
        rights.require("write", "exchange", alternate)


def delete_exchange(rights: Rights, exchange: str) -> None:
    if exchange and not exchange.startswith("amq."):
        rights.require("configure", "exchange", exchange)


def bind(
    rights: Rights, topology: Topology, kind: Kind, destination: str, source: str, routing_key: str
) -> None:
    """Unbind too. ``kind``: of the destination."""
    rights.require("write", kind, destination)
    if not source or (kind == "exchange" and not destination):
        return
    rights.require("read", "exchange", source)
    if _is_topic(topology, source):
        rights.require_topic("read", source, routing_key)


def _is_topic(topology: Topology, exchange: str) -> bool:
    found = topology.exchanges.get(exchange)
    return found is not None and key_type(found) == "topic"


def publish_rows(rights: Rights, topology: Topology, rows: pa.RecordBatch) -> None:
    """Of MESSAGE_SCHEMA: every exchange that the rows name, and every routing key where keys are limited."""
    if rights.everything:
        return
    names = rows.column("exchange")
    for exchange in names.unique().to_pylist():
        rights.require("write", "exchange", exchange)
        if rights.limits_topics(exchange) and _is_topic(topology, exchange):
            chosen = rows.filter(pc.equal(names, exchange))
            keys = set(chosen.column("routing_key").unique().to_pylist())
            for properties in chosen.column("properties").unique().to_pylist():
                keys.update(carbon_copies(properties)[0])
            for routing_key in sorted(keys):
                rights.require_topic("write", exchange, routing_key)


def entering_rows(
    rights: Rights | None, topology: Topology, rows: pa.RecordBatch, body_bytes: int, lock: Lock = FREE
) -> tuple[Routed, pa.RecordBatch]:
    """Returns where messages go that come from outside, checked and permitted, and what is delivered of them.
    ``rights`` None: all. Raises OptionError, RemoteProtocolError, PreconditionFailed, TransactionTooLarge.
    """
    expiration_us = check_rows(rows, body_bytes)
    if rights is not None:
        publish_rows(rights, topology, rows)
        _check_user_ids(rows, rights)
    copies, rows = copies_of_rows(rows)
    return topology.route_block(rows, copies, lock)._replace(expiration_us=expiration_us), rows


def _check_user_ids(rows: pa.RecordBatch, rights: Rights) -> None:
    """Like ``check_user_id``, for a block that ``check_rows`` has accepted; the error names the row."""
    if rights.impersonates:
        return
    properties = rows.column("properties")
    for encoded in properties.unique().to_pylist():
        try:
            check_user_id(encoded, rights.user)
        except PreconditionFailed as error:
            row = pc.index(properties, pa.scalar(encoded, pa.binary())).as_py()
            raise PreconditionFailed(
                f"row {row}: {error.message}", "publish without it, or as a user with the tag impersonator"
            ) from error
