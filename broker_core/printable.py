"""Text for a terminal or a log. Names come from users: an escape sequence in one would act on the terminal of
whoever looks, and a line break would forge a line of the log.

Not here: JSON, which escapes by itself.
"""

from __future__ import annotations

import logging


def printable(text: str) -> str:
    """``text`` as one line in which each character that cannot be printed is an escape of Python: control
    characters, marks that change the direction of writing, lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text
    )


class LineFormatter(logging.Formatter):
    """A record is one line; only a traceback has more."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        text = super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join(map(printable, text.splitlines()))
