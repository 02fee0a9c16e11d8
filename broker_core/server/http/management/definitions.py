"""Definitions both ways, in RabbitMQ's format: what ``txmq broker export`` writes and ``txmq broker import``
reads.

Not here: what they say and how they are applied (``broker/definitions.py``).
Invariant: an import that is wrong anywhere changes nothing. What has no counterpart is said in the answer.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import Any, cast

from broker_core import __version__
from broker_core.admin import Imported, Skipped
from broker_core.core.errors import TxmqError
from broker_core.server.http.call import DONE, HttpAnswer, HttpCall
from broker_core.server.http.gate import Need, within
from broker_core.server.http.management.overview import API_VERSION
from broker_core.server.http.refusal import bad_request
from broker_core.server.http.route import Route

Row = dict[str, Any]
_HEAD = {
    "rabbit_version": API_VERSION,
    "rabbitmq_version": API_VERSION,
    "product_name": "txmq",
    "product_version": __version__,
}
_OF_VHOST = ("parameters", "policies", "exchanges", "queues", "bindings")


def _export(call: HttpCall) -> Row:
    found = dict(call.accounts.export_definitions().definitions)
    return {**found, **_HEAD}


def _export_one(call: HttpCall) -> Row:
    """Rows name no virtual host, so that they go into another one."""
    vhost = within(call.backend, call.caller, call.params["vhost"]).state.vhost
    accounts = call.backend.accounts.by(partial(call.record, vhost=vhost))
    found = cast("dict[str, list[Row]]", accounts.export_definitions().definitions)
    rows = {kind: [dict(row) for row in found[kind] if row.get("vhost") == vhost] for kind in _OF_VHOST}
    for row in (row for kind in rows.values() for row in kind):
        del row["vhost"]
    return {**_HEAD, **rows}


def _import(call: HttpCall) -> HttpAnswer:
    return _import_answer(_imported(call, dict(call.body)))


def _import_one(call: HttpCall) -> HttpAnswer:
    """As RabbitMQ, it takes what belongs to a virtual host; users and others are left out, and listed."""
    vhost = within(call.backend, call.caller, call.params["vhost"]).state.vhost
    document = {name: call.body[name] for name in _OF_VHOST if name in call.body}
    for kind, rows in document.items():
        for row in rows if isinstance(rows, list) else ():
            if isinstance(row, dict) and row.get("vhost", vhost) != vhost:
                raise bad_request(f"{kind} name the vhost {str(row['vhost'])[:80]!r}: import them without it")
    imported = _imported(call, document, vhost)
    others = sorted(call.body.keys() - {*_OF_VHOST, *_HEAD})
    left = [
        Skipped(name, name, vhost, "only /api/definitions takes it") for name in others if call.body[name]
    ]
    return _import_answer(replace(imported, skipped=(*imported.skipped, *left)))


def _imported(call: HttpCall, document: Row, vhost: str = "/") -> Imported:
    try:
        return call.accounts.import_definitions(document, vhost)
    except TxmqError as error:
        raise bad_request(error.message) from error


def _import_answer(imported: Imported) -> HttpAnswer:
    """Empty, as RabbitMQ's, where all has a counterpart."""
    if not imported.skipped:
        return DONE
    skipped = [asdict(each) for each in imported.skipped]
    return HttpAnswer(200, {"imported": dict(imported.counts), "skipped": skipped})


_ALL, _ONE = "/api/definitions", "/api/definitions/{vhost}"
_NEED: Need = "administrator"
ROUTES = (
    Route("GET", _ALL, _NEED, _export, "Export the topology, and users with their hashes"),
    Route("POST", _ALL, _NEED, _import, "Import definitions: all, or none if one is wrong"),
    Route("GET", _ONE, _NEED, _export_one, "Export the topology of a virtual host"),
    Route("POST", _ONE, _NEED, _import_one, "Import definitions into a virtual host"),
)
