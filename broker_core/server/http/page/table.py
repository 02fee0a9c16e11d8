"""The routes of all pages."""

from __future__ import annotations

from broker_core.server.http.page import connections, login, overview, past, pipelines, queues, transactions
from broker_core.server.http.route import Route

PAGES: tuple[Route, ...] = (
    *login.ROUTES,
    *overview.ROUTES,
    *queues.ROUTES,
    *pipelines.ROUTES,
    *transactions.ROUTES,
    *past.ROUTES,
    *connections.ROUTES,
)
