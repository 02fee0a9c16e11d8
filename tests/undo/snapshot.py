"""The whole state of a broker as plain values, so that two moments can be compared.

Everything that the domain's objects hold is in it, found by walking them, so a new field is compared without
being named here. Left out are caches and marks that only cause one more look, as
``broker_core/core/undo.py`` names them.
"""

from __future__ import annotations

import enum
import functools
from collections import deque
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from broker_core.broker.queue.due_index import DueIndex
from broker_core.broker.queue.log import Log, Run
from broker_core.broker.queue.progress import IntervalSet
from broker_core.broker.queue.rank import Ranks
from broker_core.broker.queue.ready import Ready
from broker_core.core.block import Block

LEFT_OUT = frozenset(
    {
        # how to undo
        "undo", "_undo", "saved", "_saved", "_steps",
        # caches
        "cache", "_looked", "_relying", "_relied", "route_budget", "routes", "_decoded", "expires_us",
        "body_sizes",
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
    if type(value) in PLAIN:
        found[path] = value
        return
    if isinstance(value, (int, float, str, bytes, enum.Enum)) or callable(value):
        found[path] = value if not callable(value) else getattr(value, "__qualname__", type(value).__name__)
        return
    if isinstance(value, (bytearray, memoryview)):
        found[path] = bytes(value)
        return
    if isinstance(value, pa.RecordBatch):
        found[path] = value.to_pylist()
        return
    if isinstance(value, IntervalSet):
        found[path] = [*value, value.total]
        return
    if isinstance(value, Run):
        found[path] = (
            value.first,
            value.block.block_id,
            list(map(int, value.rows())),
            value.sequence,
            value.committed_at,
            value.recorded,
        )
        return
    if isinstance(value, (set, frozenset)):
        found[path] = sorted(_name(item) for item in value)
        return
    if isinstance(value, Mapping):
        value = {key: item for key, item in value.items() if not isinstance(item, (list, dict, set)) or item}
        found[path] = sorted(_name(key) for key in value)
        for key, item in sorted(value.items(), key=lambda entry: _name(entry[0])):
            _walk(item, f"{path}[{_name(key)}]", found, seen)
        return
    if isinstance(value, (list, tuple, deque)):
        found[path] = len(value)
        for number, item in enumerate(value):
            _walk(item, f"{path}[{number}]", found, seen)
        return
    if id(value) in seen:
        found[path] = f"-> {seen[id(value)]}"
        return
    seen[id(value)] = path
    if isinstance(value, Ready) and value.ranks is not None:
        value.ranks.best()  # it takes in what became visible: when is nobody's concern
    fields = _fields(value)
    if isinstance(value, Log):
        fields["_runs"], fields["_front"], fields["_firsts"] = (
            value._runs[value._front :],
            0,
            value._firsts[value._front :],
        )
    elif isinstance(value, Ranks):  # what is settled or held may stand in the heap
        assert value._offsets == {offset for _, offset in value._heap} and len(value._offsets) == len(
            value._heap
        )
        fields["_heap"] = sorted(
            entry
            for entry in value._heap
            if entry[1] not in value._held and not value._progress.is_settled(entry[1])
        )
        fields["_offsets"] = fields["_popped"] = fields["_forgotten"] = ()
    elif isinstance(value, DueIndex):  # in which order it has looked at them is nobody's concern
        entries = {(at_us, offset) for array in value._arrays for at_us, offset in array.T.tolist()}
        fields = {"entries": sorted(entries.union(value._fresh)), "exchange": value.exchange}
    elif isinstance(value, Block):
        found[path] = type(value).__name__
    for name, item in sorted(fields.items()):
        if name not in LEFT_OUT:
            _walk(item, f"{path}.{name}", found, seen)


def _fields(value: object) -> dict[str, Any]:
    fields = {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
    return {**fields, **getattr(value, "__dict__", {})}


@functools.cache
def _slots(kind: type) -> frozenset[str]:
    return frozenset(name for base in kind.__mro__ for name in getattr(base, "__slots__", ()))


def _name(key: object) -> str:
    return (
        repr(key)
        if isinstance(key, (str, int, bytes, tuple))
        else f"{type(key).__name__}:{getattr(key, 'name', '')}"
    )
