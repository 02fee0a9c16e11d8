"""Violations of what basic, confirm and tx methods mean."""

from __future__ import annotations

from functools import partial
from typing import Any

from pamqp import commands

from tests.amqp_peer import content, encoded, method, raw
from tests.server.amqp.violations.row import Like, row

Q, B, E, T = commands.Queue, commands.Basic, commands.Exchange, commands.Tx
CONFIRM = commands.Confirm.Select()
MINE = Q.Declare(queue="violation.mine", exclusive=True)
SHARED = Q.Declare(queue="violation.shared", auto_delete=True)
INTERNAL = E.Declare(exchange="violation.internal", exchange_type="fanout", internal=True)
CONSUME = B.Consume(queue="violation.mine", consumer_tag="tag")
GET = B.Get(queue="violation.mine")


def publish(
    data: bytes = b"x",
    *,
    exchange: str = "",
    routing_key: str = "violation.mine",
    immediate: bool = False,
    **properties: Any,
) -> bytes:
    return content(
        1, B.Publish(exchange=exchange, routing_key=routing_key, immediate=immediate), data, **properties
    )


BARRIER = Q.Declare(queue="violation.mine", passive=True)
NO_EXPIRATION = encoded(1, B.Publish(routing_key="violation.mine")) + raw(
    2, 1, bytes.fromhex("003c0000 0000000000000000 0100 00")
)
DELIVERY_MODE_3 = encoded(1, B.Publish(routing_key="violation.mine")) + raw(
    2, 1, bytes.fromhex("003c0000 0000000000000000 1000 03")
)

on_mine = partial(row, before=(MINE,))

PUBLISH = [
    row(
        "publish to a missing exchange",
        publish(exchange="violation.missing"),
        "NOT_FOUND - no exchange 'violation.missing' in vhost '/'",
        ids=(60, 40),
    ),
    row(
        "publish to a missing exchange in a transaction",
        publish(exchange="violation.missing"),
        "NOT_FOUND - no exchange 'violation.missing' in vhost '/'",
        ids=(60, 40),
        before=(T.Select(),),
    ),
    row(
        "publish to an internal exchange",
        publish(exchange="violation.internal"),
        "ACCESS_REFUSED - cannot publish to internal exchange 'violation.internal' in vhost '/'",
        ids=(60, 40),
        before=(INTERNAL,),
    ),
    row(
        "publish to amq.rabbitmq.trace",
        publish(exchange="amq.rabbitmq.trace"),
        "ACCESS_REFUSED - cannot publish to internal exchange 'amq.rabbitmq.trace' in vhost '/'",
        ids=(60, 40),
    ),
    on_mine("publish immediate", publish(immediate=True), "NOT_IMPLEMENTED - immediate=true", ids=(60, 40)),
    row(
        "publish immediate to a missing queue",
        publish(immediate=True, routing_key="violation.missing"),
        "NOT_IMPLEMENTED - immediate=true",
        ids=(60, 40),
    ),
    on_mine("publish to nowhere is not an error", publish(routing_key="violation.missing"), BARRIER),
    on_mine(
        "publish as another user",
        publish(user_id="nobody"),
        "PRECONDITION_FAILED - user_id property set to 'nobody' but authenticated user was 'guest'",
        ids=(60, 40),
    ),
    on_mine("publish as oneself", publish(user_id="guest"), BARRIER),
    row(
        "publish as another user in a transaction",
        publish(user_id="nobody"),
        "PRECONDITION_FAILED - user_id property set to 'nobody' but authenticated user was 'guest'",
        ids=(60, 40),
        before=(MINE, T.Select()),
    ),
    on_mine(
        "publish with an expiration that is no number",
        publish(expiration="soon"),
        "PRECONDITION_FAILED - invalid expiration 'soon': no_integer",
        ids=(60, 40),
    ),
    on_mine(
        "publish with an expiration below 0",
        publish(expiration="-1"),
        "PRECONDITION_FAILED - invalid expiration '-1': {value_negative,-1}",
        ids=(60, 40),
    ),
    on_mine(
        "publish with an expiration of nothing",
        NO_EXPIRATION,
        "PRECONDITION_FAILED - invalid expiration '': no_integer",
        ids=(60, 40),
    ),
    on_mine(
        "publish with an expiration that is too large",
        publish(expiration=str(1 << 50)),
        "PRECONDITION_FAILED - invalid expiration '1125899906842624': {value_too_large,1125899906842624}",
        ids=(60, 40),
    ),
    on_mine(
        "publish with an expiration that is a fraction",
        publish(expiration="1.5"),
        "PRECONDITION_FAILED - invalid expiration '1.5': {leftover_string,\".5\"}",
        ids=(60, 40),
    ),
    on_mine(
        "publish with a CC that is a text",
        publish(headers={"CC": "violation.mine"}),
        'PRECONDITION_FAILED - invalid message: {unacceptable_type_in_header,"CC",longstr}',
        ids=(60, 40),
    ),
    on_mine("publish with a BCC of numbers", publish(headers={"BCC": [1, 2]}), BARRIER),
    on_mine(
        "publish with delivery mode 3",
        DELIVERY_MODE_3,
        BARRIER,
        "PRECONDITION_FAILED - invalid message: {delivery_mode_unknown,3}",
        ids=(60, 40),
    ),
    on_mine("publish above the highest priority", publish(priority=255), BARRIER),
]

