"""The names of transactions: which are in use, how each transaction ended, and which one published a message.

A name is an xid or a commit token. It names one transaction only, while its outcome is remembered
(``outcomes.py``).
"""

from __future__ import annotations

from collections.abc import Iterable

from broker_core.broker.arguments import check_text
from broker_core.broker.change import InboxRow
from broker_core.broker.outcomes import Outcomes
from broker_core.broker.transaction import Transaction
from broker_core.broker.undo import Undo
from broker_core.errors import TransactionState, UnknownTransaction

NAMES_KEPT = 100_000  # for dead letters


class TransactionNames:
    def __init__(self, undo: Undo) -> None:
        self.identity = ""  # of the data directory
        self.prepared: dict[str, Transaction] = {}
        self.outcomes = Outcomes(undo)
        self._undo = undo
        self._by_time: dict[int, str] = {}  # commit time -> name

    def restore(self, named: Iterable[tuple[int, str]]) -> None:
        """Restores (commit time, name) of committed transactions while loading."""
        self._by_time = dict(sorted(named)[-NAMES_KEPT:])

    def check_new(self, xid: str) -> None:
        """Raises TransactionState for a name that is in use."""
        check_text("an xid", xid)
        if xid in self.prepared or xid in self.outcomes:
            raise TransactionState(
                f"transaction '{xid}' is {self.outcome(xid)}: an xid names one "
                "transaction only, choose another"
            )

    def outcome(self, xid: str, since_us: int = 0) -> str:
        """Returns ``prepared``, ``committed`` or ``rolled_back``.

        Raises UnknownTransaction (there was none since ``since_us``), UnknownOutcome (there may have been
        one, and it is forgotten).
        """
        if xid in self.prepared:
            return "prepared"
        if xid not in self.outcomes:
            self.outcomes.require_known(xid, since_us)
            raise UnknownTransaction(
                f"no transaction has the xid '{xid}': it was not prepared and has not ended"
            )
        return self.outcomes[xid].state

    def has_ended(self, xid: str, wanted: str) -> bool:
        """Returns whether it has ended as ``wanted``. Raises TransactionState if it ended otherwise."""
        state = self.outcome(xid)
        if state not in ("prepared", wanted):
            raise TransactionState(f"transaction '{xid}' is {state}, it cannot become {wanted}")
        return state == wanted

    def give(self, name: str, now: int) -> None:
        """Names the transaction of messages that are committed ``now``. Each work of a commit has its own
        time.
        """
        self._undo.item(self._by_time, now)
        self._by_time[now] = name
        if len(self._by_time) > NAMES_KEPT:
            del self._by_time[next(iter(self._by_time))]

    def of(self, row: InboxRow) -> str:
        """Returns the id of the transaction that published a message: its name while that is remembered, else
        a unique id.

        Returns "" for a message that was published outside a transaction.
        """
        return (
            (self._by_time.get(row.committed_at) or f"{self.identity}:{row.sequence}")
            if row.sequence % 2
            else ""
        )
