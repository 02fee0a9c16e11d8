"""Errors of a write that pass without a change of the table: a conflict, a full disk, storage that is away.

Not here: how long a write is repeated (``commits.py``), what a user is told (``batch/apply.py``).
Invariant: an error of the table or of its rows is none of them, whatever words a row has: a class is looked
for where Java writes it, at the beginning.
"""

from __future__ import annotations

import re

from connector.errors import causes

CONFLICT = "another writer commits to it"
_CONFLICT = re.compile(
    r"DELTA_CONCURRENT|DELTA_METADATA_CHANGED|DELTA_PROTOCOL_CHANGED|DELTA_SCHEMA_CHANGE_SINCE_ANALYSIS"
    r"|Concurrent\w*Exception|(Metadata|Protocol)ChangedException"
)
_FULL = re.compile(
    r"No space left on device|Disk quota exceeded|[\w.]*(DiskOutOfSpace|QuotaExceeded|DiskChecker\$Disk)\w*:"
)
_AWAY = re.compile(
    r"[\w.$]*\b(Connect|ConnectTimeout|ConnectionClosed|SocketTimeout|Socket|UnknownHost|NoRouteToHost|NoHttpResponse"
    r"|SafeMode|Standby|Retriable|AWSServiceIO|AWSServiceThrottled|AWSStatus500|ServerBusy)Exception\b"
    r"|[\w.$]*(S3|Abfs|Storage)\w*Exception: .*(Status Code: 5\d\d|SlowDown|, 50[03],)"
)


class TableAltered(Exception):
    """A write failed, and its table was altered since it was analysed."""


def why(error: BaseException) -> str:
    """What passes by itself, as the end of a sentence about a table; "" for another error."""
    texts = causes(error)
    if isinstance(error, TableAltered) or any(map(_CONFLICT.search, texts)):
        return CONFLICT
    if any(map(_FULL.search, texts)):
        return "its disk, or that of Spark, is full"
    return "its storage does not answer" if any(map(_AWAY.match, texts)) else ""
