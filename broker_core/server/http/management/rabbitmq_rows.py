"""Queues, exchanges, bindings, connections, channels and consumers as RabbitMQ shows them.

Not here: who may see them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from hashlib import blake2b
from typing import Any
from urllib.parse import quote

from broker_core.admin import ConnectionInfo
from broker_core.broker.channel import Channel
from broker_core.broker.queue import Queue
from broker_core.broker.queue.consumer import Consumer
from broker_core.message.arguments.policy import Policy, settings_without_effect
from broker_core.message.arguments.table import CONSUMER, EXCHANGE, QUEUE, without_effect
from broker_core.node.open_channels import ChannelHolder
from broker_core.routing.exchange import Binding, Exchange, canonical
from broker_core.routing.exchange_types import ARGUMENTS_OF, WaitingExchange
from broker_core.server.http.backend import NODE
from broker_core.server.http.rates import Counts, Rate, Rates, counts_of

Row = dict[str, Any]


# RabbitMQ's names of Counts, in their order. A queue has not the last two, and as in RabbitMQ those of
# deliveries only after one.
_STATS = [
    (name, f"{name}_details")
    for name in (
        *("publish", "ack", "deliver", "deliver_no_ack", "get", "get_no_ack", "redeliver"),
        *("confirm", "return_unroutable"),
    )
]
_OF_QUEUE = _STATS[:-2]
# of a consumer, by whether its queue has a single active one, and whether it gets messages
_ACTIVITY = {(False, True): "up", (True, True): "single_active", (True, False): "waiting"}


def stats(counts: Counts, rate: Rate, unacked: int = 0, names: Sequence[tuple[str, str]] = _STATS) -> Row:
    """``unacked``: delivered and not acked."""
    found: Row = {"deliver_get": counts.settled + unacked, "deliver_get_details": {"rate": rate.settled}}
    for (name, details), count, per_s in zip(names, counts, rate):
        found[name] = count
        found[details] = {"rate": per_s}
    return found


def _bytes(queue: Queue, unacked: int) -> Row:
    """Of bodies, by the share that the queue has of each block: exact where those of a block are alike."""
    there = memory = entries = 0
    for run in queue.log.runs:
        there, entries = there + run.size_bytes, entries + run.count
        memory += run.size_bytes if run.block.inbox is not None else 0
    messages = queue.messages
    each = there / entries if entries else 0.0
    return {
        "memory": memory,
        "message_bytes": round(each * messages),
        "message_bytes_ready": round(each * (messages - unacked)),
        "message_bytes_unacknowledged": round(each * unacked),
        "message_bytes_ram": round(memory * messages / entries) if entries else 0,
    }


def _use(queue: Queue, rates: Rates, counts: Counts, consumers: int) -> Row:
    idle = rates.idle_since(queue, counts)
    part = round(rates.utilisation(queue), 2) if consumers else 0
    found: Row = {"consumer_utilisation": part, "consumer_capacity": part}
    if idle is not None:
        found["idle_since"] = datetime.fromtimestamp(idle, timezone.utc).isoformat(timespec="milliseconds")
    return found


def totals(messages: int, unacknowledged: int, rate: Rate) -> Row:
    growth = {"rate": round(rate.published - rate.settled, 1)}
    return {
        "messages": messages,
        "messages_details": growth,
        "messages_ready": messages - unacknowledged,
        "messages_ready_details": growth,
        "messages_unacknowledged": unacknowledged,
        "messages_unacknowledged_details": {"rate": 0.0},
    }


def queue_row(queue: Queue, rates: Rates) -> Row:
    """Called under the lock."""
    rate, counts, consumers = rates.of_queue(queue), counts_of(queue), len(queue.consumers)
    exclusive = next((each.tag for each in queue.consumers if each.exclusive), None)
    single = queue.consumers.single_active
    unacked = queue.unacknowledged
    return {
        "name": queue.name,
        "vhost": queue.vhost,
        "type": queue.arguments.queue_type,
        "durable": queue.durable,
        "auto_delete": queue.auto_delete,
        "exclusive": queue.exclusive,
        "arguments": dict(queue.arguments.declared),
        "arguments_without_effect": without_effect(QUEUE, queue.arguments.declared),
        "node": NODE,
        "state": "running",
        **_policies(queue.arguments.policy),
        "exclusive_consumer_tag": exclusive,
        "single_active_consumer_tag": single.tag if single is not None else None,
        "consumers": consumers,
        **totals(queue.messages, unacked, rate),
        "message_stats": stats(counts, rate, unacked, _OF_QUEUE if any(counts[2:]) else _OF_QUEUE[:2]),
        **_bytes(queue, unacked),
        **_use(queue, rates, counts, consumers),
        "app": queue.owner,
        "next_offset": queue.log.visible_end,
    }


def exchange_row(exchange: Exchange[Queue], vhost: str, policy: Policy) -> Row:
    return {
        "name": exchange.name,
        "vhost": vhost,
        "type": exchange.type,
        "durable": exchange.durable,
        "auto_delete": exchange.auto_delete,
        "internal": exchange.internal,
        "arguments": dict(exchange.arguments),
        "arguments_without_effect": {
            name: why
            for name, why in without_effect(EXCHANGE, exchange.arguments).items()
            if name not in ARGUMENTS_OF.get(exchange.type, ())
        },
        **_policies(policy),
        "user_who_performed_action": "",
        **({"messages_delayed": waiting_in(exchange)} if isinstance(exchange, WaitingExchange) else {}),
    }


def waiting_in(exchange: Exchange[Queue]) -> int:
    """Returns how many messages wait in an exchange before they are routed."""
    waiting = exchange.waiting if isinstance(exchange, WaitingExchange) else None
    return 0 if waiting is None else waiting.messages


def _policies(policy: Policy) -> Row:
    return {
        "policy": policy.name,
        "operator_policy": policy.operator,
        "effective_policy_definition": dict(policy.settings),
        "settings_without_effect": settings_without_effect(policy.settings),
    }


def binding_row(source: str, binding: Binding, vhost: str) -> Row:
    target, routing_key, arguments = binding
    return {
        "source": source,
        "vhost": vhost,
        "destination": target.name,
        "destination_type": "queue" if isinstance(target, Queue) else "exchange",
        "routing_key": routing_key,
        "arguments": dict(arguments),
        "properties_key": properties_key(routing_key, arguments),
    }


def default_binding(queue: Queue) -> Row:
    """The default exchange reaches each queue by its name."""
    return binding_row("", Binding(queue, queue.name, {}), queue.vhost)


def properties_key(routing_key: str, arguments: Mapping[str, object]) -> str:
    """The name of a binding among those of the same source and destination, as RabbitMQ makes it; its hash
    of arguments is another one.
    """
    if not arguments:
        return quote(routing_key, safe="") or "~"
    digest = blake2b(canonical(arguments).encode(), digest_size=12).hexdigest()
    return f"{quote(routing_key, safe='')}~{digest}"


def connection_row(found: ConnectionInfo) -> Row:
    client = found.client_properties
    return {
        "name": found.name,
        "node": NODE,
        "user": found.user,
        "user_who_performed_action": found.user,
        "vhost": found.vhost,
        "type": "network",
        "protocol": "AMQP 0-9-1",
        "state": found.state,
        "channels": found.channels,
        "channel_max": found.channel_max,
        "frame_max": found.frame_max,
        "timeout": found.heartbeat_s,
        "client_properties": dict(client),
        "user_provided_name": str(client.get("connection_name", "")),
        "connected_at": found.connected_at_ms,
        "host": found.host,
        "port": found.port,
        "peer_host": found.peer_host,
        "peer_port": found.peer_port,
        "ssl": found.tls,
        "auth_mechanism": "PLAIN",
    }


def _where(holder: ChannelHolder) -> tuple[str, int, int]:
    """The connection, the channel's number and the port of the client: of a channel of AMQP."""
    name, _, number = holder.id.removesuffix(")").rpartition(" (")
    if holder.listener != "amqp":
        return f"{holder.listener} {holder.address}".strip(), 0, 0
    port = name.partition(" -> ")[0].rpartition(":")[2]
    return name, int(number) if number.isdigit() else 0, int(port) if port.isdigit() else 0