IGNORED = "RabbitMQ ignores what it does not know; here nothing is accepted and ignored"

CONSUMERS = [
    row(
        "consume with a used tag",
        CONSUME,
        "NOT_ALLOWED - attempt to reuse consumer tag 'tag'",
        before=(MINE, CONSUME),
    ),
    row(
        "consume with a used tag on another queue",
        B.Consume(queue="violation.other", consumer_tag="tag"),
        "NOT_ALLOWED - attempt to reuse consumer tag 'tag'",
        before=(MINE, CONSUME, Q.Declare(queue="violation.other", exclusive=True)),
    ),
    row("consume with a tag used on another channel is allowed", CONSUME, before=(MINE, (2, CONSUME))),
    row(
        "exclusive consume of a consumed queue",
        B.Consume(queue="violation.mine", exclusive=True),
        "ACCESS_REFUSED - queue 'violation.mine' in vhost '/' in exclusive use",
        before=(MINE, CONSUME),
    ),
    row(
        "consume of an exclusively consumed queue",
        CONSUME,
        "ACCESS_REFUSED - queue 'violation.mine' in vhost '/' in exclusive use",
        before=(MINE, B.Consume(queue="violation.mine", exclusive=True)),
    ),
    row(
        "exclusive consume of another connection's consumed queue",
        B.Consume(queue="violation.shared", exclusive=True),
        "ACCESS_REFUSED - queue 'violation.shared' in vhost '/' in exclusive use",
        other=(SHARED, B.Consume(queue="violation.shared")),
    ),
    on_mine(
        "consume with a priority that is a text",
        B.Consume(queue="violation.mine", arguments={"x-priority": "high"}),
        "PRECONDITION_FAILED - invalid arg 'x-priority' for queue 'violation.mine' in vhost '/': "
        '"expected integer, got longstr"',
    ),
    on_mine(
        "consume with a priority that is a fraction",
        B.Consume(queue="violation.mine", arguments={"x-priority": 1.5}),
        Like(
            "PRECONDITION_FAILED - invalid arg 'x-priority' for queue 'violation.mine' in vhost '/': "
            ".expected integer.*"
        ),
    ),
    on_mine(
        "consume with no-local is allowed", B.Consume(queue="violation.mine", no_local=True, consumer_tag="t")
    ),
    on_mine(
        "consume with an unknown argument",
        B.Consume(queue="violation.mine", arguments={"x-nonsense": 1}, consumer_tag="t"),
    ),
    row("cancel of an unknown tag", B.Cancel("unknown")),
    row(
        "qos with a size",
        B.Qos(prefetch_size=10, prefetch_count=1),
        "NOT_IMPLEMENTED - prefetch_size!=0 (10)",
    ),
    row("qos of the whole channel", B.Qos(prefetch_count=1, global_=True)),
]

