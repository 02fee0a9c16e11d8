"""What queues do by themselves: time to live, limits, dead letters with their x-death, priorities, delivery
limits.
"""

from __future__ import annotations

from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import ChannelClosedByBroker, NackError

from tests.interop.asking import Got, Inbox, channel_refuses, counts, drain, get, get_one, publish
from tests.interop.conftest import Fresh
from tests.progress import wait_until


@pytest.fixture
def dead(channel: BlockingChannel, fresh: Fresh) -> str:
    """A queue for dead letters."""
    name = fresh("dead")
    channel.queue_declare(name)
    return name


def declare(channel: BlockingChannel, queue: str, dead: str = "", **arguments: Any) -> None:
    """A queue with ``x-`` arguments, named here with underscores; ``dead`` gets its dead letters."""
    table = {f"x-{name.replace('_', '-')}": value for name, value in arguments.items()}
    if dead:
        table |= {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}
    channel.queue_declare(queue, durable=True, arguments=table)


def deaths(letter: Got) -> list[tuple[str, str, int]]:
    return [
        (death["queue"], death["reason"], death["count"]) for death in letter.properties.headers["x-death"]
    ]


# --- time to live -----------------------------------------------------------------------------------------------------


def test_messages_expire_after_the_ttl_of_their_queue(
    channel: BlockingChannel, fresh: Fresh, dead: str
) -> None:
    queue = fresh("queue")
    declare(channel, queue, dead, message_ttl=60)
    publish(channel, queue, "a", "b")
    letters = [get_one(channel, dead, auto_ack=True) for _ in range(2)]
    assert [(letter.body, deaths(letter)) for letter in letters] == [
        (b"a", [(queue, "expired", 1)]),
        (b"b", [(queue, "expired", 1)]),
    ]
    assert counts(channel, queue) == (0, 0) and get(channel, queue) is None


def test_a_message_expires_after_its_own_ttl_or_the_queues_whichever_is_shorter(
    channel: BlockingChannel, fresh: Fresh, dead: str
) -> None:
    queue = fresh("queue")
    declare(channel, queue, dead, message_ttl=60_000)
    publish(channel, queue, "short", expiration="30")
    publish(channel, queue, "long", expiration="999999999")
    letter = get_one(channel, dead, auto_ack=True)
    assert letter.body == b"short"
    assert letter.properties.expiration is None  # it must not expire again
    assert letter.properties.headers["x-death"][0]["original-expiration"] == "30"
    assert deaths(letter) == [(queue, "expired", 1)]
    assert drain(channel, queue) == [b"long"]


def test_a_message_expires_only_at_the_head_and_is_never_delivered_late(
    channel: BlockingChannel, fresh: Fresh, dead: str
) -> None:
    queue = fresh("queue")
    declare(channel, queue, dead)
    publish(channel, queue, "blocks")
    publish(channel, queue, "expires", expiration="1")
    held = get_one(channel, queue)
    assert get_one(channel, dead).body == b"expires"
    channel.basic_nack(held.tag)
    assert get_one(channel, queue).body == b"blocks"


@pytest.mark.parametrize("ttl", ["queue", "message"])
def test_with_a_ttl_of_0_a_message_goes_to_a_waiting_consumer_or_nowhere(
    channel: BlockingChannel, fresh: Fresh, ttl: str
) -> None:
    queue = fresh("queue")
    properties = {"expiration": "0"} if ttl == "message" else {}
    declare(channel, queue, **({"message_ttl": 0} if ttl == "queue" else {}))
    publish(channel, queue, "lost", **properties)
    wait_until(lambda: counts(channel, queue) == (0, 0))
    inbox = Inbox(channel, queue, auto_ack=True)
    publish(channel, queue, "given", **properties)
    assert [one.body for one in inbox.wait(1)] == [b"given"]


