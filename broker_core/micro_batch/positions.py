"""Positions and ranges of logs as the texts of errors show them."""

from collections.abc import Mapping

from broker_core.core.records import canonical

MOST = 8  # a topic has a thousand partitions


def brief(found: Mapping[str, object], other: Mapping[str, object] | None = None) -> str:
    """The logs and their positions; of very many the first, of those that ``other`` has otherwise."""
    if len(found) > MOST and other is not None:
        found = {log: at for log, at in found.items() if other.get(log) != at} or found
    if len(found) <= MOST:
        return canonical(found)
    first = canonical(dict(sorted(found.items())[:MOST]))
    return f"{first[:-1]}, and {len(found) - MOST:,} more}}"
