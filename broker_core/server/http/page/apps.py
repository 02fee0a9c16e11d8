"""Apps: a row for each, and the batches of one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from starlette.responses import Response

from broker_core.server.http.call import HttpCall
from broker_core.server.http.page import sampling
from broker_core.server.http.page.api_client import call_api
from broker_core.server.http.page.rendering import plot, render
from broker_core.server.http.refusal import not_found
from broker_core.server.http.route import page

Row = dict[str, Any]
MOST = 500  # rows of a page
BATCHES = 50


def _rows(call: HttpCall) -> list[Row]:
    rows: list[Row] = call_api(call, "/api/txmq/apps")
    return sorted(rows, key=lambda row: (-row["lag"], row["vhost"], row["app_id"]))


def _apps(call: HttpCall) -> Response:
    name = call.query.get("name", "")
    rows = [row for row in _rows(call) if name.lower() in row["app_id"].lower()]
    shown_rows = rows[:MOST]
    for row in shown_rows:
        row["curve"] = call.backend.history.of(sampling.of_app(row["vhost"], row["app_id"])).curves[0]
    several = len({row["vhost"] for row in rows}) > 1
    return render(call, "apps.html", apps=shown_rows, count_of=len(rows), name=name, several=several)


def _app(call: HttpCall) -> Response:
    vhost, app_id = call.params.get("vhost", ""), call.params.get("app", "")
    found = [row for row in _rows(call) if (row["vhost"], row["app_id"]) == (vhost, app_id)]
    if not found:
        raise not_found()
    batches: list[Row] = call_api(call, "/api/txmq/ledger/{vhost}/{app}", {"vhost": vhost, "app": app_id})
    staged: list[Row] = call_api(call, "/api/txmq/staged")
    for before, batch in pairwise(batches):
        batch["after_s"] = batch["committed_at"] - before["committed_at"]
    history = call.backend.history.of(sampling.of_app(vhost, app_id))
    lag, unapplied, unmirrored = history.curves
    return render(
        call,
        "app.html",
        app=found[0],
        batches=batches[-BATCHES:][::-1],
        lag=plot(history.times, "", messages=lag),
        waiting=plot(history.times, "", not_applied=unapplied, not_in_the_ledger=unmirrored),
        staged=[row for row in staged if (row["vhost"], row["app_id"]) == (vhost, app_id)],
    )


ROUTES = (
    page("GET", "/ui/apps", "monitoring", _apps, "apps"),
    page("GET", "/ui/app", "monitoring", _app, "one app"),
)
