"""Spans around commits, and the trace context of messages; nothing of it where OpenTelemetry is not used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from broker_core.client.broker import BrokerClient
from broker_core.core import errors
from broker_core.launcher import Broker
from broker_core.message import spans
from broker_core.message.properties import Properties
from tests.tracing import PARENT, named, spans_kept


def test_a_process_that_does_not_trace_imports_nothing_of_it(tmp_path: Path) -> None:
    commits = (
        "import sys\nfrom broker_core.launcher import Broker\n"
        f"with Broker.open({str(tmp_path / 'data')!r}) as broker, broker.channel() as channel:\n"
        "    channel.queue_declare('q')\n    channel.tx_select()\n"
        "    channel.publish(b'x', routing_key='q')\n    channel.tx_commit()\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    done = subprocess.run([sys.executable, "-c", commits], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_commit_has_a_span_at_the_client_and_one_for_its_group_in_the_broker(tmp_path: Path) -> None:
    with spans_kept() as kept, Broker.open(tmp_path / "data") as broker, BrokerClient(broker.url) as client:
        with client.channel() as channel:
            channel.queue_declare("q")
            channel.tx_select()
            channel.publish(b"secret", routing_key="q")
            channel.tx_commit()
        (commit,) = named(kept, "txmq.commit")
        assert commit.status.is_ok and commit.attributes["messaging.system"] == "txmq"
        groups = named(kept, "txmq.group_commit")
        assert groups and all(each.attributes["txmq.changes"] >= 1 for each in groups)
        assert all(each.end_time >= each.start_time for each in groups)
        assert not any("secret" in each.to_json() for each in kept.get_finished_spans())


def test_what_fails_is_in_its_span_and_is_raised_as_it_is() -> None:
    with spans_kept() as kept:
        with pytest.raises(errors.Unroutable), spans.span("txmq.commit", {}):
            raise errors.Unroutable("no queue")
        (span,) = named(kept, "txmq.commit")
        assert not span.status.is_ok and span.events[0].name == "exception"
        assert spans.current() == ""  # it is over


def test_a_tracer_that_raises_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trace = pytest.importorskip("opentelemetry.trace", reason="no opentelemetry: it is in the extra dev")

    def fail(*_: object) -> None:
        raise RuntimeError("the tracer is broken")

    monkeypatch.setattr(trace, "get_tracer", fail)
    with spans.span("txmq.commit", {}) as span:
        assert span is None
    with Broker.open(tmp_path / "data") as broker, broker.channel() as channel:
        channel.queue_declare("q")
        channel.publish(b"x", routing_key="q")
        assert broker.queues()[0].messages == 1 and broker.failure is None


def test_the_context_of_messages_is_read_once_each_and_damage_is_passed_over() -> None:
    with spans_kept():
        other = PARENT.replace("a1", "c3")
        headers = [{"traceparent": PARENT}, {"traceparent": PARENT}, {"traceparent": "00-nothing"}, {}]
        headers += [{"traceparent": 7}, {"traceparent": other, "tracestate": "vendor=1"}]
        data = [Properties(headers=each).encode() for each in headers] + [b"\xff traceparent", None]
        found = spans.contexts([pa.record_batch({"properties": pa.array(data, pa.binary())})], 9)
        assert [f"{each.trace_id:032x}" for each in found] == ["a1" * 16, "c3" * 16]
        assert found[1].trace_state.get("vendor") == "1"
        assert len(spans.contexts([pa.record_batch({"properties": pa.array(data, pa.binary())})], 1)) == 1


def test_the_context_of_a_span_is_what_others_read() -> None:
    with spans_kept() as kept, spans.span("txmq.micro_batch", {}, "CONSUMER"):
        parent = spans.current()
        data = Properties(headers={"traceparent": parent}).encode()
        (found,) = spans.contexts([pa.record_batch({"properties": pa.array([data], pa.binary())})], 9)
        spans.link([found])
    (span,) = named(kept, "txmq.micro_batch")
    assert span.links[0].context.span_id == found.span_id == span.context.span_id
