"""Queues: looked at, declared, deleted, purged."""

from __future__ import annotations

from functools import partial
from typing import Any

from broker_core.broker import command_permissions
from broker_core.broker.broker import BrokerState
from broker_core.broker.message.purge import Purge
from broker_core.broker.queue import Queue
from broker_core.core.change import Change
from broker_core.message.arguments import check_reserved
from broker_core.server.http.call import CREATED, DONE, HttpAnswer, HttpCall
from broker_core.server.http.management import rabbitmq_rows
from broker_core.server.http.management.channels import consumers_of
from broker_core.server.http.management.listing import hosts, one_of, page_of
from broker_core.server.http.refusal import bad_request, not_found
from broker_core.server.http.route import Route, read_list

Row = dict[str, Any]


def _queues(call: HttpCall) -> object:
    show = partial(rabbitmq_rows.queue_row, rates=call.backend.rates)
    queues = [queue for each in hosts(call) for _, queue in sorted(each.queues.items()) if not queue.replies]
    return page_of(call, queues, partial(call.backend.broker.map_under_lock, show=show))


def there(call: HttpCall) -> Queue:
    """The queue of the path. Raises Refusal."""
    queue = call.topology.queues.get(call.params["name"])
    if queue is None or queue.replies:
        raise not_found()
    return queue


def _one(call: HttpCall) -> Row:
    queue = there(call)
    (row,) = call.backend.broker.map_under_lock(
        [queue], partial(rabbitmq_rows.queue_row, rates=call.backend.rates)
    )
    row |= {"consumer_details": consumers_of(call, queue), "deliveries": [], "incoming": []}
    return row


def _declare(call: HttpCall) -> HttpAnswer:
    name, arguments = call.params["name"], call.get("arguments", dict, {})
    options: dict[str, Any] = {
        "durable": call.get("durable", bool, True),
        "auto_delete": call.get("auto_delete", bool, False),
        "arguments": arguments,
    }
    if not name:
        raise bad_request("a queue needs a name")

    def work(_state: BrokerState, change: Change, _now: int) -> bool:
        topology = call.topology
        command_permissions.declare_queue(call.rights, topology, name, arguments)
        new = name not in topology.queues
        check_reserved(name, topology.queues)
        topology.declare_queue(change, name, **options)
        return new

    created = call.backend.broker.run(work)
    call.record("queue.declare", vhost=call.vhost, queue=name)
    return CREATED if created else DONE


def _delete(call: HttpCall) -> HttpAnswer:
    name = there(call).name

    def work(_state: BrokerState, change: Change, _now: int) -> None:
        command_permissions.delete_queue(call.rights, name)
        topology = call.topology
        topology.require_there()
        topology.delete_queue(change, name, if_unused=call.flag("if-unused"), if_empty=call.flag("if-empty"))

    call.backend.broker.run(work)
    call.backend.broker.committer.listeners.tell_consumers()
    call.record("queue.delete", vhost=call.vhost, queue=name)
    return DONE


def _purge(call: HttpCall) -> HttpAnswer:
    name = there(call).name
    purge = Purge(call.topology, name)

    def step(state: BrokerState, change: Change, now: int) -> bool:
        command_permissions.read_queue(call.rights, name)
        call.topology.require_there()
        return purge.step(state, change, now)

    while not call.backend.broker.run(step):
        pass
    call.record("queue.purge", vhost=call.vhost, queue=name)
    return DONE


def _act(call: HttpCall) -> HttpAnswer:
    """There are no mirrors to synchronise."""
    there(call)
    if call.get("action", str, "") not in ("sync", "cancel_sync"):
        raise bad_request(f"unknown action {call.get('action', str, '')[:80]!r}")
    return DONE


ROUTES = (
    read_list("/api/queues", "management", _queues, "Queues of all virtual hosts that the caller may see"),
    read_list("/api/queues/{vhost}", "vhost", _queues, "Queues"),
    one_of("/api/queues/{vhost}/{name}", "vhost", _one, "One queue, with its consumers", works=False),
    Route("PUT", "/api/queues/{vhost}/{name}", "vhost", _declare, "Declare a queue"),
    Route("DELETE", "/api/queues/{vhost}/{name}", "vhost", _delete, "Delete a queue"),
    Route("DELETE", "/api/queues/{vhost}/{name}/contents", "vhost", _purge, "Drop ready messages"),
    Route("POST", "/api/queues/{vhost}/{name}/actions", "vhost", _act, "No effect: tools call it"),
)
