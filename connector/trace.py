"""The text of an error that crosses Spark: without Java's stack trace.

Not here: the errors of txmq themselves (``broker_core/errors.py``).
"""

from __future__ import annotations

from contextlib import suppress

from py4j.protocol import Py4JJavaError

from broker_core.errors import cause

# PySpark asks it for the text of an exception, and it knows no error classes of Delta
_HELPER = "SparkThrowableHelper.getMessage"
# exceptions that mean that a query was stopped, in the text of an error from Python
INTERRUPTIONS = (
    "java.lang.InterruptedException",
    "java.io.InterruptedIOException",
    "java.nio.channels.ClosedByInterruptException",
)


def holds_java_trace(error: BaseException | None) -> bool:
    """Whether this error contains a Java stack trace."""
    while error is not None:
        if isinstance(error, Py4JJavaError):
            return True
        error = error.__cause__ or error.__context__
    return False


def shortened(error: BaseException) -> Exception:
    """The error without its Java stack trace.

    Spark 4.2 searches the text of a failed foreachBatch for interruptions with a regular expression. A long
    text overflows the stack, and the query then ends without an error.
    """
    found = cause(error)
    if found is not None:
        return found
    text = str(error)
    summary = told(error)
    interrupted = next((name for name in INTERRUPTIONS if name in text), None)
    if interrupted is not None:  # query.stop(): in the form that Spark recognises
        return RuntimeError(
            f"py4j.protocol.Py4JJavaError: An error occurred while calling Spark: {interrupted}"
        )
    return RuntimeError(f"{type(error).__name__}: {summary}")


def told(error: BaseException) -> str:
    """The text of an error in a line, without Java's stack trace."""
    lines = [
        line.strip()
        for line in message(error).splitlines()
        if line.strip() and not line.strip().startswith(("at ", "... "))
    ]
    return " ".join(lines)[:1000]


def message(error: BaseException) -> str:
    """The text of an error; of one from the JVM, what the Java exception says."""
    cause_or_context = error.__cause__ or error.__context__
    if isinstance(error, Py4JJavaError):
        with suppress(Exception):  # the JVM may be gone
            text = str(error.java_exception.toString())
            if _HELPER not in str(error):
                return text
            return message(cause_or_context) if cause_or_context is not None else text
    return str(error)
