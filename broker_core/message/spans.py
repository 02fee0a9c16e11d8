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
from typing import Any

import pyarrow as pa

from broker_core import __version__
from broker_core.errors import RemoteProtocolError
from broker_core.message.properties import Properties

log = logging.getLogger("txmq.spans")

MODULE = "opentelemetry.trace"
PARENT, STATE = "traceparent", "tracestate"
Attributes = Mapping[str, str | int]


def _trace() -> Any:
    """The module; None: nobody has set it up."""
    found = sys.modules.get(MODULE)
    return found if hasattr(found, "get_tracer") else None  # otherwise it is being imported


@contextlib.contextmanager
def span(name: str, attributes: Attributes, kind: str = "INTERNAL") -> Iterator[Any]:
    """A span around what is done within, with its error; the span, or None if nothing records it."""
    made = _begun(name, attributes, kind)
    if made is None:
        yield None
        return
    trace = _trace()
    token = _attached(trace, made)
    try:
        yield made
    except BaseException as error:
        _ended(made, token, error)
        raise
    _ended(made, token, None)


def finished(name: str, began_ns: int, attributes: Attributes) -> None:
    """A span of what is over, since ``began_ns`` of the epoch: for the place of a lock, where nothing may
    raise.
    """
    with contextlib.suppress(Exception):
        _trace().get_tracer("txmq", __version__).start_span(
            name, attributes=attributes, start_time=began_ns
        ).end()


def _context_module() -> Any:
    return importlib.import_module("opentelemetry.context")


def _begun(name: str, attributes: Attributes, kind: str) -> Any:
    trace = _trace()
    if trace is None:
        return None
    try:
        tracer = trace.get_tracer("txmq", __version__)
        made = tracer.start_span(name, kind=getattr(trace.SpanKind, kind), attributes=attributes)
        return made if made.is_recording() else None
    except Exception as error:
        log.debug("no span %s: %s", name, error)
        return None


def _attached(trace: Any, made: Any) -> Any:
    """Makes it the parent of spans within."""
    return _context_module().attach(trace.set_span_in_context(made))


def _ended(made: Any, token: Any, error: BaseException | None) -> None:
    try:
        if error is not None:
            made.record_exception(error)
            made.set_status(_trace().StatusCode.ERROR, str(error))
        made.end()
    except Exception as failed:
        log.debug("a span was not ended: %s", failed)
    finally:
        _context_module().detach(token)


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


def link(contexts: Iterable[Any]) -> None:
    """Links the span around to these."""
    found = _trace().get_current_span()
    for context in contexts:
        found.add_link(context)


def contexts(batches: Iterable[pa.RecordBatch], most: int) -> list[Any]:
    """The contexts that these messages carry, each once, at most so many: for links of a span."""
    found: dict[tuple[int, int], Any] = {}
    for batch in batches:
        for data in batch.column(batch.schema.get_field_index("properties")).to_pylist():
            context = _context(data) if data else None
            if context is not None:
                found.setdefault((context.trace_id, context.span_id), context)
            if len(found) == most:
                return list(found.values())
    return list(found.values())


def _context(properties: bytes) -> Any:
    if PARENT.encode() not in properties:
        return None
    try:
        headers = Properties.decode(properties).headers
    except RemoteProtocolError:  # damaged: of an old data directory
        return None
    carrier = {name: value for name in (PARENT, STATE) if isinstance(value := headers.get(name), str)}
    propagator = importlib.import_module(f"{MODULE}.propagation.tracecontext").TraceContextTextMapPropagator()
    extracted = propagator.extract(carrier, _context_module().Context())
    context = _trace().get_current_span(extracted).get_span_context()
    return context if context.is_valid else None
