"""Which errors of a write pass by themselves, and how long a conflict is waited for."""

from __future__ import annotations

import errno
import os

import pytest

from broker_core.core.backoff import Time
from connector.delta import commits, transient

FULL, AWAY = "its disk, or that of Spark, is full", "its storage does not answer"


class OfJava:
    def __init__(self, text: str, cause: OfJava | None = None) -> None:
        self._text, self._cause = text, cause

    def toString(self) -> str:
        return self._text

    def getCause(self) -> OfJava | None:
        return self._cause


class Captured(Exception):
    """As PySpark's: the causes are in its origin."""

    def __init__(self, *texts: str) -> None:
        super().__init__("Job aborted")
        self._origin: OfJava | None = None
        for text in reversed(texts):
            self._origin = OfJava(text, self._origin)


KINDS: list[tuple[Exception, str]] = [
    (transient.TableAltered("columns"), transient.CONFLICT),
    (Captured("org.apache.spark.SparkException: x", "io.delta.exceptions.ConcurrentAppendException: y"), transient.CONFLICT),
    (RuntimeError("[DELTA_CONCURRENT_DELETE_READ] a file was deleted"), transient.CONFLICT),
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "part"), FULL),
    (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "part"), FULL),
    (Captured("org.apache.spark.SparkException: x", "java.io.IOException: No space left on device"), FULL),
    (Captured("org.apache.hadoop.hdfs.protocol.DSQuotaExceededException: The DiskSpace quota is exceeded"), FULL),
    (Captured("java.lang.RuntimeException: x", "java.net.ConnectException: Connection refused"), AWAY),
    (Captured("java.net.UnknownHostException: namenode"), AWAY),
    (Captured("org.apache.hadoop.hdfs.server.namenode.SafeModeException: Cannot create file"), AWAY),
    (Captured("com.amazonaws.services.s3.model.AmazonS3Exception: Slow (Service: S3; Status Code: 503; x)"), AWAY),
    (OSError(errno.EROFS, os.strerror(errno.EROFS), "part"), ""),
    (OSError(errno.EACCES, os.strerror(errno.EACCES), "part"), ""),
    (Captured("org.apache.spark.SparkException: the row 'java.net.ConnectException: refused' violates CHECK"), ""),
    (ValueError("java.net.SocketTimeoutException: as a word of a row"), ""),
]  # fmt: skip


@pytest.mark.parametrize(("error", "kind"), KINDS, ids=[str(number) for number in range(len(KINDS))])
def test_what_passes_is_told_from_what_a_table_refuses(error: Exception, kind: str) -> None:
    assert transient.why(error) == kind


def test_a_conflict_is_waited_for_with_growing_pauses_until_the_time_is_over_and_nothing_else() -> None:
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    time = Time(lambda: now[0], sleep)
    tries: list[Exception] = []

    def write(*errors: Exception) -> str:
        left = [*errors]

        def act() -> str:
            if left:
                tries.append(left.pop(0))
                raise tries[-1]
            return "written"

        return commits.retry(act, 60.0, time)

    conflict = RuntimeError("DELTA_CONCURRENT_APPEND")
    assert write(*[conflict] * 9) == "written" and len(tries) == 9
    assert len(set(slept)) == 9 and sum(slept) < 60 and slept[0] < 0.2 < 1.5 < slept[-1], slept
    with pytest.raises(RuntimeError, match="CONCURRENT"):
        write(*[conflict] * 1000)
    assert now[0] - sum(slept[:9]) == pytest.approx(60)
    for other in (OSError(errno.ENOSPC, "No space left on device"), ValueError("refused")):
        tries.clear()
        with pytest.raises(type(other)):
            write(other)
        assert tries == [other]
