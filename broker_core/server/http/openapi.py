"""The description of the API as OpenAPI 3.1, from the table of routes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from broker_core import __version__
from broker_core.server.http.route import Route, read

_PARAMETER = re.compile(r"\{(\w+)\}")


def _operation(route: Route) -> dict[str, object]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(route.path)
    ]
    answers = {"200" if route.method in ("GET", "POST") else "204": {"description": "done"}}
    answers |= {"4XX": {"description": "refused: an object with error and reason"}}
    document: dict[str, object] = {
        "summary": route.text,
        "description": f"Needs: {route.need}.",
        "tags": [_section(route.path)],
        "parameters": parameters,
        "responses": answers,
    }
    if route.method in ("PUT", "POST"):
        document["requestBody"] = {"content": {"application/json": {"schema": {"type": "object"}}}}
    return document


def _section(path: str) -> str:
    steps = path.strip("/").split("/")
    return "/".join(steps[1:3] if steps[1:2] == ["txmq"] else steps[1:2]) or steps[0]


def describe(routes: Iterable[Route]) -> dict[str, object]:
    paths: dict[str, dict[str, object]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "txmq",
            "version": __version__,
            "description": "RabbitMQ's management API, and ours.",
        },
        "security": [{"basic": []}],
        "components": {"securitySchemes": {"basic": {"type": "http", "scheme": "basic"}}},
        "paths": paths,
    }


def route(routes: Sequence[Route]) -> Route:
    """The route of the description, of ``routes`` and itself."""
    own = read("/api/txmq/openapi.json", "management", lambda _call: document, "This description")
    document = describe([*routes, own])
    return own
