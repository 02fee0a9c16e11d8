"""What the plan of a batch says of its query, in the words of Spark 4.2."""

from __future__ import annotations

import pytest

from connector.stream.query_plan import checkpoint_in, other_sources

TXMQ = "~StreamingDataSourceV2ScanRelation[queue#1, body#6] txmq"
RATE = "~StreamingDataSourceV2ScanRelation[timestamp#128, value#129L] RatePerMicroBatch(rowsPerBatch=1)"
OPTIONS = {
    "[checkpointLocation=/lake/check point, queryName=both]": "/lake/check point",
    "[queryName=a, checkpointlocation=s3://b/day=1/x]": "s3://b/day=1/x",
    "[queryName=both]": None,
}


def plan(*lines: str, options: str = "[]") -> str:
    root = f"~WriteToMicroBatchDataSourceV1 ForeachBatchSink, e8e9b92a, {options}, Append, 0"
    both = "\n".join([root, *lines])
    return (
        f"== Parsed Logical Plan ==\n{both}\n\n== Analyzed Logical Plan ==\nbody: string\n{both}\n\n"
        "== Optimized Logical Plan ==\n~LocalRelation <empty>\n"
    )


@pytest.mark.parametrize(("options", "place"), OPTIONS.items())
def test_the_checkpoint_is_an_option_of_the_query(options: str, place: str | None) -> None:
    assert checkpoint_in(plan(options=options)) == place


PLANS: dict[str, tuple[list[str], set[str]]] = {
    "queue": (["+- ~Project [body#6]", f"   +- {TXMQ}"], set()),
    "queues": (["+- ~Union false, false", f"   :- {TXMQ}", f"   +- {TXMQ}"], set()),
    "a table beside it": (["+- ~Join Inner", f"   :- {TXMQ}", "   +- Relation [value#88] text"], set()),
    "files": (
        [
            "+- ~Union false, false",
            f"   :- {TXMQ}",
            "   +- ~Project [value#51 AS value#46]",
            "      +- Relation [value#51] text",
        ],
        {"~Project [value#51 AS value#46]"},
    ),
    "rate": (["+- ~Union false, false", f"   :- {TXMQ}", f"   +- {RATE}"], {RATE}),
    "nothing new": (["+- ~LocalRelation <empty>, [body#6]"], {"~LocalRelation <empty>, [body#6]"}),
}


@pytest.mark.parametrize(("lines", "others"), PLANS.values(), ids=PLANS)
def test_what_is_not_surely_a_source_of_txmq_is_told(lines: list[str], others: set[str]) -> None:
    assert set(other_sources(plan(*lines))) == others


def test_a_plan_without_marks_says_nothing() -> None:
    assert other_sources("== Physical Plan ==") != []
