"""Queues: searched, sorted, looked into; purged and deleted after a confirmation."""

from __future__ import annotations

import base64
import re
from typing import Any

from starlette.responses import Response

from broker_core.core.errors import TxmqError
from broker_core.server.http.call import HttpCall
from broker_core.server.http.page import sampling
from broker_core.server.http.page.api_client import call_api
from broker_core.server.http.page.rendering import count, link, plot, redirect, render, sentence
from broker_core.server.http.refusal import HttpRefusal, bad_request, not_found
from broker_core.server.http.route import page

Row = dict[str, Any]
SIZE = 100  # rows of a page
PEEKS = (1, 10, 50)
PEEK_BYTES = 2_000  # of a body
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
COLUMNS = {  # of the table: by what it is sorted
    "name": "name",
    "ready": "messages_ready",
    "held": "messages_unacknowledged",
    "in": "message_stats.publish_details.rate",
    "out": "message_stats.ack_details.rate",
    "consumers": "consumers",
    "app": "app",
}


def _queues(call: HttpCall) -> Response:
    query = call.query
    name, by, down = query.get("name", ""), query.get("by", ""), query.get("down") == "1"
    api_query = {"page": query.get("page", "1"), "page_size": str(SIZE), "name": name}
    if by:
        if by not in COLUMNS:
            raise bad_request(f"the table has no column {by[:80]!r}")
        api_query |= {"sort": COLUMNS[by], "sort_reverse": "true" if down else "false"}
    try:
        found = call_api(call, "/api/queues", query=api_query)
    except HttpRefusal as refusal:
        if refusal.error != "page_out_of_range":
            raise
        found = call_api(call, "/api/queues", query={**api_query, "page": "1"})
    history = call.backend.history
    for row in found["items"]:
        key = call.backend.queue_key(row["vhost"], row["name"])
        row["curve"] = history.of(sampling.of_queue(key)).curves[0]
    several = len({row["vhost"] for row in found["items"]}) > 1
    return render(
        call, "queues.html", found=found, name=name, by=by, down=down, columns=list(COLUMNS), several=several
    )


def _at(call: HttpCall) -> dict[str, str]:
    """Raises Refusal."""
    vhost, name = call.params.get("vhost"), call.params.get("name")
    if vhost is None or name is None:
        raise not_found()
    return {"vhost": vhost, "name": name}


def _queue(call: HttpCall) -> Response:
    at = _at(call)
    row = call_api(call, "/api/queues/{vhost}/{name}", at)
    history = call.backend.history.of(sampling.of_queue(call.backend.queue_key(at["vhost"], row["name"])))
    depth, published, settled = history.curves
    peek = call.query.get("peek", "")
    messages, refused = [], ""
    if peek:
        try:
            messages = _peek(call, at, peek)
        except HttpRefusal as refusal:
            refused = refusal.reason
        except TxmqError as error:
            refused = error.message
    return render(
        call,
        "queue.html",
        queue=row,
        depth=plot(history.times, "", messages=depth),
        rates=plot(history.times, "/s", published=published, settled=settled),
        bindings=call_api(call, "/api/queues/{vhost}/{name}/bindings", at),
        holders=_holders(call, at),
        peek=peek,
        peeks=PEEKS,
        messages=messages,
        refused=refused,
    )


def _peek(call: HttpCall, at: dict[str, str], peek: str) -> list[Row]:
    """Raises Refusal, TxmqError."""
    if peek not in map(str, PEEKS):
        raise bad_request(f"peek is {peek[:80]!r}: give one of {', '.join(map(str, PEEKS))}")
    body = {"count": int(peek), "ackmode": "ack_requeue_true", "encoding": "auto", "truncate": PEEK_BYTES}
    found: list[Row] = call_api(call, "/api/queues/{vhost}/{name}/get", at, method="POST", body=body)
    for row in found:
        coded, payload = row["payload_encoding"] == "base64", row["payload"]
        row["binary"] = coded or _CONTROL.search(payload) is not None
        if row["binary"]:
            row["payload"] = (base64.b64decode(payload) if coded else payload.encode()).hex(" ")
        row["cut"] = row["payload_bytes"] > PEEK_BYTES
    return found


def _holders(call: HttpCall, at: dict[str, str]) -> list[Row]:
    """Channels with messages of the queue that they have not acked, of those whom the caller may see."""
    return [
        {**row, "held": row["unacknowledged"][at["name"]]}
        for row in _transactions(call)
        if row["vhost"] == at["vhost"] and at["name"] in row["unacknowledged"]
    ]


def _transactions(call: HttpCall) -> list[Row]:
    try:
        found: list[Row] = call_api(call, "/api/txmq/transactions")
    except HttpRefusal:  # without a tag that looks at all
        return []
    return found


def _confirm_purge(call: HttpCall) -> Response:
    row = call_api(call, "/api/queues/{vhost}/{name}", _at(call))
    says = [f"{count(row['messages_ready'])} ready messages are dropped. They cannot be restored."]
    if row["messages_unacknowledged"]:
        says.append(f"{count(row['messages_unacknowledged'])} messages that channels hold stay with them.")
    return _confirmed(call, row, "Purge", says)


def _confirm_delete(call: HttpCall) -> Response:
    at = _at(call)
    row = call_api(call, "/api/queues/{vhost}/{name}", at)
    bindings = [each for each in call_api(call, "/api/queues/{vhost}/{name}/bindings", at) if each["source"]]
    says = [f"The queue is deleted with {count(row['messages'])} messages. They cannot be restored."]
    if bindings:
        says.append(f"{len(bindings)} bindings are deleted: messages published there no longer arrive here.")
    if row["consumers"]:
        says.append(f"{row['consumers']} consumers are cancelled.")
    if row["app"]:
        says.append(sentence("The app {} reads this queue: its stream fails.", row["app"]))
    return _confirmed(call, row, "Delete", says)


def _confirmed(call: HttpCall, row: Row, verb: str, says: list[str]) -> Response:
    what = sentence("queue {} in {}", row["name"], row["vhost"])
    back = link("/ui/queue", vhost=row["vhost"], name=row["name"])
    return render(call, "confirm.html", section="Queues", what=what, says=says, verb=verb, back=back)


def _purge(call: HttpCall) -> Response:
    at = _at(call)
    call_api(call, "/api/queues/{vhost}/{name}/contents", at, method="DELETE")
    return redirect(call, link("/ui/queue", **at), sentence("Queue {} is purged.", at["name"]))


def _delete(call: HttpCall) -> Response:
    at = _at(call)
    call_api(call, "/api/queues/{vhost}/{name}", at, method="DELETE")
    return redirect(call, "/ui/queues", sentence("Queue {} is deleted.", at["name"]))


ROUTES = (
    page("GET", "/ui/queues", "management", _queues, "queues"),
    page("GET", "/ui/queue", "vhost", _queue, "one queue"),
    page("GET", "/ui/queue/purge", "vhost", _confirm_purge, "what a purge does"),
    page("POST", "/ui/queue/purge", "vhost", _purge, "purge"),
    page("GET", "/ui/queue/delete", "vhost", _confirm_delete, "what the deletion of a queue does"),
    page("POST", "/ui/queue/delete", "vhost", _delete, "delete a queue"),
)
