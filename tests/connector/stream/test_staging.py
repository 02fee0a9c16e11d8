"""What a task returns of a branch, and the driver hands back: nothing of it is lost on the way."""

from __future__ import annotations

import dataclasses

from broker_core.engine import StagedBranch
from connector.stream import staging


def test_a_staged_branch_comes_back_whole_with_the_receipt_of_its_engine() -> None:
    branch = StagedBranch("b", 3, 1, rows=7, checksum=-5, receipt="0:12-14")
    rows = staging.described(branch)
    assert rows.schema.names == [field.name for field in dataclasses.fields(StagedBranch)]
    assert [StagedBranch(**row) for row in rows.to_pylist()] == [branch]
