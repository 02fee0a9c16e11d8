"""Messages that wait in an exchange until they are due, and then are routed.

They are entries of a queue without a name, one for each such exchange. So what holds for messages in a queue
holds for them: they are part of the commit that publishes them, on the disk, sealed and compacted. When they
are due, one commit settles them there and enqueues them where they are routed to then.

Pure. Not here: which messages wait (``routing/exchange_types.py``), and when this is called
(``expiry.py``).
Invariant: a message leaves at its time, not before, as the broker's clock shows it. One that cannot be read
stays, and holds up no other.
"""

from __future__ import annotations

from contextlib import suppress

from broker_core.broker.message.due_entries import DueEntries, Rows
from broker_core.broker.message.messages import Messages
from broker_core.broker.message.removals import Removals
from broker_core.broker.queue import Queue
from broker_core.broker.queue.due_index import DueIndex
from broker_core.broker.transaction.publish import Publish
from broker_core.core.block import Blocks, NotLoaded
from broker_core.core.change import Change
from broker_core.core.errors import ResourceShortage, StoreError
from broker_core.core.undo import Tally
from broker_core.message.message import Message
from broker_core.routing.exchange_types import delay_ms
from broker_core.routing.search import STEPS, Search

_AT_ONCE = 0
_DEATH = b"\x07x-death"  # in a dead letter, which is no duplicate


class Delays(DueEntries):
    """``unroutable``: messages since the start that reached no queue when they were due."""

    def __init__(self, blocks: Blocks, messages: Messages) -> None:
        # each is routed, to queues that may drop others
        super().__init__(blocks, lambda properties: delay_ms(properties) * 1000, cost=2)
        self._messages = messages
        self.unroutable = Tally(blocks.undo)

    def index(self, queue: Queue) -> DueIndex[Queue]:
        """Returns it with what became visible."""
        index, end = queue.marks.waits, queue.log.visible_end
        assert index is not None
        if end > index.end:
            index.expect(index.end, end, _AT_ONCE)
        return index

    def deadline(self, queue: Queue) -> int:
        with suppress(NotLoaded, StoreError, ResourceShortage):
            self._look(queue, self.index(queue), _AT_ONCE)
        return super().deadline(queue)

    def release(self, change: Change, queue: Queue, rows: Rows, now: int, removals: Removals) -> int:
        new: list[Publish] = []
        letters: list[Publish] = []
        search = Search(refuses=False)
        count, exchange = 0, self.index(queue).exchange
        assert exchange is not None
        for row in rows:
            if removals.entries <= 0:
                break
            count += 1
            before = search.steps
            queues, properties = exchange.release(row.routing_key, row.properties, search)
            removals.entries -= max(1, len(queues), (search.steps - before) // STEPS)
            if queues:
                message = Message(row.body, row.routing_key, row.exchange, properties)
                (letters if _DEATH in row.properties else new).append(Publish(message, queues))
            else:
                self.unroutable.add(1)
        for publishes in (new, letters):
            if publishes:
                change.repeats = publishes is letters
                self._messages.enqueue(change, publishes, now, removals=removals)
        change.repeats = False
        return count
