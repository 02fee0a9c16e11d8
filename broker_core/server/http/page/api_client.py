"""What the API answers to the user of a page.

Invariant: a page shows and changes what the same user may see and change by the API, and nothing else: each
question goes through the need of its route.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from broker_core.server.http import gate, txmq_api
from broker_core.server.http.call import HttpAnswer, HttpCall
from broker_core.server.http.management import channels, exchanges, messages, overview, queues

_ROUTES = {
    (route.method, route.path): route
    for part in (overview, queues, exchanges, messages, channels, txmq_api)
    for route in part.ROUTES
}


def call_api(
    call: HttpCall,
    path: str,
    params: Mapping[str, str] | None = None,
    *,
    method: str = "GET",
    body: Mapping[str, Any] | None = None,
    query: Mapping[str, str] | None = None,
) -> Any:
    """``path``: of the table of routes; ``params``: for the names in it. Raises Refusal."""
    route = _ROUTES[method, path]
    caller = call.caller
    gate.permit(caller, route.need)
    if route.need == "vhost":
        caller = gate.within(call.backend, caller, (params or {})["vhost"])
    answer = route.answer
    found = answer(
        replace(call, caller=caller, params=params or {}, query=query or {}, body=body or {}, at=None)
    )
    return found.body if isinstance(found, HttpAnswer) else found
