"""The text of an error that crosses Spark: without Java's stack trace, and not where an error is expected.

Not here: the errors of txmq themselves (``broker_core/core/errors.py``).
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

from broker_core.core.errors import cause

# PySpark takes the text of an exception from it, and it has no error classes of Delta
_HELPER = "SparkThrowableHelper.getMessage"
_STACK = "\n\nJVM stacktrace:"  # in the text of an exception of PySpark, where the setting asks for it
# Java exceptions that wrap the one that says what is wrong, if they have a cause
_WRAPPERS = {
    "java.lang.RuntimeException",
    "java.lang.reflect.InvocationTargetException",
    "java.lang.reflect.UndeclaredThrowableException",
    "java.util.concurrent.CompletionException",
    "java.util.concurrent.ExecutionException",
    "org.apache.spark.SparkException",
    "org.sparkproject.guava.util.concurrent.ExecutionError",
    "org.sparkproject.guava.util.concurrent.UncheckedExecutionException",
}
_LONGEST_CHAIN = 20
_JAVA_ERROR = ("py4j.protocol", "Py4JJavaError")
_CAPTURED = ("pyspark.errors.exceptions.captured", "CapturedException")
# exceptions that mean that a query was stopped, in the text of an error from Python
_INTERRUPTIONS = (
    "java.lang.InterruptedException",
    "java.io.InterruptedIOException",
    "java.nio.channels.ClosedByInterruptException",
)


class _Asking(threading.local):
    """A filter of loggers, which drops what a thread logs while ``depth`` is not 0."""

    depth = 0

    def filter(self, _record: logging.LogRecord) -> bool:
        return not self.depth


_asking = _Asking()


@contextlib.contextmanager
def without_logs() -> Iterator[None]:
    """Where an error is an answer. PySpark logs each error of an analysis when it is made, with a Java stack
    trace of some 20 kB; not those of this thread inside.
    """
    from pyspark.logger import PySparkLogger

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).addFilter(_asking)  # once
    _asking.depth += 1
    try:
        yield
    finally:
        _asking.depth -= 1


def is_interruption(error: BaseException) -> bool:
    """Whether the query was stopped meanwhile."""
    return any(name in str(error) for name in _INTERRUPTIONS)


def holds_java_trace(error: BaseException | None) -> bool:
    """Whether this error contains a Java stack trace."""
    while error is not None:
        if _is_a(error, *_JAVA_ERROR):
            return True
        error = error.__cause__ or error.__context__
    return False


def shorten(error: BaseException) -> Exception:
    """The error without its Java stack trace.

    Spark 4.2 searches the text of a failed foreachBatch for interruptions with a regular expression. A long
    text overflows the stack, and the query then ends without an error.
    """
    found = cause(error)
    if found is not None:
        return found
    for name in _INTERRUPTIONS:
        if name in str(error):  # query.stop(): in the form that Spark recognises
            return RuntimeError(f"py4j.protocol.Py4JJavaError: An error occurred while calling Spark: {name}")
    return RuntimeError(f"{type(error).__name__}: {error_summary(error)}")


def error_summary(error: BaseException) -> str:
    """The text of an error in a line, without Java's stack trace."""
    lines = [
        line.strip()
        for line in message(error).splitlines()
        if line.strip() and not line.strip().startswith(("at ", "... "))
    ]
    return " ".join(lines)[:1000]


def message(error: Any) -> str:
    """The text of an error; of one from the JVM, what the Java exception says that is behind its wrappers."""
    cause_or_context = error.__cause__ or error.__context__
    if _is_a(error, *_JAVA_ERROR):
        with contextlib.suppress(Exception):  # the JVM may be gone
            text = str(_unwrapped(error.java_exception).toString())
            if _HELPER not in str(error):
                return text
            return message(cause_or_context) if cause_or_context is not None else text
    origin = getattr(error, "_origin", None)
    if _is_a(error, *_CAPTURED) and origin is not None:
        with contextlib.suppress(Exception):
            found = _unwrapped(origin)
            if found is not origin:
                return str(found.toString())
    return str(error).partition(_STACK)[0]


def causes(error: Any) -> list[str]:
    """The error and what is behind it, each as ``class: text``; of one from the JVM, each Java exception."""
    found = [f"{type(error).__name__}: {str(error).partition(_STACK)[0]}"]
    java = error.java_exception if _is_a(error, *_JAVA_ERROR) else getattr(error, "_origin", None)
    with contextlib.suppress(Exception):  # the JVM may be gone
        while java is not None and len(found) < _LONGEST_CHAIN:
            found.append(str(java.toString()))
            java = java.getCause()
    return found


def _is_a(error: BaseException, module: str, name: str) -> bool:
    """Whether it is of this class. A client of Spark Connect has no classes of the JVM's errors."""
    found = getattr(sys.modules.get(module), name, None)
    return found is not None and isinstance(error, found)


def _unwrapped(exception: Any) -> Any:
    """The first Java exception in the chain of causes that says more than that something else has failed."""
    for _ in range(_LONGEST_CHAIN):
        behind = exception.getCause()
        if exception.getClass().getName() not in _WRAPPERS or behind is None or not behind.getMessage():
            break
        exception = behind
    return exception


def first_line(error: BaseException) -> str:
    """The first line of an error that says something; the name of its class if none does."""
    lines = (line.strip() for line in message(error).splitlines())
    return next(filter(None, lines), type(error).__name__)
