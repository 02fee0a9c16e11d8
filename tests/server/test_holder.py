"""A data directory that another broker holds: an idle one that a client started gives it up, every other one
is named.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import txmq
from broker_core.client.broker import BrokerClient
from broker_core.core import endpoint, errors
from broker_core.launcher import Broker
from tests.server.conftest import Served, bodies, fill


def test_a_broker_that_a_client_started_and_nobody_uses_gives_its_directory_to_broker_open(
    embedded: Path,
) -> None:
    with BrokerClient(data=embedded) as client:
        fill(client, "q", 3)
        started = endpoint.read_endpoint(str(embedded))
        assert started is not None
        with Broker.open(embedded) as broker:
            now = endpoint.read_endpoint(str(embedded))
            assert now is not None and now.pid != started.pid
            with broker.channel() as channel:
                delivery = channel.get("q")
                assert delivery is not None and delivery.body == b"0"
                channel.ack(delivery.tag)
            assert bodies(client, "q") == [b"1", b"2"]  # the client has found the new holder
    with txmq.connect(data=embedded) as client:
        assert bodies(client, "q") == [b"1", b"2"]


def test_a_started_broker_with_an_open_channel_is_not_made_to_end_and_the_error_names_it(
    embedded: Path,
) -> None:
    with BrokerClient(data=embedded) as client, client.channel() as channel:
        channel.queue_declare("q")
        channel.tx_select()
        channel.publish(b"open", routing_key="q")
        held = endpoint.read_endpoint(str(embedded))
        assert held is not None
        with pytest.raises(
            errors.DataDirectoryLocked,
            match=rf"process {held.pid} "
            rf".*txmq://127.0.0.1:{held.port}.*txmq\.connect\(data=",
        ):
            Broker.open(embedded)
        channel.tx_commit()
        assert bodies(client, "q") == [b"open"]


def test_a_broker_that_a_user_started_keeps_its_directory_and_connect_works_with_it(served: Served) -> None:
    served.start()
    with pytest.raises(
        errors.DataDirectoryLocked,
        match=rf"process {served.pid} "
        rf".*{served.url}.*txmq\.connect",
    ):
        Broker.open(served.directory)
    with txmq.connect(data=served.directory) as client, txmq.connect(url=served.url) as other:
        fill(client, "q", 1)
        assert bodies(other, "q") == [b"0"]


def test_connect_works_with_a_directory_that_this_process_has_open(tmp_path: Path) -> None:
    with Broker.open(tmp_path / "data") as broker:
        with txmq.connect(data=tmp_path / "data") as client:
            fill(client, "q", 1)
        assert [info.messages for info in broker.queues()] == [1]
        with pytest.raises(errors.DataDirectoryLocked, match=r"txmq\.connect"):
            Broker.open(tmp_path / "data")
