"""Exchanges, bindings and queues as declared over pika: what is equivalent, what is refused with which words,
what goes when.
"""

from __future__ import annotations

from typing import Any

import pytest
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection

from tests.interop.asking import Inbox, channel_refuses, connection_refuses, counts, drain, get_one, publish
from tests.interop.conftest import Connect, Fresh
from tests.progress import wait_until


def bound(
    channel: BlockingChannel, fresh: Fresh, kind: str, *bindings: tuple[str, str, dict[str, Any] | None]
) -> tuple[str, dict[str, str]]:
    """An exchange of ``kind`` and, for each (word, key, arguments), a queue bound to it."""
    exchange = fresh(kind)
    channel.exchange_declare(exchange, kind)
    queues = {}
    for word, key, arguments in bindings:
        queues.setdefault(word, fresh(word))
        channel.queue_declare(queues[word])
        channel.queue_bind(queues[word], exchange, key, arguments)
    return exchange, queues


def reached(channel: BlockingChannel, queues: dict[str, str]) -> dict[str, list[str]]:
    return {word: [body.decode() for body in drain(channel, queue)] for word, queue in queues.items()}


# --- exchange types ---------------------------------------------------------------------------------------------------


def test_direct_compares_keys_and_gives_each_queue_one_copy(channel: BlockingChannel, fresh: Fresh) -> None:
    exchange, queues = bound(
        channel, fresh, "direct", ("a", "x", None), ("b", "x", None), ("b", "y", None), ("c", "", None)
    )
    for key in ("x", "y", "", "z"):
        publish(channel, key, key or "empty", exchange=exchange)
    assert reached(channel, queues) == {"a": ["x"], "b": ["x", "y"], "c": ["empty"]}


def test_fanout_takes_no_notice_of_keys(channel: BlockingChannel, fresh: Fresh) -> None:
    exchange, queues = bound(
        channel, fresh, "fanout", ("a", "x", None), ("b", "", None), ("b", "again", None)
    )
    publish(channel, "whatever", "1", exchange=exchange)
    assert reached(channel, queues) == {"a": ["1"], "b": ["1"]}


def test_topic_matches_words_with_star_and_hash(channel: BlockingChannel, fresh: Fresh) -> None:
    patterns = ("a.b", "a.*", "*.b", "a.#", "#.c", "#", "*", "a.#.c", "#.#", "")
    exchange, queues = bound(
        channel, fresh, "topic", *((pattern or "empty", pattern, None) for pattern in patterns)
    )
    for key in ("a", "a.b", "a.b.c", "a.c", "x.b", "", "a..c"):
        publish(channel, key, key or "-", exchange=exchange)
    assert reached(channel, queues) == {
        "a.b": ["a.b"],
        "a.*": ["a.b", "a.c"],
        "*.b": ["a.b", "x.b"],
        "a.#": ["a", "a.b", "a.b.c", "a.c", "a..c"],
        "#.c": ["a.b.c", "a.c", "a..c"],
        "#": ["a", "a.b", "a.b.c", "a.c", "x.b", "-", "a..c"],
        "*": ["a"],
        "a.#.c": ["a.b.c", "a.c", "a..c"],
        "#.#": ["a", "a.b", "a.b.c", "a.c", "x.b", "-", "a..c"],
        "empty": ["-"],
    }


def test_headers_matches_all_or_any_and_ignores_x_names_but_not_in_the_x_forms(
    channel: BlockingChannel, fresh: Fresh
) -> None:
    exchange, queues = bound(
        channel, fresh, "headers",
        ("all", "", {"x-match": "all", "kind": "pdf", "pages": 2}),
        ("any", "", {"x-match": "any", "kind": "pdf", "pages": 2}),
        ("default", "", {"kind": "pdf"}),
        ("present", "", {"x-match": "all", "kind": None}),
        ("none", "", {"x-match": "all"}),
        ("x", "", {"x-match": "all", "x-ignored": 1, "kind": "txt"}),
    )  # fmt: skip
    for word, headers in (
        ("both", {"kind": "pdf", "pages": 2, "more": 1}), ("one", {"kind": "pdf", "pages": 3}), ("other", {"kind": "txt"}), ("bare", {}),
    ):  # fmt: skip
        publish(channel, "", word, exchange=exchange, headers=headers)
    assert reached(channel, queues) == {
        "all": ["both"], "any": ["both", "one"], "default": ["both", "one"], "present": ["both", "one", "other"],
        "none": ["both", "one", "other", "bare"], "x": ["other"],
    }  # fmt: skip


