"""Arguments that programs for RabbitMQ 3.10 to 4.2 declare: of queues, exchanges and consumers.

Each has a meaning here, or is taken and shown with the reason why it has no effect, or is refused with it.
Other names with ``x-`` are taken as RabbitMQ takes them, and shown. Those without belong to clients.

Not here: acting on them (``broker/``, ``server/amqp/commands/ack_timeout.py``).
Invariant: an argument that promises more than this broker does is refused, or shown as without effect.
Source: the argument tables of RabbitMQ's queue types, and what 3.10.8 answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from broker_core.message.arguments.values import (
    LEAST,
    MAX_PRIORITY,
    MAX_TIME_MS,
    Check,
    anything,
    choice,
    exchange,
    flag,
    short,
    text,
    whole,
)
from broker_core.message.deduplication import HEADER, MOST

QUEUE_TYPES = ("classic", "quorum")
_EITHER, _CLASSIC, _QUORUM, _STREAM = frozenset(QUEUE_TYPES), {"classic"}, {"quorum"}, {"stream"}


class ArgumentRule(NamedTuple):
    """``types``: of the queues that have it. ``void``: why it has no effect; ``refused``: why it is refused;
    both "": it has its meaning. ``strict``: a strict broker takes it too.
    """

    value: Check = anything
    types: frozenset[str] | set[str] = _EITHER
    void: str = ""
    refused: str = ""
    strict: bool = False


_ONE_COPY = "there is one copy of a queue, on this broker: a quorum or a mirror of others does not exist"
_STORED = "bodies are in segments on the disk, whatever the queue is: none is in memory alone"
_NO_STREAM = "txmq has no streams: a queue forgets what is acked"
_IDS = "the ids are as durable as the messages: one commit has both"
_DROPS_NONE = "an exchange of type x-message-deduplication has it, and this one drops nothing"
_UNKNOWN = "neither txmq nor RabbitMQ gives it a meaning"
_TIMEOUT = whole(1, MAX_TIME_MS)
_LOCATORS = ("client-local", "min-masters", "least-leaders", "random", "balanced")

CACHE = ("x-cache-size", "x-cache-ttl")

QUEUE: Mapping[str, ArgumentRule] = {
    "x-expires": ArgumentRule(whole(1, MAX_TIME_MS)),
    "x-message-ttl": ArgumentRule(whole(0, MAX_TIME_MS)),
    "x-dead-letter-exchange": ArgumentRule(short(exchange)),
    "x-dead-letter-routing-key": ArgumentRule(short(text)),
    # holds by construction: a dead letter is in the commit that takes the message from its queue
    "x-dead-letter-strategy": ArgumentRule(
        choice("at-least-once", "at-most-once", wrong="invalid_dlx_strategy"), _QUORUM
    ),
    "x-max-length": ArgumentRule(whole()),
    "x-max-length-bytes": ArgumentRule(whole()),
    "x-max-priority": ArgumentRule(whole(0, MAX_PRIORITY, "max_value_exceeded"), _CLASSIC),
    "x-overflow": ArgumentRule(
        choice("drop-head", "reject-publish", "reject-publish-dlx", wrong="invalid_overflow")
    ),
    "x-single-active-consumer": ArgumentRule(flag),
    "x-delivery-limit": ArgumentRule(whole(LEAST)),  # below 0: no limit, as in RabbitMQ 4
    "x-consumer-timeout": ArgumentRule(_TIMEOUT),
    "x-queue-type": ArgumentRule(choice(*QUEUE_TYPES, wrong="\"unsupported queue type '{}'\"")),
    "x-internal-purpose": ArgumentRule(text, void="RabbitMQ's federation marks its own with it", strict=True),
    "x-queue-mode": ArgumentRule(
        choice("default", "lazy", wrong="\"unsupported queue mode '{}'\""), _CLASSIC, _STORED, strict=True
    ),
    "x-queue-version": ArgumentRule(
        choice(1, 2, wrong="\"unsupported queue version '{}'\""), _CLASSIC, _STORED, strict=True
    ),
    "x-max-in-memory-length": ArgumentRule(whole(), _QUORUM, _STORED),
    "x-max-in-memory-bytes": ArgumentRule(whole(), _QUORUM, _STORED),
    "x-quorum-initial-group-size": ArgumentRule(whole(1), _QUORUM, _ONE_COPY),
    "x-quorum-target-group-size": ArgumentRule(whole(1), _EITHER, _ONE_COPY),
    "x-queue-leader-locator": ArgumentRule(
        choice(*_LOCATORS, wrong="invalid_queue_locator_arg"), _EITHER, _ONE_COPY
    ),
    "x-queue-master-locator": ArgumentRule(
        choice(*_LOCATORS, wrong="invalid_queue_locator_arg"), _CLASSIC, _ONE_COPY
    ),
    **dict.fromkeys(
        ("x-ha-policy", "x-ha-policy-params", "x-ha-nodes", "x-cancel-on-ha-failover"),
        ArgumentRule(void=_ONE_COPY),
    ),
    **dict.fromkeys(
        (
            "x-max-age",
            "x-stream-max-segment-size-bytes",
            "x-max-segment-size",
            "x-stream-filter-size-bytes",
            "x-initial-cluster-size",
        ),
        ArgumentRule(types=_STREAM, refused=_NO_STREAM),
    ),
    "x-message-deduplication": ArgumentRule(flag),
    HEADER: ArgumentRule(short(text)),
    "x-cache-size": ArgumentRule(whole(1, MOST)),
    "x-cache-ttl": ArgumentRule(whole(1, MAX_TIME_MS)),
    "x-cache-persistence": ArgumentRule(
        choice("disk", "memory", wrong="\"unsupported persistence '{}'\""), void=_IDS
    ),
}

EXCHANGE: Mapping[str, ArgumentRule] = {
    "alternate-exchange": ArgumentRule(exchange),
    "x-internal-purpose": ArgumentRule(exchange, void=QUEUE["x-internal-purpose"].void, strict=True),
    "x-message-deduplication": ArgumentRule(
        refused="a queue has it, or an exchange of type x-message-deduplication drops duplicates"
    ),
    "x-cache-persistence": QUEUE["x-cache-persistence"],
    **{name: QUEUE[name]._replace(void=_DROPS_NONE, strict=True) for name in CACHE},
    "x-delayed-type": ArgumentRule(
        text, void="an exchange of type x-delayed-message has it, and this one delays nothing", strict=True
    ),
}

# queue arguments that do something only beside another one: that, and what RabbitMQ says where it is missing
NEEDS: Mapping[str, tuple[str, str]] = {
    "x-dead-letter-routing-key": ("x-dead-letter-exchange", "routing_key_but_no_dlx_defined"),
    **dict.fromkeys((*CACHE, HEADER), ("x-message-deduplication", '"no deduplication"')),
}

CONSUMER: Mapping[str, ArgumentRule] = {
    "x-priority": ArgumentRule(whole(LEAST)),
    "x-consumer-timeout": ArgumentRule(_TIMEOUT),
    "x-transaction-id": ArgumentRule(flag),
    "x-cancel-on-ha-failover": ArgumentRule(void=_ONE_COPY, strict=True),
    "x-credit": ArgumentRule(void="only RabbitMQ's AMQP 1.0 gives credit; basic.qos limits a consumer"),
    **dict.fromkeys(
        ("x-stream-offset", "x-stream-filter", "x-stream-match-unfiltered"),
        ArgumentRule(types=_STREAM, refused=_NO_STREAM),
    ),
}

# what a declaration that is repeated must have alike; what has no effect, or holds anyway, may differ
COMPARED = tuple(
    name
    for name, each in QUEUE.items()
    if (each.strict or not (each.void or each.refused)) and name != "x-dead-letter-strategy"
)
COMPARED_EXCHANGE = ("alternate-exchange", "x-internal-purpose", "x-delayed-type")


def without_effect(table: Mapping[str, ArgumentRule], arguments: Mapping[str, object]) -> dict[str, str]:
    """Returns which of the arguments have no effect here -> why."""
    return {
        name: table[name].void if name in table else _UNKNOWN
        for name in arguments
        if (table[name].void if name in table else name.startswith("x-"))
    }
