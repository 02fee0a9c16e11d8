"""The words of ``admin.`` that are about transactions, for one caller: named ones, and the history of all.

Not here: who decides which transaction (``broker/decision.py``), and how a decision is written to the audit
log (``audit.py``).
"""

from __future__ import annotations

from broker_core.admin import HistoryPage, LedgerInfo, MessageLife, PreparedInfo, TransactionInfo
from broker_core.broker.decision import Decision
from broker_core.core.xa.recover_info import RecoverInfo
from broker_core.node.local import LocalBroker
from broker_core.server.access.caller import Caller
from broker_core.server.history_reader import HistoryReader


class Transactions:
    """Those of the caller's virtual host. ``of``: the user who named one, if that is not the caller.

    ``decided_for``: whose the transaction was that is decided now; None: nobody's.
    """

    def __init__(self, broker: LocalBroker, caller: Caller, history: HistoryReader) -> None:
        self._broker = broker
        self._history = history
        self._caller = caller
        self._vhost = caller.state.vhost
        self.decided_for: str | None = None

    def prepared(self) -> list[PreparedInfo]:
        return self._broker.prepared(self._vhost, self._reads)

    def recover(self, of: str | None = None) -> list[RecoverInfo]:
        return self._broker.recover(self._user(of), self._vhost)

    def _reads(self, queue: str) -> bool:
        return self._caller.identity.owner or self._caller.rights.may("read", queue)

    def commit(self, xid: str, of: str | None = None, by_hand: bool = False) -> int:
        return self._decide("commit", xid, of, by_hand)

    def rollback(self, xid: str, of: str | None = None, by_hand: bool = False) -> None:
        self._decide("rollback", xid, of, by_hand)

    def forget(self, xid: str, of: str | None = None) -> None:
        self._decide("forget", xid, of)

    def rollback_all(self, of: str | None = None, by_hand: bool = False) -> int:
        self.decided_for = self._user(of)
        return self._broker.rollback_all(self._caller.actor, of, self._vhost, by_hand)

    def _decide(self, verb: Decision, xid: str, of: str | None, by_hand: bool = False) -> int:
        caller = self._caller
        decided = self._broker.decide(verb, xid, caller.actor, caller.rights, self._vhost, of, by_hand)
        self.decided_for = decided.user
        return decided.dropped

    def committed(self, token: str, since: float | None = None, of: str | None = None) -> bool:
        return self._broker.committed(token, since, self._vhost, self._user(of))

    def outcome(self, xid: str, since: float | None = None, of: str | None = None) -> str:
        return self._broker.outcome(xid, since, self._vhost, self._user(of))

    def transaction(self, sequence: int) -> TransactionInfo:
        return self._history.transaction(sequence, self._caller.sees)

    def history(self, limit: int, before: int = 0) -> HistoryPage:
        return self._history.page(self._caller.sees, limit, before)

    def ledger(self, app_id: str, sequence: int, limit: int) -> list[LedgerInfo]:
        return self._history.ledger(self._caller.sees, app_id, sequence, limit)

    def message(self, queue: str, offset: int, at: str = "") -> MessageLife:
        return self._history.message(queue, offset, self._caller.sees, at)

    def _user(self, of: str | None) -> str:
        return self._caller.identity.user if of is None else of


WORDS = tuple(name for name in vars(Transactions) if not name.startswith("_"))
