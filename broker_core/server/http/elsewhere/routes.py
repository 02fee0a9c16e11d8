"""Which routes an engine elsewhere has. The others are refused, with what there is instead.

Invariant: each route of a broker is here too, with the same path and the same need, so nobody learns
more by a refusal than by an answer.
"""

from __future__ import annotations

from collections.abc import Callable

from broker_core.server.http import openapi
from broker_core.server.http.call import HttpCall
from broker_core.server.http.elsewhere.answers import ANSWERS
from broker_core.server.http.refusal import HttpRefusal
from broker_core.server.http.route import Route
from broker_core.server.http.routes import ROUTES

# what one function answers for both
SHARED = frozenset(
    {
        "/api/cluster-name",
        "/api/whoami",
        "/api/auth",
        "/api/txmq/apps",
        "/api/txmq/ledger/{vhost}/{app}",
        "/api/txmq/staged",
        "/api/txmq/history/{vhost}",
        "/api/txmq/messages/{vhost}/{name}/{offset}",
        "/",
        "/ui",
        "/ui/login",
        "/ui/logout",
        "/ui/assets/{name}",
        "/ui/queues",
        "/ui/queue",
        "/ui/pipelines",
        "/ui/pipeline",
        "/ui/transactions",
        "/ui/message",
    }
)
OPENAPI = "/api/txmq/openapi.json"
CHANGES = "this door only looks: change topics with Kafka's tools, exchanges and bindings with `txmq`"
_OTHERS = (  # by how the path begins
    ("/api/connections", "Kafka lists no connections", "kafka-consumer-groups.sh lists who reads a topic"),
    ("/api/channels", "Kafka has no channels", "GET /api/txmq/staged shows what is open"),
    ("/api/consumers", "Kafka has no consumers of AMQP", "kafka-consumer-groups.sh lists its groups"),
    ("/api/users", "the users of this door are those of --users", "rights on topics are Kafka's ACLs"),
    ("/api/permissions", "rights on topics are Kafka's ACLs", "kafka-acls.sh lists them"),
    ("/api/topic-permissions", "rights on topics are Kafka's ACLs", "kafka-acls.sh lists them"),
    ("/api/vhosts", "Kafka has no virtual hosts", "all topics are in /"),
    ("/api/txmq/transactions", "commits of Kafka have no numbers", "GET /api/txmq/history/%2F lists batches"),
    ("/ui/transaction", "commits of Kafka have no numbers", "/ui/pipelines leads to the batches of an app"),
    ("/api/txmq/prepared", "Kafka has no transactions in doubt", "GET /api/txmq/apps shows what waits"),
)
_ELSE = ("this is of a broker of txmq, and here is a cluster of Kafka", f"GET {OPENAPI} lists what there is")


def _absent(route: Route) -> Callable[[HttpCall], object]:
    what = next((rest for begin, *rest in _OTHERS if route.path.startswith(begin)), _ELSE)
    reason = CHANGES if route.method != "GET" else "; ".join(what)

    def refuse(_call: HttpCall) -> object:
        raise HttpRefusal(501, "not_implemented", reason)

    return refuse


def _of(route: Route) -> Route:
    answer = ANSWERS.get((route.method, route.path))
    if answer is not None:
        return route._replace(answer=answer, works=True, counted=False)
    if route.path in SHARED:
        return route
    return route._replace(answer=_absent(route), works=False, counted=False)


def served(route: Route) -> bool:
    """Whether an engine elsewhere has it."""
    return route.path in SHARED or (route.method, route.path) in ANSWERS


_KNOWN = tuple(route for route in ROUTES if route.path != OPENAPI)
ELSEWHERE: tuple[Route, ...] = (
    *(_of(route) for route in _KNOWN),
    openapi.route([route for route in _KNOWN if served(route) and not route.page]),
)
