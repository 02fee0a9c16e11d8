"""Exchanges and bindings: looked at, declared, deleted, bound, unbound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal
from urllib.parse import quote

from broker_core.broker import command_permissions
from broker_core.broker.broker import BrokerState
from broker_core.broker.queue import Queue
from broker_core.broker.topology.topology import Topology
from broker_core.core.change import Change
from broker_core.routing.exchange import Binding, Exchange
from broker_core.server.http.call import CREATED, DONE, HttpAnswer, HttpCall
from broker_core.server.http.management import rabbitmq_rows
from broker_core.server.http.management.listing import counted_list, hosts, list_of, one_of
from broker_core.server.http.management.queues import there
from broker_core.server.http.refusal import bad_request, not_found
from broker_core.server.http.route import Route, read_all

Row = dict[str, Any]
DEFAULT = "amq.default"  # the default exchange in a path
_KINDS: dict[str, Literal["queue", "exchange"]] = {"q": "queue", "e": "exchange"}


def _exchanges(call: HttpCall) -> list[Row]:
    found: list[Row] = []
    for topology in hosts(call):
        names = sorted(topology.exchanges)
        policies = topology.policies.of_all(names, "exchanges")
        found += [
            rabbitmq_rows.exchange_row(topology.exchanges[name], topology.vhost, policy)
            for name, policy in zip(names, policies, strict=True)
        ]
    return found


def _exchange_row(call: HttpCall) -> Row:
    found = exchange(call, call.params["name"])
    return rabbitmq_rows.exchange_row(found, call.vhost, call.topology.policies.of(found.name, "exchanges"))


def exchange(call: HttpCall, name: str) -> Exchange[Queue]:
    """Raises Refusal."""
    found = call.topology.exchanges.get("" if name == DEFAULT else name)
    if found is None:
        raise not_found()
    return found


def _declare(call: HttpCall) -> HttpAnswer:
    name, type_ = call.params["name"], call.get("type", str, "direct")
    arguments = call.get("arguments", dict, {})
    options: dict[str, Any] = {
        "durable": call.get("durable", bool, True),
        "auto_delete": call.get("auto_delete", bool, False),
        "internal": call.get("internal", bool, False),
        "arguments": arguments,
    }
    if name in ("", DEFAULT):
        raise bad_request("the default exchange is always there")

    def work(_state: BrokerState, change: Change, _now: int) -> bool:
        topology = call.topology
        command_permissions.declare_exchange(call.rights, topology, name, type_, arguments)
        new = name not in topology.exchanges
        topology.declare_exchange(change, name, type_, **options)
        return new

    created = call.backend.broker.run(work)
    call.record("exchange.declare", vhost=call.vhost, exchange=name, type=type_)
    return CREATED if created else DONE


def _delete(call: HttpCall) -> HttpAnswer:
    name = exchange(call, call.params["name"]).name

    def work(_state: BrokerState, change: Change, _now: int) -> None:
        command_permissions.delete_exchange(call.rights, name)
        call.topology.require_there()
        call.topology.delete_exchange(change, name, if_unused=call.flag("if-unused"))

    call.backend.broker.run(work)
    call.record("exchange.delete", vhost=call.vhost, exchange=name)
    return DONE


# -- bindings ------------------------------------------------------------------------------------------------
def _defaults(topology: Topology) -> list[Row]:
    return [
        rabbitmq_rows.default_binding(queue)
        for _, queue in sorted(topology.queues.items())
        if not queue.replies
    ]


def _list(call: HttpCall, topology: Topology, take: Callable[[Exchange[Queue]], list[Binding]]) -> list[Row]:
    """What ``take`` takes of each exchange but the default one, by name: under the lock, one at a time."""
    found: list[Row] = []
    for name, each in sorted(topology.exchanges.items()):
        if name:
            with call.backend.broker.look:
                bindings = take(each)
            found += [rabbitmq_rows.binding_row(name, binding, topology.vhost) for binding in bindings]
    return found


def _bindings(call: HttpCall) -> list[Row]:
    return [
        row
        for topology in hosts(call)
        for row in _defaults(topology) + _list(call, topology, lambda each: each.bindings)
    ]


def _bindings_to(call: HttpCall, target: Queue | Exchange[Queue]) -> list[Row]:
    found = _list(call, call.topology, lambda each: each.bindings_to(target))
    return [rabbitmq_rows.default_binding(target), *found] if isinstance(target, Queue) else found


def _bindings_from(call: HttpCall) -> list[Row]:
    source = exchange(call, call.params["name"])
    if not source.name:
        return _defaults(call.topology)
    with call.backend.broker.look:
        found = source.bindings
    return [rabbitmq_rows.binding_row(source.name, each, call.vhost) for each in found]


def _to_queue(call: HttpCall) -> list[Row]:
    return _bindings_to(call, there(call))


def _to_exchange(call: HttpCall) -> list[Row]:
    return _bindings_to(call, exchange(call, call.params["name"]))


def _ends(call: HttpCall) -> tuple[str, Literal["queue", "exchange"], str]:
    """Source, kind and name of the destination. Raises Refusal."""
    source, name, kind = call.params["source"], call.params["destination"], _KINDS.get(call.params["kind"])
    if kind is None:
        raise not_found()
    return "" if source == DEFAULT else source, kind, name


def _between(call: HttpCall) -> list[Row]:
    source, kind, name = _ends(call)
    exchange(call, source)
    target = call.topology.queues.get(name) if kind == "queue" else call.topology.exchanges.get(name)
    if target is None:
        raise not_found()
    return [row for row in _bindings_to(call, target) if row["source"] == source]


def _one_binding(call: HttpCall) -> Row:
    key = call.params["key"]
    for row in _between(call):
        if key in (row["properties_key"], row["routing_key"]):
            return row
    raise not_found()


def _bind(call: HttpCall) -> HttpAnswer:
    name, key = _change_binding(
        call, "bind", call.get("routing_key", str, ""), call.get("arguments", dict, {})
    )
    return HttpAnswer(201, None, {"location": f"{quote(name, safe='')}/{key}"})


def _unbind(call: HttpCall) -> HttpAnswer:
    found = _one_binding(call)
    _change_binding(call, "unbind", found["routing_key"], found["arguments"])
    return DONE


def _change_binding(
    call: HttpCall, word: Literal["bind", "unbind"], routing_key: str, arguments: dict[str, object]
) -> tuple[str, str]:
    """Returns the name of the destination, and the key of the binding's properties."""
    source, kind, name = _ends(call)

    def work(_state: BrokerState, change: Change, _now: int) -> None:
        topology = call.topology
        topology.require_there()
        command_permissions.bind(call.rights, topology, kind, name, source, routing_key)
        change_it = getattr(topology, word if kind == "queue" else f"{word}_exchange")
        change_it(change, name, source, routing_key, arguments)

    call.backend.broker.run(work)
    call.record(f"{kind}.{word}", vhost=call.vhost, destination=name, source=source, routing_key=routing_key)
    return name, rabbitmq_rows.properties_key(routing_key, arguments)


