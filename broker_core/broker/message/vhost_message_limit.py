"""The room that a virtual host has for messages (``max_messages``): in all its queues together.

Not here: the maximum length of one queue (``overflow.py``). What is over the limit is refused as a full queue
refuses it: a transaction as a whole, a publish outside one by itself. A message that is routed to two queues
counts twice. A dead letter is not refused, because it would be lost, and neither is the commit of a prepared
transaction; both count for the next check.
Invariant: without such a limit a commit costs one look at a flag.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from broker_core.broker.queue import Queue
from broker_core.broker.topology.topology import Topology
from broker_core.broker.topology.virtual_hosts import VirtualHosts
from broker_core.broker.transaction.publish import Publish
from broker_core.broker.transaction.spilled import Spilled
from broker_core.broker.transaction.transaction import Transaction
from broker_core.core.errors import PreconditionFailed


class VhostMessageLimit:
    def __init__(self, virtual_hosts: VirtualHosts) -> None:
        self._virtual_hosts = virtual_hosts

    def check(self, transaction: Transaction) -> None:
        """Raises PreconditionFailed for what does not fit as a whole. What it settles makes room."""
        leaving = _by_vhost(self._virtual_hosts, _leaving(transaction))
        for topology, more in _by_vhost(self._virtual_hosts, _arriving(transaction)).items():
            rest = topology.tally.total - leaving.get(topology, 0)
            if more > topology.max_messages - rest:
                raise PreconditionFailed(
                    f"vhost '{topology.vhost}' is full: {more} more messages on {rest} are over its limit of "
                    f"{topology.max_messages}; nothing was enqueued: "
                    "let the queues be read, or raise the limit with `txmq vhost limit`"
                )

    def admit(self, transaction: Transaction, rejected: list[int]) -> list[Publish]:
        """Returns the publishes with those that do not fit made empty; their indexes go to ``rejected``."""
        leaving = _by_vhost(self._virtual_hosts, _leaving(transaction))
        room: dict[Topology, int] = {}
        admitted = []
        for index, publish in enumerate(transaction.publishes):
            arriving = _by_vhost(self._virtual_hosts, ((queue, 1) for queue in publish.queues))
            for topology in arriving:
                if topology not in room:
                    room[topology] = topology.max_messages - topology.tally.total + leaving.get(topology, 0)
            fits = all(more <= room[topology] for topology, more in arriving.items())
            for topology, more in arriving.items() if fits else ():
                room[topology] -= more
            if not fits:
                rejected.append(index)
            admitted.append(publish if fits else Publish(publish.message, (), False))
        return admitted


def _arriving(transaction: Transaction) -> Iterator[tuple[Queue, int]]:
    """Yields queues with how many messages come to each."""
    for each in (transaction.publishes, *transaction.spilled, *transaction.staged):
        if isinstance(each, Spilled):
            for queue, selection in each.selections:
                yield queue, selection.rows
        else:
            for publish in each:
                yield from ((queue, 1) for queue in publish.queues)


def _leaving(transaction: Transaction) -> Iterator[tuple[Queue, int]]:
    """Yields queues with how many messages leave each for good."""
    for queue, offset, outcome in transaction.settles:
        if not queue.progress.is_settled(offset) and (
            outcome == "ack" or (outcome == "reject" and not queue.arguments.dead_letters)
        ):
            yield queue, 1
    for queue, start, end in transaction.consumed:
        yield queue, end - start - sum(b - a for a, b in queue.progress.settled_within(start, end))


def _by_vhost(virtual_hosts: VirtualHosts, messages: Iterable[tuple[Queue, int]]) -> dict[Topology, int]:
    """Returns how many messages these are for each virtual host that has a limit."""
    found: dict[Topology, int] = {}
    for queue, more in messages:
        if queue.deleted or queue.replies:
            continue
        topology = virtual_hosts.by_name[queue.vhost]
        if topology.max_messages >= 0:
            found[topology] = found.get(topology, 0) + more
    return found
