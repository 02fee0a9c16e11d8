"""A driver and its task in one process, which runs micro-batches from queue to queue until there is nothing
left to do after FOLDER/stop exists: URL APP SOURCE TARGET FOLDER NAME.

FOLDER/offsets is the offset log of a checkpoint that all workers share, as Spark writes it: who is first is
right. NAME is the file of the answers: one JSON line for each claim, batch and error.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from broker_core.core import errors
from broker_core.engine import START, BranchHeader, Committed, Limit, Origin, ReadTicket, Vector
from broker_core.kafka.engine import KafkaEngine

QUERY = "q"
REQUEST_MS = 3_000
SETTINGS = {"kafka.request.timeout.ms": str(REQUEST_MS), "kafka.default.api.timeout.ms": "20000"}
WAIT_S = 0.2
AGAIN = (  # Spark starts the query again
    errors.ConnectionFailed,
    errors.TransactionState,
    errors.MissingBranch,
)


class Worker:
    def __init__(self, url: str, app: str, source: str, target: str, folder: Path, name: str) -> None:
        self._app, self._source, self._target, self._folder = app, source, target, folder
        self._offsets = folder / "offsets"
        self._answers = (folder / name).open("a", buffering=1)
        self._driver, self._task = KafkaEngine(url, SETTINGS), KafkaEngine(url, SETTINGS)

    def run(self) -> None:
        while True:
            try:
                if not self._step() and (self._folder / "stop").exists():
                    return
            except AGAIN as error:
                self._say(error=type(error).__name__, text=str(error))

    def _step(self) -> bool:
        """The batch behind the last one of the log, or the last one if it may not be decided; whether there
        is one.
        """
        batch = max((int(path.name) for path in self._offsets.iterdir()), default=-1)
        if batch < 0 or self._is_decided(batch):
            batch += 1
            start = self._start(batch)
            end = self._driver.claim(self._app, [self._source], start, Limit(max_rows=50), Origin(), "fail")
            if end == start or START in end.values():
                known = {log: int(at) for log, at in end.items() if at != START}
                self._driver.wait([self._source], known, WAIT_S)
                return False
            if START not in start.values():  # a symbolic start has another end for each new checkpoint
                self._say(claim=[json.dumps(start, sort_keys=True), json.dumps(end, sort_keys=True)])
            self._log(batch, end)
        committed = micro_batch(
            self._driver,
            self._task,
            (self._app, self._source, self._target),
            batch,
            self._start(batch),
            self._logged(batch),
        )
        self._say(batch=batch, already=committed.already, sequence=committed.entry.sequence)
        return True

    def _is_decided(self, batch: int) -> bool:
        last = self._driver.last_entry(self._app)
        return last is not None and last.batch_id >= batch

    # -- the checkpoint --------------------------------------------------------------------------------------

    def _start(self, batch: int) -> Vector:
        return self._logged(batch - 1) if batch else {self._source: START}

    def _logged(self, batch: int) -> Vector:
        found: Vector = json.loads((self._offsets / str(batch)).read_text())
        return found

    def _log(self, batch: int, end: Vector) -> None:
        """Whole or not at all, and once."""
        draft = self._folder / f"draft-{os.getpid()}"
        draft.write_text(json.dumps(end))
        try:
            os.link(draft, self._offsets / str(batch))
        except FileExistsError:
            if batch and self._logged(batch) != end:
                raise AssertionError(f"batch {batch} ends at {self._logged(batch)} and at {end}") from None
        finally:
            draft.unlink()

    def _say(self, **what: Any) -> None:
        self._answers.write(json.dumps(what) + "\n")


def micro_batch(
    driver: KafkaEngine, task: KafkaEngine, of: tuple[str, str, str], batch: int, start: Vector, end: Vector
) -> Committed:
    """Reads, stages and decides what was claimed. ``of``: app, source and target."""
    app, _, queue = of
    opened = driver.open_batch(app, QUERY, batch, "fail")
    ranges = driver.resolve(app, start, end)
    slices = tuple((log, first, last) for log, (first, last) in ranges.items())
    read = task.read(ReadTicket(app, QUERY, batch, ranges, slices))
    rows = [pa.record_batch({"body": found.column("body")}) for found in read]
    staged = []
    if not opened.already:
        target = {"exchange": "", "routing_key": queue}
        header = BranchHeader(opened.token, os.urandom(16).hex(), "publish", target, app, QUERY, batch)
        staged = [task.stage(header, rows)]
    committed = driver.commit_batch(app, QUERY, batch, opened.token, staged)
    driver.ack(app, end)
    return committed


if __name__ == "__main__":
    Worker(*sys.argv[1:5], Path(sys.argv[5]), sys.argv[6]).run()
