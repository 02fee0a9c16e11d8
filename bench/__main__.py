"""``python -m bench [--only FIGURE ...]``: one JSON line per figure on stdout, notes on stderr, a table at
the end.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

from bench import (
    amqp,
    backlog,
    backup,
    commits,
    connect,
    cost,
    dead_letters,
    decode,
    floods,
    http,
    permissions,
    readme,
    recovery,
    scale,
    starts,
    streams,
    tls,
)
from bench.report import Figure, Skipped, emit, note, piped, table

MEASURES: dict[str, Callable[[Path], list[Figure]]] = {
    "commit_1": commits.commit_1,
    "commit_16": commits.commit_16,
    "source_rows": streams.source_rows,
    "sink_rows": streams.sink_rows,
    "source_rows_tls": tls.source_rows_tls,
    "sink_rows_tls": tls.sink_rows_tls,
    "append_rows": streams.append_rows,
    "append_rows_connect": connect.append_rows_connect,
    "append_threads": streams.append_threads,
    "append_small_ms": streams.append_small_ms,
    "merge_rows": streams.merge_rows,
    "decode_rows": decode.decode_rows,
    "decode_rows_24": decode.decode_rows,
    "decode_rows_200": decode.decode_rows,
    "reject_rows": decode.decode_rows,
    "micro_batch_overhead_ms": streams.micro_batch_overhead_ms,
    "recovery_s": recovery.recovery_s,
    "recovery_python_s": recovery.recovery_s,
    "small_commit_read": streams.small_commit_read,
    "backlog_rss_mb": backlog.backlog,
    "backlog_open_s": backlog.backlog,
    "many_messages_rss_mb": backlog.many_messages,
    "many_messages_open_s": backlog.many_messages,
    "many_connections_ns": scale.many_connections,
    "many_queues_declare_ms": scale.many_queues,
    "many_queues_confirm_p99_ms": scale.many_queues,
    "many_queues_start_s": scale.many_queues,
    "many_apps_ns": scale.many_apps,
    "large_batch_mb": scale.large_batch,
    "amqp_tx_1": amqp.amqp_tx_1,
    "amqp_tx_1x32": amqp.amqp_tx_1x32,
    "amqp_tx_100": amqp.amqp_tx_100,
    "amqp_relay_100": amqp.amqp_relay_100,
    "amqp_confirms": amqp.amqp_confirms,
    "amqp_tx_100_permissions": permissions.amqp_tx_100_permissions,
    "amqp_confirms_permissions": permissions.amqp_confirms_permissions,
    "amqp_confirms_dedup": permissions.amqp_confirms_dedup,
    "amqp_plain_autoack": amqp.amqp_plain,
    "amqp_plain_acks": amqp.amqp_plain,
    "amqp_commit_p99": amqp.amqp_commit_p99,
    "http_commit_p99": http.http_commit_p99,
    "dead_letter_rate": dead_letters.dead_letters,
    "longest_silence_ms": dead_letters.dead_letters,
    "backup_silence_ms": backup.backup_silence_ms,
    "loop_hold_ms": cost.loop_hold_ms,
    "flood_p99_ms": floods.flood_p99_ms,
    "tx_open_100k": amqp.tx_open_100k,
    "import_ms": starts.import_ms,
    "cli_ms": starts.cli_ms,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench",
        description="Measure each figure and its reference in the same run.",
    )
    parser.add_argument(
        "--only", action="append", choices=list(MEASURES), help="only this figure (may be repeated)"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        help="measure the disk that holds this directory (default: that of the temporary files)",
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the figures to this file too, as JSON"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that every broker ends too
    # two figures may come from one measurement
    wanted = dict.fromkeys(MEASURES[name] for name in options.only or MEASURES)
    figures: list[Figure] = []
    skipped: dict[str, str] = {}
    failed = False
    for measure in wanted:
        names = [name for name in MEASURES if MEASURES[name] is measure]
        note(f"{measure.__module__}.{measure.__name__}")
        with tempfile.TemporaryDirectory(prefix="txmq-bench-", dir=options.dir) as folder:
            try:
                found = measure(Path(folder))
            except Skipped as reason:
                note(f"skipped: {reason}")
                skipped |= dict.fromkeys(names, str(reason))
                continue
            except Exception as error:  # the others of an hour stay
                traceback.print_exc()
                skipped |= dict.fromkeys(names, f"failed: {error!r}")
                failed = True
                continue
        for figure in found:
            emit(figure)
        figures += found
    print("\n" + table(figures, skipped))
    if options.write:
        readme.write(figures, options.write)
    if failed:
        sys.exit("a figure failed, see above")


if __name__ == "__main__":
    piped(main)
