"""``txmq message move``: messages of a queue go to another queue, or dead letters back to the queue that they
left first.

Not here: how a message becomes a dead letter (``broker_core/broker/message/dead_letter.py``).

Invariant: a message leaves its queue in the transaction that publishes it, so it is in one of both, whoever
dies when, and whatever is deleted meanwhile. Messages that stay are not touched, so they are neither
redelivered nor counted as delivered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, get_args

import click
import pyarrow as pa

from broker_core.broker.message.dead_letter import Reason
from broker_core.client.broker import BrokerClient
from broker_core.core import failpoint
from broker_core.core.checks import MAX_NAME_BYTES
from broker_core.core.errors import QueueNotFound, RemoteProtocolError, ResourceLocked
from broker_core.message.field_table import FieldReader, sized
from broker_core.message.properties import check, raw_headers, with_raw_headers
from txmq.address import BROKER, client_at, queue_names
from txmq.command.declare import YES, Options, argument, command, one_of, option
from txmq.command.values import Misuse, count
from txmq.output import confirm, done

REASONS = get_args(Reason)
PAGE = 1_000  # messages of one transaction, and of one reading
QUEUE, REASON, EXCHANGE = "x-first-death-queue", "x-first-death-reason", "x-first-death-exchange"
DEATHS, PREVIOUS, COPIES = "x-death", "x-previous-death", "CC"
NAMED = 10  # queues that a text names


class MessageMove(NamedTuple):
    offset: int
    to: str
    reason: str


@dataclass(frozen=True)
class MessageSelection:
    """Which messages of ``queue`` go where. ``to`` None: back to the queue that each left first, if it is one
    that ``has`` knows.
    """

    queue: str
    to: str | None
    reason: str | None
    limit: int | None
    has: Callable[[str], bool] | None = None

    def of(self, offset: int, properties: bytes) -> MessageMove | None:
        """None: the message stays."""
        try:
            headers = dict(raw_headers(properties))
        except RemoteProtocolError:  # damaged: it is moved as it is
            headers = {}
        died_in, reason = _text(headers, QUEUE), _text(headers, REASON)
        to = died_in if self.to is None else self.to
        if not to or to == self.queue or (self.reason is not None and reason != self.reason):
            return None
        if self.has is not None and not self.has(to):
            return None
        return MessageMove(offset, to, reason)


@command(
    "message move",
    "move messages to another queue, or dead letters back",
    *BROKER,
    argument("QUEUE", shell_complete=queue_names),
    *one_of(
        option("--to", "QUEUE", "move them to this queue", shell_complete=queue_names),
        option("--back", text="move each to the queue where it died first"),
        needed=True,
    ),
    option(
        "--reason",
        "REASON",
        f"only messages that died first for it: {', '.join(REASONS)}",
        type=click.Choice(REASONS),
    ),
    option("--limit", "N", "at most N messages, the oldest ones", type=count),
    YES,
)
def _move(options: Options) -> int:
    if options.to == options.queue:
        raise Misuse(f"--to is {options.to!r}, the queue itself", "name another queue")
    client = client_at(options)
    targets = _Targets(client)
    has = targets.has if options.to is None else None
    selection = MessageSelection(options.queue, options.to, options.reason, options.limit, has)
    end = _end(client, options.queue)
    found: Counter[str] = Counter(chosen.to for page in _pages(client, selection, end) for chosen in page)
    absent = targets.absent.copy()
    stay = f"; {_summary(absent, 'for')} stay: there are no such queues" if absent else ""
    if found:
        confirm(
            options, f"move takes {found.total()} messages of {options.queue}: {_summary(found, 'to')}{stay}"
        )
    moved = move(client, selection, end, found)
    missed = found.total() - moved.total()
    left = f"; {missed} were consumed, or are held by a consumer" if missed else ""
    text = f"moved {_summary(moved, 'to') or 'nothing'}{left}{stay}"
    result = {"queue": options.queue, "moved": dict(moved), "missed": missed, "absent": dict(absent)}
    return done(options, text, **result)


def _summary(found: Counter[str], word: str) -> str:
    """``3 to a, 1 to b and 2 to others``: those with the most messages."""
    most = sorted(found.most_common(NAMED))
    others = found.total() - sum(number for _, number in most)
    text = ", ".join(f"{number} {word} {queue}" for queue, number in most)
    return f"{text} and {others} {word} others" if others else text


class _Targets:
    """The queues of dead letters: a header names them, so anybody may have. ``absent``: how many are for one
    that is not there, or not for others.
    """

    def __init__(self, client: BrokerClient) -> None:
        self._client = client
        self._exists: dict[str, bool] = {}
        self.absent: Counter[str] = Counter()

    def has(self, queue: str) -> bool:
        if queue not in self._exists:
            self._exists[queue] = self._is_there(queue)
        if not self._exists[queue]:
            self.absent[queue] += 1
        return self._exists[queue]

    def _is_there(self, queue: str) -> bool:
        with self._client.channel() as channel:
            try:
                channel.queue_declare(queue, passive=True)
            except (QueueNotFound, ResourceLocked):
                return False
        return True


def move(
    client: BrokerClient, selection: MessageSelection, end: int, targets: Mapping[str, int]
) -> Counter[str]:
    """Moves what is chosen below offset ``end``, and returns how many went to each queue.

    Raises QueueNotFound before anything is moved if one of ``targets`` does not exist, and Unroutable if one
    is deleted meanwhile: messages that were for it stay.
    """
    moved: Counter[str] = Counter()
    with client.channel() as channel:
        for queue in targets:
            channel.queue_declare(queue, passive=True)
        channel.tx_select()
        for page in _pages(client, selection, end):
            waiting = {chosen.offset: chosen.to for chosen in page if chosen.to in targets}
            while waiting:
                # 1. held by this channel: nobody else consumes them
                taken = channel.get_at(selection.queue, list(waiting))
                failpoint.here("move.held")
                if not taken:
                    break
                # 2. published and acked in one transaction
                for delivery in taken:
                    message = delivery.message
                    channel.publish(
                        message.body,
                        routing_key=waiting[delivery.offset],
                        properties=without_deaths(message.properties),
                        mandatory=True,
                    )
                channel.ack(taken[-1].tag, multiple=True)
                failpoint.here("move.published")
                # 3. there, and gone here
                channel.tx_commit(routed=True)
                failpoint.here("move.committed")
                moved.update(waiting[delivery.offset] for delivery in taken)
                waiting = {offset: to for offset, to in waiting.items() if offset > taken[-1].offset}
    return moved


def without_deaths(properties: bytes) -> bytes:
    """The properties of a dead letter that is published again: its deaths are in ``x-previous-death``, and
    all else stays as it is, byte for byte.

    With ``x-death`` it would be dropped as a cycle where it dies again without a rejection. With ``CC`` it
    would go to other queues too, by the rights of who moves it; a dead letter with another key loses it too.
    """
    try:
        headers = raw_headers(properties)
        others = [each for each in headers if each[0] not in (DEATHS, QUEUE, REASON, EXCHANGE, COPIES)]
        deaths = [raw for name, raw in headers if name == DEATHS]
        if deaths:
            deaths += [raw for name, raw in others if name == PREVIOUS]
            items = b"".join(raw[5:] if raw[:1] == b"A" else raw for raw in deaths)  # no list is one item
            others = [*(each for each in others if each[0] != PREVIOUS), (PREVIOUS, b"A" + sized(items))]
        moved = with_raw_headers(properties, others) if others != headers else properties
        check(moved)  # what is no list may be too deep to be in one
        return moved
    except RemoteProtocolError:
        return properties


def _text(headers: Mapping[str, bytes], name: str) -> str:
    """Returns no text for one that is too long for a name."""
    value = FieldReader(headers[name]).value(0) if name in headers else ""
    return value if isinstance(value, str) and len(value.encode()) <= MAX_NAME_BYTES else ""


def _end(client: BrokerClient, queue: str) -> int:
    """The first offset that no message has yet. Raises QueueNotFound."""
    (log,) = client.logs([queue])
    return client.available([log])[log].end


def _pages(client: BrokerClient, selection: MessageSelection, end: int) -> Iterator[list[MessageMove]]:
    """What is chosen, oldest first, at most PAGE messages at a time."""
    (log,) = client.logs([selection.queue])
    start = client.available([log])[log].start
    left = selection.limit
    while start < end and left != 0:
        stop = min(end, start + PAGE)
        page = [chosen for rows in client.browse([(log, start, stop)]) for chosen in _chosen(selection, rows)]
        page = page[:left]
        left = left if left is None else left - len(page)
        if page:
            yield page
        start = stop


def _chosen(selection: MessageSelection, rows: pa.RecordBatch) -> Iterator[MessageMove]:
    offsets, properties = rows.column("offset").to_pylist(), rows.column("properties").to_pylist()
    for offset, encoded in zip(offsets, properties, strict=True):
        chosen = selection.of(offset, encoded)
        if chosen is not None:
            yield chosen
