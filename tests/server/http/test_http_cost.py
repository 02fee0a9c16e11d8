"""What a request about one thing costs: it grows with what it names, and not with what others have declared
(``tests/steps.py`` counts). Lists grow with what they show.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from broker_core.broker.access.users import DEFAULT_USER
from broker_core.launcher import Broker
from broker_core.server.access.caller import Caller
from broker_core.server.access.identity import Identity
from broker_core.server.http.call import HttpCall
from broker_core.server.http.routes import ROUTES
from tests.server.http.http_client import serving
from tests.steps import steps

FEW, MANY = 40, 640
QUEUE, EXCHANGE = {"vhost": "/", "name": "own"}, {"vhost": "/", "name": "amq.topic"}
PEEK = {"count": 1, "ackmode": "ack_requeue_true", "encoding": "auto"}
MESSAGE = {"properties": {}, "routing_key": "own", "payload": "x", "payload_encoding": "string"}
ONE: list[tuple[str, str, Mapping[str, str], Mapping[str, Any]]] = [
    ("GET", "/api/whoami", {}, {}),
    ("GET", "/api/health/checks/alarms", {}, {}),
    ("GET", "/api/queues/{vhost}/{name}", QUEUE, {}),
    ("PUT", "/api/queues/{vhost}/{name}", QUEUE, {"durable": True}),
    ("POST", "/api/queues/{vhost}/{name}/get", QUEUE, PEEK),
    ("DELETE", "/api/queues/{vhost}/{name}/contents", QUEUE, {}),
    ("GET", "/api/exchanges/{vhost}/{name}", EXCHANGE, {}),
    ("POST", "/api/exchanges/{vhost}/{name}/publish", {"vhost": "/", "name": "amq.default"}, MESSAGE),
    ("GET", "/api/txmq/messages/{vhost}/{name}/{offset}", {**QUEUE, "offset": "0"}, {}),
]


def asked(broker: Broker, method: str, path: str, params: Mapping[str, str], body: Mapping[str, Any]) -> None:
    served = broker.http.backend  # type: ignore[union-attr]
    (route,) = [each for each in ROUTES if (each.method, each.path) == (method, path)]
    identity = Identity(DEFAULT_USER)
    caller = Caller(identity, served.logins.rights(identity), "127.0.0.1", served.broker.state)
    route.answer(HttpCall(served, caller, params, {}, body))


@pytest.mark.parametrize(("method", "path", "params", "body"), ONE, ids=lambda each: str(each)[:60])
def test_a_request_about_one_thing_costs_no_more_beside_what_others_have_declared(
    method: str, path: str, params: Mapping[str, str], body: Mapping[str, Any], tmp_path: Path
) -> None:
    found = []
    for count in (FEW, MANY):
        with serving(tmp_path / str(count)) as broker, broker.channel() as channel:
            channel.queue_declare("own")
            channel.publish(b"body", routing_key="own")
            for number in range(count):
                channel.queue_declare(f"q{number}", durable=False)
                channel.exchange_declare(f"x{number}", "topic", durable=False)
                channel.queue_bind(f"q{number}", f"x{number}", "#")
            asked(broker, method, path, params, body)  # what is done once
            found.append(
                min(steps(lambda broker=broker: asked(broker, method, path, params, body)) for _ in range(5))  # type: ignore[misc]
            )
    few, many = found
    assert many < few * 1.2 + 50, f"{few} steps beside {FEW}, {many} beside {MANY}"
