"""``txmq history show`` and ``txmq message show``: what a commit did, what happened to a message, as text.

Plain functions: what the broker answered goes in, lines come out.
Not here: who may see what (``broker_core/broker/history/lookup.py``), the arguments (``channels.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timezone

from broker_core.admin import (
    EffectInfo,
    LedgerInfo,
    MessageLife,
    MessageStep,
    TableInfo,
    TransactionInfo,
    of_batch,
)

Row = dict[str, object]
_RANGES = 8  # of one line


def transaction_row(found: TransactionInfo) -> Row:
    """Returns a row of ``txmq history list --last``."""
    return {
        "sequence": found.sequence or None,  # commits of Kafka have none
        "committed_at": _time(found.committed_at_us),
        "by": _by(found.listener, found.user, found.client, found.address),
        "app": f"{found.app_id}/{found.ledger_sequence}" if found.app_id else "",
        "effects": [effect_text(effect) for effect in found.effects],
    }


def transaction_lines(found: TransactionInfo) -> Iterator[str]:
    """Yields a line for each thing that the transaction did."""
    yield f"transaction {found.sequence}  {_time(found.committed_at_us)}  vhost {found.vhost}"
    by = _by(found.listener, found.user, found.client, found.address)
    if by:
        yield f"  by {by}"
    if found.xid:
        yield f"  named {found.xid}"
    if found.app_id:
        yield (
            f"  app {found.app_id}, batch {found.batch_id} of query {found.query_id}, "
            f"{found.ledger_sequence} in its ledger"
        )
    yield from _what(found)
    if found.left_out:
        yield f"  {found.left_out} messages of further queues are not listed"


def batch_lines(found: LedgerInfo) -> Iterator[str]:
    """Yields a line for each thing that the decision of a micro-batch did, where its commit has no number."""
    yield f"batch {found.sequence} of app {found.app_id}  {_time(found.committed_at_us)}"
    yield f"  batch {found.batch_id} of query {found.query_id}"
    yield from _what(of_batch(found))
    if found.published:
        yield f"  published {found.published}"


def _what(found: TransactionInfo) -> Iterator[str]:
    for effect in found.effects:
        yield f"  {effect_text(effect)}"
    for table in found.tables:
        yield f"  {table.operation} of {table.rows} rows to {table.table}, {_state(table)}"


def _state(table: TableInfo) -> str:
    if table.refused:
        return f"refused: {table.refused}"
    if not table.applied:
        return "not applied yet"
    return "applied" if table.version is None else f"version {table.version}"


def message_lines(found: MessageLife) -> Iterator[str]:
    """Yields what happened to a message, oldest first."""
    yield f"message {found.offset} of queue {found.queue}: {found.state}"
    if not found.steps:
        since = f" since {_time(found.since_us)}" if found.since_us else ""
        yield f"  the history has nothing about it{since}"
    for step in found.steps:
        yield f"  {_step(step)}"
        for effect in step.to:
            yield f"    to {effect.queue} {_ranges(effect)}"


def effect_text(effect: EffectInfo) -> str:
    """Returns an effect as text: what, how many, and which offsets."""
    source = f" from {effect.source}" if effect.source else ""
    return f"{effect.effect.replace('_', '-')} {effect.entries} {effect.queue} {_ranges(effect)}{source}"


def _ranges(effect: EffectInfo) -> str:
    texts = ", ".join(
        str(start) if end == start + 1 else f"{start}-{end - 1}" for start, end in effect.ranges[:_RANGES]
    )
    if not effect.exact:
        return f"within {texts}"
    return f"at {texts}{', ...' if len(effect.ranges) > _RANGES else ''}"


def _step(step: MessageStep) -> str:
    words = [step.effect.replace("_", "-"), _time(step.committed_at_us)]
    if step.sequence:
        words.insert(1, f"by transaction {step.sequence}")
    if not step.certain:
        words[0] = f"perhaps {words[0]}"
    if step.app_id:
        words.append(f"app {step.app_id} batch {step.batch_id}")
    by = _by(step.listener, step.user, step.client, "")
    return "  ".join([*words, *([by] if by else [])])


def _by(listener: str, user: str, client: str, address: str) -> str:
    fields: Iterable[tuple[str, str]] = (
        ("", listener),
        ("user ", user),
        ("client ", client),
        ("at ", address),
    )
    return ", ".join(f"{name}{value}" for name, value in fields if value)


def _time(time_us: int) -> str:
    moment = datetime.fromtimestamp(time_us / 1e6, timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
