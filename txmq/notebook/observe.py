"""``txmq.observe(query)``: shows how far a streaming query is, while it runs.

Not here: what is drawn, and where (``views.py``).
Invariant: it only reads the query. A failure here ends the observation, and nothing else.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from broker_core.core.credentials import Credentials
from broker_core.core.errors import OptionError, TxmqError
from broker_core.engine import AppInfo, Engine
from broker_core.engines import connect
from txmq.notebook.sample import Sample
from txmq.notebook.views import View, view_here

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

KEPT = 1_000  # samples
STOP_S = 5.0  # a broker that does not answer is not waited for


class Observation:
    """Watches a query in a thread of its own, until the query ends or ``stop`` is called."""

    def __init__(
        self, query: StreamingQuery, view: View, interval_s: float, engine: Engine | None, app_id: str
    ) -> None:
        self.samples: deque[Sample] = deque(maxlen=KEPT)
        self.error: Exception | None = None  # the last one; the query may go on
        self._query = query
        self._view = view
        self._interval_s = interval_s
        self._engine = engine
        self._app_id = app_id
        self._first: dict[str, int] = {}  # by log: where the first progress began
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="txmq-observe", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the observation; the query continues."""
        self._ended.set()
        self._thread.join(STOP_S)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the query ends. Returns whether the observation is over."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with self._view as view:
                while True:
                    running = bool(self._query.isActive)  # before the last look
                    self.samples.append(self._sample(running))
                    view.show(list(self.samples))
                    if not running or self._ended.wait(self._interval_s):
                        return
        except Exception as error:
            self.error = error

    def _sample(self, running: bool) -> Sample:
        from connector.stream.spark_version import (
            has_admission_control,
        )  # there is a query, so there is Spark

        progress = self._query.lastProgress
        found: Mapping[str, Any] = json.loads(progress.json) if progress is not None else {}
        ends, latest = _offsets(found, "endOffset"), _offsets(found, "latestOffset")
        # the start of a query may be symbolic: then what its first batch consumed does not count
        for log, at in {**ends, **_offsets(found, "startOffset")}.items():
            self._first.setdefault(log, at)
        lag = None
        if latest and has_admission_control():  # else Spark takes the end of the batch for the latest one
            lag = sum(max(0, at - ends.get(log, 0)) for log, at in latest.items())
        app = self._app()
        lag, lag_s = (lag, None) if app is None else (app.lag, app.lag_s)
        return Sample(
            at_s=time.time(),
            batch_id=int(found.get("batchId", -1)),
            consumed=sum(at - self._first[log] for log, at in ends.items()),
            rows_per_s=float(found.get("processedRowsPerSecond") or 0.0),
            batch_s=float(found.get("batchDuration") or 0.0) / 1e3,
            lag=lag,
            lag_s=lag_s,
            running=running,
        )

    def _app(self) -> AppInfo | None:
        """What the broker says, if it is asked and answers."""
        try:
            return None if self._engine is None else self._engine.app(self._app_id)
        except TxmqError as error:
            self.error = error
            return None


def observe(
    query: StreamingQuery,
    url: str | None = None,
    *,
    app_id: str = "",
    data: str | os.PathLike[str] | None = None,
    vhost: str | None = None,
    credentials: Credentials | None = None,
    settings: Mapping[str, str] | None = None,
    interval_s: float = 1.0,
) -> Observation:
    """Shows a bar and a small plot of the lag of a running query: as HTML in a notebook, with rich (if it is
    installed) on a terminal, otherwise as lines of text. It ends with the query, and never disturbs it.

    With ``url`` (or ``data``) and ``app_id``, the lag comes from the broker, also in seconds; otherwise from
    two offsets in ``lastProgress``, which Spark 4.1 lacks. Returns at once; ``observe(query).wait()`` waits
    for the end. Raises OptionError.
    """
    has_address = url is not None or data is not None
    if has_address != bool(app_id):
        raise OptionError(
            "txmq.observe takes the address of a broker and an app_id together",
            "give both for the lag in seconds, or none of them",
        )
    if not interval_s > 0:
        raise OptionError(f"interval_s is {interval_s!r}", "give seconds above 0")
    engine = connect(url, data, settings, credentials, vhost=vhost) if has_address else None
    name = query.name or app_id or f"query {str(query.id)[:8]}"
    return Observation(query, view_here(name), interval_s, engine, app_id)


def _offsets(progress: Mapping[str, Any], name: str) -> dict[str, int]:
    """Of the sources of txmq: offsets by log. Those of others are no such numbers."""
    found: dict[str, int] = {}
    for source in progress.get("sources", ()):
        value = source.get(name)
        vector = json.loads(value) if isinstance(value, str) else value
        if isinstance(vector, dict):
            found |= {log: at for log, at in vector.items() if isinstance(at, int)}
    return found
