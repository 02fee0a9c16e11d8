"""The history of commits: what a transaction did, and the life of a message."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from broker_core.server.http.call import HttpCall
from broker_core.server.http.page.asking import asked
from broker_core.server.http.page.rendering import shown
from broker_core.server.http.route import page

Row = dict[str, Any]
TRANSACTION = "/api/txmq/transactions/{sequence}"
RANGES = 8  # of one effect


def _transaction(call: HttpCall) -> Response:
    sequence = call.params.get("sequence", "")
    found = asked(call, TRANSACTION, {"sequence": sequence})
    return shown(call, "transaction.html", found=found, ranges=RANGES)


def _message(call: HttpCall) -> Response:
    at = {name: call.params.get(name, "") for name in ("vhost", "name", "offset")}
    found = asked(call, "/api/txmq/messages/{vhost}/{name}/{offset}", at)
    return shown(call, "message.html", found=found, vhost=at["vhost"], ranges=RANGES)


ROUTES = (
    page("GET", "/ui/transaction", "management", _transaction, "what a transaction did"),
    page("GET", "/ui/message", "vhost", _message, "the life of a message"),
)