def channel_row(channel: Channel, holder: ChannelHolder) -> Row:
    """Of any thread: from copies that one step of Python makes."""
    connection, number, port = _where(holder)
    transaction = channel.transaction
    is_open = channel.transactional and bool(transaction)
    return {
        "name": holder.id,
        "number": number,
        "node": NODE,
        "vhost": holder.vhost,
        "user": holder.user,
        "user_who_performed_action": holder.user,
        "connection_details": {"name": connection, "peer_host": holder.address, "peer_port": port},
        "state": "running",
        "transactional": channel.transactional,
        "confirm": channel.confirming,
        "consumer_count": len(channel.consumers),
        "messages_unacknowledged": len(channel.unacked),
        "messages_unconfirmed": 0,
        "messages_uncommitted": transaction.messages if is_open else 0,
        "acks_uncommitted": len(transaction.settles) if is_open else 0,
        "prefetch_count": channel.default_prefetch,
        "global_prefetch_count": channel.prefetch,
    }


def consumer_rows(
    queue: str, channel: Channel, holder: ChannelHolder, consumers: Iterable[Consumer]
) -> list[Row]:
    """Of one channel; ``queue`` "": of all."""
    connection, number, port = _where(holder)
    details = {
        "name": holder.id,
        "number": number,
        "node": NODE,
        "user": holder.user,
        "connection_name": connection,
        "peer_host": holder.address,
        "peer_port": port,
    }
    return [
        {
            "consumer_tag": each.tag,
            "queue": {"name": each.queue.name, "vhost": holder.vhost},
            "ack_required": not each.no_ack,
            "active": each.active,
            "activity_status": _ACTIVITY[each.queue.consumers.single, each.active],
            "exclusive": each.exclusive,
            "prefetch_count": each.prefetch,
            "arguments": dict(each.arguments or {}),
            "arguments_without_effect": without_effect(CONSUMER, each.arguments or {}),
            "channel_details": details,
        }
        for each in consumers
        if not each.queue.replies and (not queue or each.queue.name == queue)  # who knows a name may answer
    ]
