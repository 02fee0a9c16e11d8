"""Which engine an address opens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from broker_core import engines
from broker_core.client.broker import BrokerClient
from broker_core.core.errors import OptionError


def test_one_engine_for_an_address_of_the_embedded_broker(tmp_path: Path) -> None:
    found = engines.connect(data=tmp_path)
    assert isinstance(found, BrokerClient)
    assert engines.connect(data=tmp_path) is found
    assert engines.connect(url="txmq://h:1") is not found


@pytest.mark.parametrize("url", ["txmq://h:1", "kafka://h:1"])
def test_a_call_that_does_not_fit_the_port_is_refused_where_it_is_made(url: str) -> None:
    engine: Any = engines.connect(url)
    for call in (
        lambda: engine.release("app", "q", True),  # ``force`` has a name
        lambda: engine.unapplied(),
        lambda: engine.unapplied("app", "more"),
        lambda: engine.unapplied("app", more=1),
    ):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(OptionError, match="logs: argument 'queues' must be a list, not a set"):
        engine.logs({"q"})


def test_settings_are_refused_for_the_embedded_broker(tmp_path: Path) -> None:
    for connect in (engines.connect, engines.connect_admin):
        with pytest.raises(OptionError, match=r"'kafka\.acks' is for connections to Kafka"):
            connect(data=tmp_path, settings={"kafka.acks": "all"})
    with pytest.raises(OptionError, match="both options"):
        engines.connect("kafka://h:9092", tmp_path)


def test_what_kafka_needs_is_imported_when_it_is_used_and_named_when_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "import sys, broker_core.engines, connector.options; print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, text=True).stdout
    assert "'broker_core.client.broker'" in loaded
    assert "'kafka'" not in loaded and "'broker_core.kafka'" not in loaded
    with pytest.raises(OptionError, match="nothing of Kafka is not part of this version"):
        engines._kafka("nothing")
    monkeypatch.setitem(sys.modules, "kafka", None)  # as if it were not installed
    for name in [name for name in sys.modules if name.startswith(("kafka.", "broker_core.kafka"))]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(OptionError, match=r"needs the Python package .*pip install .*kafka"):
        engines.connect("kafka://h:9092")
