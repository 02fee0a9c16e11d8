"""``python -m tests.walks [WALK ...]``: prints which files and functions a piece of work passes, in their order.

A line is a hand-over: the file, and the functions that are called there until another file has its turn.
Without a name it lists the walks. ``--json`` prints files, calls and hand-overs of each.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from pathlib import Path

from tests.walks.recorder import Recorder, Walk
from tests.walks.walks import WALKS


def measured(name: str) -> Walk:
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder, recorder.installed():
        return WALKS[name](recorder, Path(folder) / "data")


def shown(walk: Walk) -> str:
    lines = []
    for number, (file, functions) in enumerate(walk.visits(), 1):
        lines.append(f"{number:4}  {file:44}  {', '.join(functions)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.walks", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("walks", nargs="*", choices=[*WALKS, []], metavar="WALK", help=", ".join(WALKS))
    parser.add_argument(
        "--json", action="store_true", help="files, calls and hand-overs, of all walks without a name"
    )
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.json:
        found = {name: measured(name) for name in options.walks or WALKS}
        print(json.dumps({
            name: {"files": walk.files, "calls": len(walk.calls), "hand_overs": walk.hand_overs}
            for name, walk in found.items()
        }))  # fmt: skip
        return
    if not options.walks:
        for name, work in WALKS.items():
            print(f"{name:12}  {(work.__doc__ or '').strip()}")
    for name in options.walks:
        walk = measured(name)
        print(
            f"{name}: {len(walk.files)} files, {len(walk.calls)} calls, {walk.hand_overs} hand-overs\n{shown(walk)}"
        )


if __name__ == "__main__":
    main()
