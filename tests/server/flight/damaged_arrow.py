"""Damaged Arrow data, and a process of its own that feeds it to the ways in that are no socket:
``python -m tests.server.flight.damaged_arrow DIRECTORY SEED ROUNDS``. A crash inside Arrow ends it with a
signal.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import struct
import sys
from pathlib import Path

import pyarrow as pa
import xxhash

from broker_core.arrow.part_file import END_MARK, FilePart, PartFile
from broker_core.core import errors
from broker_core.engine import BranchHeader
from broker_core.kafka.sink import staged_branches
from broker_core.message.message import MESSAGE_SCHEMA
from broker_core.node.engine import EmbeddedEngine
from broker_core.node.local import LocalBroker
from broker_core.store.durable import DurableStore

HUGE = [2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, -1, 5, 0]


def nested_rows() -> list[pa.RecordBatch]:
    """Rows of tables, of types that Arrow finds by offsets, sizes, views, keys and type codes."""
    texts, numbers = ["a", "bc", None], [1, None, 3]
    structs = pa.array([{"n": 1, "t": "x"}, None, {"n": 3, "t": None}])
    columns = [
        pa.array(texts),
        pa.array(texts, pa.large_string()),
        pa.array(texts, pa.string_view()),
        pa.array([texts, [], None], pa.list_(pa.string())),
        pa.array([texts, [], None], pa.large_list(pa.string())),
        pa.array([[numbers], [], [None]], pa.list_(pa.large_list(pa.int64()))),
        pa.array([texts, [], None], pa.list_view(pa.string())),
        pa.array([[("k", "v")], [], None], pa.map_(pa.string(), pa.large_string())),
        pa.array([["a", "b"], ["c", "d"], None], pa.list_(pa.string(), 2)),
        structs,
        pa.array(texts).dictionary_encode(),
        pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array(["x", "y"])),
        pa.UnionArray.from_dense(
            pa.array([0, 1, 0], pa.int8()),
            pa.array([0, 0, 1], pa.int32()),
            [pa.array(["a", "b"]), pa.array([[1], [2]])],
        ),
        pa.UnionArray.from_sparse(pa.array([0, 1, 0], pa.int8()), [pa.array(texts), structs]),
    ]
    return [pa.RecordBatch.from_arrays([column], names=["c"]) for column in columns]


def broken(source: random.Random, data: bytes) -> bytes:
    """Some aligned numbers of ``data`` replaced, those of the body oftener than those of the schema."""
    found = bytearray(data)
    for _ in range(source.randint(1, 3)):
        at = source.randrange(0 if source.random() < 0.3 else len(found) // 2, len(found))
        size = source.choice((4, 8))
        at -= at % size
        value = struct.pack("<q", source.choice((*HUGE, source.randint(-(2**63), 2**63 - 1))))
        found[at : at + size] = value[:size]
    return bytes(found[: len(data)])


def stream(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def _hand_over(engine: EmbeddedEngine, directory: Path, data: bytes, number: int) -> bool:
    """Whether a writer's file with this part, and its right checksum, is taken."""
    schema = MESSAGE_SCHEMA.serialize().to_pybytes()
    written = os.open(directory / "segments", os.O_TMPFILE | os.O_RDWR)
    os.write(written, schema + data + END_MARK)
    descriptor = os.open(f"/proc/self/fd/{written}", os.O_RDONLY)
    os.close(written)
    part = FilePart(len(schema), len(data), 3, xxhash.xxh3_64_intdigest(data))
    found = os.fstat(descriptor)
    file = PartFile(os.getpid(), descriptor, found.st_dev, found.st_ino, found.st_size, (part,))
    header = BranchHeader("t", f"file-{number}", "publish", {"exchange": "", "routing_key": "in"})
    try:
        return bool(engine.stage_file(header, 0, file))
    except errors.TxmqError:
        return False
    finally:
        os.close(descriptor)


def _stage(engine: EmbeddedEngine, data: bytes, kind: str, number: int) -> bool:
    header = BranchHeader("t", f"part-{number}", kind, {"table": "x"})  # type: ignore[arg-type]
    try:
        with pa.ipc.open_stream(data) as reader:
            for part, batch in enumerate(list(reader)):
                engine.stage_part(header, part, batch)
        list(engine.read_branches([header.branch]))
    except (errors.TxmqError, pa.ArrowException, OSError, ValueError):
        return False
    return True


def _kafka(data: bytes) -> bool:
    try:
        for batch in staged_branches.rows_of([staged_branches.StagedRecord("b", data, {})]):
            for column in batch.columns:  # no dict of Python: a damaged struct may have a name twice
                column.to_string(window=len(column))
    except (errors.TxmqError, UnicodeDecodeError):
        return False
    return True


def main(directory: Path, seed: int, rounds: int) -> None:
    """Prints how many were taken and refused at each way in."""
    source = random.Random(seed)
    store = DurableStore(directory)
    with contextlib.closing(LocalBroker(store, upkeep=False)) as local:
        engine = EmbeddedEngine(local, store.adopt)
        rows = nested_rows()
        message = pa.RecordBatch.from_pydict(
            {"exchange": ["", "", ""], "routing_key": ["in", "k", "ü"], "body": [b"1", b"", b"33"],
             "properties": [b"", b"", b""]},
            schema=MESSAGE_SCHEMA,
        )  # fmt: skip
        encapsulated = message.serialize().to_pybytes()
        assert _hand_over(engine, directory, encapsulated, 0)
        assert all(_kafka(stream(batch)) for batch in rows)
        assert all(_stage(engine, stream(batch), "append", -at) for at, batch in enumerate(rows, 1))
        taken = {"file": 0, "part": 0, "messages": 0, "kafka": 0}
        for number in itertools.islice(itertools.count(1), rounds):
            damaged = broken(source, stream(source.choice(rows)))
            taken["kafka"] += _kafka(damaged)
            taken["part"] += _stage(engine, damaged, "append", number)
            taken["messages"] += _stage(engine, broken(source, stream(message)), "publish", -1000 - number)
            taken["file"] += _hand_over(engine, directory, broken(source, encapsulated), number)
        print(taken, "of", rounds)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
