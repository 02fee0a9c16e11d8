"""What of a batch is applied at the same time: each table that fails is named."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest

from broker_core.core.errors import NotApplied
from broker_core.engine import LedgerEntry, ToApply
from connector.batch import apply
from connector.batch.apply import DecidedBatch

ENTRY = LedgerEntry("app", 7, "q", 3, "token", {"in": (0, 2)}, 2, 0, 1)


class NoContext:
    def __init__(self, _spark: object) -> None:
        self.entered = contextlib.nullcontext


@pytest.mark.parametrize("fails", [[], ["a"], ["b"], ["a", "b"], ["b", "c", "d"]])
def test_of_tables_side_by_side_each_that_fails_is_raised_or_logged_by_its_name(
    fails: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[str] = []

    class Batch(DecidedBatch):
        def apply(self, steps: Any) -> None:
            name = steps[0][1][0].target["table"]
            tried.append(name)
            if name in fails:
                raise NotApplied(f"why {name} fails")

    monkeypatch.setattr(apply, "ThreadContext", NoContext)
    nothing: Any = None
    tables = [[(number, [ToApply("append", {"table": name}, (), 1)])] for number, name in enumerate("abcd")]
    with contextlib.ExitStack() as stack:
        if fails:
            stack.enter_context(pytest.raises(NotApplied, match=f"why {fails[0]} fails"))
        stack.enter_context(caplog.at_level(logging.ERROR))
        Batch(nothing, nothing, nothing, nothing, ENTRY).apply_side_by_side(tables)
    assert sorted(tried) == ["a", "b", "c", "d"]
    assert [each.getMessage() for each in caplog.records] == [
        f"table '{name}' has not taken batch 7 of app 'app': [TXMQ_NOT_APPLIED] why {name} fails"
        for name in fails[1:]
    ]
