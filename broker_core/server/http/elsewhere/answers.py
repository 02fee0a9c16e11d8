"""Queues, exchanges, bindings, messages, the overview and metrics of an engine elsewhere: the same paths and
rows as of a broker, by its ports.

Not here: apps, ledgers and the history, which one function answers for both (``own.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import psutil
from starlette.responses import Response

from broker_core.address import VHOST
from broker_core.admin import QueueInfo
from broker_core.broker import command_permissions
from broker_core.server.http.call import HttpCall
from broker_core.server.http.elsewhere.served import EngineServed
from broker_core.server.http.elsewhere.topic_rates import counts_of, sum_of
from broker_core.server.http.management import messages, shown
from broker_core.server.http.management.listing import listed, only, paged
from broker_core.server.http.management.overview import Objects, overview_row
from broker_core.server.http.management.shown import Row
from broker_core.server.http.metrics import build_info, counter, gauge, of_apps, text
from broker_core.server.http.refusal import not_found
from broker_core.server.http.served import NODE

Answer = Callable[[HttpCall], object]


def _served(call: HttpCall) -> EngineServed:
    return cast(EngineServed, call.served)


# -- queues --------------------------------------------------------------------------------------------------
def _rows(served: EngineServed, queues: Sequence[QueueInfo]) -> list[Row]:
    readers: dict[str, list[str]] = {}
    for app in served.apps():
        for name in app.queues:
            readers.setdefault(name, []).append(app.app_id)
    rows = []
    for each in queues:
        rate = served.topic_rates.of(each.name)
        rows.append(
            {
                "name": each.name,
                "vhost": VHOST,
                "type": "topic",
                "durable": each.durable,
                "auto_delete": False,
                "exclusive": False,
                "arguments": dict(each.arguments),
                "node": NODE,
                "state": "running",
                "consumers": 0,
                **shown.totals(each.messages, 0, rate),
                "message_stats": shown.stats(counts_of(each), rate),
                "app": ", ".join(readers.get(each.name, ())),
                "next_offset": each.next_offset,
            }
        )
    return rows


def _queues(call: HttpCall) -> object:
    served = _served(call)
    return paged(call, served.queues(), lambda some: _rows(served, some))


def _there(call: HttpCall) -> QueueInfo:
    """The queue of the path; a log of it, ``orders/3``, leads to it. Raises Refusal."""
    name = call.params["name"].partition("/")[0]
    for each in _served(call).queues():
        if each.name == name:
            return each
    raise not_found()


def _queue(call: HttpCall) -> Row:
    (row,) = _rows(_served(call), [_there(call)])
    return only(call, {**row, "consumer_details": [], "deliveries": [], "incoming": []})


def _peek(call: HttpCall) -> list[Row]:
    """The first messages of each log, the logs one after the other."""
    asked = messages.asked(call)
    queue = _there(call)
    command_permissions.read_queue(call.rights, queue.name)
    engine = _served(call).engine
    rows: list[Row] = []
    for log, of in engine.available(engine.logs([queue.name])).items():
        more = asked._replace(most=asked.most - len(rows))
        if not more.most:
            break  # the other logs need not be asked
        found = engine.browse([(log, of.start, min(of.end, of.start + more.most))])
        rows += [{**row, "log": log} for row in messages.rows_of(found, more, queue.messages - len(rows))]
    return rows


# -- exchanges and bindings ----------------------------------------------------------------------------------
def _exchanges(call: HttpCall) -> object:
    return listed(call, [shown.exchange_columns(each, VHOST) for each in _served(call).exchanges()])


def _bindings(call: HttpCall) -> object:
    served = _served(call)
    defaults = [shown.default_binding(each.name, VHOST) for each in served.queues()]
    return listed(call, defaults + [shown.binding_columns(each, VHOST) for each in served.bindings()])


def _bindings_of(call: HttpCall) -> object:
    name = _there(call).name
    rows = [
        shown.binding_columns(each, VHOST)
        for each in _served(call).bindings()
        if (each.kind, each.destination) == ("queue", name)
    ]
    return listed(call, [shown.default_binding(name, VHOST), *rows])


# -- all -----------------------------------------------------------------------------------------------------
def _overview(call: HttpCall) -> Row:
    served = _served(call)
    queues = served.queues()
    objects = Objects(queues=len(queues), exchanges=len(served.exchanges()))
    held, rate = 0, served.topic_rates.of_all()
    return overview_row(call, sum_of(queues), rate, sum(each.messages for each in queues), held, objects)


def _metrics(call: HttpCall) -> Response:
    served = _served(call)
    queues = served.queues()
    return text(
        [
            build_info(),
            gauge("txmq_queues", "Queues", len(queues)),
            gauge("txmq_messages", "Messages that are kept", sum(each.messages for each in queues)),
            counter("txmq_published", "Offsets that were given", sum(each.next_offset for each in queues)),
            counter("txmq_logins_refused", "Logins refused since the start", served.logins.refusals),
            gauge("txmq_memory_bytes", "Resident memory of the door", psutil.Process().memory_info().rss),
            *of_apps(served),
        ]
    )


ANSWERS: Mapping[tuple[str, str], Answer] = {
    ("GET", "/api/overview"): _overview,
    ("GET", "/api/queues"): _queues,
    ("GET", "/api/queues/{vhost}"): _queues,
    ("GET", "/api/queues/{vhost}/{name}"): _queue,
    ("GET", "/api/queues/{vhost}/{name}/bindings"): _bindings_of,
    ("POST", "/api/queues/{vhost}/{name}/get"): _peek,
    ("GET", "/api/exchanges"): _exchanges,
    ("GET", "/api/exchanges/{vhost}"): _exchanges,
    ("GET", "/api/bindings"): _bindings,
    ("GET", "/api/bindings/{vhost}"): _bindings,
    ("GET", "/metrics"): _metrics,
}
