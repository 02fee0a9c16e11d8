"""Whether the log of a Delta table proves that a batch is in it."""

from __future__ import annotations

from typing import Any

import pytest

from connector.delta.log import CLOCKS_APART_MS, Commit, find_commit, is_of
from connector.tables.commit_id import CommitId, restored_in, txn_app_id

DECIDED_MS = 10 * CLOCKS_APART_MS
BATCH = {"app_id": "app", "sequence": 4, "token": "mine", "query_id": "q", "batch_id": 3}
OTHER = {**BATCH, "token": "another"}
LONG_BEFORE = DECIDED_MS - CLOCKS_APART_MS - 1


def commit(version: int, timestamp_ms: int, metadata: dict[str, Any] | None = None) -> Commit:
    return Commit(version, timestamp_ms, metadata or {})


def restore(version: int, to: int | None, timestamp_ms: int = DECIDED_MS) -> Commit:
    return Commit(version, timestamp_ms, {}, "RESTORE", to)


@pytest.mark.parametrize(
    ("history", "answer"),
    [
        ([commit(1, DECIDED_MS, BATCH), commit(0, 0)], True),
        ([commit(9, DECIDED_MS + 5), commit(8, DECIDED_MS + 1, BATCH)], True),
        ([commit(9, DECIDED_MS + 5), commit(8, LONG_BEFORE, OTHER)], False),
        ([commit(1, DECIDED_MS, OTHER), commit(0, DECIDED_MS)], False),
        ([commit(9, DECIDED_MS, OTHER), commit(8, DECIDED_MS)], None),
        ([commit(8, DECIDED_MS - CLOCKS_APART_MS // 2)], None),
        ([], False),
        ([restore(7, 4), commit(6, DECIDED_MS, BATCH)], False),
        ([restore(7, 6), commit(6, DECIDED_MS, BATCH)], True),
        ([commit(8, DECIDED_MS, BATCH), restore(7, 4), commit(6, DECIDED_MS, BATCH)], True),
        ([restore(9, 5), restore(8, 2), commit(4, DECIDED_MS, BATCH)], True),
        ([restore(9, None), commit(8, DECIDED_MS, BATCH)], None),
        ([restore(9, None, LONG_BEFORE), commit(8, LONG_BEFORE, OTHER)], False),
    ],
    ids=[
        "newest",
        "behind another's",
        "before the decision",
        "whole log",
        "cleaned too far",
        "clocks differ",
        "no log",
        "taken out",
        "restored to it",
        "taken out and there again",
        "a restore that was taken out",
        "restored to a time",
        "restored to a time before the decision",
    ],
)
def test_the_log_proves_a_batch_or_its_absence_or_says_that_it_cannot(
    history: list[Commit], answer: bool | None
) -> None:
    assert find_commit(iter(history), BATCH, DECIDED_MS * 1000).exists is answer


def test_a_commit_of_another_step_of_the_batch_is_not_that_of_this_one() -> None:
    first, second = ({**BATCH, "txn_app_id": f"app@data/table{step}"} for step in ("", "#1"))
    assert is_of(first, first) and is_of(second, second)
    assert not is_of(first, second) and not is_of(second, first)
    # the ledger's own check, and a commit that names no id
    assert is_of(second, BATCH) and is_of(BATCH, second)


@pytest.mark.parametrize("app", ["app", "a/b#1~2@c"])
@pytest.mark.parametrize("step", [0, 1])
def test_a_step_behind_a_restore_has_an_id_of_its_own_of_the_same_app(app: str, step: int) -> None:
    of_table = txn_app_id(app, "5e1f", "/lake/t", step)
    for name, base in ((of_table, txn_app_id(app, "5e1f", "/lake/t")), (f"l:{app}@5e1f", f"l:{app}@5e1f")):
        once = CommitId(name, 4, {**BATCH, "txn_app_id": name}, DECIDED_MS * 1000)
        behind = once.behind(7)
        assert restored_in(behind.txn_app_id, base) == 7 and behind.batch["txn_app_id"] == behind.txn_app_id
        assert behind.behind(9) == once.behind(9)
        assert behind.txn_app_id.endswith("~7#1" if step and name == of_table else "~7")
        assert not is_of(behind.batch, once.batch)
