"""The rights that permit what is staged are asked again when it is decided. Pure.

Not here: what a permission allows (``broker/command_permissions.py``), and whose an attempt is
(``owners.py``).
Invariant: what is decided is permitted to who decides it, by the rights of that moment. Parts that were asked
with these rights are not read again; after a restart all are. Keys under BCC are not kept, and not asked.
"""

from __future__ import annotations

from collections.abc import Iterable

from broker_core.broker import command_permissions
from broker_core.broker.access.rights import Rights
from broker_core.broker.broker import BrokerState
from broker_core.broker.message.content import check_user_id
from broker_core.broker.state.block import NotLoaded, ReadBlock, together
from broker_core.broker.state.records import PartRecord
from broker_core.micro_batch.branch import Branches, inline_rows


class StagedRights:
    """``read_addresses`` returns at least each exchange, routing key and properties of a block once."""

    def __init__(self, state: BrokerState, branches: Branches, read_addresses: ReadBlock) -> None:
        self._topology = state.topology
        self._branches = branches
        self._read = read_addresses

    def require(
        self, rights: Rights | None, token: str, parts: Iterable[PartRecord], queues: Iterable[str] = ()
    ) -> None:
        """``queues``: that the decision consumes. Raises AccessRefused, PreconditionFailed (user_id),
        NotLoaded.
        """
        if rights is None:
            return
        for queue in queues:
            command_permissions.read_queue(rights, queue)
        if self._branches.asked.get(token) == rights.now:
            return
        missing: list[NotLoaded] = []
        for part in parts:
            if part.kind == "publish" and part.rows:
                try:
                    rows = self._read(part.block_id) if part.block_id else inline_rows(part)
                except NotLoaded as error:
                    missing.append(error)
                    continue
                command_permissions.publish_rows(rights, self._topology, rows)
                if not rights.impersonates:
                    for properties in rows.column("properties").unique().to_pylist():
                        check_user_id(properties, rights.user)
        if missing:
            raise together(missing)
