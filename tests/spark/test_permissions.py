"""Streams of a user with few permissions: what it may do works whole, the rest is one clear error."""

from __future__ import annotations

from typing import Any

import pytest

from broker_core.core import password as passwords
from broker_core.core.errors import AccessRefused, LoginRefused, cause

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("planned_once")]


def test_a_stream_needs_read_on_its_queue_write_on_its_exchanges_and_its_own_app(rig: Any) -> None:
    rig.declare("in", "out")
    rig.publish("in", "a", "b")
    accounts = rig.broker.accounts
    for user, read in (("ann", "^in$"), ("bob", "^(in|out)$")):
        accounts.add_user(user, passwords.hashed(f"of {user}", passwords.Cost(4)))
        accounts.set_permissions(user, "^$", "^amq\\.default$", read)

    def run(user: str, checkpoint: str, **target: str) -> None:
        login = {"user": user, "password": f"of {user}"}
        rows = rig.stream("in", **login).select("body")
        rig.sink(rows, checkpoint=checkpoint, **login, **target).trigger(
            availableNow=True
        ).start().awaitTermination()

    def refusal(user: str, checkpoint: str, **target: str) -> str:
        with pytest.raises(Exception) as caught:
            run(user, checkpoint, **target)
        error = cause(caught.value)
        assert isinstance(error, (AccessRefused, LoginRefused)), caught.value
        return error.message

    assert "exchange 'amq.fanout'" in refusal("ann", "of ann", exchange="amq.fanout")
    run("ann", "of ann", queue="out")
    assert rig.bodies("out") == ["a", "b"] and rig.bodies("in") == []
    assert "app 'app' in vhost '/' refused for user 'bob'" in refusal("bob", "of bob", queue="out")
    with pytest.raises(Exception) as caught:
        rig.look("in", user="ann", password="a wrong one").collect()
    assert isinstance(cause(caught.value), LoginRefused) and "a wrong one" not in str(caught.value)
    with pytest.raises(Exception) as caught:
        rig.look("out", user="ann", password="of ann").collect()
    assert "queue 'out' in vhost '/' refused for user 'ann'" in str(cause(caught.value))