@pytest.mark.parametrize(
    ("expiration", "why"), [("abc", "no_integer"), ("-1", "{value_negative,-1}"), ("", "no_integer")]
)
def test_an_expiration_that_is_no_number_closes_the_channel_with_406(
    channel: BlockingChannel, fresh: Fresh, expiration: str, why: str
) -> None:
    queue = fresh("queue")
    declare(channel, queue)
    channel_refuses(
        channel,
        lambda: publish(channel, queue, "x", expiration=expiration),
        406,
        f"PRECONDITION_FAILED - invalid expiration '{expiration}': {why}",
    )


def test_an_unused_queue_expires_and_one_in_use_does_not(
    channel: BlockingChannel, other: BlockingChannel, fresh: Fresh
) -> None:
    used, unused = fresh("used"), fresh("unused")
    for queue in (used, unused):
        declare(channel, queue, expires=300)
    other.basic_consume(used, lambda *_: None)

    def gone() -> bool:
        probe = channel.connection.channel()
        try:
            probe.queue_bind(unused, "amq.fanout")
        except ChannelClosedByBroker as refusal:
            return bool(refusal.reply_code == 404)
        probe.close()
        return False

    wait_until(gone)
    assert counts(channel, used) == (0, 1)


# --- limits -----------------------------------------------------------------------------------------------------------


def test_over_max_length_the_oldest_go_to_the_dead_letter_exchange(
    channel: BlockingChannel, fresh: Fresh, dead: str
) -> None:
    queue = fresh("queue")
    declare(channel, queue, dead, max_length=3)
    publish(channel, queue, *"abcde")
    letters = [get_one(channel, dead, auto_ack=True) for _ in range(2)]
    assert [(one.body, deaths(one)) for one in letters] == [
        (b"a", [(queue, "maxlen", 1)]),
        (b"b", [(queue, "maxlen", 1)]),
    ]
    assert drain(channel, queue) == [b"c", b"d", b"e"]


def test_unacked_messages_do_not_count_towards_max_length(channel: BlockingChannel, fresh: Fresh) -> None:
    queue = fresh("queue")
    declare(channel, queue, max_length=2)
    publish(channel, queue, "a", "b")
    get_one(channel, queue)
    get_one(channel, queue)
    publish(channel, queue, "c", "d")
    wait_until(lambda: counts(channel, queue) == (2, 0))
    assert drain(channel, queue) == [b"c", b"d"]


def test_a_requeued_message_that_finds_its_place_taken_is_dropped_as_the_oldest(
    channel: BlockingChannel, fresh: Fresh, dead: str
) -> None:
    queue = fresh("queue")
    declare(channel, queue, dead, max_length=2)
    publish(channel, queue, "a", "b")
    tag = get_one(channel, queue).tag
    publish(channel, queue, "c")
    channel.basic_nack(tag, requeue=True)
    letter = get_one(channel, dead)
    assert (letter.body, deaths(letter)) == (b"a", [(queue, "maxlen", 1)])
    assert drain(channel, queue) == [b"b", b"c"]


def test_over_max_length_bytes_the_oldest_go(channel: BlockingChannel, fresh: Fresh) -> None:
    queue = fresh("queue")
    declare(channel, queue, max_length_bytes=100)
    publish(channel, queue, b"a" * 60, b"b" * 40, b"c" * 50)
    wait_until(lambda: counts(channel, queue) == (2, 0))
    assert drain(channel, queue) == [b"b" * 40, b"c" * 50]


def test_reject_publish_refuses_the_newest_and_without_confirms_nobody_is_told(
    channel: BlockingChannel, fresh: Fresh
) -> None:
    queue = fresh("queue")
    declare(channel, queue, max_length=2, overflow="reject-publish")
    publish(channel, queue, *"abcd")
    wait_until(lambda: counts(channel, queue) == (2, 0))
    assert drain(channel, queue) == [b"a", b"b"]