_ONE, _BETWEEN = "/api/exchanges/{vhost}/{name}", "/api/bindings/{vhost}/e/{source}/{kind}/{destination}"
ROUTES = (
    counted_list("/api/exchanges", "management", _exchanges, "Exchanges that the caller may see"),
    counted_list("/api/exchanges/{vhost}", "vhost", _exchanges, "Exchanges"),
    one_of(_ONE, "vhost", _exchange_row, "One exchange", works=False),
    Route("PUT", _ONE, "vhost", _declare, "Declare an exchange"),
    Route("DELETE", _ONE, "vhost", _delete, "Delete an exchange"),
    list_of(f"{_ONE}/bindings/source", "vhost", _bindings_from, "Bindings from an exchange"),
    list_of(f"{_ONE}/bindings/destination", "vhost", _to_exchange, "Bindings to an exchange"),
    list_of("/api/queues/{vhost}/{name}/bindings", "vhost", _to_queue, "Bindings to a queue"),
    list_of("/api/bindings", "management", _bindings, "Bindings of all that the caller may see"),
    list_of("/api/bindings/{vhost}", "vhost", _bindings, "Bindings"),
    read_all(_BETWEEN, "vhost", _between, "Bindings between two; kind: q or e"),
    Route("POST", _BETWEEN, "vhost", _bind, "Bind a queue (q) or an exchange (e)"),
    read_all(f"{_BETWEEN}/{{key}}", "vhost", _one_binding, "One binding"),
    Route("DELETE", f"{_BETWEEN}/{{key}}", "vhost", _unbind, "Unbind"),
)
