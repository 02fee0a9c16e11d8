"""Which offsets a micro-batch has of sources that are not txmq: its entry in Spark's offset log, as a digest.

The engine knows what a batch reads of its own logs. Of another source (files, rates, Kafka's own, Delta) it
knows the number of the batch alone, and a number comes again with other rows where an older checkpoint was
put back. Spark writes the entry of a batch once, before it runs it, and replays the batch from the entry. So
the digest is of the whole entry: an offset of files counts lists that are stored elsewhere, and says not what
is in them, but the time of the entry differs whenever a batch is planned anew.
Not here: the comparison (``micro_batch/claims/other_sources.py``).
Invariant: what is not known is refused. Of sources of txmq alone there is no digest: their ranges say more.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Collection
from pathlib import Path

from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from broker_core.core.errors import OptionError
from broker_core.engine import UNKNOWN_OFFSETS
from connector.errors import error_summary, without_logs
from connector.options import AddressOptions
from connector.stream.offset import is_offset, is_symbolic
from connector.stream.query_plan import other_sources, plans

log = logging.getLogger("txmq")

_OWN: dict[tuple[str, str], frozenset[str]] = {}  # engine and app -> the names of its logs, as last seen
# Engine, app, query and what an offset names: a source that is not txmq stays one as long as its query runs.
_OTHERS: set[tuple[str, str, str, frozenset[str]]] = set()
MOST_OTHERS = 1000  # a source may name something new in each batch


class OffsetLog:
    """Of a run of a query of an app; ``checkpoint``: its location, None where Spark does not say it."""

    def __init__(self, address: AddressOptions, app_id: str, checkpoint: str | None) -> None:
        self._address, self._app_id = address, app_id
        self._checkpoint = checkpoint
        self._own = False  # all of its sources are txmq's
        self._query = ""  # whose the checkpoint is, once that was read

    def digest(self, batch_id: int, query_id: str, spark: SparkSession | None = None) -> str:
        """The digest of the entry of a batch; "" if txmq has all of its sources, UNKNOWN_OFFSETS if the app
        has a queue and a sink cannot know more. ``spark`` reads what this process cannot. Raises OptionError.
        """
        if self._own:
            return ""
        entry = None if self._checkpoint is None else self._entry(self._checkpoint, batch_id, query_id, spark)
        if entry is None:
            return self._without_entry(query_id, spark)
        offsets = entry.splitlines()[2:]  # behind the version and the metadata
        if all(_is_missing(each) or self._is_own(each) for each in offsets):
            self._own = not any(map(_is_missing, offsets))
            return ""
        return hashlib.sha256(entry.encode()).hexdigest()[:32]

    def _entry(self, checkpoint: str, batch_id: int, query_id: str, spark: SparkSession | None) -> str | None:
        """None if this process cannot read it, and has no Spark. Raises OptionError."""
        try:
            self._query = self._query or _id(checkpoint, spark)
            if self._query == query_id:
                return text_of(f"{checkpoint.rstrip('/')}/offsets/{batch_id}", spark)
            what = f"checkpoint {checkpoint!r} is of query {self._query}, and this is query {query_id}"
        except Exception as error:
            if spark is None:
                return None
            why = error_summary(error)
            what = f"the entry of batch {batch_id} cannot be read in checkpoint {checkpoint!r} ({why})"
        raise OptionError(what, "give transactional checkpoint=, the checkpointLocation of the query")

    def _without_entry(self, query_id: str, spark: SparkSession | None) -> str:
        """Raises OptionError unless the plan of the batch has sources of txmq alone, or may have one."""
        if self._logs(()):
            if spark is None:
                return UNKNOWN_OFFSETS
            found_plans = plans(spark, query_id)
            if found_plans and not any(map(other_sources, found_plans)):
                self._own = True
                return ""
        raise OptionError(
            f"app {self._app_id!r} reads a source that is not txmq, or has another appId, and the offsets of "
            "a batch there are unknown: Spark does not name the checkpoint, or this process cannot read it",
            "if the source is txmq, give both the same appId. Otherwise, give transactional checkpoint=, the "
            "checkpointLocation of the query; give format('txmq') the option checkpointLocation on a disk of "
            "the driver, or use foreachBatch with transactional",
        )

    def _is_own(self, offset: str) -> bool:
        """``offset`` has the name of its source before it in newer checkpoints."""
        try:
            logged = json.loads(offset[max(offset.find("{"), 0) :])
        except ValueError:
            return False
        names = frozenset(logged if isinstance(logged, dict) and all(map(is_offset, logged.values())) else ())
        source = str(self._address), self._app_id, self._query, names
        if not names or source in _OTHERS:
            return False
        logs = self._logs(names)
        # the app claims a queue before it has a number there
        if not names & logs and not is_symbolic(logged):
            if len(_OTHERS) >= MOST_OTHERS:
                _OTHERS.clear()
            _OTHERS.add(source)
        return names <= logs

    def _logs(self, names: Collection[str]) -> frozenset[str]:
        """The queues of the app and their logs, asked again where ``names`` are not among them."""
        key = str(self._address), self._app_id
        logs = _OWN.get(key)
        if not logs or not logs >= set(names):
            engine = self._address.engine()
            app = engine.app(self._app_id)
            logs = frozenset(() if app is None else (*app.queues, *engine.logs(app.queues)))
            _OWN[key] = logs
        return logs


def owner(checkpoint: str, spark: SparkSession) -> str:
    """The id of the query whose checkpoint it is; "" where it cannot be read."""
    try:
        return _id(checkpoint, spark)
    except Exception as error:  # whatever Spark raises
        log.debug("checkpoint %s cannot be read: %s", checkpoint, error_summary(error))
        return ""


def _id(checkpoint: str, spark: SparkSession | None) -> str:
    return str(json.loads(text_of(f"{checkpoint.rstrip('/')}/metadata", spark))["id"])


def _is_missing(offset: str) -> bool:
    """A source had nothing yet."""
    return offset.rpartition(":")[2] in ("-", "null")


def text_of(path: str, spark: SparkSession | None) -> str:
    """The text of a file. What is not on a disk of this host, Spark reads. Raises FileNotFoundError, or what
    Spark raises.
    """
    local = re.sub(r"^dbfs:/+", "/dbfs/", re.sub(r"^file:/+", "/", path))
    try:
        return Path(local).read_text("utf-8")
    except OSError:
        if spark is None:
            raise
    # a path of Spark is a pattern
    pattern = re.sub(r"([\\{}\[\]*?])", r"\\\1", path)
    try:
        with without_logs():
            return str(spark.read.text(pattern, wholetext=True).collect()[0]["value"])
    except AnalysisException as error:
        if error.getCondition() == "PATH_NOT_FOUND":
            raise FileNotFoundError(f"there is no {path}") from None
        raise
