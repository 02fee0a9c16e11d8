"""Figures, their goals, and their output."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass


class Skipped(Exception):
    """A figure cannot be measured on this machine; the text is the reason."""


@dataclass(frozen=True)
class Figure:
    """``ratio``: value divided by reference; both are None for a figure without reference."""

    figure: str
    value: float
    unit: str
    reference: float | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class Goal:
    """``of``: the compared number, ``ratio`` or ``value``."""

    of: str
    at_least: float
    aim: float
    less_is_better: bool = False


# of table_latency: rows a second
RATES, PERCENTS = (100, 1_000, 10_000), (50, 95, 99)
GOALS = {
    "source_rows": Goal("ratio", 0.7, 0.95),
    "sink_rows": Goal("ratio", 0.75, 0.9),
    "source_rows_tls": Goal("ratio", 0.5, 0.8),
    "sink_rows_tls": Goal("ratio", 0.5, 0.8),
    "commit_1": Goal("ratio", 0.5, 0.9),
    "commit_16": Goal("ratio", 2.5, 5),
    "append_rows": Goal("ratio", 0.8, 0.95),
    "append_threads": Goal("ratio", 0.8, 0.9),
    "append_small_ms": Goal("value", 30, 15, less_is_better=True),
    "merge_rows": Goal("ratio", 0.8, 0.95),
    **dict.fromkeys(("decode_rows", "decode_rows_24", "decode_rows_200"), Goal("ratio", 0.9, 1)),
    "reject_rows": Goal("ratio", 1.1, 1.5),
    "micro_batch_overhead_ms": Goal("value", 40, 15, less_is_better=True),
    "small_commit_read": Goal("ratio", 0.5, 0.9),
    "backlog_rss_mb": Goal("value", 500, 250, less_is_better=True),
    "backlog_open_s": Goal("value", 3, 1, less_is_better=True),
    "many_messages_rss_mb": Goal("value", 500, 250, less_is_better=True),
    "many_messages_open_s": Goal("value", 3, 1, less_is_better=True),
    **dict.fromkeys(
        ("many_connections_ns", "many_queues_declare_ms", "many_apps_ns", "large_batch_mb"),
        Goal("ratio", 1.5, 1.1, less_is_better=True),
    ),
    "many_queues_confirm_p99_ms": Goal("value", 20, 10, less_is_better=True),
    "many_queues_start_s": Goal("value", 3, 1.5, less_is_better=True),
    "amqp_tx_1": Goal("ratio", 1, 3),
    "amqp_tx_1x32": Goal("ratio", 1, 3),
    "amqp_tx_100": Goal("ratio", 1.5, 5),
    "amqp_relay_100": Goal("ratio", 1.5, 5),
    "amqp_confirms": Goal("ratio", 0.5, 1.5),
    "amqp_tx_100_permissions": Goal("ratio", 1.02, 1, less_is_better=True),
    "amqp_confirms_dedup": Goal("ratio", 1.25, 1.1, less_is_better=True),
    "amqp_confirms_permissions": Goal("ratio", 1.02, 1, less_is_better=True),
    "amqp_plain_autoack": Goal("ratio", 0.5, 1.5),
    "amqp_plain_acks": Goal("ratio", 0.5, 1.5),
    "amqp_commit_p99": Goal("ratio", 1, 0.5, less_is_better=True),
    "http_commit_p99": Goal("ratio", 1.1, 1, less_is_better=True),
    "dead_letter_rate": Goal("ratio", 0.5, 1),
    "recovery_s": Goal("ratio", 1.3, 1.1, less_is_better=True),
    "recovery_python_s": Goal("ratio", 1.3, 1.1, less_is_better=True),
    "backup_silence_ms": Goal("value", 100, 50, less_is_better=True),
    "longest_silence_ms": Goal("value", 100, 50, less_is_better=True),
    "loop_hold_ms": Goal("value", 50, 20, less_is_better=True),
    "flood_p99_ms": Goal("value", 50, 25, less_is_better=True),
    "kafka_decode": Goal("value", 2_500_000, 4_000_000),
    "kafka_encode": Goal("value", 3_000_000, 5_000_000),
    "kafka_encode_uneven": Goal("value", 3_000_000, 5_000_000),
    "kafka_source_rows": Goal("ratio", 1, 2),
    "kafka_source_rows_lz4": Goal("ratio", 1, 2),
    "kafka_sink_rows": Goal("ratio", 1, 2),
    "kafka_partitions_ms": Goal("ratio", 1, 0.5, less_is_better=True),
    "kafka_decide_ms": Goal("value", 15, 4, less_is_better=True),
    "kafka_decide_tv1_ms": Goal("value", 25, 12, less_is_better=True),
    "kafka_chain_p50_ms": Goal("ratio", 1.3, 1, less_is_better=True),
    "kafka_chain_p95_ms": Goal("ratio", 1.3, 1, less_is_better=True),
    "latency_p50_ms": Goal("ratio", 1.2, 1, less_is_better=True),
    "latency_p95_ms": Goal("ratio", 1.2, 1, less_is_better=True),
    **{
        f"table_latency_{rate}_p{percent}_ms": Goal("ratio", 1, 0.25, less_is_better=True)
        for rate in RATES
        for percent in PERCENTS
    },
    "kafka_foreach_batch_rows": Goal("ratio", 1, 1.2),
    "tx_open_100k": Goal("ratio", 0.7, 0.9),
    "import_ms": Goal("value", 150, 75, less_is_better=True),
    "cli_ms": Goal("value", 400, 250, less_is_better=True),
}


def against(figure: str, values: Sequence[float], references: Sequence[float], unit: str) -> Figure:
    """The medians of alternating repetitions, and their ratio."""
    value, reference = statistics.median(values), statistics.median(references)
    note(
        f"{figure}: {', '.join(f'{v:,.1f}' for v in values)}; reference "
        f"{', '.join(f'{v:,.1f}' for v in references)}"
    )
    return Figure(figure, round(value, 1), unit, round(reference, 1), round(value / reference, 3))


def beyond(figure: str, times_ms: Sequence[float], references_ms: Sequence[float]) -> Figure:
    """By how much one median is above the other, and their ratio."""
    value, reference = statistics.median(times_ms), statistics.median(references_ms)
    return Figure(figure, round(value - reference, 1), "ms", round(reference, 1), round(value / reference, 3))


def piped(main: Callable[[], None]) -> None:
    """Runs ``main`` until it ends, or the reader of its output (head) does."""
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BrokenPipeError:  # nor does the end of the process complain of it
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def note(text: str) -> None:
    print(f"# {text}", file=sys.stderr, flush=True)


def emit(figure: Figure) -> None:
    print(json.dumps(asdict(figure)), flush=True)


def reached(figure: Figure) -> str:
    goal = GOALS.get(figure.figure)
    if goal is None:
        return ""
    found = figure.ratio if goal.of == "ratio" else figure.value
    if found is None:
        return "?"

    def holds(bound: float) -> bool:
        return found <= bound if goal.less_is_better else found >= bound

    return "aim" if holds(goal.aim) else "target" if holds(goal.at_least) else "MISSED"


def table(figures: Sequence[Figure], skipped: Mapping[str, str]) -> str:
    """A line per figure; ``skipped`` maps a skipped figure to the reason."""
    lines = [
        f"{'figure':26}{'value':>14} {'unit':10}{'reference':>14}{'ratio':>8}{'target':>8}{'aim':>7}  reached"
    ]
    for figure in figures:
        goal = GOALS.get(figure.figure)
        reference = "" if figure.reference is None else f"{figure.reference:,.1f}"
        ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
        target, aim = (f"{goal.at_least:g}", f"{goal.aim:g}") if goal else ("", "")
        lines.append(
            f"{figure.figure:26}{figure.value:>14,.1f} "
            f"{figure.unit:10}{reference:>14}{ratio:>8}{target:>8}{aim:>7}  {reached(figure)}"
        )
    return "\n".join(lines + [f"{name:26}       skipped  {why}" for name, why in skipped.items()])
