from __future__ import annotations

import threading

from broker_core.node.local import LocalBroker
from broker_core.server import slots
from broker_core.server.slots import Slots
from tests.broker.node.test_committer import GatedStore, remember
from tests.progress import wait_until


def test_so_many_compute_at_once_and_the_users_in_turn() -> None:
    computing = Slots(2)
    inside: list[str] = []
    goes = threading.Semaphore(0)

    def call(user: str) -> None:
        with computing.computing(user):
            inside.append(user)
            goes.acquire()

    threads: list[threading.Thread] = []

    def begin(user: str) -> None:
        threads.append(threading.Thread(target=call, args=(user,)))
        threads[-1].start()

    for number in range(20):
        begin("flooder")
        wait_until(lambda: len(inside) + sum(map(len, computing.waiting.values())) == number + 1)  # noqa: B023
    begin("other")
    wait_until(lambda: "other" in computing.waiting)
    assert inside == ["flooder"] * 2
    goes.release()
    wait_until(lambda: len(inside) == 3)
    goes.release()
    wait_until(lambda: len(inside) == 4)
    assert sorted(inside[2:]) == ["flooder", "other"]
    for _ in range(len(threads)):
        goes.release()
    for thread in threads:
        thread.join()
    assert len(inside) == 21 and computing.free == 2 and not computing.waiting


def test_who_waits_for_a_commit_or_a_lock_leaves_the_slot_to_others() -> None:
    store = GatedStore()
    broker = LocalBroker(store, upkeep=False)
    broker.committer.waits = slots.free
    computing = Slots(1)
    store.gate.clear()
    store.entered.clear()
    leader = threading.Thread(target=broker.run, args=(remember("leader"),))
    leader.start()
    assert store.entered.wait(600)
    order: list[str] = []

    def commits() -> None:
        with computing.computing("ann"):
            broker.run(remember("follower"))
            order.append("committed")

    def waits(lock: threading.Lock) -> None:
        with computing.computing("ann"), slots.holding(lock):
            order.append("locked")

    lock = threading.Lock()
    with lock:
        others = [threading.Thread(target=commits), threading.Thread(target=waits, args=(lock,))]
        for other in others:
            other.start()
            wait_until(lambda: broker.committer.waiting and computing.free == 1)
        with computing.computing("bob"):
            assert order == []
            store.gate.set()
            leader.join()
            others[0].join()  # it takes no slot again
    others[1].join()
    assert order == ["committed", "locked"] and computing.free == 1
    broker.close()
