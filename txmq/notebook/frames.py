"""``txmq.apps(url)`` and ``txmq.queues(url)``: the lists of the commands as frames of pandas.

Not here: who may see them (the engine). The same lists as Spark DataFrames: ``connector/state.py``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from broker_core.admin import QueueInfo
from broker_core.core.credentials import Credentials
from broker_core.engine import AppInfo
from broker_core.engines import connect, connect_admin

if TYPE_CHECKING:
    import pandas as pd


def apps(
    url: str | None = None,
    *,
    data: str | os.PathLike[str] | None = None,
    vhost: str | None = None,
    credentials: Credentials | None = None,
    settings: Mapping[str, str] | None = None,
) -> pd.DataFrame:
    """Returns the apps, by name: their queues, their last batch, and their lag in messages (``lag``) and
    seconds (``lag_s``).

    ``url``: ``txmq://host:5673/vhost`` or ``kafka://host:9092``; or ``data``, a data directory, with
    ``vhost``. ``settings``: options of the connection to Kafka. Raises ImportError without pandas.
    """
    _require_pandas("apps")
    return _frame(AppInfo, connect(url, data, settings, credentials, vhost=vhost).apps())


def queues(
    url: str | None = None,
    *,
    data: str | os.PathLike[str] | None = None,
    vhost: str | None = None,
    credentials: Credentials | None = None,
    settings: Mapping[str, str] | None = None,
) -> pd.DataFrame:
    """Returns the queues, by name: their messages, consumers and owner, and the age of the oldest message in
    seconds (``oldest_s``). Arguments as for :func:`apps`.
    """
    _require_pandas("queues")
    return _frame(QueueInfo, connect_admin(url, data, settings, credentials, vhost=vhost).queues())


def _require_pandas(name: str) -> None:
    try:
        import pandas  # noqa: F401
    except ModuleNotFoundError:
        raise ImportError(
            f"txmq.{name} returns a frame of pandas, which this Python does not have: pip install pandas, or "
            f"read the same with spark.read.format('txmq').option('table', '{name}')"
        ) from None


def _frame(kind: type[Any], rows: Iterable[Any]) -> pd.DataFrame:
    import pandas as pd

    names = [field.name for field in dataclasses.fields(kind)]
    found = pd.DataFrame([dataclasses.asdict(row) for row in rows], columns=names)
    ages = [name for name in names if name.endswith("_s")]
    return found.astype(dict.fromkeys(ages, "float64"))  # without a row, or without an age
