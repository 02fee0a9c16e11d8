"""The steps of a micro-batch: the order of its operations on each table, and what may share a step.

Appends that follow each other are one step of a table, one Delta commit. Each merge, delete and overwrite is
a step of its own. The steps of a table are numbered from 0, and done in this order.

Not here: what an operation does. Pure; the caller has a lock.
Invariant: a step of a table is one commit with a transaction id of its own, so each is repeated on its own
(``tables/commit_id.py``).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from broker_core.core.errors import OptionError
from broker_core.engine import BranchTarget


class Steps:
    """The steps of one attempt at a batch."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, bool]] = {}  # location -> its last step, and whether it appends
        self._targets: dict[tuple[str, str, int], tuple[BranchTarget, int]] = {}  # and how many share it

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

    def same_target(self, kind: str, name: str, step: int, target: BranchTarget) -> None:
        """Adds an append to the step. Raises OptionError if an earlier one has other columns or options."""
        earlier, sharing = self._targets.get((kind, name, step), (target, 0))
        if earlier == target:
            self._targets[kind, name, step] = target, sharing + 1
            return
        what = "columns" if earlier["schema"] != target["schema"] else "options"
        raise OptionError(
            f"two {kind}s to {name!r} in one micro-batch have different {what}, but they are one commit",
            f"give both the same {what}, or union them by name first",
        )

    @contextlib.contextmanager
    def left_by_failures(self, lock: threading.Lock, kind: str, name: str, step: int) -> Iterator[None]:
        """One that shares the step stages its rows. If it fails, the next one may have other columns."""
        try:
            yield
        except BaseException:
            with lock:
                target, sharing = self._targets.pop((kind, name, step))
                if sharing > 1:
                    self._targets[kind, name, step] = target, sharing - 1
            raise
