"""An app that this process decides for: fenced, its decisions replayed, and which answers may come from
memory.

Not here: epochs (``producer_epoch.py``), the rules of a batch (``decide.py``).
Invariant: every refusal, and every "already", was decided after a fence of the same call. An epoch that
was kept may have been overtaken, so memory alone only answers "not decided, and the next one", which the
transaction then proves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from broker_core import errors
from broker_core.broker.state.records import LedgerRecord
from broker_core.failpoint import here
from broker_core.kafka import names
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.sink.decisions import Changes, Decisions
from broker_core.kafka.sink.producer_epoch import TIMEOUT_MS, ProducerEpoch

T = TypeVar("T")


class FencedApp:
    def __init__(self, client: Client, decisions: Decisions) -> None:
        self._client = client
        self._decisions = decisions
        self.epoch = ProducerEpoch(client, names.producer_of(decisions.app_id))

    def fence(self, lasting_ms: int = TIMEOUT_MS) -> None:
        """Takes over the app, for transactions of at most ``lasting_ms``."""
        self.epoch.fence(lasting_ms)
        try:
            self._decisions.replay(fenced=True)
        except BaseException:
            self.epoch.release()  # an epoch decides only with a memory that is as new
            raise
        here("kafka.owned.replayed")

    def answer(
        self, ask: Callable[[], LedgerRecord | None], lasting_ms: int = TIMEOUT_MS
    ) -> LedgerRecord | None:
        """Returns the answer of ``ask``: None, of a batch that is new, also from an epoch that was kept; an
        entry or an error only behind a fence of this call.
        """
        fenced = not self.epoch.is_held or self.epoch.timeout_ms < lasting_ms
        if fenced:
            self.fence(lasting_ms)
        try:
            found = ask()
        except (errors.LineageConflict, errors.BatchGap):
            if fenced:
                raise
        else:
            if found is None or fenced:
                return found
        self.fence(lasting_ms)
        return ask()

    def patiently(self, attempt: Callable[[], T]) -> T:
        """Returns what ``attempt`` does; again from the fence, after a pause, where an answer was lost or
        another driver took over.
        """
        patience = self._client.patience()
        while True:
            try:
                return attempt()
            except (errors.ConnectionFailed, errors.TransactionState) as error:
                self.epoch.release()
                patience.wait(error)

    def write(self, changes: Changes) -> None:
        """Writes decisions that publish nothing."""
        log = self._decisions.log
        transaction = self.epoch.begin()
        transaction.join([log])
        transaction.append({log: changes.encoded(self.epoch.now())})
        here("kafka.owned.entered")
        transaction.commit()
        here("kafka.owned.committed")