def test_an_x_match_that_is_neither_all_nor_any_is_406(channel: BlockingChannel, fresh: Fresh) -> None:
    exchange, queue = fresh("headers"), fresh("queue")
    channel.exchange_declare(exchange, "headers")
    channel.queue_declare(queue)
    channel_refuses(
        channel,
        lambda: channel.queue_bind(queue, exchange, "", {"x-match": "some"}),
        406,
        'PRECONDITION_FAILED - Invalid x-match field value <<"some">>; expected all, any, all-with-x, or '
        "any-with-x",
    )


def test_the_default_exchange_reaches_every_queue_by_its_name_and_cannot_be_touched(
    connection: BlockingConnection, channel: BlockingChannel, fresh: Fresh
) -> None:
    queue = fresh("queue")
    channel.queue_declare(queue)
    publish(channel, queue, "a")
    assert drain(channel, queue) == [b"a"]
    text = "ACCESS_REFUSED - operation not permitted on the default exchange"
    for action in (
        lambda one: one.queue_bind(queue, "", "key"),
        lambda one: one.queue_unbind(queue, "", "key"),
        lambda one: one.exchange_delete(""),
        lambda one: one.exchange_bind("amq.direct", "", "key"),
        lambda one: one.exchange_bind("", "amq.direct", "key"),
    ):
        refused = connection.channel()
        channel_refuses(refused, lambda one=refused, act=action: act(one), 403, text)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("amq.direct", "direct"),
        ("amq.fanout", "fanout"),
        ("amq.topic", "topic"),
        ("amq.headers", "headers"),
        ("amq.match", "headers"),
    ],
)
def test_the_predeclared_exchanges_are_there_and_durable_and_cannot_be_deleted(
    connection: BlockingConnection, channel: BlockingChannel, name: str, kind: str
) -> None:
    channel.exchange_declare(name, kind, passive=True)
    channel.exchange_declare(name, kind, durable=True)
    text = f"ACCESS_REFUSED - deletion of system exchange '{name}' in vhost '/' not allowed"
    channel_refuses(channel, lambda: channel.exchange_delete(name), 403, text)


# --- exchanges --------------------------------------------------------------------------------------------------------


def test_exchange_to_exchange_bindings_pass_messages_on_once_even_in_a_ring(
    channel: BlockingChannel, fresh: Fresh
) -> None:
    first, second, queue = fresh("first"), fresh("second"), fresh("queue")
    channel.exchange_declare(first, "topic")
    channel.exchange_declare(second, "fanout")
    channel.queue_declare(queue)
    channel.exchange_bind(second, first, "log.#")
    channel.exchange_bind(first, second)  # a ring
    channel.queue_bind(queue, second)
    channel.queue_bind(queue, first, "log.*")
    publish(channel, "log.a", "a", exchange=first)
    publish(channel, "other", "not passed on", exchange=first)
    publish(channel, "any", "b", exchange=second)
    assert drain(channel, queue) == [b"a", b"b"]
    channel.exchange_unbind(second, first, "log.#")
    channel.queue_unbind(queue, first, "log.*")
    publish(channel, "log.b", "c", exchange=first)
    assert drain(channel, queue) == []


def test_an_alternate_exchange_gets_what_finds_no_queue(channel: BlockingChannel, fresh: Fresh) -> None:
    main, rest, hit, miss = fresh("main"), fresh("rest"), fresh("hit"), fresh("miss")
    channel.exchange_declare(rest, "fanout")
    channel.exchange_declare(main, "direct", arguments={"alternate-exchange": rest})
    for queue in (hit, miss):
        channel.queue_declare(queue)
    channel.queue_bind(hit, main, "hit")
    channel.queue_bind(miss, rest)
    channel.confirm_delivery()
    for key in ("hit", "miss"):
        channel.basic_publish(main, key, key.encode(), mandatory=True)
    assert (drain(channel, hit), drain(channel, miss)) == ([b"hit"], [b"miss"])
    channel.exchange_delete(rest)
    publish(channel, "miss", "nowhere", exchange=main)  # the alternate exchange is missing, which is no error
    assert channel.is_open


def test_an_internal_exchange_takes_no_publishes_but_messages_of_exchanges(
    channel: BlockingChannel, fresh: Fresh
) -> None:
    inner, outer, queue = fresh("inner"), fresh("outer"), fresh("queue")
    channel.exchange_declare(inner, "fanout", internal=True)
    channel.exchange_declare(outer, "fanout")
    channel.exchange_bind(inner, outer)
    channel.queue_declare(queue)
    channel.queue_bind(queue, inner)
    publish(channel, "", "a", exchange=outer)
    assert drain(channel, queue) == [b"a"]
    channel_refuses(
        channel,
        lambda: publish(channel, "", "b", exchange=inner),
        403,
        f"ACCESS_REFUSED - cannot publish to internal exchange '{inner}' in vhost '/'",
    )


