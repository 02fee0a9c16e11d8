"""Spans of OpenTelemetry, and the trace context of messages: W3C's ``traceparent`` and ``tracestate``.

Spans are made in a process that has imported OpenTelemetry: who records them has set it up before.
Not here: what is measured (``node/committer.py``, ``client/channel.py``, ``connector/batch``).
Invariant: nothing is imported before that, and without it a span costs one lookup. What a tracer raises
changes nothing of what is traced. A span has no body.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Protocol

import pyarrow as pa

from broker_core import __version__
from broker_core.core.errors import RemoteProtocolError
from broker_core.message.properties import Properties

log = logging.getLogger("txmq.spans")

MODULE = "opentelemetry.trace"
PARENT, STATE = "traceparent", "tracestate"
Attributes = Mapping[str, str | int]


class SpanContext(Protocol):
    trace_id: int
    span_id: int
    trace_flags: int
    is_valid: bool


class TracedSpan(Protocol):
    """What is used of a span of OpenTelemetry."""

    def is_recording(self) -> bool: ...
    def get_span_context(self) -> SpanContext: ...
    def add_link(self, context: SpanContext) -> None: ...
    def record_exception(self, exception: BaseException) -> None: ...
    def set_status(self, status: object, description: str) -> None: ...
    def end(self) -> None: ...


def _trace() -> ModuleType | None:
    """The module; None: nobody has set it up."""
    found = sys.modules.get(MODULE)
    return found if hasattr(found, "get_tracer") else None  # otherwise it is being imported


@contextlib.contextmanager
def span(name: str, attributes: Attributes, kind: str = "INTERNAL") -> Iterator[TracedSpan | None]:
    """A span around what is done within, with its error; the span, or None if nothing records it."""
    one = _begin(name, {"messaging.system": "txmq", **attributes}, kind)
    if one is None:
        yield None
        return
    token = _attach(one)
    try:
        yield one
    except BaseException as error:
        _end(one, token, error)
        raise
    _end(one, token, None)


def micro_batch(app_id: str, batch_id: int) -> AbstractContextManager[TracedSpan | None]:
    return span("txmq.micro_batch", {"txmq.app_id": app_id, "txmq.batch_id": batch_id}, "CONSUMER")


def finished(name: str, began_ns: int, attributes: Attributes) -> None:
    """A span of what is over, since ``began_ns`` of the epoch: for the place of a lock, where nothing may
    raise.
    """
    with contextlib.suppress(Exception):
        _of("trace").get_tracer("txmq", __version__).start_span(
            name, attributes={"messaging.system": "txmq", **attributes}, start_time=began_ns
        ).end()


def _of(name: str) -> ModuleType:
    return importlib.import_module(f"opentelemetry.{name}")


def _begin(name: str, attributes: Attributes, kind: str) -> TracedSpan | None:
    trace = _trace()
    if trace is None:
        return None
    try:
        tracer = trace.get_tracer("txmq", __version__)
        one: TracedSpan = tracer.start_span(name, kind=getattr(trace.SpanKind, kind), attributes=attributes)
        return one if one.is_recording() else None
    except Exception as error:
        log.debug("no span %s: %s", name, error)
        return None


def _attach(one: TracedSpan) -> object:
    """Makes it the parent of spans within."""
    token: object = _of("context").attach(_of("trace").set_span_in_context(one))
    return token


def _end(one: TracedSpan, token: object, error: BaseException | None) -> None:
    try:
        if error is not None:
            one.record_exception(error)
            one.set_status(_of("trace").StatusCode.ERROR, str(error))
        one.end()
    except Exception as failed:
        log.debug("a span was not ended: %s", failed)
    finally:
        _of("context").detach(token)


def current() -> str:
    """The ``traceparent`` of the span around; "" if nothing records it."""
    trace = _trace()
    if trace is None:
        return ""
    found = trace.get_current_span()
    if not found.is_recording():
        return ""
    context = found.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def link(contexts: Iterable[SpanContext]) -> None:
    """Links the span around to these."""
    found = _of("trace").get_current_span()
    for context in contexts:
        found.add_link(context)


def contexts(batches: Iterable[pa.RecordBatch], most: int) -> list[SpanContext]:
    """The contexts that these messages carry, each once, at most so many: for links of a span."""
    found: dict[tuple[int, int], SpanContext] = {}
    for batch in batches:
        for data in batch.column(batch.schema.get_field_index("properties")).to_pylist():
            context = _context(data) if data else None
            if context is not None:
                found.setdefault((context.trace_id, context.span_id), context)
            if len(found) == most:
                return list(found.values())
    return list(found.values())


def _context(properties: bytes) -> SpanContext | None:
    if PARENT.encode() not in properties:
        return None
    try:
        headers = Properties.decode(properties).headers
    except RemoteProtocolError:  # damaged: of an old data directory
        return None
    carrier = {name: value for name in (PARENT, STATE) if isinstance(value := headers.get(name), str)}
    propagator = _of("trace.propagation.tracecontext").TraceContextTextMapPropagator()
    extracted = propagator.extract(carrier, _of("context").Context())
    context: SpanContext = _of("trace").get_current_span(extracted).get_span_context()
    return context if context.is_valid else None
