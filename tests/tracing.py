"""Spans of OpenTelemetry, kept in memory. The provider of the process stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

PARENT = f"00-{'a1' * 16}-{'b2' * 8}-01"  # of a trace that began elsewhere


@contextmanager
def spans_kept() -> Iterator[Any]:
    """An exporter that has what this process records meanwhile; without the SDK the test is skipped."""
    why = "no opentelemetry-sdk: it is in the extra dev"
    trace, sdk, export, memory = (
        pytest.importorskip(f"opentelemetry.{name}", reason=why)
        for name in ("trace", "sdk.trace", "sdk.trace.export", "sdk.trace.export.in_memory_span_exporter")
    )
    kept, provider = memory.InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(kept))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "get_tracer", provider.get_tracer)
        yield kept
    provider.shutdown()


def named(kept: Any, name: str) -> list[Any]:
    return [each for each in kept.get_finished_spans() if each.name == name]
