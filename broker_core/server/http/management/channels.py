"""Connections, channels and consumers: looked at and closed.

Invariant: without a tag that looks, a caller sees its own alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from broker_core.admin import ConnectionInfo
from broker_core.broker.channel import Channel
from broker_core.broker.queue import Queue
from broker_core.node.open_channels import ChannelHolder
from broker_core.server.http.call import DONE, HttpAnswer, HttpCall
from broker_core.server.http.gate import looks
from broker_core.server.http.management import rabbitmq_rows
from broker_core.server.http.management.listing import counted_list, list_of, one_of
from broker_core.server.http.refusal import denied, not_found
from broker_core.server.http.route import Route

Row = dict[str, Any]
OBJECT = "User not authorised to access object"


def _sees(call: HttpCall, user: str) -> bool:
    return looks(call.caller) or user == call.user


def _connections(call: HttpCall) -> list[Row]:
    """Those of the virtual host and of the user of the path, if it names them."""
    vhost, user = call.params.get("vhost"), call.params.get("user")
    rows = [
        rabbitmq_rows.connection_row(each)
        for each in call.backend.connections()
        if _sees(call, each.user) and vhost in (None, each.vhost) and user in (None, each.user)
    ]
    return sorted(rows, key=lambda row: str(row["name"]))


def _connection(call: HttpCall) -> ConnectionInfo:
    """Raises Refusal: a caller who sees its own alone is told the same of others and of none."""
    for each in call.backend.connections():
        if each.name == call.params["name"] and _sees(call, each.user):
            return each
    raise not_found() if looks(call.caller) else denied(OBJECT)


def _connection_row(call: HttpCall) -> Row:
    return rabbitmq_rows.connection_row(_connection(call))


def _close(call: HttpCall) -> HttpAnswer:
    found = _connection(call)
    if found.user != call.user and not call.caller.operates:
        raise denied(OBJECT)
    if not call.backend.broker.open_channels.close(found.name):
        raise not_found()
    call.record("connection.close", connection=found.name, of=found.user)
    return DONE


def _channels(call: HttpCall) -> Iterator[tuple[Channel, ChannelHolder]]:
    """Those of the virtual host of the path, if it names one, in the order of their opening."""
    vhost = call.params.get("vhost")
    for channel, holder in sorted(call.backend.broker.open_channels.all(), key=lambda each: each[1].since_us):
        shared = not channel.closed and holder.listener != "process" and _sees(call, holder.user)
        if shared and vhost in (None, holder.vhost):
            yield channel, holder


def _channel_rows(call: HttpCall) -> list[Row]:
    return [rabbitmq_rows.channel_row(channel, holder) for channel, holder in _channels(call)]


def _channels_of(call: HttpCall) -> list[Row]:
    name = _connection(call).name
    return [row for row in _channel_rows(call) if row["connection_details"]["name"] == name]


def _channel(call: HttpCall) -> Row:
    for channel, holder in _channels(call):
        if holder.id == call.params["name"]:
            row = rabbitmq_rows.channel_row(channel, holder)
            consumers = list(channel.consumers.values())
            row["consumer_details"] = rabbitmq_rows.consumer_rows("", channel, holder, consumers)
            return row
    raise not_found() if looks(call.caller) else denied(OBJECT)


def _consumers(call: HttpCall, queue: str = "") -> list[Row]:
    return [
        row
        for channel, holder in _channels(call)
        for row in rabbitmq_rows.consumer_rows(queue, channel, holder, list(channel.consumers.values()))
    ]


def consumers_of(call: HttpCall, queue: Queue) -> list[Row]:
    """Of the queue of the path: those whom the caller may see."""
    return _consumers(call, queue.name) if queue.consumers else []


ROUTES = (
    counted_list("/api/connections", "management", _connections, "Connections of AMQP"),
    one_of("/api/connections/{name}", "management", _connection_row, "One connection"),
    Route("DELETE", "/api/connections/{name}", "management", _close, "Close a connection"),
    counted_list("/api/connections/{name}/channels", "management", _channels_of, "Channels of a connection"),
    counted_list("/api/connections/username/{user}", "management", _connections, "Connections of a user"),
    counted_list("/api/vhosts/{vhost}/connections", "vhost", _connections, "Connections to a virtual host"),
    counted_list("/api/channels", "management", _channel_rows, "Channels of AMQP and of Flight"),
    one_of("/api/channels/{name}", "management", _channel, "One channel, with its consumers"),
    counted_list("/api/vhosts/{vhost}/channels", "vhost", _channel_rows, "Channels in a virtual host"),
    list_of("/api/consumers", "management", _consumers, "Consumers"),
    list_of("/api/consumers/{vhost}", "vhost", _consumers, "Consumers in a virtual host"),
)
