"""Exchanges of one virtual host in which messages wait, each with the queue where they do.

Not here: routing (``routing/exchange_types.py``), and what happens when a message is due
(``message/delays.py``).
Invariant: such a queue is in ``queues_by_id`` and not in ``queues``: no client can name it, no policy applies
to it. It is recorded if its exchange is, and ends with it.
"""

from __future__ import annotations

from broker_core.broker.queue import Queue
from broker_core.broker.queue.due_index import DueIndex
from broker_core.broker.topology.registry import Registry
from broker_core.core.block import Blocks
from broker_core.core.change import DELETED, Change, Numbers
from broker_core.core.ids import CommitSequence, QueueId
from broker_core.core.records import QueueRecord
from broker_core.core.undo import Tally
from broker_core.routing.exchange import Exchange
from broker_core.routing.exchange_types import DeduplicationExchange, DelayedExchange, WaitingExchange
from broker_core.routing.exchanges import Exchanges
from broker_core.routing.memory import bytes_of
from broker_core.routing.search import MOST, Search

WAITING = "amq.delayed."  # before the name of an exchange: the queue where its messages wait


class WaitingExchanges(Exchanges[Queue]):
    """``tally``: of the messages of all queues."""

    _blocks: Blocks
    _numbers: Numbers
    _registry: Registry
    tally: Tally

    def delayed(self) -> list[tuple[str, Queue]]:
        """Returns the exchanges in which messages wait, with the queues where they do."""
        exchanges = list(self.exchanges.values())
        found = [(each.name, each.waiting) for each in exchanges if isinstance(each, WaitingExchange)]
        return [(name, waiting) for name, waiting in found if waiting is not None]

    def every_queue(self) -> list[Queue]:
        """Returns also those where messages wait."""
        return [*self.queues.values(), *(queue for _, queue in self.delayed())]

    def later(self, queue: str) -> str:
        """Returns the first exchange that delays and then leads to this queue alone by its name; or ""."""
        exchanges = [self.exchanges[name] for name, _ in sorted(self.delayed())]
        delaying = (each for each in exchanges if isinstance(each, DelayedExchange) and not each.internal)
        only, search = (self.queues.get(queue),), Search(refuses=False)
        found = (each for each in delaying if search.steps > MOST or each.route(queue, search=search) == only)
        first = next(found, None)
        return "" if first is None or search.steps > MOST else first.name

    def _ready(self, change: Change, exchange: Exchange[Queue]) -> Exchange[Queue]:
        """Returns it, with the queue where its messages wait."""
        if isinstance(exchange, WaitingExchange) and exchange.waiting is None:
            queue_id, waiting, durable = self._new_id(change), WAITING + exchange.name, exchange.durable
            arguments = exchange.waiting_arguments
            queue = Queue(
                queue_id,
                waiting,
                self._blocks,
                durable=durable,
                arguments=arguments,
                vhost=self.vhost,
                tally=self.tally,
            )
            self.wait_in(queue, exchange)
            if durable:  # no record of another queue is exclusive
                change.put(QueueRecord(queue_id, waiting, durable, True, False, arguments, self.vhost))
        return exchange

    def wait_in(self, queue: Queue, exchange: WaitingExchange[Queue]) -> None:
        """The messages of the exchange wait in the queue, which is new or restored."""
        self._undo.item(self.queues_by_id, queue.queue_id)
        self._undo.attribute(exchange, "waiting")
        self.queues_by_id[queue.queue_id] = exchange.waiting = queue
        queue.marks.waits, queue.marks.timed = DueIndex(self._undo, exchange), True
        self._registry.last_id = max(self._registry.last_id, queue.queue_id)
        if queue.log.ids is not None and isinstance(exchange, DeduplicationExchange):
            queue.log.ids.rule = exchange.rule
        self.memory.add(bytes_of(queue.name, queue.arguments.declared) + queue.arguments.id_bytes)
        exchange.cache.change()

    def _unbind_everywhere(
        self, change: Change, destination: Queue | Exchange[Queue]
    ) -> list[Exchange[Queue]]:
        """Also ends the queue of an exchange, which is deleted."""
        if isinstance(destination, WaitingExchange) and destination.waiting is not None:
            self._end(change, destination.waiting)
        return super()._unbind_everywhere(change, destination)

    # -- queues, whether or not they have a name -------------------------------------------------------------
    def _new_id(self, change: Change) -> QueueId:
        """The commit sequence never decreases, even over restarts (core/change.py), so an id from it is never
        used again.
        """
        change.sequence = change.sequence or self._numbers.next_sequence()
        queue_id = QueueId(max(change.sequence, self._registry.last_id + 1))
        self._numbers.sequence = change.sequence = CommitSequence(queue_id)
        return queue_id

    def _end(self, change: Change, queue: Queue) -> None:
        """Deletes a queue that has no name any more."""
        self._undo.item(self.queues_by_id, queue.queue_id)
        self._undo.attribute(queue, "deleted")
        del self.queues_by_id[queue.queue_id]
        queue.deleted = True
        self.memory.add(-bytes_of(queue.name, queue.arguments.declared) - queue.arguments.id_bytes)
        queue.leave(self._undo)
        if queue.messages:
            change.effects.note(DELETED, queue, queue.progress.floor, queue.log.next_offset, queue.messages)
        self._remove_exchanges(change, super()._unbind_everywhere(change, queue))
        self._registry.forget_messages(change, queue)
        if queue.written:
            change.drop(QueueRecord, (queue.queue_id,))