def test_reject_publish_dlx_dead_letters_what_it_refuses_and_nacks_it(
    channel: BlockingChannel, fresh: Fresh, dead: str
) -> None:
    queue = fresh("queue")
    declare(channel, queue, dead, max_length=1, overflow="reject-publish-dlx")
    channel.confirm_delivery()
    publish(channel, queue, "a")
    with pytest.raises(NackError):
        publish(channel, queue, "b")
    letter = get_one(channel, dead)
    assert (letter.body, deaths(letter)) == (b"b", [(queue, "maxlen", 1)])


# --- dead letters -----------------------------------------------------------------------------------------------------


def test_a_dead_letter_carries_where_it_died_and_why_and_what_it_was(
    channel: BlockingChannel, fresh: Fresh
) -> None:
    exchange, queue, dead = fresh("exchange"), fresh("queue"), fresh("dead")
    channel.exchange_declare(exchange, "topic")
    channel.queue_declare(dead)
    channel.queue_bind(dead, exchange, "in.#")
    channel.queue_declare(queue, arguments={"x-dead-letter-exchange": exchange})
    channel.queue_bind(queue, exchange, "work.*")
    channel.queue_bind(dead, exchange, "work.*.never")
    channel.queue_unbind(dead, exchange, "in.#")
    channel.queue_bind(dead, exchange, "work.one")  # the letter keeps its routing key
    channel.queue_unbind(queue, exchange, "work.*")
    publish(channel, queue, "body", headers={"mine": "kept"}, correlation_id="c", priority=4)
    tag = get_one(channel, queue).tag
    channel.queue_bind(dead, exchange, queue)
    channel.basic_reject(tag, requeue=False)
    letter = get_one(channel, dead)
    assert (letter.body, letter.exchange, letter.routing_key, letter.redelivered) == (
        b"body",
        exchange,
        queue,
        False,
    )
    headers = letter.properties.headers
    headers.pop("x-original-transaction", None)  # of txmq alone
    (death,) = headers.pop("x-death")
    assert headers == {
        "mine": "kept", "x-first-death-exchange": "", "x-first-death-queue": queue, "x-first-death-reason": "rejected"
    }  # fmt: skip
    assert death.pop("time") is not None
    assert death == {
        "count": 1,
        "exchange": "",
        "queue": queue,
        "reason": "rejected",
        "routing-keys": [queue],
    }
    assert (
        letter.properties.correlation_id,
        letter.properties.priority,
        letter.properties.delivery_mode,
    ) == ("c", 4, 2)


def test_each_round_trip_counts_and_the_newest_death_comes_first(
    channel: BlockingChannel, fresh: Fresh
) -> None:
    work, wait = fresh("work"), fresh("wait")
    declare(channel, work, wait)
    declare(channel, wait, work, message_ttl=1)
    publish(channel, work, "again")
    for round_number in range(3):
        letter = get_one(channel, work)
        expected = [(wait, "expired", round_number), (work, "rejected", round_number)] if round_number else []
        assert (deaths(letter) if round_number else []) == expected
        channel.basic_reject(letter.tag, requeue=False)
    last = get_one(channel, work, auto_ack=True)
    assert deaths(last) == [(wait, "expired", 3), (work, "rejected", 3)]
    assert last.properties.headers["x-first-death-reason"] == "rejected"


def test_a_cycle_without_a_rejection_ends_with_the_message_dropped(
    channel: BlockingChannel, fresh: Fresh
) -> None:
    one, two = fresh("one"), fresh("two")
    declare(channel, one, two, message_ttl=1)
    declare(channel, two, one, message_ttl=1)
    channel.confirm_delivery()
    publish(channel, one, "round")
    probe = fresh("probe")
    channel.queue_declare(probe)
    wait_until(lambda: counts(channel, one) == (0, 0) and counts(channel, two) == (0, 0))
    assert (get(channel, one), get(channel, two)) == (None, None)


def test_a_missing_dead_letter_exchange_drops_without_an_error(
    channel: BlockingChannel, fresh: Fresh
) -> None:
    queue = fresh("queue")
    channel.queue_declare(queue, arguments={"x-dead-letter-exchange": fresh("missing")})
    publish(channel, queue, "a")
    channel.basic_reject(get_one(channel, queue).tag, requeue=False)
    assert counts(channel, queue) == (0, 0)
    assert channel.is_open