def test_an_auto_delete_exchange_goes_with_its_last_binding(channel: BlockingChannel, fresh: Fresh) -> None:
    exchange, queue = fresh("auto"), fresh("queue")
    channel.exchange_declare(exchange, "direct", auto_delete=True)
    channel.queue_declare(queue)
    channel.queue_bind(queue, exchange, "a")
    channel.queue_bind(queue, exchange, "b")
    channel.queue_unbind(queue, exchange, "a")
    channel.exchange_declare(exchange, "direct", passive=True)
    channel.queue_delete(queue)
    text = f"NOT_FOUND - no exchange '{exchange}' in vhost '/'"
    channel_refuses(channel, lambda: channel.exchange_declare(exchange, passive=True), 404, text)


DIVERTED = {"alternate-exchange": "amq.fanout"}
KINDS = {
    "exchange": {"exchange_type": "direct", "durable": True, "arguments": DIVERTED},
    "queue": {"durable": True, "arguments": {"x-max-length": 5}},
}
SHORT, DIVERTS = "the value '5' of type 'signedint'", "the value 'amq.fanout' of type 'longstr'"


@pytest.mark.parametrize(
    ("kind", "change", "argument", "received", "current"),
    [
        ("exchange", {"exchange_type": "fanout"}, "type", "'fanout'", "'direct'"),
        ("exchange", {"durable": False}, "durable", "'false'", "'true'"),
        ("exchange", {"auto_delete": True}, "auto_delete", "'true'", "'false'"),
        ("exchange", {"internal": True}, "internal", "'true'", "'false'"),
        ("exchange", {"arguments": {}}, "alternate-exchange", "none", DIVERTS),
        ("queue", {"durable": False}, "durable", "'false'", "'true'"),
        ("queue", {"auto_delete": True}, "auto_delete", "'true'", "'false'"),
        ("queue", {"arguments": {"x-max-length": 6}}, "x-max-length", "'6'", "'5'"),
        ("queue", {"arguments": {}}, "x-max-length", "none", SHORT),
        ("queue", {"arguments": {"x-max-length": 5, "x-message-ttl": 9}}, "x-message-ttl", SHORT.replace("5", "9"), "none"),
    ],
)  # fmt: skip
def test_the_same_may_be_declared_again_and_another_may_not(
    connection: BlockingConnection, fresh: Fresh, kind: str, change: dict[str, Any],
    argument: str, received: str, current: str,
) -> None:  # fmt: skip
    name = fresh(kind)

    def declare(channel: BlockingChannel, **other: Any) -> None:
        getattr(channel, f"{kind}_declare")(name, **{**KINDS[kind], **other})

    for _ in range(2):
        declare(connection.channel())
    channel = connection.channel()
    text = f"inequivalent arg '{argument}' for {kind} '{name}' in vhost '/': received {received} but current is {current}"
    channel_refuses(channel, lambda: declare(channel, **change), 406, f"PRECONDITION_FAILED - {text}")


def test_an_unknown_exchange_type_closes_the_connection_with_503(
    connection: BlockingConnection, channel: BlockingChannel, fresh: Fresh
) -> None:
    connection_refuses(
        connection,
        lambda: channel.exchange_declare(fresh("x"), "no-such"),
        503,
        "COMMAND_INVALID - unknown exchange type 'no-such'",
    )


def test_names_that_start_with_amq_are_reserved(connection: BlockingConnection) -> None:
    for action, text in (
        (
            lambda one: one.exchange_declare("amq.mine", "direct"),
            "exchange name 'amq.mine' contains reserved prefix 'amq.*'",
        ),
        (lambda one: one.queue_declare("amq.mine"), "queue name 'amq.mine' contains reserved prefix 'amq.*'"),
    ):
        channel = connection.channel()
        channel_refuses(channel, lambda one=channel, act=action: act(one), 403, f"ACCESS_REFUSED - {text}")


def test_deleting_an_exchange_if_unused_and_a_missing_one(channel: BlockingChannel, fresh: Fresh) -> None:
    exchange, queue = fresh("exchange"), fresh("queue")
    channel.exchange_delete(exchange)  # it is not there, which is no error
    channel.exchange_declare(exchange, "direct")
    channel.queue_declare(queue)
    channel.queue_bind(queue, exchange, "key")
    refused = channel.connection.channel()
    text = f"PRECONDITION_FAILED - exchange '{exchange}' in vhost '/' in use"
    channel_refuses(refused, lambda: refused.exchange_delete(exchange, if_unused=True), 406, text)
    channel.queue_unbind(queue, exchange, "key")
    channel.exchange_delete(exchange, if_unused=True)


