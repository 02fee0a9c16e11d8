"""``txmq message move``: which messages go where, and what they have there.

Not here: a mover or a broker that is killed (``tests/server/test_move_kill.py``).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from broker_core.launcher import Broker
from broker_core.message.properties import Properties
from tests.progress import wait_until
from txmq import cli, move


def _moved(capsys: pytest.CaptureFixture[str], url: str, *arguments: str) -> Any:
    code = cli.main(["message", "move", *arguments, "--yes", "--json", "--url", url])
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    return json.loads(captured.out)


def _refused(capsys: pytest.CaptureFixture[str], url: str, *arguments: str) -> str:
    code = cli.main(["message", "move", *arguments, "--url", url])
    captured = capsys.readouterr()
    assert (code, captured.out) == (1, "") and captured.err.count("\n") == 1
    return captured.err


def _declare(broker: Broker, dead: str = "dead", *sources: str, **arguments: Any) -> None:
    with broker.channel() as channel:
        channel.queue_declare(dead, arguments=arguments)
        for name in sources:
            route = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}
            channel.queue_declare(name, arguments=route)


def _reject(broker: Broker, queue: str, *bodies: bytes, properties: Properties | None = None) -> None:
    """Publishes bodies, and rejects them."""
    with broker.channel() as channel:
        for body in bodies:
            channel.publish(body, routing_key=queue, properties=properties or b"")
        for _ in bodies:
            delivery = channel.get(queue)
            assert delivery is not None
            channel.reject(delivery.tag, requeue=False)


def _contents(broker: Broker, queue: str) -> list[tuple[bytes, Properties, bool]]:
    found = []
    with broker.channel() as channel:
        while (delivery := channel.get(queue)) is not None:
            properties = Properties.decode(delivery.message.properties)
            found.append((delivery.body, properties, delivery.redelivered))
    return found


def _bodies(broker: Broker, queue: str) -> list[bytes]:
    return [body for body, _, _ in _contents(broker, queue)]


def test_dead_letters_go_back_to_the_queues_where_they_died_with_all_that_they_had(
    broker: Broker, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _declare(broker, "dead", "a", "b")
    given = Properties(content_type="text/x", headers={"k": 1}, correlation_id="c", delivery_mode=2)
    _reject(broker, "a", b"1", b"2", properties=given)
    _reject(broker, "b", b"3")
    with broker.channel() as channel:
        channel.publish(b"no dead letter", routing_key="dead")
    assert _moved(capsys, url, "dead", "--back") == {
        "queue": "dead",
        "moved": {"a": 2, "b": 1},
        "missed": 0,
        "absent": {},
    }
    first, second = _contents(broker, "a")
    assert (first[0], second[0], _bodies(broker, "b")) == (b"1", b"2", [b"3"])
    deaths = first[1].headers.pop(move.PREVIOUS)
    assert [(each["queue"], each["reason"], each["count"]) for each in deaths] == [("a", "rejected", 1)]
    assert first[1] == given
    # what stays was not touched
    assert _contents(broker, "dead") == [(b"no dead letter", Properties(), False)]


def test_a_message_that_went_back_may_die_there_again_and_again(
    broker: Broker, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a rejection: with its old deaths it would be dropped as a cycle."""
    with broker.channel() as channel:
        channel.queue_declare("dead")
        route = {"x-dead-letter-exchange": "", "x-message-ttl": 1}
        channel.queue_declare("later", arguments={**route, "x-dead-letter-routing-key": "dead"})
        channel.queue_declare("first", arguments={**route, "x-dead-letter-routing-key": "later"})
        channel.publish(b"m", routing_key="first")
    for times in range(1, 4):
        wait_until(lambda: [each.messages for each in broker.queues() if each.name == "dead"] == [1])
        ((body, properties, _),) = _contents(broker, "dead")
        assert (body, properties.headers["x-first-death-queue"]) == (b"m", "first")
        assert [each["queue"] for each in properties.headers["x-death"]] == ["later", "first"]
        assert len(properties.headers.get(move.PREVIOUS, ())) == 2 * (times - 1)
        assert _moved(capsys, url, "dead", "--back")["moved"] == {"first": 1}


