"""Violations of what exchange and queue methods mean."""

from __future__ import annotations

from functools import partial
from typing import Any

from pamqp import commands

from tests.amqp_peer import changed, content
from tests.server.amqp.violations.row import inequivalent, locked, row

Q, B, E = commands.Queue, commands.Basic, commands.Exchange
MINE = Q.Declare(queue="violation.mine", exclusive=True)
DIRECT = E.Declare(exchange="violation.direct", exchange_type="direct", auto_delete=True)
DURABLE = Q.Declare(queue="violation.durable", durable=True)
MESSAGE = content(1, B.Publish(routing_key="violation.mine"), b"x")


def queue(arguments: dict[str, Any], **fields: Any) -> Q.Declare:
    return Q.Declare(queue="violation.arguments", arguments=arguments, **{"exclusive": True, **fields})


def exchange(name: str, kind: str, **fields: Any) -> E.Declare:
    return changed(E.Declare(exchange="x", exchange_type=kind), exchange=name, **fields)


IGNORED = "RabbitMQ ignores what it does not know; here nothing is accepted and ignored"

on_direct = partial(row, before=(DIRECT,))
on_mine = partial(row, before=(MINE,))

EXCHANGES = [
    row(
        "exchange.declare of an unknown type",
        exchange("violation.x", "nonsense"),
        "COMMAND_INVALID - unknown exchange type 'nonsense'",
    ),
    row(
        "exchange.declare without a type",
        exchange("violation.x", ""),
        "COMMAND_INVALID - invalid exchange type ''",
    ),
    row(
        "exchange.declare of an unknown x- type",
        exchange("violation.x", "x-nonsense"),
        "COMMAND_INVALID - unknown exchange type 'x-nonsense'",
    ),
    on_direct(
        "exchange.declare again with another type",
        exchange("violation.direct", "fanout", auto_delete=True),
        inequivalent("type", "exchange 'violation.direct'", "received 'fanout' but current is 'direct'"),
    ),
    on_direct(
        "exchange.declare again with another durability",
        exchange("violation.direct", "direct", auto_delete=True, durable=True),
        inequivalent("durable", "exchange 'violation.direct'", "received 'true' but current is 'false'"),
    ),
    on_direct(
        "exchange.declare again without auto-delete",
        exchange("violation.direct", "direct"),
        inequivalent("auto_delete", "exchange 'violation.direct'", "received 'false' but current is 'true'"),
    ),
    on_direct(
        "exchange.declare again as internal",
        exchange("violation.direct", "direct", auto_delete=True, internal=True),
        inequivalent("internal", "exchange 'violation.direct'", "received 'true' but current is 'false'"),
    ),
    on_direct(
        "exchange.declare again with an alternate exchange",
        exchange(
            "violation.direct", "direct", auto_delete=True, arguments={"alternate-exchange": "amq.fanout"}
        ),
        inequivalent(
            "alternate-exchange",
            "exchange 'violation.direct'",
            "received the value 'amq.fanout' of type 'longstr' but current is none",
        ),
    ),
    on_direct("exchange.declare again the same", DIRECT),
    on_direct(
        "exchange.declare passive of another type", exchange("violation.direct", "fanout", passive=True)
    ),
    on_direct(
        "exchange.declare passive of an unknown type", exchange("violation.direct", "nonsense", passive=True)
    ),
    row(
        "exchange.declare passive of a missing exchange",
        exchange("violation.missing", "direct", passive=True),
        "NOT_FOUND - no exchange 'violation.missing' in vhost '/'",
    ),
    row(
        "exchange.declare of a reserved name",
        exchange("amq.violation", "direct"),
        "ACCESS_REFUSED - exchange name 'amq.violation' contains reserved prefix 'amq.*'",
    ),
    row(
        "exchange.declare passive of a missing reserved name",
        exchange("amq.violation", "direct", passive=True),
        "NOT_FOUND - no exchange 'amq.violation' in vhost '/'",
    ),
    row("exchange.declare of amq.direct as it is", exchange("amq.direct", "direct", durable=True)),
    row(
        "exchange.declare of amq.direct, not durable",
        exchange("amq.direct", "direct"),
        inequivalent("durable", "exchange 'amq.direct'", "received 'false' but current is 'true'"),
    ),
    row(
        "exchange.declare of amq.direct as fanout",
        exchange("amq.direct", "fanout", durable=True),
        inequivalent("type", "exchange 'amq.direct'", "received 'fanout' but current is 'direct'"),
    ),
    row(
        "exchange.declare of the default exchange",
        exchange("", "direct", durable=True),
        "ACCESS_REFUSED - operation not permitted on the default exchange",
    ),
    row(
        "exchange.declare passive of the default exchange",
        exchange("", "direct", passive=True),
        "ACCESS_REFUSED - operation not permitted on the default exchange",
    ),
    row(
        "exchange.declare with an alternate exchange that is a number",
        exchange("violation.x", "direct", auto_delete=True, arguments={"alternate-exchange": 100_000}),
        "PRECONDITION_FAILED - invalid type 'signedint' for arg 'alternate-exchange' in exchange "
        "'violation.x' in vhost '/'",
    ),
    row(
        "exchange.declare with an unknown argument",
        exchange("violation.args", "direct", auto_delete=True, arguments={"x-nonsense": 5}),
        E.Delete(exchange="violation.args"),
    ),
    row("exchange.delete of a missing exchange", E.Delete(exchange="violation.missing")),
    row(
        "exchange.delete of the default exchange",
        changed(E.Delete(exchange="x"), exchange=""),
        "ACCESS_REFUSED - operation not permitted on the default exchange",
    ),
    row(
        "exchange.delete of amq.direct",
        E.Delete(exchange="amq.direct"),
        "ACCESS_REFUSED - deletion of system exchange 'amq.direct' in vhost '/' not allowed",
    ),
    row(
        "exchange.delete of amq.nonsense",
        E.Delete(exchange="amq.nonsense"),
        "ACCESS_REFUSED - deletion of system exchange 'amq.nonsense' in vhost '/' not allowed",
    ),
    row(
        "exchange.delete if-unused of a bound exchange",
        E.Delete(exchange="violation.direct", if_unused=True),
        "PRECONDITION_FAILED - exchange 'violation.direct' in vhost '/' in use",
        before=(DIRECT, MINE, Q.Bind(queue="violation.mine", exchange="violation.direct", routing_key="k")),
    ),
    row(
        "exchange.bind to a missing source",
        E.Bind(destination="amq.direct", source="violation.missing", routing_key="k"),
        "NOT_FOUND - no exchange 'violation.missing' in vhost '/'",
    ),
    row(
        "exchange.bind to a missing destination",
        E.Bind(destination="violation.missing", source="amq.direct", routing_key="k"),
        "NOT_FOUND - no exchange 'violation.missing' in vhost '/'",
    ),
    row(
        "exchange.bind from the default exchange",
        changed(E.Bind(destination="amq.direct", source="x", routing_key="k"), source=""),
        "ACCESS_REFUSED - operation not permitted on the default exchange",
    ),
    row(
        "exchange.bind to the default exchange",
        changed(E.Bind(destination="x", source="amq.direct", routing_key="k"), destination=""),
        "ACCESS_REFUSED - operation not permitted on the default exchange",
    ),
    row(
        "exchange.unbind from a missing source",
        E.Unbind(destination="amq.direct", source="violation.missing", routing_key="k"),
    ),
    row(
        "exchange.unbind of a missing destination",
        E.Unbind(destination="violation.missing", source="amq.direct", routing_key="k"),
    ),
    row(
        "exchange.unbind from the default exchange",
        changed(E.Unbind(destination="amq.direct", source="x", routing_key="k"), source=""),
        "ACCESS_REFUSED - operation not permitted on the default exchange",
    ),
    row(
        "exchange.unbind of what was never bound",
        E.Unbind(destination="amq.direct", source="amq.fanout", routing_key="k"),
    ),
    row(
        "exchange.bind to a headers exchange with a wrong x-match",
        E.Bind(destination="amq.direct", source="amq.headers", arguments={"x-match": "some"}),
        'PRECONDITION_FAILED - Invalid x-match field value <<"some">>; expected all, any, '
        "all-with-x, or any-with-x",
    ),
]

