"""Connections, channels and consumers: looked at, and connections closed."""

from __future__ import annotations

from collections import Counter

from starlette.responses import Response

from broker_core.server.http.call import HttpCall
from broker_core.server.http.page.api_client import call_api
from broker_core.server.http.page.rendering import redirect, render, sentence
from broker_core.server.http.refusal import not_found
from broker_core.server.http.route import page

CONNECTION = "/api/connections/{name}"
HOME = "/ui/connections"
MOST = 200  # rows of each table


def _connections(call: HttpCall) -> Response:
    connections, channels = call_api(call, "/api/connections"), call_api(call, "/api/channels")
    consumers = call_api(call, "/api/consumers")
    return render(
        call,
        "connections.html",
        connections=connections[:MOST],
        channels=channels[:MOST],
        consumers=consumers[:MOST],
        counts=(len(connections), len(channels), len(consumers)),
        consumers_of=Counter(row["channel_details"]["name"] for row in consumers),
        operates=call.caller.operates,
    )


def _confirm(call: HttpCall) -> Response:
    name = call.params.get("name", "")
    row = call_api(call, CONNECTION, {"name": name})
    says = [
        sentence(
            "The connection of {} from {}:{} is closed, with its {} channels.",
            *(row[column] for column in ("user", "peer_host", "peer_port", "channels")),
        ),
        "Its open transactions are rolled back. What it holds goes back to the queues, and is delivered "
        "again.",
        "A client that reconnects by itself comes back.",
    ]
    return render(
        call,
        "confirm.html",
        section="Connections",
        what=sentence("connection {}", name),
        says=says,
        verb="Close",
        back=HOME,
    )


def _close(call: HttpCall) -> Response:
    name = call.params.get("name")
    if name is None:
        raise not_found()
    call_api(call, CONNECTION, {"name": name}, method="DELETE")
    return redirect(call, HOME, sentence("Connection {} is closed.", name))


ROUTES = (
    page("GET", HOME, "management", _connections, "connections"),
    page("GET", "/ui/connection/close", "management", _confirm, "what a close does"),
    page("POST", "/ui/connection/close", "management", _close, "close a connection"),
)