TAKEN = (MINE, publish(), GET)
taken = partial(row, before=TAKEN)
TAGS = [
    row("ack of an unknown tag", B.Ack(5), "PRECONDITION_FAILED - unknown delivery tag 5"),
    row("ack of an unknown tag, multiple", B.Ack(5, True), "PRECONDITION_FAILED - unknown delivery tag 5"),
    taken(
        "ack of an unknown tag, multiple, above a known one",
        B.Ack(5, True),
        "PRECONDITION_FAILED - unknown delivery tag 5",
    ),
    taken("ack of 0, not multiple", B.Ack(0), "PRECONDITION_FAILED - unknown delivery tag 0"),
    taken("ack of 0, multiple", B.Ack(0, True), BARRIER),
    on_mine("ack of 0, multiple, with nothing to ack", B.Ack(0, True), BARRIER),
    taken("ack twice", B.Ack(1), B.Ack(1), "PRECONDITION_FAILED - unknown delivery tag 1"),
    taken(
        "ack below what was acked, multiple",
        B.Ack(1),
        B.Ack(1, True),
        "PRECONDITION_FAILED - unknown delivery tag 1",
    ),
    taken(
        "ack of another channel's tag",
        (2, B.Ack(1)),
        (2, Q.Declare(queue="violation.mine", passive=True)),
        "PRECONDITION_FAILED - unknown delivery tag 1",
        ids=(60, 80),
    ),
    row(
        "ack of a delivery without ack",
        B.Ack(1),
        "PRECONDITION_FAILED - unknown delivery tag 1",
        before=(MINE, publish(), B.Get(queue="violation.mine", no_ack=True)),
    ),
    row("nack of an unknown tag", B.Nack(5), "PRECONDITION_FAILED - unknown delivery tag 5"),
    taken(
        "nack of an unknown tag, multiple", B.Nack(5, True), "PRECONDITION_FAILED - unknown delivery tag 5"
    ),
    taken("nack of 0, not multiple", B.Nack(0), "PRECONDITION_FAILED - unknown delivery tag 0"),
    on_mine("nack of 0, multiple, with nothing to nack", B.Nack(0, True), BARRIER),
    taken("nack of what was acked", B.Ack(1), B.Nack(1), "PRECONDITION_FAILED - unknown delivery tag 1"),
    row("reject of an unknown tag", B.Reject(5), "PRECONDITION_FAILED - unknown delivery tag 5"),
    taken("reject of 0", B.Reject(0), "PRECONDITION_FAILED - unknown delivery tag 0"),
    taken(
        "reject twice", B.Reject(1, False), B.Reject(1, False), "PRECONDITION_FAILED - unknown delivery tag 1"
    ),
    row(
        "ack of an unknown tag in a transaction, before its commit",
        B.Ack(5),
        "PRECONDITION_FAILED - unknown delivery tag 5",
        before=(T.Select(),),
    ),
    row(
        "ack twice in a transaction, before its commit",
        B.Ack(1),
        B.Ack(1),
        "PRECONDITION_FAILED - unknown delivery tag 1",
        before=(*TAKEN, T.Select()),
    ),
    row(
        "nack of what was acked in this transaction",
        B.Ack(1),
        B.Nack(1),
        "PRECONDITION_FAILED - unknown delivery tag 1",
        before=(*TAKEN, T.Select()),
    ),
    row(
        "ack of what was acked in a rolled back transaction is allowed",
        B.Ack(1),
        T.Commit(),
        before=(*TAKEN, T.Select(), B.Ack(1), T.Rollback()),
    ),
    row("recover without requeue", B.Recover(False), "NOT_IMPLEMENTED - requeue=false"),
    taken("recover without requeue, with a delivery", B.Recover(False), "NOT_IMPLEMENTED - requeue=false"),
    row(
        "recover-async without requeue",
        method(1, 60, 100, b"\0"),
        "NOT_IMPLEMENTED - requeue=false",
        ids=(60, 100),
    ),
    on_mine("recover-async", method(1, 60, 100, b"\x01"), BARRIER),
    row(
        "basic.ack of a confirm, from the client",
        B.Ack(1),
        "PRECONDITION_FAILED - unknown delivery tag 1",
        before=(MINE, CONFIRM),
    ),
]

MODES = [
    row("tx.commit without tx.select", T.Commit(), "PRECONDITION_FAILED - channel is not transactional"),
    row("tx.rollback without tx.select", T.Rollback(), "PRECONDITION_FAILED - channel is not transactional"),
    row("tx.select twice", T.Select(), before=(T.Select(),)),
    row("tx.commit of nothing", T.Commit(), before=(T.Select(),)),
    row("tx.rollback of nothing", T.Rollback(), before=(T.Select(),)),
    row("confirm.select twice", CONFIRM, before=(CONFIRM,)),
    row(
        "confirm.select on a transactional channel",
        CONFIRM,
        "PRECONDITION_FAILED - cannot switch from tx to confirm mode",
        before=(T.Select(),),
    ),
    row(
        "tx.select on a confirming channel",
        T.Select(),
        "PRECONDITION_FAILED - cannot switch from confirm to tx mode",
        before=(CONFIRM,),
    ),
    row(
        "tx.commit on a confirming channel",
        T.Commit(),
        "PRECONDITION_FAILED - channel is not transactional",
        before=(CONFIRM,),
    ),
    row(
        "commit into a full queue that rejects",
        publish(),
        publish(),
        T.Commit(),
        "PRECONDITION_FAILED - partial tx completion",
        why="RabbitMQ keeps the first of the two; here nothing of a commit that fails is kept, and the text "
        "names the queue",
        here=Like("PRECONDITION_FAILED - .*'violation.mine'.*"),
        before=(
            Q.Declare(
                queue="violation.mine",
                exclusive=True,
                arguments={"x-max-length": 1, "x-overflow": "reject-publish"},
            ),
            T.Select(),
        ),
    ),
    row(
        "commit to a queue deleted since",
        publish(),
        Q.Delete(queue="violation.mine"),
        T.Commit(),
        before=(MINE, T.Select()),
    ),
]

ROWS = PUBLISH + CONSUMERS + TAGS + MODES
