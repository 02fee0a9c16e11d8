"""The API of txmq: apps, their ledger, what is prepared and staged, the store and its alarms."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from functools import partial
from typing import Any

from broker_core.admin import PAGE, LedgerInfo
from broker_core.broker.decision import Decision
from broker_core.core.errors import QueueNotFound, UnknownTransaction
from broker_core.engine import StagedBatch
from broker_core.server.http.call import HttpCall
from broker_core.server.http.gate import visible, within
from broker_core.server.http.refusal import bad_request, not_found
from broker_core.server.http.route import Route, read, read_all

Row = dict[str, Any]
ENTRIES = 1_000  # of a ledger, the last ones


def _vhosts(call: HttpCall) -> list[str]:
    return [topology.vhost for topology in visible(call.backend, call.caller)]


def _apps(call: HttpCall) -> list[Row]:
    now_us = call.backend.broker.clock()
    rows = []
    for vhost in _vhosts(call):
        staged: dict[str, list[StagedBatch]] = {}
        for each in call.backend.staged_batches(vhost):
            staged.setdefault(each.app_id, []).append(each)
        for app, entries in call.backend.app_ledgers(vhost, 2):
            row = {"vhost": vhost, **asdict(app)}
            row["staged"] = [
                {"batch_id": each.batch_id, "idle_s": each.idle_s, "client": each.client, "rows": each.rows}
                for each in staged.get(app.app_id, ())
            ]
            if entries:
                row["last_batch"] = _last_batch(entries[0], entries[-1], now_us)
            rows.append(row)
    return rows


def _last_batch(before: LedgerInfo, last: LedgerInfo, now_us: int) -> Row:
    """``after_s``: since the one ``before``; ``rate``: messages a second meanwhile; None: it is the first."""
    after_s = (last.committed_at_us - before.committed_at_us) / 1e6
    return {
        "batch_id": last.batch_id,
        "messages": last.messages,
        "published": last.published,
        "committed_at": last.committed_at_us / 1e6,
        "age_s": round(max(0, now_us - last.committed_at_us) / 1e6, 3),
        "after_s": after_s or None,
        "rate": round(last.messages / after_s, 3) if after_s else None,
    }


def _ledger(call: HttpCall) -> list[Row]:
    vhost = within(call.backend, call.caller, call.params["vhost"]).state.vhost
    found = call.backend.app_ledgers(vhost, ENTRIES, call.params["app"])
    if not found:
        raise not_found()
    ((_, entries),) = found
    rows = []
    for entry in entries:
        row = asdict(entry)
        del row["app_id"]
        row["committed_at"] = row.pop("committed_at_us") / 1e6
        row["to_apply"] = sum(each.waits for each in entry.tables)
        rows.append(row)
    return rows


def _prepared(call: HttpCall) -> list[Row]:
    return [
        {"vhost": vhost, **asdict(each)}
        for vhost in _vhosts(call)
        for each in call.backend.broker.prepared(vhost)
    ]


def _staged(call: HttpCall) -> list[Row]:
    return [
        {"vhost": vhost, **{name: value for name, value in asdict(each).items() if name != "token"}}
        for vhost in _vhosts(call)
        for each in call.backend.staged_batches(vhost)
    ]


def _transactions(call: HttpCall) -> list[Row]:
    rows = []
    for vhost in _vhosts(call):
        for each in call.backend.broker.channels(vhost):
            if each.open_s or each.publishes or each.acks or each.unacknowledged:
                rows.append({"vhost": vhost, **asdict(each)})
    return rows


def _committed(call: HttpCall) -> Row:
    """Of the virtual hosts that the caller may see, the one of this transaction."""
    sequence = _number(call, "sequence")
    for vhost in _vhosts(call):
        sees = within(call.backend, call.caller, vhost).sees
        with contextlib.suppress(UnknownTransaction):
            return asdict(call.backend.past.transaction(sequence, sees))
    raise not_found()


def _message(call: HttpCall) -> Row:
    name, offset, at = call.params["name"], _number(call, "offset"), call.query.get("at", "")
    try:
        return asdict(call.backend.past.message(name, offset, call.caller.sees, at))
    except QueueNotFound:
        raise not_found() from None


def _history(call: HttpCall) -> Row:
    limit, before = (_counted(call.query.get(name, "0"), name) for name in ("limit", "before"))
    return asdict(call.backend.past.page(call.caller.sees, limit or PAGE, before))


def _number(call: HttpCall, name: str) -> int:
    return _counted(call.params[name], name)


def _counted(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise bad_request(f"'{text[:20]}' is not the number of a {name}")
    return int(text)


def _store(call: HttpCall) -> Row:
    segments = call.backend.broker.segments()
    counts = call.backend.broker.committer.counts
    failure = call.backend.broker.committer.failure
    return {
        "directory": call.backend.directory,
        "segments": len(segments),
        "bytes": sum(each.size_bytes for each in segments),
        "dead_bytes": sum(
            max(each.size_bytes - sum(block.length for block in each.blocks), 0) for each in segments
        ),
        "commits": counts.changes,
        "commit_groups": counts.groups,
        "commit_seconds": round(counts.durable_s, 6),
        "failure": "" if failure is None else failure.message,
    }


def _alarms(call: HttpCall) -> list[Row]:
    alarm = call.backend.quotas.alarm
    shortage = alarm.now() if alarm is not None else None
    return [] if shortage is None else [{"reason": shortage.reason, "numbers": shortage.numbers}]


def _decide(verb: Decision, call: HttpCall) -> Row:
    xid, of = call.params["xid"], call.get("of", str, "")
    actor = call.caller.actor
    done = call.backend.broker.decide(verb, xid, actor, call.rights, call.vhost, of or None, by_hand=True)
    call.record(f"transaction.{verb}", vhost=call.vhost, xid=xid, of=of or None)
    return {"decided": verb, "dropped": done.dropped}


def _rollback_all(call: HttpCall) -> Row:
    of = call.get("of", str, "") or None
    ended = call.backend.broker.rollback_all(call.caller.actor, of, call.vhost, by_hand=True)
    call.record("transaction.rollback_all", vhost=call.vhost, of=of)
    return {"decided": "rollback", "transactions": ended}


def _skip_damaged(call: HttpCall) -> Row:
    """Only looks, unless the body says otherwise: what leaves a queue does not come back."""
    vhost = within(call.backend, call.caller, call.params["vhost"]).state.vhost
    name, check = call.params["name"], call.get("check", bool, True)
    found = call.backend.broker.skip_damaged(name, check, vhost)
    call.record("queue.skip_damaged", vhost=vhost, queue=name, check=check)
    return {"check": check, **asdict(found)}


_LEDGER, _XID = "/api/txmq/ledger/{vhost}/{app}", "/api/txmq/prepared/{vhost}/{xid}"
ROUTES = (
    Route("GET", "/api/txmq/apps", "monitoring", _apps, "Apps: lag, last batch"),
    Route("GET", _LEDGER, "monitoring", _ledger, "The last batches of an app"),
    read_all("/api/txmq/prepared", "monitoring", _prepared, "Prepared transactions that nobody has decided"),
    Route("POST", f"{_XID}/commit", "vhost", partial(_decide, "commit"), "Commit a prepared transaction"),
    Route("POST", f"{_XID}/rollback", "vhost", partial(_decide, "rollback"), "Roll back a prepared one"),
    Route(
        "POST",
        "/api/txmq/prepared/{vhost}/rollback",
        "vhost",
        _rollback_all,
        'Roll back all that the caller has prepared; with {"of": USER}, that of another user',
    ),
    Route(
        "POST",
        "/api/txmq/queues/{vhost}/{name}/skip-damaged",
        "administrator",
        _skip_damaged,
        'List damaged messages of a queue; with {"check": false}, remove them',
    ),
    Route("GET", "/api/txmq/staged", "monitoring", _staged, "Staged batches that are not decided"),
    read_all(
        "/api/txmq/transactions", "monitoring", _transactions, "Open transactions, and who holds messages"
    ),
    Route(
        "GET",
        "/api/txmq/transactions/{sequence}",
        "management",
        _committed,
        "What a committed transaction did, as far as the history goes back",
    ),
    Route(
        "GET",
        "/api/txmq/history/{vhost}",
        "vhost",
        _history,
        "The last transactions, the newest first; ?before=N: those below that number",
    ),
    Route(
        "GET", "/api/txmq/messages/{vhost}/{name}/{offset}", "vhost", _message, "What happened to a message"
    ),
    Route("GET", "/api/txmq/store", "monitoring", _store, "Segments, bytes, commits"),
    read("/api/txmq/alarms", "monitoring", _alarms, "Why publishers wait; an empty list if they do not"),
)
