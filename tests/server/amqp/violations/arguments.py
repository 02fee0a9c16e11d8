"""Queue arguments that mean nothing, and queues that belong to another connection."""

from __future__ import annotations

from typing import Any

from pamqp import commands

from tests.server.amqp.violations.row import Answered, ChannelClosed, invalid, locked, row

Q, B = commands.Queue, commands.Basic


def queue(arguments: dict[str, Any], **fields: Any) -> Q.Declare:
    return Q.Declare(queue="violation.arguments", arguments=arguments, **{"exclusive": True, **fields})


CLASSIC = "PRECONDITION_FAILED - invalid arg '{}' for queue 'violation.arguments' in vhost '/' of queue type rabbit_classic_queue"

ARGUMENTS = [
    row(f"queue.declare with {name}", queue(arguments), expected)
    for name, arguments, expected in (
        (
            "x-message-ttl that is a text",
            {"x-message-ttl": "soon"},
            ChannelClosed(406, invalid("x-message-ttl", '"expected integer, got longstr"'), (50, 10)),
        ),
        (
            "x-message-ttl that is a boolean",
            {"x-message-ttl": True},
            ChannelClosed(406, invalid("x-message-ttl", '"expected integer, got bool"'), (50, 10)),
        ),
        (
            "x-message-ttl below 0",
            {"x-message-ttl": -200},
            ChannelClosed(406, invalid("x-message-ttl", "{value_negative,-200}"), (50, 10)),
        ),
        (
            "x-message-ttl that is too large",
            {"x-message-ttl": 1 << 50},
            ChannelClosed(406, invalid("x-message-ttl", "{value_too_large,1125899906842624}"), (50, 10)),
        ),
        (
            "x-expires of 0",
            {"x-expires": 0},
            ChannelClosed(406, invalid("x-expires", "{value_zero,0}"), (50, 10)),
        ),
        (
            "x-expires that is a text",
            {"x-expires": "soon"},
            ChannelClosed(406, invalid("x-expires", '"expected integer, got longstr"'), (50, 10)),
        ),
        (
            "x-max-length below 0",
            {"x-max-length": -200},
            ChannelClosed(406, invalid("x-max-length", "{value_negative,-200}"), (50, 10)),
        ),
        (
            "x-max-length that is a text",
            {"x-max-length": "many"},
            ChannelClosed(406, invalid("x-max-length", '"expected integer, got longstr"'), (50, 10)),
        ),
        (
            "x-max-length-bytes below 0",
            {"x-max-length-bytes": -200},
            ChannelClosed(406, invalid("x-max-length-bytes", "{value_negative,-200}"), (50, 10)),
        ),
        (
            "x-overflow that is unknown",
            {"x-overflow": "burst"},
            ChannelClosed(406, invalid("x-overflow", "invalid_overflow"), (50, 10)),
        ),
        (
            "x-overflow that is a number",
            {"x-overflow": 100_000},
            ChannelClosed(406, invalid("x-overflow", "{unacceptable_type,signedint}"), (50, 10)),
        ),
        (
            "x-dead-letter-exchange that is a number",
            {"x-dead-letter-exchange": 100_000},
            ChannelClosed(
                406,
                "PRECONDITION_FAILED - invalid type 'signedint' for arg 'x-dead-letter-exchange' in queue "
                "'violation.arguments'"
                " in vhost '/'",
                (50, 10),
            ),
        ),
        (
            "x-dead-letter-routing-key that is a number",
            {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": 100_000},
            ChannelClosed(
                406, invalid("x-dead-letter-routing-key", "{unacceptable_type,signedint}"), (50, 10)
            ),
        ),
        (
            "x-dead-letter-routing-key alone",
            {"x-dead-letter-routing-key": "k"},
            ChannelClosed(
                406, invalid("x-dead-letter-routing-key", "routing_key_but_no_dlx_defined"), (50, 10)
            ),
        ),
        (
            "x-max-priority of 256",
            {"x-max-priority": 256},
            ChannelClosed(406, invalid("x-max-priority", "{max_value_exceeded,256}"), (50, 10)),
        ),
        (
            "x-max-priority below 0",
            {"x-max-priority": -200},
            ChannelClosed(406, invalid("x-max-priority", "{value_negative,-200}"), (50, 10)),
        ),
        (
            "x-max-priority that is a text",
            {"x-max-priority": "high"},
            ChannelClosed(406, invalid("x-max-priority", '"expected integer, got longstr"'), (50, 10)),
        ),
        (
            "x-single-active-consumer that is a text",
            {"x-single-active-consumer": "yes"},
            ChannelClosed(406, invalid("x-single-active-consumer", "{unacceptable_type,longstr}"), (50, 10)),
        ),
        (
            "x-queue-type that is unknown",
            {"x-queue-type": "heap"},
            ChannelClosed(406, invalid("x-queue-type", "\"unsupported queue type 'heap'\""), (50, 10)),
        ),
        (
            "x-queue-type that is a number",
            {"x-queue-type": 100_000},
            ChannelClosed(406, invalid("x-queue-type", "{unacceptable_type,signedint}"), (50, 10)),
        ),
        (
            "x-queue-mode that is unknown",
            {"x-queue-mode": "fast"},
            ChannelClosed(406, invalid("x-queue-mode", "\"unsupported queue mode 'fast'\""), (50, 10)),
        ),
        (
            "x-queue-version of 3",
            {"x-queue-version": 3},
            ChannelClosed(406, invalid("x-queue-version", "\"unsupported queue version '3'\""), (50, 10)),
        ),
        ("an unknown argument without x-", {"nonsense": 1}, Answered(("Queue.DeclareOk",))),
    )
] + [
    row(
        "queue.declare of an exclusive quorum queue",
        queue({"x-queue-type": "quorum"}, durable=True),
        "PRECONDITION_FAILED - invalid property 'exclusive-owner' for queue 'violation.arguments' "
        "in vhost '/'",
    ),
    row(
        "queue.declare of a transient quorum queue",
        queue({"x-queue-type": "quorum"}, exclusive=False),
        "PRECONDITION_FAILED - invalid property 'non-durable' for queue 'violation.arguments' in vhost '/'",
    ),
    row(
        "queue.declare of an auto-delete quorum queue",
        queue({"x-queue-type": "quorum"}, durable=True, exclusive=False, auto_delete=True),
        "PRECONDITION_FAILED - invalid property 'auto-delete' for queue 'violation.arguments' in vhost '/'",
    ),
    row("queue.declare with an unknown argument", queue({"x-nonsense": 1})),
    row(
        "queue.declare with x-delivery-limit",
        queue({"x-delivery-limit": 3}),
        CLASSIC.format("x-delivery-limit"),
        why="every queue of this broker counts deliveries",
        here=Answered(("Queue.DeclareOk",)),
    ),
    row(
        "queue.declare of a stream",
        queue({"x-queue-type": "stream"}, durable=True, exclusive=True),
        "PRECONDITION_FAILED - invalid property 'exclusive-owner' for queue 'violation.arguments' "
        "in vhost '/'",
        why="this broker has no streams",
        here=invalid("x-queue-type", "\"unsupported queue type 'stream'\""),
    ),
]

THEIRS = Q.Declare(queue="violation.theirs", exclusive=True)
LOCKED = [
    row(f"{name} of another connection's exclusive queue", frame, expected, other=(THEIRS,))
    for name, frame, expected in (
        ("queue.declare", THEIRS, ChannelClosed(405, locked("violation.theirs"), (50, 10))),
        (
            "queue.declare without exclusive",
            Q.Declare(queue="violation.theirs"),
            ChannelClosed(405, locked("violation.theirs"), (50, 10)),
        ),
        (
            "queue.declare passive",
            Q.Declare(queue="violation.theirs", passive=True),
            ChannelClosed(405, locked("violation.theirs"), (50, 10)),
        ),
        (
            "queue.bind",
            Q.Bind(queue="violation.theirs", exchange="amq.direct", routing_key="k"),
            ChannelClosed(405, locked("violation.theirs"), (50, 20)),
        ),
        (
            "queue.bind, in vain,",
            Q.Bind(queue="violation.theirs", exchange="violation.missing", routing_key="k"),
            ChannelClosed(404, "NOT_FOUND - no exchange 'violation.missing' in vhost '/'", (50, 20)),
        ),
        (
            "queue.unbind",
            Q.Unbind(queue="violation.theirs", exchange="amq.direct", routing_key="k"),
            Answered(("Queue.UnbindOk",)),
        ),
        (
            "queue.purge",
            Q.Purge(queue="violation.theirs"),
            ChannelClosed(405, locked("violation.theirs"), (50, 30)),
        ),
        (
            "queue.delete",
            Q.Delete(queue="violation.theirs"),
            ChannelClosed(405, locked("violation.theirs"), (50, 40)),
        ),
        (
            "basic.get",
            B.Get(queue="violation.theirs"),
            ChannelClosed(405, locked("violation.theirs"), (60, 70)),
        ),
        (
            "basic.consume",
            B.Consume(queue="violation.theirs"),
            ChannelClosed(405, locked("violation.theirs"), (60, 20)),
        ),
    )
]

ROWS = ARGUMENTS + LOCKED
