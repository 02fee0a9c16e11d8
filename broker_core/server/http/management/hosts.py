"""Virtual hosts, users and permissions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from broker_core.admin import UserInfo
from broker_core.broker.topology.topology import Topology
from broker_core.core import password as passwords
from broker_core.server.http.backend import NODE
from broker_core.server.http.call import CREATED, DONE, HttpAnswer, HttpCall
from broker_core.server.http.gate import Need
from broker_core.server.http.management import rabbitmq_rows
from broker_core.server.http.management.listing import hosts, list_of, one_of
from broker_core.server.http.refusal import bad_request, not_found
from broker_core.server.http.route import Route, read, read_all

Row = dict[str, Any]
_LIMITS = {"max-connections": "max_connections", "max-queues": "max_queues", "max-messages": "max_messages"}


# -- virtual hosts -------------------------------------------------------------------------------------------
def _vhost_row(call: HttpCall, topology: Topology) -> Row:
    found = list(topology.queues.values())
    unacked = sum(queue.unacknowledged for queue in found)
    counts, rate = call.backend.rates.of_hosts([topology.vhost])
    return {
        "name": topology.vhost,
        "description": "",
        "tags": [],
        "default_queue_type": "classic",
        "metadata": {"description": "", "tags": []},
        "tracing": False,
        "cluster_state": {NODE: "running"},
        **rabbitmq_rows.totals(topology.tally.total, unacked, rate),
        "message_stats": rabbitmq_rows.stats(counts, rate, unacked),
    }


def _vhosts(call: HttpCall) -> list[Row]:
    return [_vhost_row(call, each) for each in hosts(call)]


def _vhost_name(call: HttpCall) -> str:
    """The virtual host of the path. Raises Refusal: there is none."""
    name = call.params["vhost"]
    if name not in call.backend.broker.state.virtual_hosts.by_name:
        raise not_found()
    return name


def _put_vhost(call: HttpCall) -> HttpAnswer:
    name = call.params["vhost"]
    if name in call.backend.broker.state.virtual_hosts.by_name:
        return DONE
    call.vhosts.add_vhost(name)
    return CREATED


def _delete_vhost(call: HttpCall) -> HttpAnswer:
    call.vhosts.delete_vhost(_vhost_name(call))
    return DONE


def _limit_rows(call: HttpCall) -> list[Row]:
    seen = {each.vhost for each in hosts(call)}
    rows = []
    for each in call.vhosts.vhosts():
        value = {name: getattr(each, field) for name, field in _LIMITS.items()}
        value = {name: limit for name, limit in value.items() if limit is not None}
        if each.name in seen and value:
            rows.append({"vhost": each.name, "value": value})
    return rows


def _limit(call: HttpCall) -> HttpAnswer:
    field = _LIMITS.get(call.params["name"])
    if field is None:
        raise bad_request(f"there is no limit {call.params['name'][:80]!r}: use {', '.join(_LIMITS)}")
    call.require("value")
    value = call.get("value", int, -1)
    call.vhosts.limit_vhost(_vhost_name(call), **{field: max(value, -1)})
    return DONE


def _unlimit(call: HttpCall) -> HttpAnswer:
    field = _LIMITS.get(call.params["name"])
    if field is None:
        raise not_found()
    call.vhosts.limit_vhost(_vhost_name(call), **{field: -1})
    return DONE


# -- users ---------------------------------------------------------------------------------------------------
def _user_row(user: UserInfo) -> Row:
    return {
        "name": user.name,
        "password_hash": "",  # it leaves the broker by no listener
        "hashing_algorithm": "scrypt",
        "tags": list(user.tags),
        "limits": {},
    }


def _users(call: HttpCall) -> list[Row]:
    return [_user_row(each) for each in call.accounts.users()]


def _user(call: HttpCall) -> UserInfo:
    """Raises Refusal."""
    for each in call.accounts.users():
        if each.name == call.params["user"]:
            return each
    raise not_found()


def _tags(call: HttpCall) -> list[str]:
    """A list, or a text with commas. Raises Refusal."""
    tags = call.body.get("tags")
    if tags is None:
        raise bad_request("tags_not_present")
    if isinstance(tags, str):
        return [each.strip() for each in tags.split(",") if each.strip()]
    if isinstance(tags, list) and all(isinstance(each, str) for each in tags):
        return tags
    raise bad_request("field 'tags' must be of type string or array")


def _put_user(call: HttpCall) -> HttpAnswer:
    name, tags = call.params["user"], _tags(call)
    if "password_hash" in call.body:
        raise bad_request("password_hash is not accepted: give the password itself")
    password = call.get("password", str, "")
    there = any(each.name == name for each in call.accounts.users() if each.source != "default")
    if not password and not there:
        raise bad_request("a new user needs a password")
    hashed = passwords.hashed(password) if password else ""
    return CREATED if call.accounts.put_user(name, hashed, tags) else DONE


def _delete_user(call: HttpCall) -> HttpAnswer:
    call.accounts.delete_user(_user(call).name)
    return DONE


# -- permissions ---------------------------------------------------------------------------------------------
_PERMISSION = ("user", "vhost", "configure", "write", "read")
_TOPIC_PERMISSION = ("user", "vhost", "exchange", "write", "read")


def permission_rows(call: HttpCall, *, topic: bool = False) -> list[Row]:
    """Those of the user and of the virtual host of the path, if it names them."""
    user, vhost = call.params.get("user"), call.params.get("vhost")
    columns = _TOPIC_PERMISSION if topic else _PERMISSION
    return [
        {column: getattr(each, column) for column in columns}
        for each in call.accounts.permissions()
        if bool(each.exchange) is topic and user in (None, each.user) and vhost in (None, each.vhost)
    ]


def _without_permissions(call: HttpCall) -> list[Row]:
    permitted = {row["user"] for row in permission_rows(call)}
    return [row for row in _users(call) if row["name"] not in permitted]


_topic_permissions = partial(permission_rows, topic=True)


def _of_user(topic: bool) -> Callable[[HttpCall], object]:
    def answer(call: HttpCall) -> object:
        _user(call)
        return permission_rows(call, topic=topic)

    return answer


def _one_permission(call: HttpCall) -> Row:
    found = permission_rows(call)
    if not found:
        raise not_found()
    return found[0]


def _put_permission(call: HttpCall) -> HttpAnswer:
    call.require("configure", "write", "read")
    user, vhost = call.params["user"], _vhost_name(call)
    patterns = {name: call.get(name, str, "") for name in ("configure", "write", "read")}
    new = not permission_rows(call)
    call.accounts.set_permissions(user, **patterns, vhost=vhost)
    return CREATED if new else DONE


def _delete_permission(call: HttpCall) -> HttpAnswer:
    call.accounts.clear_permissions(_one_permission(call)["user"], vhost=_vhost_name(call))
    return DONE


def _put_topic(call: HttpCall) -> HttpAnswer:
    call.require("exchange", "write", "read")
    user, exchange = call.params["user"], call.get("exchange", str, "")
    patterns = {name: call.get(name, str, "") for name in ("write", "read")}
    new = all(row["exchange"] != exchange for row in permission_rows(call, topic=True))
    call.accounts.set_topic_permissions(user, exchange, **patterns, vhost=_vhost_name(call))
    return CREATED if new else DONE


def _delete_topic(call: HttpCall) -> HttpAnswer:
    if not permission_rows(call, topic=True):
        raise not_found()
    call.accounts.clear_topic_permissions(call.params["user"], vhost=_vhost_name(call))
    return DONE


ADMIN: Need = "administrator"
_OF_HOST, _TOPIC = "/api/permissions/{vhost}/{user}", "/api/topic-permissions/{vhost}/{user}"
ROUTES = (
    list_of("/api/vhosts", "management", _vhosts, "Virtual hosts that the caller may see"),
    one_of("/api/vhosts/{vhost}", "vhost", lambda call: _vhosts(call)[0], "One virtual host"),
    Route("PUT", "/api/vhosts/{vhost}", ADMIN, _put_vhost, "Add a virtual host"),
    Route("DELETE", "/api/vhosts/{vhost}", ADMIN, _delete_vhost, "Delete a virtual host"),
    read_all("/api/vhosts/{vhost}/permissions", ADMIN, permission_rows, "Permissions in a virtual host"),
    read_all("/api/vhosts/{vhost}/topic-permissions", ADMIN, _topic_permissions, "Topic permissions in one"),
    read_all("/api/vhost-limits", "management", _limit_rows, "Limits of virtual hosts"),
    read_all("/api/vhost-limits/{vhost}", "vhost", _limit_rows, "Limits of one"),
    Route("PUT", "/api/vhost-limits/{vhost}/{name}", ADMIN, _limit, "Set a limit"),
    Route("DELETE", "/api/vhost-limits/{vhost}/{name}", ADMIN, _unlimit, "Remove a limit"),
    read("/api/user-limits", ADMIN, lambda _call: [], "There are no limits of users: an empty list"),
    read("/api/user-limits/{user}", ADMIN, lambda _call: [], "There are none of one either"),
    read_all("/api/users/without-permissions", ADMIN, _without_permissions, "Users who may enter nowhere"),
    list_of("/api/users", ADMIN, _users, "Users, without their passwords"),
    read_all("/api/users/{user}", ADMIN, lambda call: _user_row(_user(call)), "One user"),
    Route("PUT", "/api/users/{user}", ADMIN, _put_user, "Add a user, or set password and tags"),
    Route("DELETE", "/api/users/{user}", ADMIN, _delete_user, "Delete a user"),
    read_all("/api/users/{user}/permissions", ADMIN, _of_user(False), "Permissions of a user"),
    read_all("/api/users/{user}/topic-permissions", ADMIN, _of_user(True), "Topic permissions of a user"),
    read_all("/api/permissions", ADMIN, permission_rows, "All permissions"),
    read_all(_OF_HOST, ADMIN, _one_permission, "Permissions of a user in a virtual host"),
    Route("PUT", _OF_HOST, ADMIN, _put_permission, "Set permissions"),
    Route("DELETE", _OF_HOST, ADMIN, _delete_permission, "Remove permissions"),
    read_all("/api/topic-permissions", ADMIN, _topic_permissions, "All topic permissions"),
    read_all(_TOPIC, ADMIN, _topic_permissions, "Topic permissions of a user in a virtual host"),
    Route("PUT", _TOPIC, ADMIN, _put_topic, "Set topic permissions"),
    Route("DELETE", _TOPIC, ADMIN, _delete_topic, "Remove topic permissions"),
)
