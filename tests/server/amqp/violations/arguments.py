"""Queue arguments that mean nothing, and queues that belong to another connection."""

from __future__ import annotations

from typing import Any

from pamqp import commands

from tests.server.amqp.violations.row import Answered, ChannelClosed, invalid, locked, row

Q, B = commands.Queue, commands.Basic


def queue(arguments: dict[str, Any], **fields: Any) -> Q.Declare:
    return Q.Declare(queue="violation.arguments", arguments=arguments, **{"exclusive": True, **fields})


CLASSIC = "PRECONDITION_FAILED - invalid arg '{}' for queue 'violation.arguments' in vhost '/' of queue type rabbit_classic_queue"


def refusal(arguments: dict[str, Any], expected: Any) -> Any:
    """A text is why the last argument means nothing."""
    return invalid([*arguments][-1], expected) if isinstance(expected, str) else expected


ARGUMENTS = [
    row(f"queue.declare with {name}", queue(arguments), refusal(arguments, expected))
    for name, arguments, expected in (
        ("x-message-ttl that is a text", {"x-message-ttl": "soon"}, '"expected integer, got longstr"'),
        ("x-message-ttl that is a boolean", {"x-message-ttl": True}, '"expected integer, got bool"'),
        ("x-message-ttl below 0", {"x-message-ttl": -200}, "{value_negative,-200}"),
        ("x-message-ttl that is too large", {"x-message-ttl": 1 << 50}, "{value_too_large,1125899906842624}"),
        ("x-expires of 0", {"x-expires": 0}, "{value_zero,0}"),
        ("x-expires that is a text", {"x-expires": "soon"}, '"expected integer, got longstr"'),
        ("x-max-length below 0", {"x-max-length": -200}, "{value_negative,-200}"),
        ("x-max-length that is a text", {"x-max-length": "many"}, '"expected integer, got longstr"'),
        ("x-max-length-bytes below 0", {"x-max-length-bytes": -200}, "{value_negative,-200}"),
        ("x-overflow that is unknown", {"x-overflow": "burst"}, "invalid_overflow"),
        ("x-overflow that is a number", {"x-overflow": 100_000}, "{unacceptable_type,signedint}"),
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
            "{unacceptable_type,signedint}",
        ),
        (
            "x-dead-letter-routing-key alone",
            {"x-dead-letter-routing-key": "k"},
            "routing_key_but_no_dlx_defined",
        ),
        ("x-max-priority of 256", {"x-max-priority": 256}, "{max_value_exceeded,256}"),
        ("x-max-priority below 0", {"x-max-priority": -200}, "{value_negative,-200}"),
        ("x-max-priority that is a text", {"x-max-priority": "high"}, '"expected integer, got longstr"'),
        (
            "x-single-active-consumer that is a text",
            {"x-single-active-consumer": "yes"},
            "{unacceptable_type,longstr}",
        ),
        ("x-queue-type that is unknown", {"x-queue-type": "heap"}, "\"unsupported queue type 'heap'\""),
        ("x-queue-type that is a number", {"x-queue-type": 100_000}, "{unacceptable_type,signedint}"),
        ("x-queue-mode that is unknown", {"x-queue-mode": "fast"}, "\"unsupported queue mode 'fast'\""),
        ("x-queue-version of 3", {"x-queue-version": 3}, "\"unsupported queue version '3'\""),
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
TAKEN = locked("violation.theirs")
LOCKED = [
    row(f"{name} of another connection's exclusive queue", frame, *(expected or [TAKEN]), other=(THEIRS,))
    for name, frame, *expected in (
        ("queue.declare", THEIRS),
        ("queue.declare without exclusive", Q.Declare(queue="violation.theirs")),
        ("queue.declare passive", Q.Declare(queue="violation.theirs", passive=True)),
        ("queue.bind", Q.Bind(queue="violation.theirs", exchange="amq.direct", routing_key="k")),
        (
            "queue.bind, in vain,",
            Q.Bind(queue="violation.theirs", exchange="violation.missing", routing_key="k"),
            "NOT_FOUND - no exchange 'violation.missing' in vhost '/'",
        ),
        (
            "queue.unbind",
            Q.Unbind(queue="violation.theirs", exchange="amq.direct", routing_key="k"),
            Answered(("Queue.UnbindOk",)),
        ),
        ("queue.purge", Q.Purge(queue="violation.theirs")),
        ("queue.delete", Q.Delete(queue="violation.theirs")),
        ("basic.get", B.Get(queue="violation.theirs")),
        ("basic.consume", B.Consume(queue="violation.theirs")),
    )
]

ROWS = ARGUMENTS + LOCKED
