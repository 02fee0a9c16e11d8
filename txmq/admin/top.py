"""``txmq top``: queues and apps with their rates, live.

Not here: the screen (``screen.py``). LiveRates: rates between two samples, from the broker's own offsets.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from broker_core.admin import QueueInfo
from broker_core.engine import AppInfo
from txmq.address import BROKER, admin_at, engine_at
from txmq.admin.screen import show_live
from txmq.command.declare import Options, command, option
from txmq.command.values import above_zero
from txmq.output import Row, table

INTERVAL = option("--interval", "SECONDS", "update after this time; default 2", type=above_zero, default=2.0)


@command("top", "show the rates of queues and apps, live", *BROKER, INTERVAL, json=False)
def _top(options: Options) -> int:
    rates = LiveRates()

    def fetch(rows: int) -> list[str]:
        queues, apps = admin_at(options).queues(), engine_at(options).apps()
        return rates.screen(queues, apps, rows, time.monotonic())

    return show_live(fetch, options.interval, "txmq top")


class LiveRates:
    """Rates between two calls of ``screen``."""

    def __init__(self) -> None:
        self._at = 0.0
        self._before: dict[str, tuple[int, int]] = {}  # what came and what went, by kind and name
        self._first = True

    def screen(
        self, queues: Sequence[QueueInfo], apps: Sequence[AppInfo], rows: int, now_s: float
    ) -> list[str]:
        counts = {
            f"queue {each.name}": (each.next_offset, each.next_offset - each.messages) for each in queues
        }
        counts |= {f"app {each.app_id}": (each.sequence, 0) for each in apps}
        passed_s, before, first = now_s - self._at, self._before, self._first
        self._at, self._before, self._first = now_s, counts, False

        def rate(name: str, index: int) -> float:
            came = counts[name][index] - before.get(name, (0, 0))[index]
            return 0.0 if first else max(0, came) / passed_s  # less: it was deleted and declared again

        of_queues: list[Row] = [
            {
                "queue": each.name,
                "messages": each.messages,
                "oldest_s": each.oldest_s,
                "unacked": each.unacknowledged,
                "in/s": rate(f"queue {each.name}", 0),
                "out/s": rate(f"queue {each.name}", 1),
                "consumers": each.consumers,
                "owner": each.owner,
            }
            for each in queues
        ]
        of_queues.sort(key=lambda row: (-row["in/s"] - row["out/s"], -row["messages"]))
        of_apps: list[Row] = [
            {
                "app": each.app_id,
                "lag": each.lag,
                "lag_s": each.lag_s,
                "batch": each.sequence,
                "batches/s": rate(f"app {each.app_id}", 0),
                "unapplied": each.unapplied,
                "queues": each.queues,
            }
            for each in sorted(apps, key=lambda each: -each.lag)
        ]
        came, went, there = (sum(row[name] for row in of_queues) for name in ("in/s", "out/s", "messages"))
        head = f"{len(queues)} queues, {there} messages, {came:.1f}/s in, {went:.1f}/s out, {len(apps)} apps"
        for_apps = min(len(apps) + 1, max(2, rows // 2)) if apps else 0
        return [head, "", *_some(of_queues, rows - 3 - for_apps), "", *_some(of_apps, for_apps)]


def _some(rows: Sequence[Row], lines: int) -> list[str]:
    """At most ``lines`` of a table, its head included."""
    return table(rows[: max(0, lines - 1)]) if lines > 1 else []
