"""Policies and operator policies, in RabbitMQ's forms."""

from __future__ import annotations

from collections.abc import Callable

from broker_core.broker.export import policy_row
from broker_core.broker.topology.policies import KINDS
from broker_core.server.http.call import CREATED, DONE, HttpAnswer, HttpCall
from broker_core.server.http.management.listing import list_of
from broker_core.server.http.refusal import not_found
from broker_core.server.http.route import Route, read_all

Row = dict[str, object]


def _rows(operator: bool) -> Callable[[HttpCall], list[Row]]:
    def rows(call: HttpCall) -> list[Row]:
        """Raises Refusal: there is no such virtual host."""
        vhost, name = call.params.get("vhost"), call.params.get("name")
        if vhost not in (None, *call.backend.broker.state.virtual_hosts.by_name):
            raise not_found()
        found = call.vhosts.policies(vhost)
        return [
            policy_row(each) for each in found if each.kind == KINDS[operator] and name in (None, each.name)
        ]

    return rows


def _routes(operator: bool, path: str, text: str) -> tuple[Route, ...]:
    rows, one = _rows(operator), f"/api/{path}/{{vhost}}/{{name}}"

    def show(call: HttpCall) -> object:
        found = rows(call)
        if not found:
            raise not_found()
        return found[0]

    def put(call: HttpCall) -> HttpAnswer:
        call.require("pattern", "definition")
        vhost, name, new = call.params["vhost"], call.params["name"], not rows(call)
        apply_to, priority = call.get("apply-to", str, "all"), call.get("priority", int, 0)
        pattern, definition = call.get("pattern", str, ""), call.get("definition", dict, {})
        call.vhosts.set_policy(
            name, pattern, definition, vhost=vhost, operator=operator, apply_to=apply_to, priority=priority
        )
        return CREATED if new else DONE

    def delete(call: HttpCall) -> HttpAnswer:
        show(call)
        call.vhosts.delete_policy(call.params["name"], vhost=call.params["vhost"], operator=operator)
        return DONE

    return (
        list_of(f"/api/{path}", "monitoring", rows, f"All {text}"),
        read_all(f"/api/{path}/{{vhost}}", "monitoring", rows, f"The {text} of a virtual host"),
        read_all(one, "monitoring", show, f"One of the {text}"),
        Route("PUT", one, "administrator", put, f"Set one of the {text}"),
        Route("DELETE", one, "administrator", delete, f"Delete one of the {text}"),
    )


ROUTES = (*_routes(False, "policies", "policies"), *_routes(True, "operator-policies", "operator policies"))
