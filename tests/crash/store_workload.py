"""What the crash tests of the store do to it: steps that use every kind of write, each one commit, each told
by its number.

``step`` depends only on the seed, the number and what the store holds, so a MemoryStore that ran the same
steps is the model of a durable one that was killed. As a program: ``store_workload.py DIRECTORY SEED STEPS``
goes on where the directory stands and prints ``ack N`` after each commit, and the error where one ends it.

Invariant: step N puts HoleRecord(1, N, N + 1) in its commit, so the store itself says which steps it holds.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import sys
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from broker_core.arrow.part_file import PartWriter
from broker_core.core.change import Change, InboxRow
from broker_core.core.errors import DiskFull, StoreError
from broker_core.core.records import HoleRecord, PartRecord, RunRecord
from broker_core.message.message import MESSAGE_SCHEMA
from broker_core.store.durable import DurableStore
from broker_core.store.port import BlockInfo, Store, StoreImage

ROLL_BYTES = 20_000


@dataclass
class State:
    """What a domain would know of the store."""

    steps: int = 0
    open_batch: int = 0
    open_rows: int = 0
    runs: list[RunRecord] = field(default_factory=list)
    parts: list[PartRecord] = field(default_factory=list)

    @classmethod
    def of(cls, image: StoreImage) -> State:
        state = cls()
        for record in image.records:
            if isinstance(record, HoleRecord):
                state.steps = max(state.steps, record.end)
            elif isinstance(record, RunRecord) and record.queue_id == 1:
                state.runs.append(record)
            elif isinstance(record, PartRecord):
                state.parts.append(record)
        state.runs.sort(key=lambda run: run.first)
        state.parts.sort(key=lambda part: part.part)
        if image.inbox:
            state.open_batch, state.open_rows = image.inbox[-1].block_id, len(image.inbox)
        return state


def messages(number: int, count: int) -> pa.RecordBatch:
    bodies = [b"large-%d-%d" % (number, i) * 8 for i in range(count)]
    columns: list[list[Any]] = [[""] * count, ["q"] * count, bodies, [b""] * count]
    arrays = [
        pa.array(column, schema_field.type)
        for column, schema_field in zip(columns, MESSAGE_SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=MESSAGE_SCHEMA)


def _written(store: Store, block: pa.RecordBatch, *, by_file: bool) -> BlockInfo:
    """Appended; or, where the store has files and the disk has room for one, handed over in it."""
    if by_file and isinstance(store, DurableStore):
        with (
            contextlib.suppress(OSError, DiskFull),
            contextlib.closing(PartWriter(str(store.directory))) as writer,
        ):
            writer.append(block)
            for info, _ in store.adopt(writer.end()):
                return info
    return store.append(block)


def step(store: Store, state: State, seed: int) -> None:
    """The next step: one commit."""
    number = state.steps
    choice = random.Random(f"{seed}-{number}")
    change = Change(sequence=number + 1, journal=[HoleRecord(1, number, number + 1)])
    kind = choice.choice(
        ("small", "small", "small", "large", "large", "seal", "compact", "forget", "branch", "apply")
    )
    if kind == "seal" and state.open_rows:
        store.seal(state.open_batch)
        change.seals.append(state.open_batch)
        change.put(RunRecord(2, number * 1000, state.open_rows, state.open_batch, 0, b"", 0, 0))
        state.open_batch = state.open_rows = 0
    elif kind == "large":
        info = _written(store, messages(number, choice.randrange(1, 60)), by_file=number % 4 == 0)
        run = RunRecord(1, number * 1000, info.rows, info.block_id, 0, b"", number + 1, 0)
        change.names.append(info.block_id)
        change.put(run)
        state.runs.append(run)
    elif kind == "compact" and state.runs:
        run = choice.choice(state.runs)
        store.rewrite(run.block_id, b"\xaa" * (run.count // 8 + 1))
        change.moves.append(run.block_id)
    elif kind == "forget" and state.runs:
        run = state.runs.pop(0)
        change.drop(RunRecord, run.key)
        change.forgets.append(run.block_id)
    elif kind == "branch":
        info = store.append(pa.record_batch({"n": pa.array(range(number, number + choice.randrange(1, 50)))}))
        store.sync()
        part = PartRecord(
            "branch", number, "t", "append", {}, 0, 0, info.rows, 0, 0, info.block_id, b"", {}, 0, []
        )
        change.names.append(info.block_id)
        change.put(part)
        state.parts.append(part)
    elif kind == "apply" and state.parts:
        part = state.parts.pop(0)
        change.drop(PartRecord, part.key)
        change.forgets.append(part.block_id)
    else:
        state.open_batch = state.open_batch or store.new_block_id()
        for _ in range(choice.randrange(1, 4)):
            row = InboxRow(
                state.open_batch,
                state.open_rows,
                number + 1,
                number,
                "",
                "q",
                b"",
                b"small-%d" % number,
                bytes(16),
            )
            change.rows.append(row)
            state.open_rows += 1
    store.commit([change])
    state.steps = number + 1


def contents(store: Store, image: StoreImage) -> list[Any]:
    """All the store holds, with the rows of the blocks in place of their ids, which differ from store to
    store.
    """
    found: list[Any] = []
    for record in image.records:
        if isinstance(record, HoleRecord):
            found.append(("step", record.start))
        elif isinstance(record, (RunRecord, PartRecord)):
            block = store.read(record.block_id)
            key = record.first if isinstance(record, RunRecord) else record.part
            found.append((record.TABLE, key, str(block.schema), str(block.to_pydict())))
    found += [("inbox", *row[1:]) for row in image.inbox]
    found.append(("blocks", len(image.blocks)))
    return [*sorted(found, key=repr), image.sequence]


def main(directory: str, seed: int, steps: int, file_limit: int = 0, roll_bytes: int = ROLL_BYTES) -> None:
    try:
        store = DurableStore(directory, roll_bytes=roll_bytes)
        state = State.of(store.load())
        if file_limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, resource.RLIM_INFINITY))
        for _ in range(steps):
            step(store, state, seed)
            os.write(1, b"ack %d\n" % state.steps)
    except StoreError as error:
        os.write(1, f"error {error}\n".encode())
        return
    store.close()
    os.write(1, b"closed\n")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
