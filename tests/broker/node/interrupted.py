"""A process whose main thread relays messages in transactions while SIGINT comes again and again; started by
``test_interrupts.py``.

It moves every message of ``in`` to ``out``, beside two threads that publish. Prints what it saw as JSON.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import threading
import time
from types import FrameType

from broker_core.core import errors, failpoint
from broker_core.node.channel import LocalChannel
from broker_core.node.local import LocalBroker
from broker_core.store.durable import DurableStore
from tests.make import spill
from tests.reading import fetched

POINTS = ["committer.planned", "committer.durable", "committer.published"]
POINTS += [f"store.commit.{step}" for step in ("begin", "synced", "executed", "committed")]
POINTS += [
    "store.append.written",
    "store.seal.written",
    "store.seal.synced",
    "upkeep.seal.written",
    "upkeep.seal.committed",
]

armed = False
interrupts = 0
progress = 0


def handler(_number: int, _frame: FrameType | None) -> None:
    global armed, interrupts
    if armed:
        armed = False
        interrupts += 1
        raise KeyboardInterrupt


def interrupt(_name: str = "") -> None:
    os.kill(os.getpid(), signal.SIGINT)


def attack(source: random.Random, ending: threading.Event) -> None:
    while not ending.wait(source.uniform(0, 0.003)):
        interrupt()


def at_failpoints(source: random.Random, transactions: int) -> None:
    for name in POINTS:
        for hit in source.sample(range(1, transactions), 60):
            failpoint.arm(name, interrupt, hit=hit)


def relay(broker: LocalBroker, channel: LocalChannel, number: int) -> bool:
    """One transaction; whether it is committed."""
    global armed
    token = f"t{number}"
    try:
        armed = True
        delivery = channel.get("in")
        if delivery is not None:
            for _ in range(1 + number % 3):
                channel.publish(delivery.body, routing_key="out", mandatory=number % 2 == 0)
            if number % 50 == 0:
                spill(broker, channel)
            channel.ack(delivery.tag)
        channel.tx_commit(token)
        armed = False
        return True
    except KeyboardInterrupt:
        pass
    try:
        if broker.outcome(token) == "committed":
            return True
    except errors.UnknownTransaction:
        pass
    channel.tx_rollback()
    channel.recover()
    return False


def beside(broker: LocalBroker, counts: list[int], ending: threading.Event) -> None:
    with broker.channel() as channel:
        while not ending.is_set():
            channel.publish(b"beside", routing_key="beside")
            counts.append(1)


def watch(ending: threading.Event) -> None:
    """Ends the process when nothing moves any more, however slow the machine is."""
    seen, since = -1, time.monotonic()
    while not ending.wait(1):
        if progress != seen:
            seen, since = progress, time.monotonic()
        elif time.monotonic() - since > 60:
            faulthandler.dump_traceback()
            os._exit(3)


def bodies(broker: LocalBroker, name: str) -> list[int]:
    queue = broker.state.topology.queue(name)
    return [
        int(fetched(broker, queue, offset).body)
        for offset in range(queue.progress.floor, queue.log.visible_end)
    ]


def main(path: str, seed: int, transactions: int, how: str) -> None:
    global progress
    source = random.Random(seed)
    broker = LocalBroker(DurableStore(path))
    with broker.channel() as channel:
        for name in ("in", "out", "beside"):
            channel.queue_declare(name)
        channel.tx_select()
        for number in range(transactions):
            channel.publish(str(number).encode(), routing_key="in")
        channel.tx_commit()
    ending, counts = threading.Event(), [[], []]  # type: ignore[var-annotated]
    threads = [threading.Thread(target=beside, args=(broker, each, ending)) for each in counts]
    threads.append(threading.Thread(target=watch, args=(ending,), daemon=True))
    signal.signal(signal.SIGINT, handler)
    if how == "failpoints":
        at_failpoints(source, transactions)
    else:
        threads.append(threading.Thread(target=attack, args=(source, ending)))
    for thread in threads:
        thread.start()
    channel = broker.channel()
    channel.tx_select()
    moved = number = 0
    while moved < transactions:
        number += 1
        moved += relay(broker, channel, number)
        progress += 1
    ending.set()
    for thread in threads:
        thread.join()
    found = {
        "interrupts": interrupts,
        "left": len(bodies(broker, "in")),
        "out": bodies(broker, "out"),
        "beside": broker.state.topology.queue("beside").messages - sum(map(len, counts)),
        "handler": signal.getsignal(signal.SIGINT) is handler,
    }
    channel.close()
    broker.close()
    again = LocalBroker(DurableStore(path), upkeep=False)
    found["reopened"] = bodies(again, "out") == found["out"] and not bodies(again, "in")
    again.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
