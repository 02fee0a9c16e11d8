"""What a caller asks of the history of commits costs a bounded part of it, whoever asks and whatever is found; several
calls have all of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest

from broker_core.admin import MessageLife, MessageStep, TransactionInfo
from broker_core.broker.history import rows as history_rows
from broker_core.broker.history.lookup import (
    BUDGET_BYTES,
    ROW_BYTES,
    Place,
    ReadBudget,
    Visibility,
    latest,
    steps,
)
from broker_core.broker.history.rows import LINES, compressed
from broker_core.core.change import ACKNOWLEDGED, PUBLISHED
from broker_core.core.errors import OptionError, QueueNotFound
from broker_core.core.records import HistoryRecord
from broker_core.node.vhost_engines import VhostEngines
from broker_core.server.history_reader import HistoryReader
from tests.broker.conftest import Node

pytestmark = [pytest.mark.slow, pytest.mark.product]  # a history of 120,000 commits

T = TypeVar("T")
ALL = Visibility("/", True, "", lambda _queue: True, lambda _app: True, {})
NOTHING = Visibility("/", False, "mallory", lambda queue: queue == "mine", lambda _app: False, {})
EACH = 2_000  # commits of a row
ROWS = 60
WHOLE = 1 << 60


def row(number: int, each: int = EACH) -> HistoryRecord:
    """Row 1, 2, ... Even rows: commits publish to queue 7 "in"; odd ones acknowledge what the one before did."""
    kind, before = (ACKNOWLEDGED, (number - 2) // 2) if number % 2 == 0 else (PUBLISHED, (number - 1) // 2)
    first = (number - 1) * each + 1
    commits = [
        [first + at, (first + at) * 1_000, 0, [[kind, 7, 0, 1, before * each + at, before * each + at + 1]]]
        for at in range(each)
    ]
    text = {"who": [["amqp", "/", "shop", "", ""]], "queues": {"7": ["/", "in"]}, "commits": commits}
    last = first + each - 1
    packed = json.dumps(text, separators=(",", ":")).encode()
    return compressed(HistoryRecord(number, first, last, last * 1_000, LINES, packed))


@pytest.fixture(scope="module")
def long() -> list[HistoryRecord]:
    found = [row(number) for number in range(1, ROWS + 1)]
    assert sum(len(each.commits) for each in found) > BUDGET_BYTES / 2  # compressed
    return found


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the texts that were read."""
    sizes: list[int] = []
    whole = json.loads

    def recorded(text: bytes) -> object:
        sizes.append(len(text))
        return whole(text)

    monkeypatch.setattr(history_rows.json, "loads", recorded)
    return sizes


def life(rows: list[HistoryRecord], offset: int, place: Place, most: int) -> tuple[list[MessageStep], int]:
    """All steps, and how many calls they took."""
    found, calls, at = [], 0, place
    while True:
        told, more = steps(rows, "in", offset, ALL, at, ReadBudget(most))
        found += told
        calls += 1
        if more is None:
            return found, calls
        at = more


def all_of(rows: list[HistoryRecord], limit: int, most: int) -> list[TransactionInfo]:
    found: list[TransactionInfo] = []
    before = 0
    while len(found) < limit:
        some, before = latest(rows, ALL, limit - len(found), before, ReadBudget(most))
        found += some
        if not before:
            break
    return found


@pytest.mark.parametrize("place", [Place(7), Place()], ids=["known", "gone"])
@pytest.mark.parametrize("offset", [0, 37, 59, 60, 1_000])
@pytest.mark.parametrize("most", [1, ROW_BYTES + 1, 9_000])
def test_calls_that_read_little_have_the_same_steps_together(place: Place, offset: int, most: int) -> None:
    rows = [row(number, 20) for number in range(1, 9)]
    assert life(rows, offset, place, most)[0] == life(rows, offset, place, WHOLE)[0]
    assert len(life(rows, offset, place, most)[0]) == (2 if offset < 80 else 0)


@pytest.mark.parametrize("limit", [1, 19, 20, 21, 159, 160, 1_000])
@pytest.mark.parametrize("most", [1, ROW_BYTES + 1, 9_000])
def test_calls_that_read_little_have_the_same_transactions_together(limit: int, most: int) -> None:
    rows = [row(number, 20) for number in range(1, 9)]
    found = all_of(rows, limit, most)
    assert found == all_of(rows, limit, WHOLE)
    assert [each.sequence for each in found] == list(range(160, 0, -1))[:limit]