def test_only_what_died_for_the_reason_and_only_the_oldest_ones_move(
    broker: Broker, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _declare(broker, "dead", "a")
    with broker.channel() as channel:
        route = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
        channel.queue_declare("short", arguments={**route, "x-max-length": 0})
        channel.queue_declare("other")
        channel.publish(b"too many", routing_key="short")
    _reject(broker, "a", b"1", b"2", b"3")
    assert _moved(capsys, url, "dead", "--to", "other", "--reason", "rejected", "--limit", "2")["moved"] == {
        "other": 2
    }
    assert _bodies(broker, "other") == [b"1", b"2"]
    assert _bodies(broker, "dead") == [b"too many", b"3"]
    assert _moved(capsys, url, "dead", "--to", "other", "--limit", "0")["moved"] == {}
    assert _moved(capsys, url, "dead", "--to", "other", "--reason", "expired")["moved"] == {}


def test_a_message_that_stays_is_not_counted_as_delivered(
    broker: Broker, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _declare(broker, "dead", "a", **{"x-delivery-limit": 0, "x-queue-type": "quorum"})
    with broker.channel() as channel:
        channel.publish(b"stays", routing_key="dead")
    for _ in range(3):
        _reject(broker, "a", b"1")
        assert _moved(capsys, url, "dead", "--back")["moved"] == {"a": 1}
        assert _bodies(broker, "a") == [b"1"]
        with broker.channel() as channel:
            channel.queue_purge("a")
    assert [each.messages for each in broker.queues() if each.name == "dead"] == [1]


def test_messages_of_a_queue_with_priorities_move_by_their_age(
    broker: Broker, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _declare(broker, "ranked", **{"x-max-priority": 5})
    _declare(broker, "plain")
    with broker.channel() as channel:
        for number in range(6):
            channel.publish(b"%d" % number, routing_key="ranked", properties=Properties(priority=number))
    assert _moved(capsys, url, "ranked", "--to", "plain", "--limit", "3")["moved"] == {"plain": 3}
    assert (_bodies(broker, "plain"), _bodies(broker, "ranked")) == ([b"0", b"1", b"2"], [b"5", b"4", b"3"])


def test_what_a_consumer_holds_stays_with_it(
    broker: Broker, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _declare(broker, "dead", "a")
    _reject(broker, "a", b"1", b"2")
    with broker.channel() as consumer:
        held = consumer.get("dead")
        assert held is not None and held.body == b"1"
        answer = _moved(capsys, url, "dead", "--back")
        assert (answer["moved"], answer["missed"]) == ({"a": 1}, 1)
        consumer.ack(held.tag)
    assert (_bodies(broker, "dead"), _bodies(broker, "a")) == ([], [b"2"])


def test_more_messages_than_one_transaction_takes_move_in_their_order(
    broker: Broker, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _declare(broker, "from")
    _declare(broker, "into")
    sent = [b"%d" % number for number in range(2_500)]
    large = [bytes([number]) * (3 << 20) for number in range(4)]  # two of them are more than one answer
    with broker.channel() as channel:
        channel.tx_select()
        for body in [*sent, *large]:
            channel.publish(body, routing_key="from")
        channel.tx_commit()
    assert _moved(capsys, url, "from", "--to", "into")["moved"] == {"into": 2_504}
    assert (_bodies(broker, "into"), _bodies(broker, "from")) == ([*sent, *large], [])


def test_nothing_moves_where_a_queue_is_missing_or_nobody_agreed(
    broker: Broker, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _declare(broker, "dead", "a", "gone")
    _reject(broker, "a", b"1")
    _reject(broker, "gone", b"2")
    assert "move takes 2 messages of dead: 1 to a, 1 to gone, which needs --yes" in _refused(
        capsys, url, "dead", "--back"
    )
    assert "no queue 'x'" in _refused(capsys, url, "dead", "--to", "x", "--yes")
    assert "no queue 'x'" in _refused(capsys, url, "x", "--to", "a", "--yes")
    assert (_bodies(broker, "dead"), _bodies(broker, "a")) == ([b"1", b"2"], [])


def test_what_died_in_a_queue_that_is_gone_stays_and_holds_up_nothing_else(
    broker: Broker, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A header names the queue, so whoever publishes to the queue of dead letters may name any."""
    _declare(broker, "dead", "a", "gone")
    _reject(broker, "gone", b"1")
    _reject(broker, "a", b"2", b"3")
    with broker.channel() as channel:
        channel.queue_delete("gone")
        channel.queue_declare("mine", exclusive=True)
        for number in range(12):
            forged = Properties(headers={move.QUEUE: f"forged{number:02d}"})
            channel.publish(b"forged", routing_key="dead", properties=forged)
        for name in ("mine", "x" * 70_000):
            channel.publish(b"forged", routing_key="dead", properties=Properties(headers={move.QUEUE: name}))
        refused = _refused(capsys, url, "dead", "--back")
        assert "move takes 2 messages of dead: 2 to a; 1 for forged00, 1 for forged01," in refused
        assert " and 4 for others stay: there are no such queues, which needs --yes" in refused
        answer = _moved(capsys, url, "dead", "--back", "--limit", "1")
        assert (answer["moved"], len(answer["absent"])) == ({"a": 1}, 14), "the limit is of those that move"
        assert _moved(capsys, url, "dead", "--back")["moved"] == {"a": 1}
        assert _moved(capsys, url, "dead", "--back")["moved"] == {}
    assert _bodies(broker, "a") == [b"2", b"3"]
    assert _bodies(broker, "dead") == [b"1", *[b"forged"] * 14]


@pytest.mark.parametrize("died", [True, False])
def test_a_message_moves_to_its_queue_alone_whatever_other_keys_it_has(
    died: bool, broker: Broker, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """``CC`` is of who published it, perhaps to an exchange that knows no such queue; the mover has other
    rights.
    """
    _declare(broker, "secret")
    with broker.channel() as channel:
        for exchange, queue, arguments in (
            ("dlx", "dead", {}),
            ("x", "a", {"x-dead-letter-exchange": "dlx"}),
        ):
            channel.exchange_declare(exchange, "fanout")
            channel.queue_declare(queue, arguments=arguments)
            channel.queue_bind(queue, exchange)
        published = Properties(headers={"CC": ["secret"], "k": 1})
        channel.publish(b"1", "x" if died else "dlx", "key", published)
        if died:
            delivery = channel.get("a")
            assert delivery is not None
            channel.reject(delivery.tag, requeue=False)
    to = ("--back",) if died else ("--to", "a")
    assert _moved(capsys, url, "dead", *to)["moved"] == {"a": 1}
    assert {each.name: each.messages for each in broker.queues()} == {"secret": 0, "dead": 0, "a": 1}
    ((_, properties, _),) = _contents(broker, "a")
    assert properties.headers.get("k") == 1 and "CC" not in properties.headers


@pytest.mark.parametrize("step", ["move.held", "move.published"])
def test_what_was_for_a_queue_that_is_deleted_meanwhile_stays(
    step: str, broker: Broker, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _declare(broker, "dead")
    _declare(broker, "to")
    with broker.channel() as channel:
        for number in range(3):
            channel.publish(b"%d" % number, routing_key="dead")

    def deleted(name: str) -> None:
        if name == step:
            with broker.channel() as channel:
                channel.queue_delete("to")

    monkeypatch.setattr(move.failpoint, "here", deleted)
    refused = _refused(capsys, url, "dead", "--to", "to", "--yes")
    assert refused.startswith("txmq: [TXMQ_UNROUTABLE] 3 messages of the transaction reach no queue")
    assert _bodies(broker, "dead") == [b"0", b"1", b"2"]
