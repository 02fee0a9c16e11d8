"""import_ms and cli_ms: how long `import txmq` and `txmq queue list` take, from the start of Python to its
end.

The reference of both is a Python that does nothing.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.broker import serving
from bench.report import Figure, against
from txmq import BrokerClient

REPETITIONS = 15
NOTHING = ("-c", "pass")


def import_ms(_folder: Path) -> list[Figure]:
    return [_started("import_ms", ("-c", "import txmq"))]


def cli_ms(folder: Path) -> list[Figure]:
    with serving(folder / "cli") as served:
        with BrokerClient(served.url) as client, client.channel() as channel:
            channel.queue_declare("orders")
        return [_started("cli_ms", ("-m", "txmq", "queue", "list", "--url", served.url))]


def _started(figure: str, arguments: Sequence[str]) -> Figure:
    """The median time of a process, which is the value, beside that of the reference."""
    found, references = [], []
    for _ in range(REPETITIONS + 1):
        references.append(_process_ms(NOTHING))
        found.append(_process_ms(arguments))
    return against(figure, found[1:], references[1:], "ms")


def _process_ms(arguments: Sequence[str]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return (time.perf_counter() - started) * 1000