def test_bindings_with_a_missing_end_are_404_and_unbinding_what_is_not_bound_is_no_error(
    connection: BlockingConnection, channel: BlockingChannel, fresh: Fresh
) -> None:
    queue, exchange, missing = fresh("queue"), fresh("exchange"), fresh("missing")
    channel.queue_declare(queue)
    channel.exchange_declare(exchange, "direct")
    channel.queue_unbind(queue, exchange, "never bound")
    channel.exchange_unbind(exchange, "amq.direct", "never bound")
    no_queue, no_exchange = (
        f"NOT_FOUND - no queue '{missing}' in vhost '/'",
        f"NOT_FOUND - no exchange '{missing}' in vhost '/'",
    )
    for action, text in (
        (lambda one: one.queue_bind(missing, exchange, "k"), no_queue),
        (lambda one: one.queue_bind(queue, missing, "k"), no_exchange),
        (lambda one: one.exchange_bind(missing, exchange, "k"), no_exchange),
        (lambda one: one.exchange_bind(exchange, missing, "k"), no_exchange),
        (lambda one: one.exchange_declare(missing, passive=True), no_exchange),
        (lambda one: one.queue_declare(missing, passive=True), no_queue),
        (lambda one: one.queue_purge(missing), no_queue),
    ):
        refused = connection.channel()
        channel_refuses(refused, lambda one=refused, act=action: act(one), 404, text)


def test_a_binding_made_twice_is_one(channel: BlockingChannel, fresh: Fresh) -> None:
    exchange, queues = bound(channel, fresh, "direct", ("a", "k", None), ("a", "k", None))
    publish(channel, "k", "1", exchange=exchange)
    assert reached(channel, queues) == {"a": ["1"]}
    channel.queue_unbind(queues["a"], exchange, "k")
    publish(channel, "k", "2", exchange=exchange)
    assert reached(channel, queues) == {"a": []}


# --- queues -----------------------------------------------------------------------------------------------------------


def test_a_queue_without_a_name_gets_one_and_is_the_one_meant_by_no_name(channel: BlockingChannel) -> None:
    first = channel.queue_declare("", exclusive=True).method.queue
    assert first.startswith("amq.gen-")
    second = channel.queue_declare("", exclusive=True).method.queue
    assert second not in ("", first)
    channel.queue_bind("", "amq.fanout")
    publish(channel, second, "a")
    assert channel.basic_get("", auto_ack=True)[2] == b"a"
    publish(channel, second, "b", "c")
    assert channel.queue_purge("").method.message_count == 2
    assert channel.queue_delete("").method.message_count == 0


def test_no_queue_name_before_any_declaration_is_refused(
    connection: BlockingConnection, channel: BlockingChannel
) -> None:
    channel_refuses(channel, lambda: channel.basic_get(""), 404, "NOT_FOUND - no previously declared queue")


def test_declare_tells_messages_and_consumers_and_delete_and_purge_how_many_went(
    channel: BlockingChannel, other: BlockingChannel, fresh: Fresh
) -> None:
    queue = fresh("queue")
    answer = channel.queue_declare(queue).method
    assert (answer.queue, answer.message_count, answer.consumer_count) == (queue, 0, 0)
    publish(channel, queue, *"abcde")
    wait_until(lambda: counts(channel, queue) == (5, 0))
    get_one(channel, queue)
    wait_until(lambda: counts(channel, queue) == (4, 0))
    assert channel.queue_purge(queue).method.message_count == 4
    channel.basic_nack(1, requeue=True)  # the purge did not take what was out
    wait_until(lambda: counts(channel, queue) == (1, 0))
    other.basic_qos(prefetch_count=1)
    other.basic_consume(queue, lambda *_: None)
    wait_until(lambda: counts(channel, queue) == (0, 1))
    publish(channel, queue, "f", "g")
    wait_until(lambda: counts(channel, queue) == (2, 1))
    assert channel.queue_delete(queue).method.message_count == 2
    # it is not there any more, which is no error
    assert channel.queue_delete(queue).method.message_count == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"x-message-ttl": -1},
            "invalid arg 'x-message-ttl' for queue '{}' in vhost '/': {{value_negative,-1}}",
        ),
        (
            {"x-message-ttl": "1"},
            "invalid arg 'x-message-ttl' for queue '{}' in vhost '/': \"expected integer, got longstr\"",
        ),
        ({"x-expires": 0}, "invalid arg 'x-expires' for queue '{}' in vhost '/': {{value_zero,0}}"),
        (
            {"x-max-length": -5},
            "invalid arg 'x-max-length' for queue '{}' in vhost '/': {{value_negative,-5}}",
        ),
        ({"x-overflow": "burn"}, "invalid arg 'x-overflow' for queue '{}' in vhost '/': invalid_overflow"),
        (
            {"x-max-priority": 256},
            "invalid arg 'x-max-priority' for queue '{}' in vhost '/': {{max_value_exceeded,256}}",
        ),
        (
            {"x-dead-letter-routing-key": "k"},
            "invalid arg 'x-dead-letter-routing-key' for queue '{}' in vhost '/': "
            "routing_key_but_no_dlx_defined",
        ),
        (
            {"x-dead-letter-exchange": 5},
            "invalid type 'signedint' for arg 'x-dead-letter-exchange' in queue '{}' in vhost '/'",
        ),
    ],
    ids=str,
)
def test_wrong_queue_arguments_are_406(
    channel: BlockingChannel, fresh: Fresh, arguments: dict[str, Any], text: str
) -> None:
    queue = fresh("queue")
    channel_refuses(
        channel,
        lambda: channel.queue_declare(queue, arguments=arguments),
        406,
        f"PRECONDITION_FAILED - {text.format(queue)}",
    )


