"""Every call of the Flight listener with good arguments, for tests that send it with bad ones; and how to send
it.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.flight as arrow_flight

from broker_core.arrow.parts import stream_of
from broker_core.client.connection import SendHeader
from broker_core.core import errors
from broker_core.flight import contract
from broker_core.flight.authorization import CHALLENGE_HEADER
from broker_core.message.message import MESSAGE_SCHEMA

Call = tuple[str, dict[str, Any]]  # action, arguments

ENGINE: dict[str, dict[str, Any]] = {
    "logs": {"queues": ["in"]},
    "log_ids": {"logs": ["in"]},
    "available": {"logs": ["in"], "starts": {"in": 0}},
    "offsets": {"queues": ["in"], "origin": {"at": "earliest", "offsets": {"in": 0}, "timestamp_us": 1}},
    "wait": {"queues": ["in"], "ends": {"in": 0}, "timeout_s": 0.0},
    "claim": {
        "app_id": "app",
        "queues": ["in"],
        "start": {"in": "start"},
        "limit": {"max_rows": 1, "max_bytes": 10, "end": {"in": 1}},
        "origin": {"at": "earliest"},
        "on_new_checkpoint": "fail",
    },
    "resolve": {"app_id": "app", "start": {"in": "start"}, "end": {"in": 1}},
    "count": {"app_id": "app", "ranges": {"in": [0, 1]}},
    "dead_letter_route": {"queue": "in"},
    "ack": {"app_id": "app", "end": {"in": 1}},
    "open_batch": {
        "app_id": "app",
        "query_id": "q",
        "batch_id": 0,
        "on_new_checkpoint": "fail",
        "token": "t",
    },
    "commit_batch": {
        "app_id": "app",
        "query_id": "q",
        "batch_id": 0,
        "token": "t",
        "branches": [{"branch": "b", "partition": 0, "attempt": 0, "rows": 1, "checksum": 0}],
        "on_unroutable": "fail",
        "opens": "fail",
    },
    "commit_branches": {
        "token": "w",
        "branches": [{"branch": "b", "partition": 0, "attempt": 0, "rows": 1, "checksum": 0}],
    },
    "rollback_batch": {"token": "t"},
    "publish_refused": {
        "app_id": "app",
        "sequence": 1,
        "branches": ["b"],
        "rows": "0",
        "token": "w",
        "staged": [{"branch": "b", "partition": 0, "attempt": 0, "rows": 1, "checksum": 0}],
    },
    "resume": {
        "app_id": "app",
        "entries": [
            {
                "app_id": "app",
                "sequence": 7,
                "query_id": "q",
                "batch_id": 6,
                "token": "t",
                "ranges": {"in": [0, 0]},
                "messages": 0,
                "published": 0,
                "committed_at_us": 1,
                "to_apply": [],
                "applied": True,
                "mirrored": True,
            }
        ],
    },
    "unapplied": {"app_id": "app"},
    "app": {"app_id": "app"},
    "mark_applied": {"app_id": "app", "sequence": 1},
    "entries": {"app_id": "app"},
    "unmirrored": {"app_id": "app", "limit": 10},
    "mark_mirrored": {"app_id": "app", "sequence": 1},
    "last_entry": {"app_id": "app"},
    "apps": {},
    "staged_batches": {},
    "identity": {},
    "skip": {"app_id": "app", "sequence": 1, "branches": ["b"], "to": "/nowhere"},
    "note": {"app_id": "app", "sequence": 1, "branches": ["b"], "name": "rows_to", "text": "/nowhere"},
    "release": {"app_id": "app", "queue": "other"},
}
CHANNEL: dict[str, dict[str, Any]] = {
    "exchange_declare": {
        "exchange": "x",
        "type": "topic",
        "durable": True,
        "auto_delete": False,
        "internal": False,
        "arguments": {"alternate-exchange": "amq.fanout"},
    },
    "exchange_delete": {"exchange": "x", "if_unused": False},
    "queue_declare": {
        "queue": "w",
        "durable": True,
        "exclusive": False,
        "auto_delete": False,
        "arguments": {"x-max-length": 10, "x-message-ttl": 1000},
        "passive": False,
    },
    "queue_bind": {
        "queue": "in",
        "exchange": "amq.headers",
        "routing_key": "k",
        "arguments": {"x-match": "all", "n": 1},
    },
    "queue_unbind": {
        "queue": "in",
        "exchange": "amq.headers",
        "routing_key": "k",
        "arguments": {"x-match": "all", "n": 1},
    },
    "queue_purge": {"queue": "w"},
    "queue_delete": {"queue": "w", "if_unused": False, "if_empty": False},
    "publish": {
        "body": {"$bytes": "AAA="},
        "exchange": "",
        "routing_key": "in",
        "properties": {"$bytes": ""},
        "mandatory": False,
    },
    "publish_all": {
        "messages": [
            {"body": {"$bytes": "AAA="}, "exchange": "", "routing_key": "in", "properties": {"$bytes": ""}}
        ]
    },
    "get": {"queue": "in", "no_ack": False},
    "get_at": {"queue": "in", "offsets": [0]},
    "ack": {"tag": 1, "multiple": True},
    "nack": {"tag": 1, "multiple": True, "requeue": True},
    "reject": {"tag": 1, "requeue": True},
    "recover": {},
    "tx_select": {},
    "tx_timeout": {"seconds": 60.0},
    "tx_current": {},
    "confirm_select": {},
    "take_returned": {"taken": 0},
    "tx_commit": {"token": ""},
    "tx_rollback": {},
    "prepare": {"xid": "xa"},
}
ADMIN: dict[str, dict[str, Any]] = {
    "queues": {},
    "exchanges": {},
    "bindings": {},
    "channels": {},
    "connections": {},
    "consumers": {},
    "status": {},
    "close": {"id": "nobody"},
    "prepared": {},
    "committed": {"token": "t", "since": 1.0},
    "outcome": {"xid": "t", "since": 1.0},
    "call_took_place": {"channel": "c", "number": 1, "since_us": 0},
    "transaction": {"sequence": 1},
    "history": {"limit": 1},
    "message": {"queue": "in", "offset": 0},
    "ledger": {"app_id": "", "sequence": 0, "limit": 10},
    "commit": {"xid": "xa"},
    "rollback": {"xid": "xa"},
    "rollback_all": {},
    "forget": {"xid": "xa"},
    "recover": {},
}
ACCOUNTS: dict[str, dict[str, Any]] = {
    "users": {},
    "add_user": {"name": "new", "password_hash": "$scrypt$...", "tags": ["monitoring"]},
    "set_password": {"name": "new", "password_hash": "$scrypt$..."},
    "set_tags": {"name": "new", "tags": []},
    "delete_user": {"name": "new"},
    "permissions": {},
    "set_permissions": {"user": "new", "configure": "", "write": "", "read": "", "vhost": "/"},
    "clear_permissions": {"user": "new", "vhost": "/"},
    "set_topic_permissions": {"user": "new", "exchange": "x", "write": "", "read": "", "vhost": "/"},
    "clear_topic_permissions": {"user": "new", "exchange": "x", "vhost": "/"},
    "give_app": {"app_id": "app", "user": "new", "vhost": "/"},
    "vhosts": {},
    "add_vhost": {"name": "new", "max_queues": 1, "max_connections": 2, "max_messages": 3},
    "limit_vhost": {"name": "new", "max_queues": 1, "max_connections": -1, "max_messages": 0},
    "delete_vhost": {"name": "new"},
    "export_definitions": {},
    "import_definitions": {"definitions": {}, "vhost": "/", "check": True},
    "policies": {},
    "set_policy": {"name": "p", "pattern": "^q", "definition": {}, "vhost": "/"},
    "delete_policy": {"name": "p", "vhost": "/", "operator": False},
}
HEADER = {
    "token": "s",
    "branch": "b",
    "kind": "publish",
    "target": {"exchange": "", "routing_key": "in"},
    "app_id": "",
    "query_id": "",
    "batch_id": -1,
    "partition": 0,
    "attempt": 0,
}
READ = {
    "app_id": "app",
    "query_id": "q",
    "batch_id": 0,
    "ranges": {"in": [0, 1]},
    "slices": [["in", 0, 1]],
    "fail_on_data_loss": True,
}
FILE = {
    "pid": 1,
    "descriptor": 5,
    "device": 1,
    "inode": 1,
    "size_bytes": 8,
    "parts": [{"position": 0, "length": 8, "rows": 1, "checksum": 1}],
}
TICKETS: list[dict[str, Any]] = [
    {"read": READ},
    {"browse": [["in", 0, 3]]},
    {"branches": ["b"]},
    {"backup": True},
]

CALLS: list[Call] = [
    *((f"engine.{word}", arguments) for word, arguments in ENGINE.items()),
    *((f"channel.{word}", arguments) for word, arguments in CHANNEL.items()),
    *((f"admin.{word}", arguments) for word, arguments in {**ADMIN, **ACCOUNTS}.items()),
    ("read", READ),
    ("stage", {"header": HEADER, "part": 0}),
    ("adopt", {"header": HEADER, "part": 0, "file": FILE}),
]


def messages(*bodies: bytes, routing_key: str = "in") -> pa.RecordBatch:
    columns = {
        "exchange": [""] * len(bodies),
        "routing_key": [routing_key] * len(bodies),
        "body": bodies,
        "properties": [b""] * len(bodies),
    }
    return pa.RecordBatch.from_pydict(columns, schema=MESSAGE_SCHEMA)


def part_body(header: Any, rows: bytes | pa.Buffer) -> bytes:
    head = json.dumps(header).encode()
    return b"".join((len(head).to_bytes(4, "little"), head, memoryview(rows)))


class Raw:
    """Sends what it is given, as it is: no client code in between. An error that crossed is returned, one
    without our code is raised.
    """

    def __init__(self, url: str, header: str = "", vhost: str = "/") -> None:
        """``header``: of ``authorization``; "": without."""
        middleware = [SendHeader(header, vhost)] if header or vhost != "/" else []
        self.client = arrow_flight.connect(url.replace("txmq://", "grpc://"), middleware=middleware)
        self._numbers = itertools.count(1)
        self.channel_id = ""

    def action(self, name: str, body: bytes) -> errors.TxmqError | list[bytes]:
        return self._asked(lambda: [bytes(result.body) for result in self.client.do_action((name, body))])

    def prove(self, challenge: bytes) -> list[bytes]:
        headers = [(CHALLENGE_HEADER.encode(), challenge.hex().encode())]
        options = arrow_flight.FlightCallOptions(headers=headers)
        return [bytes(result.body) for result in self.client.do_action(("prove", b""), options)]

    def get(self, ticket: bytes) -> errors.TxmqError | list[pa.RecordBatch]:
        return self._asked(lambda: [chunk.data for chunk in self.client.do_get(arrow_flight.Ticket(ticket))])

    def _asked(self, call: Any) -> Any:
        try:
            return call()
        except (arrow_flight.FlightError, pa.ArrowException, OSError) as error:
            crossed = contract.error_from(error)
            if crossed is None:
                raise
            return crossed

    def call(self, name: str, arguments: Any) -> errors.TxmqError | list[bytes]:
        """``name`` with ``arguments``, which may be anything that JSON can write."""
        if name.startswith("channel."):
            if not self.channel_id:
                self.channel_id = os.urandom(8).hex()
                self._numbers = itertools.count(1)
                self.action(
                    "channel.open",
                    json.dumps({"channel": self.channel_id, "number": 0, "arguments": {}}).encode(),
                )
            said = {"channel": self.channel_id, "number": next(self._numbers), "arguments": arguments}
            answer = self.action(name, json.dumps(said).encode())
            if isinstance(answer, errors.RemoteProtocolError):  # it may not have taken its number
                self.close_channel()
            return answer
        if name == "stage":
            rows = stream_of([messages(b"1")], MESSAGE_SCHEMA)
            return self.action(name, part_body(arguments, rows))
        return self.action(name, json.dumps(arguments).encode())

    def close_channel(self) -> None:
        if self.channel_id:
            self.action(
                "channel.close",
                json.dumps({"channel": self.channel_id, "number": 0, "arguments": {}}).encode(),
            )
            self.channel_id = ""


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in ``value``, containers too."""
    if path:
        yield path
    if isinstance(value, dict) and "$bytes" not in value:
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from leaves(item, (*path, place))


def replaced(value: Any, path: tuple[Any, ...], by: Any) -> Any:
    """A copy with the value at ``path`` replaced."""
    if not path:
        return by
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], by)
    return copy


__all__ = ["CALLS", "HEADER", "READ", "TICKETS", "Raw", "leaves", "messages", "part_body", "replaced"]
