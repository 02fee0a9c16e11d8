"""The state of a broker, all in memory, composed of its parts.

Pure: no I/O, no clock, no threads. Every operation that must be durable gets a :class:`Change` and fills it.
It checks first, then changes memory, so a refused operation changes nothing. The committer writes the change
and calls ``Commits.publish``. Bodies of stored blocks and new block ids come from the two functions given at
load (``load.py``).

Invariant: entries at or above a queue's ``visible_end`` belong to a commit that is not durable yet, and are
invisible to every reader.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from broker_core.broker.access.users import Users
from broker_core.broker.commit import Commits, Prepared
from broker_core.broker.message.dispatch import Dispatch
from broker_core.broker.message.expiry import Expiry
from broker_core.broker.message.messages import Messages, StoredMessages
from broker_core.broker.message.overflow import Overflow
from broker_core.broker.message.settlement import Settlement
from broker_core.broker.message.vhost_message_limit import VhostMessageLimit
from broker_core.broker.queue import Queue
from broker_core.broker.queue.pending_checks import PendingChecks
from broker_core.broker.repair import RepairResult
from broker_core.broker.topology.virtual_hosts import VirtualHosts
from broker_core.broker.transaction.names import TransactionNames
from broker_core.core.address import VHOST
from broker_core.core.block import Blocks, ReadBlock
from broker_core.core.change import Change, Numbers
from broker_core.core.ids import BlockId
from broker_core.core.records import Record, RunRecord

R = TypeVar("R", bound=Record)


class LoadResult:
    """Results of loading, beside the state itself."""

    def __init__(self) -> None:
        self.repaired = RepairResult()
        self.latest_us = 0  # the latest commit time
        self.records: dict[type[Record], list[Any]] = {}  # of micro-batches

    def take(self, kind: type[R], vhost: str = VHOST) -> list[R]:
        """Removes and returns the records of a virtual host's micro-batches, which the rules for them keep
        from now on.
        """
        found = self.records.get(kind, [])
        self.records[kind] = [record for record in found if record.vhost != vhost]
        return [record for record in found if record.vhost == vhost]


class BrokerState:
    """The state as one virtual host sees it: ``topology`` has its names, all else is of the whole broker.

    ``undo`` restores all of it; ``pending_checks`` says what must be checked. The state that the committer
    passes to works is that of ``/``; who is bound to a virtual host uses ``of``.
    """

    def __init__(self, *, new_block_id: Callable[[], BlockId], read: ReadBlock) -> None:
        self.blocks = blocks = Blocks(new_block_id, read)
        self.undo = blocks.undo
        self.pending_checks = pending_checks = PendingChecks(self.undo)
        self.numbers = numbers = Numbers(self.undo)
        self.virtual_hosts = virtual_hosts = VirtualHosts(blocks, numbers)
        self.topology = virtual_hosts.by_name[VHOST]
        self.users = Users(self.undo)
        self.names = names = TransactionNames(self.undo, self.users)
        virtual_hosts.forget_outcomes = names.forget_vhost
        overflow = Overflow(blocks, pending_checks)
        self.messages = messages = Messages(
            virtual_hosts, numbers, blocks, names.of_messages, overflow, pending_checks
        )
        self.expiry = Expiry(virtual_hosts.registry, blocks, messages, overflow, pending_checks)
        self.settlement = settlement = Settlement(blocks, messages, overflow, pending_checks)
        vhost_message_limit = VhostMessageLimit(virtual_hosts)
        self.transactions = transactions = Commits(
            numbers,
            blocks,
            names,
            overflow,
            messages,
            StoredMessages(messages),
            settlement,
            virtual_hosts,
            vhost_message_limit,
            self.expiry,
            pending_checks,
        )
        self.prepared = Prepared(transactions)
        self.dispatch = Dispatch(virtual_hosts.registry, blocks, self.expiry, pending_checks)
        self.loaded = LoadResult()

    @property
    def vhost(self) -> str:
        return self.topology.vhost

    @property
    def queues(self) -> Iterable[Queue]:
        """Returns the queues of all virtual hosts."""
        return self.virtual_hosts.registry.by_id.values()

    def of(self, vhost: str) -> BrokerState:
        """Returns the same state, as another virtual host sees it. Raises NotAllowed: there is none."""
        topology = self.virtual_hosts.get(vhost)
        if topology is self.topology:
            return self
        seen = copy.copy(self)
        seen.topology = topology
        return seen

    # -- upkeep ----------------------------------------------------------------------------------------------
    def sealing(self, block_id: BlockId) -> list[RunRecord]:
        """Returns the runs of an open block that moves to a segment, for the change that seals it."""
        puts: list[RunRecord] = []
        for queue in self.queues:
            if queue.written:
                puts += queue.log.record_runs(block_id)
        return puts

    def living_rows(self, block_ids: Sequence[BlockId]) -> dict[BlockId, tuple[bytes, int]]:
        """Returns per block a bitmap of the rows that some queue needs, and their number. A block that a
        staged part holds is left out.
        """
        masks = {
            block_id: np.zeros(self.blocks.rows(block_id), dtype=np.bool_)
            for block_id in block_ids
            if block_id in self.blocks.by_id
        }
        pins = dict.fromkeys(masks, 0)
        for queue in self.queues:
            for run in queue.log.runs_in(masks.keys()):
                pins[run.block_id] += 1
                mask = masks[run.block_id]
                rows = np.asarray(run.rows())
                for start, end in queue.progress.needed_within(run.first, run.end):
                    mask[rows[start - run.first : end - run.first]] = True
        return {
            block_id: (np.packbits(mask, bitorder="little").tobytes(), int(np.count_nonzero(mask)))
            for block_id, mask in masks.items()
            if pins[block_id] == self.blocks.by_id[block_id].pins
        }

    def closing(self, change: Change) -> None:
        """Records at a clean shutdown how far each queue was delivered."""
        for queue in self.queues:
            queue.record(change)
            if queue.written:
                change.put(queue.progress_record())