def test_an_exclusive_queue_is_its_connections_alone_and_goes_with_it(
    connect: Connect, connection: BlockingConnection, fresh: Fresh
) -> None:
    queue, owner = fresh("queue"), connect()
    own = owner.channel()
    own.queue_declare(queue, exclusive=True)
    own.queue_bind(queue, "amq.fanout")
    publish(own, queue, "a")
    text = (
        f"RESOURCE_LOCKED - cannot obtain exclusive access to locked queue '{queue}' in vhost '/'. It could "
        "be originally declared on "
        "another connection or the exclusive property value does not match that of the original declaration."
    )
    for action in (
        lambda one: one.queue_declare(queue, passive=True),
        lambda one: one.queue_declare(queue, exclusive=True),
        lambda one: one.queue_bind(queue, "amq.fanout"),
        lambda one: one.queue_unbind(queue, "amq.fanout"),
        lambda one: one.basic_get(queue),
        lambda one: one.basic_consume(queue, lambda *_: None),
        lambda one: one.queue_purge(queue),
        lambda one: one.queue_delete(queue),
    ):
        channel = connection.channel()
        channel_refuses(channel, lambda one=channel, act=action: act(one), 405, text)
    publish(connection.channel(), queue, "b")  # anybody may publish to it
    wait_until(lambda: counts(own, queue) == (2, 0))
    owner.close()
    missing = connection.channel()
    channel_refuses(
        missing,
        lambda: missing.queue_declare(queue, passive=True),
        404,
        f"NOT_FOUND - no queue '{queue}' in vhost '/'",
    )


def test_an_auto_delete_queue_goes_with_its_last_consumer_and_not_before_it_had_one(
    connection: BlockingConnection, channel: BlockingChannel, fresh: Fresh
) -> None:
    queue = fresh("queue")
    channel.queue_declare(queue, auto_delete=True)
    publish(channel, queue, "a")
    first = channel.basic_consume(queue, lambda *_: None)
    second = connection.channel()
    second.basic_consume(queue, lambda *_: None)
    channel.basic_cancel(first)
    assert counts(channel, queue)[1] == 1
    second.close()
    channel_refuses(
        channel,
        lambda: channel.queue_declare(queue, passive=True),
        404,
        f"NOT_FOUND - no queue '{queue}' in vhost '/'",
    )


def test_delete_if_empty_and_if_unused_are_406_while_there_are_messages_or_consumers(
    connection: BlockingConnection, channel: BlockingChannel, fresh: Fresh
) -> None:
    queue = fresh("queue")
    channel.queue_declare(queue)
    publish(channel, queue, "a")
    counts(channel, queue)
    refused = connection.channel()
    text = f"PRECONDITION_FAILED - queue '{queue}' in vhost '/' not empty"
    channel_refuses(refused, lambda: refused.queue_delete(queue, if_empty=True), 406, text)
    inbox = Inbox(channel, queue)
    inbox.wait(1)
    refused = connection.channel()
    text = f"PRECONDITION_FAILED - queue '{queue}' in vhost '/' in use"
    channel_refuses(refused, lambda: refused.queue_delete(queue, if_unused=True), 406, text)
    channel.basic_cancel(inbox.tag)
    channel.basic_ack(0, multiple=True)
    assert channel.queue_delete(queue, if_unused=True, if_empty=True).method.message_count == 0
