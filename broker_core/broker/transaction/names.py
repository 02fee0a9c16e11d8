"""The names of transactions: which are in use, and how each ended.

Not here: how long an outcome is kept (``outcomes.py``, ``heuristics.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from broker_core.broker.access.shares import Shares
from broker_core.broker.access.users import DEFAULT_USER, Users, is_owned, keys_in, name_of, transaction_key
from broker_core.broker.transaction.heuristics import Heuristics
from broker_core.broker.transaction.outcomes import NAMES, Outcomes
from broker_core.broker.transaction.transaction import MessageTransactions, Transaction
from broker_core.core.change import Change
from broker_core.core.errors import HeuristicOutcome, TransactionState, UnknownTransaction
from broker_core.core.records import HEURISTICALLY, OutcomeRecord
from broker_core.core.undo import Undo
from broker_core.core.xa.xid import check_name
from broker_core.message.arguments import check_text


class TransactionNames:
    """A name is an xid or a commit token. It names one transaction of its user in its virtual host, while its
    outcome is remembered (``outcomes.py``): nobody takes the name of another, nor learns from it. Everything
    here is kept by key (``access/users.py``).
    """

    def __init__(self, undo: Undo, users: Users) -> None:
        self._users, self.shares = users, Shares(users)
        self.prepared: dict[str, Transaction] = {}
        self.prepared_in: dict[str, str] = {}  # the virtual host of each
        self.outcomes = Outcomes(undo, self.shares)
        self.heuristics = Heuristics(undo, self.shares)
        self.of_messages = MessageTransactions(undo)

    def user(self, user: str) -> str:
        """Returns under which name a user's transactions are kept: the default user is the owner of the
        directory.
        """
        return "" if user == DEFAULT_USER and self._users.default else user

    def key(self, vhost: str, name: str, user: str = "") -> str:
        """Returns the key of a user's transaction; "": of the owner of the data directory, and of the default
        user.
        """
        return transaction_key(vhost, self.user(user), name)

    def knows(self, key: str) -> bool:
        return key in self.prepared or self.has_outcome(key)

    def has_outcome(self, key: str) -> bool:
        return key in self.outcomes or key in self.heuristics.by_key

    def ended(self) -> Iterator[str]:
        """Returns the keys of all with an outcome."""
        return chain(self.outcomes, self.heuristics.by_key)

    def check_new(self, key: str) -> None:
        """Raises TransactionState for a name that is in use."""
        name = name_of(key)
        check_text("an xid", name)
        check_name(name)
        if self.knows(key):
            raise TransactionState(
                f"transaction '{name}' is {self.outcome(key)}: an xid names only one "
                "transaction; choose another"
            )

    def outcome(self, key: str, since_us: int = 0) -> str:
        """Returns ``prepared``, ``committed`` or ``rolled_back``; ``heuristically_`` before it if somebody
        else than who named it has decided, until that is forgotten.

        Raises UnknownTransaction (there was none since ``since_us``), UnknownOutcome (there may have been
        one, and it is forgotten).
        """
        if key in self.prepared:
            return "prepared"
        if not self.has_outcome(key):
            self.outcomes.require_known(key, since_us)
            raise UnknownTransaction(
                f"no transaction has the xid '{name_of(key)}': it was not prepared and has not ended"
            )
        return (self.heuristics.by_key.get(key) or self.outcomes[key]).state

    def has_ended(self, key: str, verb: str, by_hand: bool) -> bool:
        """Returns whether it has ended as ``verb`` ends it. ``by_hand``: as in ``end``. Raises
        HeuristicOutcome, even if it ended so, and TransactionState if it ended otherwise.
        """
        state = self.outcome(key)
        ended, name = state.removeprefix(HEURISTICALLY), name_of(key)
        if state != ended and not by_hand:
            word, done = ("COM", "committed") if ended == "committed" else ("RB", "rolled back")
            raise HeuristicOutcome(
                f"XA_HEUR{word}: transaction '{name}' was {done} by hand",
                "end what belongs to it likewise, then forget it",
            )
        if ended not in ("prepared", verb):
            raise TransactionState(f"transaction '{name}' is {state}, it cannot become {verb}")
        return ended == verb

    def end(self, change: Change, key: str, state: str, now: int, by_hand: bool) -> None:
        """It has ended: committed or rolled_back. ``by_hand``: who named it does not know of that."""
        if not by_hand:
            self.outcomes.remember(change, OutcomeRecord(key, state, now))
        elif (over := self.heuristics.add(change, key, state, now)) is not None:
            self.forget(change, over)

    def forget_vhost(self, change: Change, vhost: str) -> None:
        """What ended in an earlier virtual host of this name did not end in the one that is made now."""
        self._drop(change, keys_in(vhost, self.ended()))

    def forget_user(self, change: Change, user: str) -> None:
        """What a deleted user has ended did not end for a later user of its name."""
        keys = [*self.heuristics.keys_of.get(user, ()), *self.outcomes.keys_of.get((NAMES, user), ())]
        self._drop(change, list(filter(is_owned, keys)))

    def _drop(self, change: Change, keys: list[str]) -> None:
        for key in filter(self.heuristics.by_key.__contains__, keys):
            self.forget(change, key)
        if keys:
            self.outcomes.drop(change, filter(self.outcomes.__contains__, keys))

    def forget(self, change: Change, key: str) -> None:
        """Its outcome is as any other, if it was heuristic. Raises TransactionState (prepared),
        UnknownTransaction, UnknownOutcome.
        """
        if self.outcome(key) == "prepared":
            raise TransactionState(f"transaction '{name_of(key)}' is prepared", "commit it or roll it back")
        if key in self.heuristics.by_key:
            record = self.heuristics.remove(key)
            state = record.state.removeprefix(HEURISTICALLY)
            self.outcomes.remember(change, OutcomeRecord(key, state, record.decided_at))
