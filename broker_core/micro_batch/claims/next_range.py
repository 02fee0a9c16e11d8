"""Which range of its logs an app reads next (S2): that of the claim of its start, or a new one. Pure.

Not here: the claims of before (``claim.py``), and what a symbolic start means (``origins.py``).
Invariant: the same start has the same end, whatever the limit, the new messages or the number of drivers that
ask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from broker_core.core.errors import CheckpointMismatch, OptionError
from broker_core.core.records import ClaimRecord, OriginRecord, canonical
from broker_core.engine import START, Limit, OnNewCheckpoint, Origin, Vector
from broker_core.micro_batch.claims.claim import Below, Claims
from broker_core.micro_batch.claims.finished import CommittedBelow, asked_once
from broker_core.micro_batch.claims.logs import Logs
from broker_core.micro_batch.sink import RecordSink

KEPT_SOURCES = 1000  # sets of logs of an app, and of queues


def next_range(
    claims: Claims,
    logs: Logs,
    sink: RecordSink,
    app_id: str,
    queues: Sequence[str],
    start: Vector,
    limit: Limit,
    origin: Origin,
    on_new_checkpoint: OnNewCheckpoint,
    committed: CommittedBelow,
) -> Vector:
    """Returns the end vector for ``start``; it may name logs that ``start`` lacks: those are new, and
    read from their beginning. ``committed`` is what is known of all below ``start``. Steps 1 to 4 check
    and read, and change nothing; 5 to 7 are one change.
    """
    # 1. whose the start is, and who owns the logs
    names = {queue: logs.of(queue) for queue in sorted(queues)}
    every = [log for found in names.values() for log in found]
    acked, symbolic = _split(app_id, start, names)
    goes_on = not symbolic and on_new_checkpoint == "resume"
    origin_record = _released_at(claims, logs, app_id, names, acked) if goes_on else None
    below = claims.below(logs, app_id, start, committed) if origin_record is None else Below(app_id, acked)
    for log in every:
        logs.require_ownable(log, app_id)
    # 2. what a symbolic start means
    if symbolic:
        query, left = claims.reads.last_query(app_id), claims.releases.left_at(logs, app_id, names)
        ends = committed.decided.consumed(every)
        origin_record = claims.origins.meaning(
            logs, app_id, symbolic, origin, on_new_checkpoint, ends, names, query, left
        )
    lineage = claims.origins.lineage(app_id, names) if origin_record is None else origin_record.lineage
    # 3. the range: that of a known claim, or a new one
    begin = _begin(logs, every, acked, origin_record)
    before = asked_once(claims.at(app_id, start, lineage if symbolic else None), committed, claims.reads)
    if before is not None:
        end, begin = dict(before.end), {log: int(first) for log, (first, _) in before.ranges.items()}
    else:
        end = dict(begin) if logs.too_few(begin, limit) else logs.cut(begin, limit)
    # 4. room for what is recorded
    if origin_record is not None:
        claims.origins.require_room(origin_record, KEPT_SOURCES)
    if before is None:
        claims.sources.require_room(app_id, begin, KEPT_SOURCES)
    # 5. own the logs, and record what the start means
    for log, first in begin.items():
        logs.own(log, app_id, first)
    if origin_record is not None:
        claims.origins.keep(sink, origin_record)
    # 6. ack below a concrete start, which no checkpoint asks for again
    if acked and committed.by_spark:
        claims.ack_below(logs, sink, below)
    # 7. add the claim, unless it is known
    if before is None:
        if end == begin:
            return start
        _record(claims, logs, sink, app_id, lineage, start, begin, end)
    return dict(end)


def _released_at(
    claims: Claims, logs: Logs, app_id: str, names: Mapping[str, Sequence[str]], acked: Mapping[str, int]
) -> OriginRecord | None:
    """Returns the origin of a start at the offsets where a release left the app; None: it is not there,
    or somebody has gone on since then.
    """
    left = claims.releases.left_at(logs, app_id, names)
    if not left or acked != left or claims.ends(app_id, left):
        return None
    lineage = claims.origins.lineage(app_id, names)
    return OriginRecord(app_id, canonical(sorted(names)), lineage, dict(left), True, claims.vhost)


def _record(
    claims: Claims,
    logs: Logs,
    sink: RecordSink,
    app_id: str,
    lineage: int,
    start: Vector,
    begin: Mapping[str, int],
    end: Mapping[str, int],
) -> None:
    spans = {log: (begin[log], end[log]) for log in sorted(begin)}
    claimed = {log: logs.claim(log, first, last) for log, (first, last) in spans.items()}
    claim = ClaimRecord(
        app_id=app_id,
        lineage=lineage,
        start=canonical(start),
        end=dict(end),
        ranges={log: [first, last] for log, (first, last) in spans.items()},
        skipped={log: found.skipped for log, found in claimed.items() if found.skipped},
        redelivered={log: found.redelivered for log, found in claimed.items() if found.redelivered},
        position=claims.position(app_id) + 1,
        vhost=claims.vhost,
    )
    claims.apply(claim)
    sink.put(claim)
    claims.prune(sink, claim)


def _split(
    app_id: str, start: Vector, names: Mapping[str, Sequence[str]]
) -> tuple[dict[str, int], list[str]]:
    """Returns the offsets of a start vector, and the queues whose start is symbolic. ``names``: all queues of
    the reader, and their logs. Raises OptionError: there is none. CheckpointMismatch: the start names others.
    """
    if not names:
        raise OptionError("the stream names no queue; give the option queue")
    acked = {log: int(offset) for log, offset in start.items() if offset != START}
    symbolic = [queue for queue in names if start.get(queue) == START]
    every = {log for found in names.values() for log in found}
    if strange := start.keys() - acked.keys() - set(symbolic) | acked.keys() - every:
        raise CheckpointMismatch(
            f"the checkpoint of app {app_id!r} names {', '.join(sorted(strange))}, which the queues "
            f"{', '.join(names)} do not have. Read the same queues, or use a new checkpoint with "
            "onNewCheckpoint=resume"
        )
    return acked, symbolic


def _begin(
    logs: Logs, every: Sequence[str], acked: Mapping[str, int], origin: OriginRecord | None
) -> dict[str, int]:
    """Returns where a new range begins: in a log that the start lacks, at its beginning."""
    begin = dict(acked)
    if origin is not None:
        begin |= {log: int(offset) for log, offset in origin.start.items()}
    return {log: logs.first(log) for log in every if log not in begin} | begin
