"""The embedded default: the directory is its owner's alone, and its port answers only those who can read it.

Another user of the machine is a real one where the tests run as root; elsewhere, the modes are what is
tested.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow.flight as arrow_flight
import pytest

from broker_core.client.broker import BrokerClient
from broker_core.core import endpoint, errors
from broker_core.core.credentials import Credentials
from broker_core.flight.authorization import Basic, Bearer
from broker_core.launcher import Broker
from broker_core.server.listener_options import ListenerOptions
from tests.server.conftest import Served, bodies, end_broker, fill
from tests.server.flight.flight_calls import CALLS, TICKETS

NOBODY = 65534


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_directory_is_its_owners_alone_and_its_port_has_a_token(embedded: Path) -> None:
    with BrokerClient(data=embedded) as client:
        fill(client, "q", 3)
        assert bodies(client, "q") == [b"0", b"1", b"2"]
    assert mode(embedded) == 0o700
    assert {name: mode(embedded / name) for name in (endpoint.ENDPOINT, "broker.log", "lock")} == {
        endpoint.ENDPOINT: 0o600, "broker.log": 0o600, "lock": 0o600,
    }  # fmt: skip
    found = endpoint.read_endpoint(str(embedded))
    assert found is not None and len(found.token) >= 43 and found.token not in repr(found)
    log = (embedded / "broker.log").read_text()
    assert found.token not in log
    with open(f"/proc/{found.pid}/cmdline") as command, open(f"/proc/{found.pid}/environ") as environment:
        assert found.token not in command.read() and found.token not in environment.read()


def _refused(port: int, authorization: str | None) -> set[str]:
    """What each call answers, its kind alone."""
    headers = [(b"authorization", authorization.encode())] if authorization else []
    options = arrow_flight.FlightCallOptions(headers=headers, timeout=20)
    answers = set()

    def ask(
        call,
    ) -> None:  # each with a connection of its own: one that is refused often is not read any more
        try:
            with arrow_flight.connect(f"grpc://127.0.0.1:{port}") as client:
                call(client)
            answers.add("answered")
        except arrow_flight.FlightUnauthenticatedError as error:
            answers.add("refused" if "[TXMQ_LOGIN_REFUSED]" in str(error) else str(error))
        except arrow_flight.FlightError as error:
            answers.add(type(error).__name__)

    for name, arguments in [*CALLS, ("hello", {}), ("admin.give_up", {}), ("no.such", {})]:
        ask(lambda client: list(client.do_action((name, json.dumps(arguments).encode()), options)))  # noqa: B023
    for ticket in TICKETS:
        sent = arrow_flight.Ticket(json.dumps(ticket).encode())
        ask(lambda client: client.do_get(sent, options).read_all())  # noqa: B023
    return answers


def test_without_the_token_the_port_answers_nothing(tmp_path: Path) -> None:
    with Broker.open(tmp_path / "data", listeners=ListenerOptions(token_only=True)) as broker:
        found = endpoint.read_endpoint(str(tmp_path / "data"))
        assert found is not None
        wrong = [None, Bearer("").header, Bearer(found.token[:-1]).header, Bearer(found.id).header, "Bearer",
                 Basic("guest", "guest").header, Basic("", found.token).header, found.token]  # fmt: skip
        for authorization in wrong:
            assert _refused(broker.port, authorization) == {"refused"}
        assert "refused" not in _refused(broker.port, Bearer(found.token).header)
        known = Credentials(token=found.token)
        with BrokerClient(f"txmq://127.0.0.1:{broker.port}", credentials=known) as client:
            assert client.identity() == found.id
        with BrokerClient(f"txmq://127.0.0.1:{broker.port}") as client:
            with pytest.raises(errors.LoginRefused, match="data=DIR"):
                client.queues()


def test_each_start_makes_another_token_and_clients_of_the_directory_follow(served: Served) -> None:
    served.start("", "--token-only")
    first = endpoint.read_endpoint(str(served.directory))
    with BrokerClient(data=served.directory) as client:
        fill(client, "q", 2)
        served.kill()
        served.start("", "--token-only")  # at the same port: the connection comes back, and its token is old
        assert len(bodies(client, "q")) == 2
        second = endpoint.read_endpoint(str(served.directory))
        assert first is not None and second is not None
        assert first.port == second.port and first.token != second.token


def test_the_modes_of_an_old_directory_are_tightened_at_the_start(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with Broker.open(data):
        pass
    data.chmod(0o755)
    (data / endpoint.ENDPOINT).write_text("{}")  # left behind, and readable
    with Broker.open(data) as broker, BrokerClient(data=data) as client:
        assert client.queues() == [] and mode(data) == 0o700 and mode(data / endpoint.ENDPOINT) == 0o600
        assert broker.url.startswith("txmq://")


OTHER = """
import os, sys, socket, ssl, encodings.idna
from broker_core.client.broker import BrokerClient
from broker_core.core.errors import TxmqError
os.setgroups([]); os.setgid({user}); os.setuid({user})
for how in ({{"url": "txmq://127.0.0.1:{port}"}}, {{"data": {data!r}}}):
    try:
        BrokerClient(**how).queues()
        print("served")
    except TxmqError as error:
        print(error.code)
try:
    print(os.listdir({data!r}))
except PermissionError:
    print("not listed")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_of_the_machine_can_neither_read_nor_connect() -> None:
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o755)  # the path to the directory is open
        data = Path(parent, "data")
        with BrokerClient(data=data) as client:
            fill(client, "q", 1)
        found = endpoint.read_endpoint(str(data))
        assert found is not None
        try:
            code = OTHER.format(user=NOBODY, port=found.port, data=str(data))
            ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
            said = ended.stdout.split()
            assert said == ["TXMQ_LOGIN_REFUSED", "TXMQ_DATA_DIRECTORY_INVALID", "not", "listed"], ended
        finally:
            end_broker(data)
