"""The table of all routes."""

from __future__ import annotations

from broker_core.server.http import metrics, openapi, own
from broker_core.server.http.management import (
    channels,
    definitions,
    exchanges,
    health,
    hosts,
    messages,
    overview,
    queues,
)
from broker_core.server.http.page.table import PAGES
from broker_core.server.http.route import Route

ROUTES: tuple[Route, ...] = (
    *overview.ROUTES,
    *queues.ROUTES,
    *messages.ROUTES,
    *exchanges.ROUTES,
    *channels.ROUTES,
    *hosts.ROUTES,
    *definitions.ROUTES,
    *health.ROUTES,
    *own.ROUTES,
    *metrics.ROUTES,
)
ROUTES += (openapi.route(ROUTES), *PAGES)
