"""Messages by hand: looked at in a queue, published to an exchange.

Invariant: to look changes nothing: no message is held, moved, acked or marked as redelivered.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from typing import Any, cast

import pyarrow as pa

from broker_core.broker import command_permissions
from broker_core.broker.queue.ready import oldest
from broker_core.message.properties import NAMES, Properties
from broker_core.node.open_channels import ChannelHolder
from broker_core.routing.content import check_user_id
from broker_core.server.http.call import HttpCall
from broker_core.server.http.management.exchanges import exchange
from broker_core.server.http.management.queues import there
from broker_core.server.http.refusal import bad_request
from broker_core.server.http.route import Route

Row = dict[str, Any]
PEEKS = ("ack_requeue_true", "reject_requeue_true")
MOST = 1_000  # messages
MOST_BYTES = 8 * 1024 * 1024  # of their bodies
STEPS = 2_000  # to the messages that are looked at, in one piece


def _peek(call: HttpCall) -> list[Row]:
    call.require("count", "ackmode", "encoding")
    mode, encoding = call.get("ackmode", str, ""), call.get("encoding", str, "auto")
    if mode not in PEEKS:
        raise bad_request(
            f"ackmode is {mode[:80]!r}, and messages are only looked at: give {' or '.join(PEEKS)}; consume "
            "them with AMQP"
        )
    if encoding not in ("auto", "base64"):
        raise bad_request(f"encoding is {encoding[:80]!r}: give auto or base64")
    count, longest = min(max(call.get("count", int, 1), 0), MOST), call.get("truncate", int, MOST_BYTES)
    queue = there(call)
    command_permissions.read_queue(call.rights, queue.name)
    engine = call.backend.engines.of(call.vhost)
    most, at = count, cast("int | None", 0)
    slices: list[tuple[str, int, int]] = []
    while at is not None:
        with call.backend.broker.look:  # others go on between two pieces
            call.topology.shared(queue.name)
            left = queue.messages - queue.unacknowledged
            found, at = oldest(queue.ready, at, most, STEPS)
        slices += [(queue.name, start, end) for start, end in found]
        most -= sum(end - start for start, end in found)
    found_rows = _first(engine.browse(slices), count)
    return [_message_row(row, encoding, longest, left - number) for number, row in enumerate(found_rows, 1)]


def _first(batches: Iterable[pa.RecordBatch], most: int) -> Iterator[Row]:
    """At most so many rows, and MOST_BYTES of bodies, unless the first one has more."""
    count = size = 0
    for batch in batches:
        for row in batch.to_pylist():
            size += len(row["body"])
            if count == most or (count and size > MOST_BYTES):
                return
            count += 1
            yield row


def _message_row(row: Row, encoding: str, longest: int, left: int) -> Row:
    body = cast(bytes, row["body"])
    cut = body[:longest]
    try:
        payload, coded = cut.decode() if encoding == "auto" else "", "string"
    except UnicodeDecodeError:
        encoding = "base64"
    if encoding == "base64":
        payload, coded = base64.b64encode(cut).decode(), "base64"
    properties = Properties.decode(row["properties"]) if row["properties"] else Properties()
    return {
        "payload": payload,
        "payload_bytes": len(body),
        "payload_encoding": coded,
        "exchange": row["exchange"],
        "routing_key": row["routing_key"],
        "redelivered": bool(row["redelivered"]),
        "message_count": max(left, 0),
        "log": row["queue"],
        "offset": row["offset"],
        "properties": {
            name: value for name in NAMES if (value := getattr(properties, name)) not in (None, {})
        },
    }


def _publish(call: HttpCall) -> dict[str, bool]:
    call.require("properties", "routing_key", "payload", "payload_encoding")
    target = exchange(call, call.params["name"]).name
    routing_key, payload = call.get("routing_key", str, ""), call.get("payload", str, "")
    match call.get("payload_encoding", str, "string"):
        case "string":
            body = payload.encode()
        case "base64":
            try:
                body = base64.b64decode(payload, validate=True)
            except ValueError:  # also of a text that is not ASCII
                raise bad_request("the payload is not base64") from None
        case other:
            raise bad_request(f"payload_encoding is {other[:80]!r}: give string or base64")
    fields = call.get("properties", dict, {})
    unknown = sorted(set(fields) - set(NAMES))
    if unknown:
        raise bad_request(f"there is no property {unknown[0][:80]!r}")
    properties = Properties(**fields).encode()
    command_permissions.publish(call.rights, call.topology, target, routing_key, properties)
    if not call.rights.impersonates:
        check_user_id(properties, call.user)
    alarm = call.backend.quotas.alarm
    shortage = alarm.now() if alarm is not None else None
    if shortage is not None:
        raise bad_request(f"publishers have to wait: the broker is {shortage.reason} ({shortage.numbers})")
    broker = call.backend.broker
    holder = ChannelHolder("", "process", call.user, call.caller.address, "http", call.vhost, broker.clock())
    with broker.channel(vhost=call.vhost, user=call.user, rights=call.rights, holder=holder) as channel:
        return {"routed": channel.publish(body, target, routing_key, properties)}


def _alive(call: HttpCall) -> dict[str, str]:
    """A message goes through the broker, as RabbitMQ tests itself: its queue stays."""
    name = "aliveness-test"
    command_permissions.declare_queue(call.rights, call.topology, name, {})
    command_permissions.publish(call.rights, call.topology, "", name)
    command_permissions.read_queue(call.rights, name)
    broker = call.backend.broker
    holder = ChannelHolder("", "process", call.user, call.caller.address, "http", call.vhost, broker.clock())
    with broker.channel(vhost=call.vhost, user=call.user, rights=call.rights, holder=holder) as channel:
        channel.queue_declare(name, durable=False)
        channel.publish(b"test_message", "", name)
        if channel.get(name, no_ack=True) is None:
            return {"status": "failed", "reason": "the message did not come back"}
    return {"status": "ok"}


ROUTES = (
    Route("POST", "/api/queues/{vhost}/{name}/get", "vhost", _peek, "Peek at messages"),
    Route("POST", "/api/exchanges/{vhost}/{name}/publish", "vhost", _publish, "Publish"),
    Route("GET", "/api/aliveness-test/{vhost}", "vhost", _alive, "Declare, publish and get", commits=True),
)