def test_cc_and_bcc_route_to_more_queues_and_bcc_is_taken_off(channel: BlockingChannel, fresh: Fresh) -> None:
    to, cc, bcc = fresh("to"), fresh("cc"), fresh("bcc")
    for queue in (to, cc, bcc):
        channel.queue_declare(queue)
    publish(channel, to, "m", headers={"CC": [cc, to], "BCC": [bcc], "kept": 1})
    got = [get_one(channel, queue) for queue in (to, cc, bcc)]
    assert [(one.body, one.routing_key, one.properties.headers) for one in got] == [
        (b"m", to, {"CC": [cc, to], "kept": 1})
    ] * 3
    assert get(channel, to) is None


# --- priorities and delivery limits -----------------------------------------------------------------------------------


def test_higher_priorities_come_first_and_equal_ones_in_order(channel: BlockingChannel, fresh: Fresh) -> None:
    queue = fresh("queue")
    declare(channel, queue, max_priority=5)
    for body, priority in (("a", None), ("b", 1), ("c", 5), ("d", 9), ("e", 0), ("f", 1)):
        publish(channel, queue, body, priority=priority)
    assert [get_one(channel, queue).body for _ in range(3)] == [b"c", b"d", b"b"]
    channel.basic_nack(3, multiple=True, requeue=True)
    wait_until(lambda: counts(channel, queue) == (6, 0))
    assert drain(channel, queue) == [b"c", b"d", b"b", b"f", b"a", b"e"]


def test_a_queue_without_max_priority_takes_no_notice_of_priorities(
    channel: BlockingChannel, fresh: Fresh
) -> None:
    queue = fresh("queue")
    declare(channel, queue)
    for body, priority in (("a", 1), ("b", 9)):
        publish(channel, queue, body, priority=priority)
    assert drain(channel, queue) == [b"a", b"b"]


def test_over_the_delivery_limit_a_message_is_dead_lettered_and_before_it_counts(
    channel: BlockingChannel, fresh: Fresh, dead: str
) -> None:
    queue = fresh("queue")
    declare(channel, queue, dead, delivery_limit=2, queue_type="quorum")
    publish(channel, queue, "poison")
    seen = []
    for _ in range(3):
        one = get_one(channel, queue)
        seen.append((one.redelivered, (one.properties.headers or {}).get("x-delivery-count")))
        channel.basic_nack(one.tag, requeue=True)
    letter = get_one(channel, dead, auto_ack=True)
    assert (letter.body, deaths(letter)) == (b"poison", [(queue, "delivery_limit", 1)])
    assert seen == [(False, 0), (True, 1), (True, 2)]
    assert get(channel, queue) is None


def test_a_user_id_that_is_not_the_connections_closes_the_channel_with_406(
    channel: BlockingChannel, fresh: Fresh
) -> None:
    queue = fresh("queue")
    declare(channel, queue)
    publish(channel, queue, "mine", user_id="guest")
    assert get_one(channel, queue).properties.user_id == "guest"
    channel_refuses(
        channel,
        lambda: publish(channel, queue, "x", user_id="somebody"),
        406,
        "PRECONDITION_FAILED - user_id property set to 'somebody' but authenticated user was 'guest'",
    )


@pytest.mark.parametrize("transient", [False, True])
def test_a_queue_that_is_deleted_and_made_again_is_empty(
    connection: BlockingConnection, fresh: Fresh, transient: bool
) -> None:
    channel, queue = connection.channel(), fresh("queue")
    for _ in range(2):
        channel.queue_declare(queue, durable=not transient)
        assert get(channel, queue) is None
        channel.basic_publish("", queue, b"x", pika.BasicProperties(delivery_mode=1 if transient else 2))
        wait_until(lambda: counts(channel, queue) == (1, 0))
        assert channel.queue_delete(queue).method.message_count == 1
