"""What the plots of the page show of an engine elsewhere, every five seconds.

Invariant: the engine is asked in a thread beside the loop. If it does not answer, there is a gap.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Executor

from broker_core.address import VHOST
from broker_core.server.http.elsewhere.served import EngineServed
from broker_core.server.http.page.sampling import Row, of_app, of_queue, of_vhost


class EngineSampler:
    """The same numbers as ``page/sampling.py``, without commits."""

    def __init__(self, served: EngineServed, beside: Executor) -> None:
        self._served, self._beside = served, beside

    async def sample(self) -> None:
        rows = await asyncio.get_running_loop().run_in_executor(self._beside, self._rows)
        history = self._served.history
        history.begin(time.time())
        history.add(rows)
        history.end()

    def _rows(self) -> list[Row]:
        served = self._served
        queues, apps = served.queues(), served.apps()
        rates = served.topic_rates
        rates.look(queues)
        of_all = rates.of_all()
        messages = sum(each.messages for each in queues)
        rows: list[Row] = [(of_vhost(VHOST), (messages, of_all.published, of_all.settled))]
        rows += [(of_app(VHOST, app.app_id), (app.lag, app.unapplied, app.unmirrored)) for app in apps]
        rows += [(of_queue(each.name), (each.messages, *rates.of(each.name))) for each in queues]
        return rows
