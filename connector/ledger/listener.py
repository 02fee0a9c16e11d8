"""Listeners on the user's session that keep the Delta ledger complete at the end of a query.

Not here: the writing itself (delta_ledger.py).

Invariant: nothing depends on a listener. It only writes earlier what the next start would write.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import SparkSession
from pyspark.sql.streaming import listener as events
from pyspark.sql.streaming.listener import StreamingQueryListener

from broker_core.core.errors import OptionError
from broker_core.engine import OnNewCheckpoint
from connector.errors import first_line
from connector.ledger.delta_ledger import DeltaLedger, log
from connector.ledger.resume import Resume
from connector.options import app_options
from connector.table_formats import table_format
from connector.tables.table import is_connect

FLUSH_AT_END_S = 30.0


class FlushAtEnd(StreamingQueryListener):
    """Completes the ledger when the query ends; without an id when any query does, and behind each batch."""

    def __init__(self, ledger: DeltaLedger, query_id: str | None) -> None:
        self._ledger = ledger
        self._query_id = query_id

    def onQueryStarted(self, event: events.QueryStartedEvent) -> None:
        pass

    def onQueryProgress(self, event: events.QueryProgressEvent) -> None:
        if self._query_id is None:
            self._ledger.notify()

    def onQueryTerminated(self, event: events.QueryTerminatedEvent) -> None:
        if self._query_id not in (None, str(event.id)):
            return
        try:
            self._ledger.flush(FLUSH_AT_END_S)
        except Exception as error:
            # the listener bus reports no errors; the table lags and the next start repairs it
            log.warning("the Delta ledger is not complete at the end of the query: %s", first_line(error))


class Mirror:
    """The result of ``mirror_offsets``: ``flush`` waits for the table, ``close`` removes the listener."""

    def __init__(self, spark: SparkSession, ledger: DeltaLedger) -> None:
        self._spark = spark
        self._ledger = ledger
        self._listener = FlushAtEnd(ledger, None)
        ledger.start()
        spark.streams.addListener(self._listener)

    def flush(self, timeout_s: float = 60.0) -> None:
        """Wait until the table has every decided batch. Raises TimeoutError, or the last error."""
        self._ledger.flush(timeout_s)

    def close(self) -> None:
        """Stop mirroring; the next start writes the missing rows."""
        self._spark.streams.removeListener(self._listener)
        self._ledger.close()

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def mirror_offsets(
    spark: SparkSession,
    *,
    ledger: str,
    app_id: str,
    url: str | None = None,
    data: str | None = None,
    vhost: str | None = None,
    settings: Mapping[str, str] | None = None,
    on_new_checkpoint: OnNewCheckpoint = "fail",
    resume_from: str | None = None,
) -> Mirror:
    """Copy the ledger of ``app_id`` to the Delta table ``ledger`` (path or name), for native sinks.

    Writes the rows that an earlier process did not write, then follows the query. ``vhost``: the virtual
    host, with ``data``. ``settings``: options of the connection to Kafka. With
    ``on_new_checkpoint="resume"``, an app whose engine has lost its ledger continues after the last batch of
    the table: call this before the query starts. ``resume_from``: the engine that wrote the table, if this
    engine has the same messages at the same offsets. Raises OptionError, CheckpointMismatch.
    """
    if not ledger:
        raise OptionError("mirror_offsets needs a ledger", "name the Delta table with ledger=")
    engine = app_options(settings, url=url, data=data, vhost=vhost, appId=app_id).address.engine()
    session = spark if is_connect(spark) else spark.newSession()
    Resume(table_format(), ledger, engine, app_id, on_new_checkpoint, resume_from).ready(spark)
    return Mirror(spark, DeltaLedger(session, ledger, engine, app_id))
