"""The claims of an app by its sources: the sets of logs that it claims together. Pure.

Invariant: a source without a claim is not kept.
"""

from __future__ import annotations

from collections.abc import Iterable

from broker_core.core.records import ClaimRecord, canonical
from broker_core.core.undo import Undo
from broker_core.micro_batch.claims.origins import too_many


class Sources:
    def __init__(self, undo: Undo) -> None:
        self._undo = undo
        self._of: dict[str, dict[str, list[ClaimRecord]]] = {}  # app -> logs -> in order of position

    def claims(self, claim: ClaimRecord) -> list[ClaimRecord]:
        """Returns those of its source."""
        return self._of[claim.app_id][_logs(claim.ranges)]

    def add(self, claim: ClaimRecord) -> None:
        app, logs = claim.app_id, _logs(claim.ranges)
        if app not in self._of:
            self._undo.item(self._of, app)
        sources = self._of.setdefault(app, {})
        self._undo.item(sources, logs)
        claims = sources.setdefault(logs, [])
        self._undo.growth(claims)
        claims.append(claim)

    def remove(self, claim: ClaimRecord) -> None:
        app, logs = claim.app_id, _logs(claim.ranges)
        sources, claims = self._of[app], self._of[app][logs]
        at = claims.index(claim)
        self._undo.append((claims.insert, at, claim))
        del claims[at]
        if not claims:
            self._undo.order(sources)
            del sources[logs]
        if not sources:
            self._undo.item(self._of, app)
            del self._of[app]

    def require_room(self, app_id: str, logs: Iterable[str], most: int) -> None:
        """For a claim of these logs. Raises NotAllowed: the app has as many sources."""
        sources = self._of.get(app_id, {})
        if len(sources) >= most and _logs(logs) not in sources:
            raise too_many(app_id, most)


def _logs(logs: Iterable[str]) -> str:
    return canonical(sorted(logs))
