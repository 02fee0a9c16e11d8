"""The whole state of a broker as plain values, so that two moments can be compared.

Everything that the domain's objects hold is in it, found by walking them, so a new field is compared without
being named here. Left out are caches and marks that only cause one more look, as
``broker_core/core/undo.py`` names them.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from broker_core.broker.queue.due_index import DueIndex
from broker_core.broker.queue.log import Log, Run
from broker_core.broker.queue.progress import IntervalSet
from broker_core.broker.queue.rank import Ranks
from broker_core.broker.queue.ready import Ready
from broker_core.core.block import Block
from tests.make import planned

LEFT_OUT = frozenset(
    {
        # how to undo
        "undo", "_undo", "saved", "_saved", "_steps",
        # caches
        "cache", "routes", "_decoded", "expires_us", "body_sizes",
        "deadline", "_read", "_new_block_id", "_ordinary",
        # where it has an entry is its concern: ``broker/test_expirations.py`` has its exceptions
        "expirations",
        # indexes whose choices have no effect but on the time
        "_candidates", "_wild",
        # marks that cause one more look
        "touched", "runnable", "next_deadline", "_deadlines", "_planned", "_crowded", "timed", "hasty",
        "offered", "used_at_us", "parked", "remembering",
        # of one work, which begins with none
        "_fresh",
        # numbers that are never given twice
        "_next_transient", "last_id",
        # given at the start
        "send", "cancelled_by",
        # a new object after each change, also after one that is undone
        "epoch",
    }
)  # fmt: skip
PLAIN = frozenset({type(None), bool, int, float, str, bytes})


def snapshot(*roots: object) -> dict[str, object]:
    """Path -> value, for all that can be reached from ``roots``."""
    found: dict[str, object] = {}
    seen: dict[int, str] = {}
    for number, root in enumerate(roots):
        _walk(root, f"{type(root).__name__}{number}", found, seen)
    return found


def difference(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """What is not the same, a line each."""
    if before == after:
        return []
    missing = object()
    keys = sorted({*before, *after})
    return [
        f"{key}: {before.get(key, missing)!r} -> {after.get(key, missing)!r}"
        for key in keys
        if before.get(key, missing) != after.get(key, missing)
    ]


def _walk(value: Any, path: str, found: dict[str, object], seen: dict[int, str]) -> None:
    kind: Any = type(value)
    if kind in PLAIN:
        found[path] = value
        return
    walk, is_shared = _walk_of(kind)
    if is_shared:
        if id(value) in seen:
            found[path] = f"-> {seen[id(value)]}"
            return
        seen[id(value)] = path
    walk(value, path, found, seen)


@functools.cache
def _walk_of(kind: Any) -> tuple[Callable[..., None], bool]:
    """How to walk values of this type, and whether one may be reached on several paths."""
    if issubclass(kind, (int, float, str, bytes, enum.Enum)):
        return _leaf(lambda value: value), False
    if any("__call__" in base.__dict__ for base in kind.__mro__):
        return _leaf(lambda value: getattr(value, "__qualname__", kind.__name__)), False
    for of, leaf in LEAVES.items():
        if issubclass(kind, of):
            return _leaf(leaf), False
    if issubclass(kind, Mapping):
        return _walk_mapping, False
    if issubclass(kind, (list, tuple, deque)):
        return _walk_items, False
    return _walk_object, True


def _leaf(plain: Callable[[Any], object]) -> Callable[..., None]:
    def walk(value: Any, path: str, found: dict[str, object], _seen: dict[int, str]) -> None:
        found[path] = plain(value)

    return walk


def _run(run: Run) -> object:
    rows = list(map(int, run.rows()))
    return run.first, run.block.block_id, rows, run.sequence, run.committed_at, run.recorded


LEAVES: dict[Any, Callable[[Any], object]] = {
    (bytearray, memoryview): bytes,
    pa.RecordBatch: pa.RecordBatch.to_pylist,
    IntervalSet: lambda value: [*value, value.total],
    Run: _run,
    (set, frozenset): lambda value: sorted(map(_name, value)),
}


def _walk_mapping(
    value: Mapping[Any, Any], path: str, found: dict[str, object], seen: dict[int, str]
) -> None:
    items = [
        (_name(key), item) for key, item in value.items() if not isinstance(item, (list, dict, set)) or item
    ]
    items.sort(key=operator.itemgetter(0))
    found[path] = [name for name, _ in items]
    for name, item in items:
        _walk(item, f"{path}[{name}]", found, seen)


def _walk_items(value: Any, path: str, found: dict[str, object], seen: dict[int, str]) -> None:
    found[path] = len(value)
    for number, item in enumerate(value):
        _walk(item, f"{path}[{number}]", found, seen)


def _walk_object(value: Any, path: str, found: dict[str, object], seen: dict[int, str]) -> None:
    if isinstance(value, Ready) and value.ranks is not None:
        value.ranks.best()  # it takes in what became visible: when is nobody's concern
    fields = _fields(value)
    if isinstance(value, Log):
        front = fields.pop("_front")
        fields |= {name: fields[name][front:] for name in ("_runs", "_firsts")}
    elif isinstance(value, Ranks):  # what is settled or held may stand in the heap
        heap, offsets = fields.pop("_heap"), fields.pop("_offsets")
        assert offsets == {offset for _, offset in heap} and len(offsets) == len(heap)
        gone, settled = fields["_unacked"], fields["_progress"].is_settled
        fields["_heap"] = sorted(entry for entry in heap if entry[1] not in gone and not settled(entry[1]))
        del fields["_popped"], fields["_forgotten"]
    elif isinstance(value, DueIndex):  # in which order it has looked at them is nobody's concern
        fields = {"entries": sorted({*planned(value)}), "exchange": value.exchange}
    elif isinstance(value, Block):
        found[path] = type(value).__name__
    for name, item in fields.items():
        _walk(item, f"{path}.{name}", found, seen)


def _fields(value: object) -> dict[str, Any]:
    kind: Any = type(value)
    own = getattr(value, "__dict__", None)
    names = sorted({*_slots(kind), *own} - LEFT_OUT) if own else _slots(kind)
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


@functools.cache
def _slots(kind: Any) -> list[str]:
    """Those that are compared, in order."""
    return sorted({name for base in kind.__mro__ for name in getattr(base, "__slots__", ())} - LEFT_OUT)


def _name(key: object) -> str:
    return (
        repr(key)
        if isinstance(key, (str, int, bytes, tuple))
        else f"{type(key).__name__}:{getattr(key, 'name', '')}"
    )
