"""The table of all routes: of the APIs, and of the pages."""

from __future__ import annotations

from itertools import chain

from broker_core.server.http import metrics, openapi, txmq_api
from broker_core.server.http.management import (
    channels,
    definitions,
    exchanges,
    health,
    hosts,
    messages,
    overview,
    policies,
    queues,
)
from broker_core.server.http.page import apps, connections, login, transactions
from broker_core.server.http.page import overview as overview_page
from broker_core.server.http.page import queues as queues_page
from broker_core.server.http.route import Route

_RABBITMQ = overview, queues, messages, exchanges, channels, hosts, policies, definitions, health
_API = *_RABBITMQ, txmq_api, metrics
_PAGES = login, overview_page, queues_page, apps, transactions, connections
_API_ROUTES: tuple[Route, ...] = tuple(chain.from_iterable(each.ROUTES for each in _API))
ROUTES = (*_API_ROUTES, openapi.route(_API_ROUTES), *chain.from_iterable(each.ROUTES for each in _PAGES))
