"""``txmq move``: messages of a queue go to another queue, or dead letters back to the queue that they left
first.

Not here: how a message becomes a dead letter (``broker_core/broker/message/dead_letter.py``).

Invariant: a message leaves its queue in the transaction that publishes it, so it is in one of both, whoever
dies when, and whatever is deleted meanwhile. Messages that stay are not touched, so they are neither
redelivered nor counted as delivered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from broker_core import failpoint
from broker_core.client.broker import BrokerClient
from broker_core.errors import OptionError, RemoteProtocolError
from broker_core.message.field_table import FieldReader
from broker_core.message.properties import raw_headers, rewrite_of
from txmq.address import BROKER, client_at, queue_names
from txmq.command.declare import YES, Options, argument, command, one_of, option
from txmq.command.values import count
from txmq.output import confirm, done

PAGE = 1_000  # messages of one transaction, and of one reading
QUEUE, REASON, EXCHANGE = "x-first-death-queue", "x-first-death-reason", "x-first-death-exchange"
DEATHS, PREVIOUS = "x-death", "x-previous-death"


class Chosen(NamedTuple):
    offset: int
    to: str
    reason: str


@dataclass(frozen=True)
class MessageSelection:
    """Which messages of ``queue`` go where. ``to`` None: back to the queue that each left first."""

    queue: str
    to: str | None
    reason: str | None
    limit: int | None

    def of(self, offset: int, properties: bytes) -> Chosen | None:
        """None: the message stays."""
        try:
            headers = raw_headers(properties)
        except RemoteProtocolError:  # damaged: it is moved as it is
            headers = {}
        died_in, reason = _text(headers, QUEUE), _text(headers, REASON)
        to = died_in if self.to is None else self.to
        if not to or to == self.queue or (self.reason is not None and reason != self.reason):
            return None
        return Chosen(offset, to, reason)


@command(
    "move",
    "move messages to another queue, or dead letters back",
    *BROKER,
    argument("QUEUE", shell_complete=queue_names),
    *one_of(
        option("--to", "QUEUE", "to this queue", shell_complete=queue_names),
        option("--back", text="each to the queue where it died first"),
        needed=True,
    ),
    option("--reason", "REASON", "only those that died first for it: rejected, expired, maxlen, ..."),
    option("--limit", "N", "at most N, the oldest", type=count),
    YES,
)
def _move(options: Options) -> int:
    if options.to == options.queue:
        raise OptionError(f"--to is {options.to!r}, the queue itself", "name another queue")
    selection = MessageSelection(options.queue, options.to, options.reason, options.limit)
    client = client_at(options)
    end = _end(client, options.queue)
    found: Counter[str] = Counter(chosen.to for page in _pages(client, selection, end) for chosen in page)
    text = ", ".join(f"{number} to {queue}" for queue, number in sorted(found.items())) or "nothing"
    if found:
        confirm(options, f"move takes {found.total()} messages of {options.queue}: {text}")
    moved = move(client, selection, end, found)
    text = ", ".join(f"{number} to {queue}" for queue, number in sorted(moved.items())) or "nothing"
    missed = found.total() - moved.total()
    left = f"; {missed} were consumed, or are held by a consumer" if missed else ""
    return done(options, f"moved {text}{left}", queue=options.queue, moved=dict(moved), missed=missed)


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
                last = taken[-1].offset
                waiting = {offset: to for offset, to in waiting.items() if offset > last}
    return moved


def without_deaths(properties: bytes) -> bytes:
    """The properties of a dead letter that is published again: its deaths are kept under
    ``x-previous-death``.

    With ``x-death`` it would be dropped as a cycle where it dies again without a rejection.
    """

    def changed(headers: dict[str, object]) -> dict[str, object]:
        deaths, earlier = headers.get(DEATHS), headers.get(PREVIOUS)
        kept = [each for found in (deaths, earlier) if isinstance(found, list) for each in found]
        return {**dict.fromkeys((DEATHS, QUEUE, REASON, EXCHANGE)), PREVIOUS: kept or None}

    try:
        return rewrite_of(properties, changed, (DEATHS, PREVIOUS)) if raw_headers(properties) else properties
    except RemoteProtocolError:
        return properties


def _text(headers: Mapping[str, bytes], name: str) -> str:
    value = FieldReader(headers[name]).value(0) if name in headers else ""
    return value if isinstance(value, str) else ""


def _end(client: BrokerClient, queue: str) -> int:
    """The first offset that no message has yet. Raises QueueNotFound."""
    (log,) = client.logs([queue])
    return client.available([log])[log].end


def _pages(client: BrokerClient, selection: MessageSelection, end: int) -> Iterator[list[Chosen]]:
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


def _chosen(selection: MessageSelection, rows: pa.RecordBatch) -> Iterator[Chosen]:
    offsets, properties = rows.column("offset").to_pylist(), rows.column("properties").to_pylist()
    for offset, encoded in zip(offsets, properties, strict=True):
        chosen = selection.of(offset, encoded)
        if chosen is not None:
            yield chosen
