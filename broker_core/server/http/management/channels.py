"""Connections, channels and consumers: looked at and closed.

Invariant: without a tag that looks, a caller sees its own alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from broker_core.admin import ConnectionInfo
from broker_core.broker.channel import Channel
from broker_core.broker.queue import Queue
from broker_core.node.held_channels import ChannelHolder
from broker_core.server.http.call import DONE, HttpAnswer, HttpCall
from broker_core.server.http.gate import looks
from broker_core.server.http.management import shown
from broker_core.server.http.management.listing import listed, only
from broker_core.server.http.refusal import denied, not_found
from broker_core.server.http.route import Route, read_all, read_list

Row = dict[str, Any]
OBJECT = "User not authorised to access object"


def _sees(call: HttpCall, user: str) -> bool:
    return looks(call.caller) or user == call.user


def _connections(call: HttpCall, vhost: str = "", user: str = "") -> object:
    rows = [
        shown.connection_row(each)
        for each in call.served.connections()
        if _sees(call, each.user) and vhost in ("", each.vhost) and user in ("", each.user)
    ]
    return listed(call, sorted(rows, key=lambda row: str(row["name"])))


def _connection(call: HttpCall) -> ConnectionInfo:
    """Raises Refusal: a caller who sees its own alone is told the same of others and of none."""
    for each in call.served.connections():
        if each.name == call.params["name"] and _sees(call, each.user):
            return each
    raise not_found() if looks(call.caller) else denied(OBJECT)


def _close(call: HttpCall) -> HttpAnswer:
    found = _connection(call)
    if found.user != call.user and not call.caller.operates:
        raise denied(OBJECT)
    if not call.served.broker.held.close(found.name):
        raise not_found()
    call.record("connection.close", connection=found.name, of=found.user)
    return DONE


def _channels(call: HttpCall) -> Iterator[tuple[Channel, ChannelHolder]]:
    """In the order of their opening."""
    for channel, holder in sorted(call.served.broker.held.all(), key=lambda each: each[1].since_us):
        if not channel.closed and holder.listener != "process" and _sees(call, holder.user):
            yield channel, holder


def _channel_list(call: HttpCall, vhost: str = "") -> object:
    rows = [
        shown.channel_row(channel, holder)
        for channel, holder in _channels(call)
        if vhost in ("", holder.vhost)
    ]
    return listed(call, rows)


def _channels_of(call: HttpCall) -> object:
    name = _connection(call).name
    rows = [shown.channel_row(channel, holder) for channel, holder in _channels(call)]
    return listed(call, [row for row in rows if row["connection_details"]["name"] == name])


def _channel(call: HttpCall) -> Row:
    for channel, holder in _channels(call):
        if holder.id == call.params["name"]:
            row = shown.channel_row(channel, holder)
            consumers = list(channel.consumers.values())
            row["consumer_details"] = shown.consumer_rows("", channel, holder, consumers)
            return only(call, row)
    raise not_found() if looks(call.caller) else denied(OBJECT)


def _consumers(call: HttpCall, vhost: str = "") -> object:
    rows: list[Row] = []
    for channel, holder in _channels(call):
        if vhost in ("", holder.vhost):
            rows += shown.consumer_rows("", channel, holder, list(channel.consumers.values()))
    return listed(call, rows)


def consumers_of(call: HttpCall, queue: Queue) -> list[Row]:
    """Of those whom the caller may see."""
    rows: list[Row] = []
    if queue.consumers:
        for channel, holder in _channels(call):
            if holder.vhost == queue.vhost:
                rows += shown.consumer_rows(queue.name, channel, holder, list(channel.consumers.values()))
    return rows


ROUTES = (
    read_list("/api/connections", "management", _connections, "Connections of AMQP"),
    read_list(
        "/api/connections/{name}",
        "management",
        lambda call: only(call, shown.connection_row(_connection(call))),
        "One connection",
    ),
    Route("DELETE", "/api/connections/{name}", "management", _close, "Close a connection"),
    read_list("/api/connections/{name}/channels", "management", _channels_of, "Channels of a connection"),
    read_list(
        "/api/connections/username/{user}",
        "management",
        lambda call: _connections(call, user=call.params["user"]),
        "Connections of a user",
    ),
    read_list(
        "/api/vhosts/{vhost}/connections",
        "vhost",
        lambda call: _connections(call, call.vhost),
        "Connections to a virtual host",
    ),
    read_list("/api/channels", "management", _channel_list, "Channels of AMQP and of Flight"),
    read_all("/api/channels/{name}", "management", _channel, "One channel, with its consumers"),
    read_list(
        "/api/vhosts/{vhost}/channels",
        "vhost",
        lambda call: _channel_list(call, call.vhost),
        "Channels in a virtual host",
    ),
    read_all("/api/consumers", "management", _consumers, "Consumers"),
    read_all(
        "/api/consumers/{vhost}",
        "vhost",
        lambda call: _consumers(call, call.vhost),
        "Consumers in a virtual host",
    ),
)
