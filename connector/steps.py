"""The steps of a micro-batch: the order of its operations on each table, and what may share a step.

Appends that follow each other are one step of a table, one Delta commit. Each merge, delete and overwrite is
a step of its own. The steps of a table are numbered from 0, and done in this order.

Not here: what an operation does. Pure.
Invariant: a step of a table is one commit with a transaction id of its own, so each is repeated on its own
(``delta.txn_app_id``).
"""

from __future__ import annotations

from typing import Any

from broker_core.errors import OptionError


class Steps:
    """The steps of one attempt at a batch."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, bool]] = {}  # location -> its last step, and whether it appends
        self._targets: dict[tuple[str, str, int], dict[str, Any]] = {}

    def append(self, location: str) -> int:
        """The step of an append."""
        step, appends = self._last.get(location, (0, True))
        step += not appends
        self._last[location] = step, True
        return step

    def change(self, location: str) -> int:
        """The step of a merge, a delete or an overwrite."""
        step = self._last[location][0] + 1 if location in self._last else 0
        self._last[location] = step, False
        return step

    def same_target(self, kind: str, name: str, step: int, target: dict[str, Any]) -> None:
        """Raises OptionError if the step has been used with other columns or options."""
        earlier = self._targets.setdefault((kind, name, step), target)
        if earlier == target:
            return
        what = "columns" if earlier["schema"] != target["schema"] else "options"
        raise OptionError(
            f"two {kind}s to {name!r} in one micro-batch have different {what}, but they are one commit",
            f"give both the same {what}, or union them by name first",
        )
