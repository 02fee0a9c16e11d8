"""What the door of an engine elsewhere serves: its apps, queues and ledgers, by the ports of the engine.

Not here: which routes it has (``routes.py``), lists as RabbitMQ shows them (``answers.py``).
Invariant: nothing of the engine changes. What is shown is at most KEPT_S old, and what is staged STAGED_S, or
older where that takes long: to find it, whole topics are read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from broker_core.admin import (
    Admin,
    BindingInfo,
    ExchangeInfo,
    HistoryPage,
    LedgerInfo,
    MessageLife,
    QueueInfo,
    TransactionInfo,
)
from broker_core.broker.history.lookup import Sees
from broker_core.engine import AppInfo, AttemptInfo, Engine
from broker_core.server.http.elsewhere.recent import Recent
from broker_core.server.http.elsewhere.topic_rates import TopicRates
from broker_core.server.http.served import AppLedger, Past, Served

T = TypeVar("T")
KEPT_S, STAGED_S = 1.0, 30.0
STAGED_SHARE = 20.0  # the stage topics are read for a twentieth of the time at most


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineServed(Served):
    """``broker``: of no messages; it has the users of the door, and the virtual host ``/``."""

    engine: Engine
    admin: Admin
    elsewhere: bool = True
    recent: Recent = field(default_factory=Recent)
    topic_rates: TopicRates = field(default_factory=TopicRates)

    def kept(self, key: Hashable, ask: Callable[[], T]) -> T:
        return self.recent.get(key, ask, KEPT_S)

    # -- as Served -------------------------------------------------------------------------------------------
    def pipelines(self, vhost: str, last: int = 1, app_id: str | None = None) -> list[AppLedger]:
        if app_id is None:
            apps = self.apps()
        else:
            found = self.kept(("app", app_id), lambda: self.engine.app(app_id))
            apps = [found] if found is not None else []
        return [AppLedger(app, self._ledger(app, last)) for app in apps]

    def _ledger(self, app: AppInfo, last: int) -> Sequence[LedgerInfo]:
        count = min(last, app.sequence)
        if not count:
            return ()
        key = ("ledger", app.app_id, app.sequence, count)
        found = self.kept(key, lambda: self.admin.ledger(app.app_id, app.sequence - count, count))
        return [each for each in found if each.app_id == app.app_id]

    def attempts(self, vhost: str) -> list[AttemptInfo]:
        return self.recent.get("attempts", self.engine.attempts, STAGED_S, STAGED_SHARE)

    @property
    def past(self) -> Past:
        return EnginePast(self)

    def queue_key(self, vhost: str, name: str) -> str:
        return name

    # -- of the engine ---------------------------------------------------------------------------------------
    def apps(self) -> list[AppInfo]:
        return self.kept("apps", self.engine.apps)

    def queues(self) -> list[QueueInfo]:
        """By name."""
        return self.kept("queues", self.admin.queues)

    def exchanges(self) -> list[ExchangeInfo]:
        return self.kept("exchanges", self.admin.exchanges)

    def bindings(self) -> list[BindingInfo]:
        return self.kept("bindings", self.admin.bindings)


class EnginePast:
    """The micro-batches that the ledgers of the apps keep."""

    def __init__(self, served: EngineServed) -> None:
        self._served = served

    def transaction(self, sequence: int, sees: Sees) -> TransactionInfo:
        return self._served.admin.transaction(sequence)

    def page(self, sees: Sees, limit: int, before: int) -> HistoryPage:
        admin = self._served.admin
        return HistoryPage(tuple(self._served.kept(("history", limit), lambda: admin.history(limit))))

    def message(self, queue: str, offset: int, sees: Sees, at: str) -> MessageLife:
        return self._served.admin.message(queue, offset)
