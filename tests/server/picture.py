"""All that a broker in this process has in memory, as text: equal pictures mean that nothing has changed."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from broker_core.launcher import Broker

# marks that cost at most one more look, and caches
_SKIPPED = {
    "touched",
    "runnable",
    "next_deadline",
    "_deadlines",
    "_planned",
    "_crowded",
    "undo",
    "_undo",
    "_lock",
    "_read",
    "_new_batch_id",
    "_ordinary",
    "cache",
}
_LEAVES = (str, bytes, int, float, bool, type(None))


def picture(broker: Broker) -> str:
    """Stop the upkeep of the broker first: it has changes of its own."""
    engine = broker.engine
    return "\n".join(
        repr(_plain(part, {}))
        for part in (
            broker.local.state,
            engine.batches.claims,
            engine.batches.ledger,
            engine.batches.branches,
        )
    )


def _plain(value: Any, seen: dict[int, int]) -> Any:
    if isinstance(value, _LEAVES):
        return value
    if isinstance(value, (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type)):
        return None
    if id(value) in seen:
        return ("seen", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, Mapping):
        return [(_plain(key, seen), _plain(item, seen)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *(_plain(item, seen) for item in value)]
    if isinstance(value, (set, frozenset)):
        return sorted(str(_plain(item, seen)) for item in value)
    names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    names += list(getattr(value, "__dict__", ()))
    return [
        type(value).__name__,
        *((name, _plain(getattr(value, name, None), seen)) for name in sorted(set(names) - _SKIPPED)),
    ]
