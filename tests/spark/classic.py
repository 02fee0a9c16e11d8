"""Tests of tests/spark that need a classic session, and why. The others run over Spark Connect too, with
``TXMQ_SESSION=connect`` (``sessions.py``).

Not here: what Spark Connect does differently, docs/connect.md.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping

import pytest

# words in a test, and why it is one of a classic session
WORDS: Mapping[str, str] = {
    r"failpoint\.arm|monkeypatch|caplog|nonlocal": "looks into the process of the function, which is another one on Connect",
    r"_jsparkSession|sparkContext|_jvm\b|_jdf|\.newSession\(|query_thread|getOrCreate": "looks into the JVM",
    r"DeltaTable\b": "compares with Delta's API, whose plug-in the server does not have",
}
JVM_ERROR = "an error of the JVM, which is another one on Connect"
HERE = "keeps what the function has in this process"
TESTS: Mapping[str, str] = {
    "test_foreach_batch.py::test_an_append_that_would_fail_after_the_decision_is_refused_before_it": (
        "Connect asks a table for types and constraints alone"
    ),
    "test_foreach_batch.py::test_an_exception_with_a_long_java_trace_ends_the_query_as_failed": JVM_ERROR,
    "test_foreach_batch.py::test_tx_is_of_no_use_after_its_function": HERE,
    "test_merge.py::test_what_a_table_would_refuse_stops_before_anything_is_consumed": HERE,
    "test_foreach_batch.py::test_several_appends_to_one_table_are_one_delta_commit": (
        "where a new table is, Connect does not tell: spellings of its path are tables of their own until it is there"
    ),
}


def reason(item: pytest.Function) -> str | None:
    """Why a test needs a classic session; None if it does not."""
    name = f"{item.path.name}::{item.originalname}"
    source = inspect.getsource(item.function)
    return TESTS.get(name) or next((why for words, why in WORDS.items() if re.search(words, source)), None)
