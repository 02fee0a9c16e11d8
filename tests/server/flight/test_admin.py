"""The operator's port over Flight."""

from __future__ import annotations

import pytest

from broker_core import engines
from broker_core.core.errors import ExchangeNotFound, Unroutable
from broker_core.launcher import Broker


def test_an_operator_makes_binds_fills_and_removes_queues() -> None:
    with Broker.memory() as broker:
        admin = engines.connect_admin(broker.url)
        admin.declare_queue("orders", arguments={"x-max-length": 10})
        admin.declare_exchange("shop", "topic")
        admin.bind("orders", "shop", "new.*")
        assert admin.publish([b"a", b"b"], "shop", "new.eu") == 2
        (queue,) = admin.queues()
        assert (queue.name, queue.messages, queue.next_offset, queue.logs) == ("orders", 2, 2, 1)
        admin.unbind("orders", "shop", "new.*")
        with pytest.raises(Unroutable, match="1 of 1 messages"):
            admin.publish([b"c"], "shop", "new.eu")
        admin.delete_exchange("shop")
        with pytest.raises(ExchangeNotFound):
            admin.bind("orders", "shop", "new.*")
        admin.delete_queue("orders")
        assert admin.queues() == []
