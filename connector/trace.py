"""The text of an error that crosses Spark: without Java's stack trace.

Not here: the errors of txmq themselves (``broker_core/errors.py``).
"""

from __future__ import annotations

from py4j.protocol import Py4JJavaError

from broker_core.errors import cause

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
    lines = [
        line.strip()
        for line in str(error).splitlines()
        if line.strip() and not line.strip().startswith(("at ", "... "))
    ]
    return " ".join(lines)[:1000]
