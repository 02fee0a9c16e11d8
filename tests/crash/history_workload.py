"""What the crash tests of the history of commits do: commits, and then its upkeep, which dies at one step.

As a program: ``history_workload.py DIRECTORY WORK STEP``. It prints the history before the upkeep, then is
killed at STEP of ``pack`` or of ``trim``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from broker_core.broker.history.history import TOGETHER
from broker_core.broker.history.lookup import ReadBudget, Visibility, latest
from broker_core.core import failpoint
from broker_core.node.local import LocalBroker
from broker_core.node.upkeep import compact_history
from broker_core.store.durable import DurableStore

ALL = Visibility("/", True, "", lambda _queue: True, lambda _app: True, {})
COMMITS = TOGETHER + 44
DAY_US = 25 * 3600 * 1_000_000  # longer than commits are kept


def opened(directory: Path, later_us: int = 0) -> LocalBroker:
    """``later_us``: so much later than now."""
    return LocalBroker(DurableStore(directory), lambda: time.time_ns() // 1_000 + later_us, upkeep=False)


def told(broker: LocalBroker) -> str:
    """The whole history, the newest first, as text."""
    rows = broker.run(lambda state, _change, _now: state.transactions.history.rows())
    found, more = latest(rows, ALL, sys.maxsize, 0, ReadBudget())
    assert not more
    return repr(found)


def commit(broker: LocalBroker, count: int) -> None:
    """Commits of messages, which have their history beside them, and acks, which have records."""
    with broker.channel() as channel:
        channel.queue_declare("in")
        for number in range(count):
            if number % 3 == 2:
                delivery = channel.get("in")
                assert delivery is not None
                channel.ack(delivery.tag)
            else:
                channel.publish(b"%d" % number, routing_key="in")


def pack(broker: LocalBroker) -> None:
    compact_history(broker.committer, broker.clock())


def main(directory: str, work: str, step: str) -> None:
    broker = opened(Path(directory))
    commit(broker, COMMITS)
    if work == "trim":
        pack(broker)
        broker.close()
        broker = opened(Path(directory), DAY_US)
        commit(broker, 1)
    print(told(broker), flush=True)
    failpoint.arm(step, "kill")
    pack(broker)


if __name__ == "__main__":
    main(*sys.argv[1:])