NO_QUEUE = "violation.missing"
QUEUES = [
    row(
        "queue.declare passive of a missing queue",
        Q.Declare(queue=NO_QUEUE, passive=True),
        "NOT_FOUND - no queue 'violation.missing' in vhost '/'",
    ),
    row(
        "queue.bind of a missing queue",
        Q.Bind(queue=NO_QUEUE, exchange="amq.direct", routing_key="k"),
        "NOT_FOUND - no queue 'violation.missing' in vhost '/'",
    ),
    row("queue.unbind of a missing queue", Q.Unbind(queue=NO_QUEUE, exchange="amq.direct", routing_key="k")),
    row(
        "queue.purge of a missing queue",
        Q.Purge(queue=NO_QUEUE),
        "NOT_FOUND - no queue 'violation.missing' in vhost '/'",
    ),
    row("queue.delete of a missing queue", Q.Delete(queue=NO_QUEUE)),
    row("queue.delete if-unused of a missing queue", Q.Delete(queue=NO_QUEUE, if_unused=True)),
    row(
        "basic.get from a missing queue",
        B.Get(queue=NO_QUEUE),
        "NOT_FOUND - no queue 'violation.missing' in vhost '/'",
    ),
    row(
        "basic.consume of a missing queue",
        B.Consume(queue=NO_QUEUE),
        "NOT_FOUND - no queue 'violation.missing' in vhost '/'",
    ),
    on_mine(
        "queue.bind to a missing exchange",
        Q.Bind(queue="violation.mine", exchange="violation.missing", routing_key="k"),
        "NOT_FOUND - no exchange 'violation.missing' in vhost '/'",
    ),
    on_mine(
        "queue.unbind from a missing exchange",
        Q.Unbind(queue="violation.mine", exchange="violation.missing", routing_key="k"),
    ),
    row(
        "queue.bind of a missing queue to a missing exchange",
        Q.Bind(queue=NO_QUEUE, exchange="violation.missing", routing_key="k"),
        "NOT_FOUND - no exchange 'violation.missing' in vhost '/'",
    ),
    on_mine(
        "queue.bind to the default exchange",
        changed(Q.Bind(queue="violation.mine", exchange="x", routing_key="k"), exchange=""),
        "ACCESS_REFUSED - operation not permitted on the default exchange",
    ),
    on_mine(
        "queue.unbind from the default exchange",
        changed(Q.Unbind(queue="violation.mine", exchange="x", routing_key="violation.mine"), exchange=""),
        "ACCESS_REFUSED - operation not permitted on the default exchange",
    ),
    on_mine(
        "queue.unbind of what was never bound",
        Q.Unbind(queue="violation.mine", exchange="amq.direct", routing_key="never"),
    ),
    on_mine(
        "queue.bind to a headers exchange with a wrong x-match",
        Q.Bind(queue="violation.mine", exchange="amq.headers", arguments={"x-match": "some"}),
        'PRECONDITION_FAILED - Invalid x-match field value <<"some">>; expected all, any, '
        "all-with-x, or any-with-x",
    ),
    on_mine(
        "queue.bind to a headers exchange with an x-match that is a number",
        Q.Bind(queue="violation.mine", exchange="amq.headers", arguments={"x-match": 100_000}),
        "PRECONDITION_FAILED - Invalid x-match field type signedint (value 100000); expected longstr",
    ),
    on_mine(
        "queue.bind to a headers exchange without x-match",
        Q.Bind(queue="violation.mine", exchange="amq.headers", arguments={"a": 5}),
    ),
    row(
        "queue.bind without a queue that was declared",
        changed(Q.Bind(queue="x", exchange="amq.direct", routing_key="k"), queue=""),
        "NOT_FOUND - no previously declared queue",
    ),
    row(
        "queue.purge without a queue that was declared",
        changed(Q.Purge(queue="x"), queue=""),
        "NOT_FOUND - no previously declared queue",
    ),
    row(
        "queue.delete without a queue that was declared",
        changed(Q.Delete(queue="x"), queue=""),
        "NOT_FOUND - no previously declared queue",
    ),
    row(
        "queue.declare passive without a queue that was declared",
        Q.Declare(queue="", passive=True),
        "NOT_FOUND - no queue '' in vhost '/'",
    ),
    row(
        "basic.get without a queue that was declared",
        changed(B.Get(queue="x"), queue=""),
        "NOT_FOUND - no previously declared queue",
    ),
    row(
        "basic.consume without a queue that was declared",
        changed(B.Consume(queue="x"), queue=""),
        "NOT_FOUND - no previously declared queue",
    ),
    row(
        "queue.declare of a reserved name",
        Q.Declare(queue="amq.violation"),
        "ACCESS_REFUSED - queue name 'amq.violation' contains reserved prefix 'amq.*'",
    ),
    row(
        "queue.declare passive of a missing reserved name",
        Q.Declare(queue="amq.violation", passive=True),
        "NOT_FOUND - no queue 'amq.violation' in vhost '/'",
    ),
    row("queue.delete of a missing reserved name", Q.Delete(queue="amq.violation")),
    on_mine(
        "queue.declare again as durable, of an exclusive queue",
        Q.Declare(queue="violation.mine", exclusive=True, durable=True),
    ),
    row(
        "queue.declare again with durability",
        Q.Declare(queue="violation.plain", durable=True, auto_delete=True),
        inequivalent("durable", "queue 'violation.plain'", "received 'true' but current is 'false'"),
        before=(Q.Declare(queue="violation.plain", auto_delete=True), B.Consume(queue="violation.plain")),
    ),
    on_mine(
        "queue.declare again as not exclusive", Q.Declare(queue="violation.mine"), locked("violation.mine")
    ),
    row(
        "queue.declare again as exclusive",
        Q.Declare(queue="violation.plain", exclusive=True, auto_delete=True),
        locked("violation.plain"),
        before=(Q.Declare(queue="violation.plain", auto_delete=True), B.Consume(queue="violation.plain")),
    ),
    on_mine(
        "queue.declare again with auto-delete",
        Q.Declare(queue="violation.mine", exclusive=True, auto_delete=True),
        inequivalent("auto_delete", "queue 'violation.mine'", "received 'true' but current is 'false'"),
    ),
    row(
        "queue.declare again with a time to live",
        queue({"x-message-ttl": 100_000}),
        inequivalent(
            "x-message-ttl",
            "queue 'violation.arguments'",
            "received the value '100000' of type 'signedint' but current is none",
        ),
        before=(queue({}),),
    ),
    row(
        "queue.declare again with another time to live",
        queue({"x-message-ttl": 100_000}),
        inequivalent(
            "x-message-ttl", "queue 'violation.arguments'", "received '100000' but current is '200000'"
        ),
        before=(queue({"x-message-ttl": 200_000}),),
    ),
    row(
        "queue.declare again without a time to live",
        queue({}),
        inequivalent(
            "x-message-ttl",
            "queue 'violation.arguments'",
            "received none but current is the value '200000' of type 'signedint'",
        ),
        before=(queue({"x-message-ttl": 200_000}),),
    ),
    row(
        "queue.declare again with the same value of another integer type",
        queue({"x-message-ttl": 1 << 20}),
        before=(queue({"x-message-ttl": 1 << 20}),),
    ),
    row(
        "queue.declare again with another length",
        queue({"x-max-length": 5}),
        inequivalent("x-max-length", "queue 'violation.arguments'", "received '5' but current is '6'"),
        before=(queue({"x-max-length": 6}),),
    ),
    row(
        "queue.declare again with another dead-letter exchange",
        queue({"x-dead-letter-exchange": "a"}),
        inequivalent(
            "x-dead-letter-exchange", "queue 'violation.arguments'", "received 'a' but current is 'b'"
        ),
        before=(queue({"x-dead-letter-exchange": "b"}),),
    ),
    row(
        "queue.declare again with another overflow",
        queue({"x-max-length": 5, "x-overflow": "reject-publish"}),
        inequivalent(
            "x-overflow",
            "queue 'violation.arguments'",
            "received 'reject-publish' but current is 'drop-head'",
        ),
        before=(queue({"x-max-length": 5, "x-overflow": "drop-head"}),),
    ),
    row(
        "queue.declare again with another priority",
        queue({"x-max-priority": 5}),
        inequivalent("x-max-priority", "queue 'violation.arguments'", "received '5' but current is '6'"),
        before=(queue({"x-max-priority": 6}),),
    ),
    row(
        "queue.delete if-unused of a consumed queue",
        Q.Delete(queue="violation.mine", if_unused=True),
        "PRECONDITION_FAILED - queue 'violation.mine' in vhost '/' in use",
        before=(MINE, B.Consume(queue="violation.mine")),
    ),
    row(
        "queue.delete if-empty of a filled queue",
        Q.Delete(queue="violation.mine", if_empty=True),
        "PRECONDITION_FAILED - queue 'violation.mine' in vhost '/' not empty",
        before=(MINE, MESSAGE),
    ),
]

ROWS = EXCHANGES + QUEUES
