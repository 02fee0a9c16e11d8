"""Transactions: those in doubt, which are decided by hand, those that are open, and the history of
commits: what one did, and the life of a message.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.responses import Response

from broker_core.broker.decision import Decision
from broker_core.core.address import VHOST
from broker_core.server.http.call import HttpCall
from broker_core.server.http.gate import visible, within
from broker_core.server.http.page.api_client import call_api
from broker_core.server.http.page.rendering import count, duration, redirect, render, sentence, size
from broker_core.server.http.refusal import not_found
from broker_core.server.http.route import Route, page

Row = dict[str, Any]
HOME = "/ui/transactions"
LAST = 50  # committed ones, of a page
EFFECTS = 4  # of one
DECIDE = {verb: f"/api/txmq/prepared/{{vhost}}/{{xid}}/{verb}" for verb in ("commit", "rollback")}
TRANSACTION = "/api/txmq/transactions/{sequence}"
RANGES = 8  # of one effect


def _transactions(call: HttpCall) -> Response:
    hosts = [topology.vhost for topology in visible(call.backend, call.caller)]
    vhost = call.params.get("vhost") or (VHOST if VHOST in hosts else hosts[0])
    before = call.params.get("before") or "0"
    query = {"limit": str(LAST), "before": before}
    return render(
        call,
        "transactions.html",
        prepared=call_api(call, "/api/txmq/prepared"),
        open=call_api(call, "/api/txmq/transactions"),
        operates=call.caller.operates,
        last=call_api(call, "/api/txmq/history/{vhost}", {"vhost": vhost}, query=query),
        before=int(before),
        vhost=vhost,
        hosts=hosts,
        most=EFFECTS,
    )


def _there(call: HttpCall) -> Row:
    """The transaction in doubt that the query names. Raises Refusal."""
    vhost, xid, of = (call.params.get(name, "") for name in ("vhost", "xid", "of"))
    found: list[Row] = call_api(call, "/api/txmq/prepared")
    for row in found:
        if (row["vhost"], row["xid"], row["user"]) == (vhost, xid, of):
            return row
    raise not_found()


def _confirm(verb: Decision, call: HttpCall) -> Response:
    row = _there(call)
    within(call.backend, call.caller, row["vhost"])
    publishes, settles = count(row["publishes"]), count(row["settles"])
    if verb == "commit":
        says = [
            f"{publishes} messages ({size(row['size_bytes'])}) are published: consumers and apps see "
            "them at once."
        ]
        if row["settles"]:
            says.append(f"{settles} messages that it has acked or rejected are settled for good.")
    else:
        says = [
            f"{publishes} messages ({size(row['size_bytes'])}) are dropped as if they had never been "
            "published."
        ]
        if row["settles"]:
            says.append(
                f"{settles} messages that it has acked or rejected go back to their queues, and are "
                "delivered again."
            )
    for word, field in (("It publishes to", "to"), ("It settles messages of", "acked")):
        if row.get(field):
            queues = [part for name, n in row[field].items() for part in (name, count(n))]
            says.append(sentence(f"{word} {', '.join(['{} ({})'] * len(row[field]))}.", *queues))
    if row["dropped"]:
        says.append(f"{count(row['dropped'])} of all these have no effect: their queue was deleted.")
    says += [
        f"It has waited for {duration(row['age_s'])}. Its coordinator may still decide: ask it first, since "
        "it cannot decide otherwise afterwards.",
        "The decision is durable, and final.",
    ]
    user = row["user"] or "the owner of the directory"
    what = sentence("transaction {} of {} in {}", row["xid"], user, row["vhost"])
    word = "Commit" if verb == "commit" else "Roll back"
    return render(call, "confirm.html", section="Transactions", what=what, says=says, verb=word, back=HOME)


def _decide(verb: Decision, call: HttpCall) -> Response:
    vhost, xid, of = (call.params.get(name, "") for name in ("vhost", "xid", "of"))
    call_api(call, DECIDE[verb], {"vhost": vhost, "xid": xid}, method="POST", body={"of": of})
    done = "committed" if verb == "commit" else "rolled back"
    return redirect(call, HOME, sentence("Transaction {} is {}.", xid, done))


def _of(verb: Decision) -> tuple[Route, ...]:
    path, text = f"/ui/transaction/{verb}", f"{verb} by hand"
    return (
        page("GET", path, "monitoring", partial(_confirm, verb), f"{text}, what it does"),
        page("POST", path, "vhost", partial(_decide, verb), text),
    )


def _transaction(call: HttpCall) -> Response:
    sequence = call.params.get("sequence", "")
    found = call_api(call, TRANSACTION, {"sequence": sequence})
    return render(call, "transaction.html", found=found, ranges=RANGES)


def _message(call: HttpCall) -> Response:
    at = {name: call.params.get(name, "") for name in ("vhost", "name", "offset")}
    found = call_api(call, "/api/txmq/messages/{vhost}/{name}/{offset}", at)
    return render(call, "message.html", found=found, vhost=at["vhost"], ranges=RANGES)


ROUTES = (
    page("GET", HOME, "monitoring", _transactions, "transactions"),
    *_of("commit"),
    *_of("rollback"),
    page("GET", "/ui/transaction", "management", _transaction, "what a transaction did"),
    page("GET", "/ui/message", "vhost", _message, "the life of a message"),
)
