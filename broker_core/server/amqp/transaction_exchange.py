"""Named transactions for AMQP clients: a publish to ``amq.transaction`` names or decides a transaction.

AMQP 0-9-1 has no method for prepared transactions, and every client has ``basic.publish`` and ``basic.get``.
So:

    publish to ``amq.transaction`` with the body ``order-7`` (its name) and the routing key
        timeout     the body is a number of seconds: a longer transaction of this channel is rolled back
        token       then tx.commit: committed under this token
        prepare     then tx.commit: prepared, not committed (XA)
        commit      decide a prepared transaction, from any connection of its user or of an operator,
        rollback    on a channel without tx
        forget      that somebody else has decided it: its outcome is no longer told apart
    get from ``amq.transaction.order-7`` with no_ack
        "was it committed?": prepared, committed, rolled_back, unknown, or empty; heuristically_ before it
        if somebody else has decided, until that is forgotten
    get from ``amq.transaction@recover`` with no_ack
        what the user has prepared: a page as JSON, whose routing key is the queue of the next page, or empty
    get from ``amq.transaction@current`` with no_ack
        the id of the open transaction of this channel

Empty: it was not committed. ``unknown``: outcomes are forgotten up to the time in the property ``timestamp``,
and this may be one of them; a transaction that began later was not committed.

A decision is durable when it is confirmed (confirm.select), or when any later command of the channel is
answered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

from broker_core.broker.access.users import payer_of
from broker_core.broker.broker import BrokerState
from broker_core.broker.decision import Decision
from broker_core.broker.recover import recover
from broker_core.broker.transaction.outcomes import NAMES
from broker_core.core.change import Change
from broker_core.core.checks import MAX_NAME_BYTES
from broker_core.core.errors import PreconditionFailed, QueueNotFound, UnknownOutcome, UnknownTransaction
from broker_core.core.xa.xid import check_name
from broker_core.message.field_table import Timestamp
from broker_core.message.properties import Properties

NAME = "amq.transaction"
_OUTCOME, _RECOVER, CURRENT = "amq.transaction.", "amq.transaction@recover", "amq.transaction@current"
QUESTIONS = (_OUTCOME, _RECOVER, CURRENT)  # what the names of queues that only answer start with
Name: TypeAlias = Literal["token", "prepare"]
Verb: TypeAlias = Name | Decision | Literal["timeout"]
_VERBS: tuple[Verb, ...] = ("token", "prepare", "commit", "rollback", "forget", "timeout")


class NamedTransaction(NamedTuple):
    """The name of the open transaction of a channel: of its commit, or of its prepare."""

    token: str = ""
    prepare: str = ""

    def __bool__(self) -> bool:
        return bool(self.token or self.prepare)

    def with_name(self, verb: Name, xid: str) -> NamedTransaction:
        """Raises PreconditionFailed if it has a name already."""
        if self:
            raise PreconditionFailed(
                f"the transaction is named '{self.token or self.prepare}' already: it cannot be named '{xid}'"
            )
        return self._replace(**{verb: xid})


def parse(routing_key: str, body: bytes) -> tuple[Verb, str]:
    """The verb, which is the routing key, and the xid or seconds. Raises PreconditionFailed, OptionError."""
    verb = next((verb for verb in _VERBS if verb == routing_key), None)
    if verb is None:
        raise PreconditionFailed(
            f"unknown routing key '{routing_key}' for exchange '{NAME}': use one of {', '.join(_VERBS)}"
        )
    names = verb in ("token", "prepare")
    longest = MAX_NAME_BYTES - (len(_OUTCOME) if names else 0)  # the queue of its outcome is a short string
    xid = body.decode(errors="replace")
    if len(body) > longest or xid.encode() != body:
        raise PreconditionFailed(f"an xid is UTF-8 text of at most {longest} bytes, not {body[:40]!r}")
    if not xid:
        raise PreconditionFailed("an empty body names no transaction: publish the xid as the body")
    if names:
        check_name(xid)
    return verb, xid


def seconds(text: str) -> float:
    """Raises PreconditionFailed."""
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", text):
        raise PreconditionFailed(f"a timeout is a number of seconds, not '{text[:40]}'")
    return float(text)


class Answer(NamedTuple):
    """A message of a queue that only answers."""

    body: bytes
    properties: bytes
    routing_key: str
    left: int = 0


def question(name: str, user: str) -> Callable[[BrokerState, Change, int], Answer | None]:
    """Returns the work that answers a get from queue ``name``, which starts with one of QUESTIONS; None: the
    queue is empty. Raises QueueNotFound.
    """
    if name.startswith(_OUTCOME):
        return partial(_outcome, name.removeprefix(_OUTCOME), user)
    page = re.fullmatch(r"(?::([0-9]{1,18}))?", name.removeprefix(_RECOVER))
    if page is None:
        raise QueueNotFound(f"no queue '{name}': use '{_RECOVER}', then the routing key of each answer")
    return partial(_recover, int(page[1] or 0), user)


def _outcome(xid: str, user: str, state: BrokerState, _change: Change, _now_us: int) -> Answer | None:
    """None: there is no such transaction, and there was none."""
    key = state.names.key(state.vhost, xid, user)
    try:
        return Answer(state.names.outcome(key).encode(), b"", xid)
    except UnknownTransaction:
        return None
    except UnknownOutcome:
        horizon_s = -(-state.names.outcomes.horizon(NAMES, payer_of(key)) // 1_000_000)
        return Answer(b"unknown", Properties(timestamp=Timestamp(horizon_s)).encode(), xid)


def _recover(after_us: int, user: str, state: BrokerState, _change: Change, _now_us: int) -> Answer | None:
    page = recover(state, state.vhost, user, after_us)
    if not page.rows:
        return None
    rows = [{"xid": row.xid, "state": row.state, "since": row.since_us / 1e6} for row in page.rows]
    properties = Properties(content_type="application/json").encode()
    return Answer(json.dumps(rows).encode(), properties, f"{_RECOVER}:{page.rows[-1].since_us}", page.left)