ASKED: dict[str, Callable[[list[HistoryRecord]], object]] = {
    "a message that is not there": lambda rows: steps(rows, "in", 10**9, ALL, Place(7), ReadBudget()),
    "a message of a queue that is gone": lambda rows: steps(rows, "in", 10**9, ALL, Place(), ReadBudget()),
    "a queue that never was": lambda rows: steps(rows, "who", 0, ALL, Place(), ReadBudget()),
    "the last ones": lambda rows: latest(rows, ALL, 10**9, 0, ReadBudget()),
    "of what the caller may not see": lambda rows: latest(rows, NOTHING, 1, 0, ReadBudget()),
    "its messages": lambda rows: steps(rows, "in", 10**9, NOTHING, Place(7), ReadBudget()),
}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_a_call_reads_a_bounded_part(
    ask: Callable[[list[HistoryRecord]], object], long: list[HistoryRecord], read_bytes: list[int]
) -> None:
    ask(long[:1])
    one, whole = sum(read_bytes) or 1, len(long)
    read_bytes.clear()
    ask(long)
    assert sum(read_bytes) <= BUDGET_BYTES + one
    assert len(read_bytes) < whole


def test_the_search_begins_where_a_stored_message_was_published(node: Node, read_bytes: list[int]) -> None:
    with node.channel() as channel:
        channel.queue_declare("in")
        for number in range(600):
            channel.publish(b"%d" % number, routing_key="in")
    reader = HistoryReader(node.broker, VhostEngines(node.broker))
    read_bytes.clear()
    found = reader.message("in", 599, ALL)
    assert ([each.effect for each in found.steps], found.state, found.more) == (["published"], "ready", "")
    last = sum(read_bytes)
    read_bytes.clear()
    assert [each.effect for each in reader.message("in", 0, ALL).steps] == ["published"]
    assert last <= sum(read_bytes)


def test_a_place_goes_on_and_no_other_text_is_one(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    with node.channel() as channel:
        channel.queue_declare("in")
        channel.publish(b"x", routing_key="in")
        delivery = channel.get("in")
        assert delivery is not None
        channel.ack(delivery.tag)
        channel.queue_delete("in")
    reader = HistoryReader(node.broker, VhostEngines(node.broker))
    queue_id = next(iter(_first(node).queues))
    whole = reader.message("in", 0, ALL)
    assert [each.effect for each in whole.steps] == ["published", "acknowledged"]
    last = whole.steps[0].sequence
    rest = reader.message("in", 0, ALL, f"{queue_id}.{last}.1")
    assert replace(rest, steps=whole.steps[:1] + rest.steps) == whole
    end = reader.message("in", 0, ALL, f"{queue_id}.{10**17}.1")
    assert (end.steps, end.more) == ((), "")
    with pytest.raises(QueueNotFound):
        reader.message("in", 5, ALL, f"{queue_id}.{10**17}.0")
    for text in ("x", "1.2", "1.2.3", "-1.2.0", "1.2.0.0", "1" * 19 + ".1.0", "\u0661.1.0", "1.1.0\n"):
        with pytest.raises(OptionError, match="is no place in the history"):
            reader.message("in", 0, ALL, text)


def _first(node: Node) -> history_rows.PastCommit:
    return next(history_rows.commits(node.broker.state.transactions.history.rows()[0]))


def test_a_place_shows_nothing_of_another_queue(node: Node) -> None:
    """Who gives the id of another queue learns nothing of it."""
    with node.channel() as channel:
        for queue in ("mine", "secret"):
            channel.queue_declare(queue)
        channel.publish(b"x", routing_key="secret")
    secret = node.broker.state.topology.queues["secret"].queue_id
    reader = HistoryReader(node.broker, VhostEngines(node.broker))
    found: MessageLife = reader.message("mine", 0, NOTHING, f"{secret}.0.1")
    assert found.steps == ()
    assert reader.message("mine", 0, ALL, f"{secret}.0.1").steps == ()
