"""The first page: how much goes on, what is behind, and what is wrong. And the page of the store."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from broker_core.server.http.call import HttpCall
from broker_core.server.http.gate import looks, visible
from broker_core.server.http.page import sampling
from broker_core.server.http.page.api_client import call_api
from broker_core.server.http.page.rendering import plot, render
from broker_core.server.http.route import page

Row = dict[str, Any]
FEW = 8  # rows of a table on this page


def _overview(call: HttpCall) -> Response:
    keys = [sampling.of_vhost(topology.vhost) for topology in visible(call.backend, call.caller)]
    times, (depth, published, settled) = call.backend.history.of(*keys)
    values: Row = {
        "overview": call_api(call, "/api/overview"),
        "depth": plot(times, "", messages=depth),
        "rates": plot(times, "/s", published=published, settled=settled),
        "longest": call_api(
            call,
            "/api/queues",
            query={"sort": "messages", "sort_reverse": "true", "page": "1", "page_size": str(FEW)},
        )["items"],
        "commits": None,
        "node": None,
        "alarms": [],
        "behind": [],
        "in_doubt": 0,
    }
    if looks(call.caller):
        times, (changes, milliseconds, groups) = call.backend.history.of(sampling.COMMITS)
        values |= {
            "commits": plot(times, "/s", commits=changes, groups=groups),
            "latency": plot(times, "ms", latency=milliseconds),
            "now": {"commits": _last(changes), "latency": _last(milliseconds)},
            "node": call_api(call, "/api/nodes")[0],
            "alarms": call_api(call, "/api/txmq/alarms"),
            "behind": _behind(call),
            "in_doubt": len(call_api(call, "/api/txmq/prepared")),
            "failure": call_api(call, "/api/txmq/store")["failure"],
        }
    return render(call, "overview.html", **values)


def _behind(call: HttpCall) -> list[Row]:
    apps: list[Row] = call_api(call, "/api/txmq/apps")
    return sorted(apps, key=lambda app: (-app["lag"], app["app_id"]))[:FEW]


def _last(curve: list[float | None]) -> float | None:
    return curve[-1] if curve else None


def _store(call: HttpCall) -> Response:
    alarm = call.backend.quotas.alarm
    times, (changes, milliseconds, groups) = call.backend.history.of(sampling.COMMITS)
    return render(
        call,
        "store.html",
        store=call_api(call, "/api/txmq/store"),
        node=call_api(call, "/api/nodes")[0],
        alarms=call_api(call, "/api/txmq/alarms"),
        levels=alarm.levels() if alarm is not None else [],
        staged=call_api(call, "/api/txmq/staged"),
        listeners=call.backend.listening(),
        commits=plot(times, "/s", commits=changes, groups=groups),
        latency=plot(times, "ms", latency=milliseconds),
    )


ROUTES = (
    page("GET", "/ui", "management", _overview, "overview"),
    page("GET", "/ui/store", "monitoring", _store, "store"),
)
