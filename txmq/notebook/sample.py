"""One look at a streaming query."""

from __future__ import annotations

from typing import NamedTuple


class Sample(NamedTuple):
    """``lag`` and ``lag_s``: messages that are not consumed, and the age of the oldest; None: not known.
    ``consumed``: since the observation began, as far as the progress of the query tells.
    """

    at_s: float
    batch_id: int  # the last one that ended, -1: none
    consumed: int
    rows_per_s: float
    batch_s: float
    lag: int | None
    lag_s: float | None
    running: bool
