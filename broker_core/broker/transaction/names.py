"""The names of transactions: which are in use, how each transaction ended, and which one published a message.

A name is an xid or a commit token. It names one transaction of its user in its virtual host, while its
outcome is remembered (``outcomes.py``): nobody takes the name of another, nor learns from it. Everything
here is kept by key (``access/own_id.py``).
"""

from __future__ import annotations

from collections.abc import Iterable

from broker_core.broker.access.own_id import name_of, older_keys, transaction_key
from broker_core.broker.access.users import DEFAULT_USER, Users
from broker_core.broker.arguments import check_text
from broker_core.broker.state.change import InboxRow
from broker_core.broker.state.undo import Undo
from broker_core.broker.transaction.outcomes import Outcomes
from broker_core.broker.transaction.transaction import Transaction
from broker_core.errors import TransactionState, UnknownTransaction

NAMES_KEPT = 100_000  # for dead letters


class TransactionNames:
    def __init__(self, undo: Undo, users: Users) -> None:
        self._users = users
        self.identity = ""  # of the data directory
        self.prepared: dict[str, Transaction] = {}
        self.prepared_in: dict[str, str] = {}  # the virtual host of each
        self.outcomes = Outcomes(undo)
        self._undo = undo
        self._by_time: dict[int, str] = {}  # commit time -> name

    def restore(self, named: Iterable[tuple[int, str]]) -> None:
        """Restores (commit time, name) of committed transactions while loading."""
        self._by_time = dict(sorted(named)[-NAMES_KEPT:])

    def key(self, vhost: str, name: str, user: str = "") -> str:
        """Returns the key of a user's transaction; "": of the owner of the data directory, and of the default
        user. If an older version has left one of this name, which is nobody's, that is the one.
        """
        key = transaction_key(vhost, "" if user == DEFAULT_USER and self._users.default else user, name)
        if not self.knows(key):
            for older in older_keys(vhost, name):
                if self.prepared_in[older] == vhost if older in self.prepared else older in self.outcomes:
                    return older
        return key

    def knows(self, key: str) -> bool:
        return key in self.prepared or key in self.outcomes

    def check_new(self, key: str) -> None:
        """Raises TransactionState for a name that is in use."""
        name = name_of(key)
        check_text("an xid", name)
        if self.knows(key):
            raise TransactionState(
                f"transaction '{name}' is {self.outcome(key)}: an xid names only one "
                "transaction; choose another"
            )

    def outcome(self, key: str, since_us: int = 0) -> str:
        """Returns ``prepared``, ``committed`` or ``rolled_back``.

        Raises UnknownTransaction (there was none since ``since_us``), UnknownOutcome (there may have been
        one, and it is forgotten).
        """
        if key in self.prepared:
            return "prepared"
        if key not in self.outcomes:
            self.outcomes.require_known(name_of(key), since_us)
            raise UnknownTransaction(
                f"no transaction has the xid '{name_of(key)}': it was not prepared and has not ended"
            )
        return self.outcomes[key].state

    def has_ended(self, key: str, wanted: str) -> bool:
        """Returns whether it has ended as ``wanted``. Raises TransactionState if it ended otherwise."""
        state = self.outcome(key)
        if state not in ("prepared", wanted):
            raise TransactionState(f"transaction '{name_of(key)}' is {state}, it cannot become {wanted}")
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
