"""The broker is killed with SIGKILL while AMQP clients commit: all of a transaction is there or nothing, and
after commit-ok always all.

Real clients (a raw socket, pika), a real broker process; the store's own steps are in ``test_store_crash``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
from pamqp import commands

from broker_core.store.salvage.verify import verify
from tests.amqp_peer import Closed, Peer, content, contents, encoded, peer
from tests.amqp_server import AmqpServed, NotReady
from tests.crash import amqp_reader, amqp_relay
from tests.progress import wait_until

pytestmark = pytest.mark.crash

Q, B, T = commands.Queue, commands.Basic, commands.Tx
MESSAGES = 20_000
TAKEN = 1_000
QUEUES = ["crash.0", "crash.1", "crash.2", "crash.3"]
EACH = MESSAGES // len(QUEUES)


def wanted(round_: int, queue: int) -> list[bytes]:
    return [b"%d:%d:%d" % (round_, queue, number) for number in range(EACH)]


def publishes(round_: int) -> bytes:
    """The frames of a whole transaction's publishes, one queue after the other, message by message."""
    by_queue = (
        contents(1, B.Publish(routing_key=name), wanted(round_, queue), delivery_mode=2)
        for queue, name in enumerate(QUEUES)
    )
    return b"".join(itertools.chain.from_iterable(zip(*by_queue)))


def declare(served: AmqpServed) -> None:
    """The queues, and the source with ``TAKEN`` messages."""
    with peer(served.amqp_url, 1) as client:
        for queue in [*QUEUES, "crash.source"]:
            client.call(1, Q.Declare(queue=queue, durable=True), Q.DeclareOk)
        client.call(1, T.Select(), T.SelectOk)
        for number in range(TAKEN - client.count(1, "crash.source")):
            client.publish(1, "", "crash.source", b"%d" % number, delivery_mode=2)
        client.call(1, T.Commit(), T.CommitOk)
        client.end()


class Transaction:
    """One large transaction: takes ``TAKEN``, publishes ``MESSAGES``, acks, commits. Each step may be the
    broker's last.
    """

    def __init__(self, url: str, frames: bytes) -> None:
        self._frames = frames
        self._client = Peer(url).opened(1)
        self.committed = False
        self.commit_sent = threading.Event()
        self.began = threading.Event()
        self.taken = False
        self.gathered = False  # the broker has all of it and lives; only the commit is to come
        self.took_s = 0.0

    def run(self) -> None:
        client = self._client
        with contextlib.suppress(Closed), client:
            client.call(1, T.Select(), T.SelectOk)
            client.call(1, B.Consume(queue="crash.source", consumer_tag="source"), B.ConsumeOk)
            tag = 0
            while tag < TAKEN:
                tag = client.expect(B.Deliver).delivery_tag
                client.content(1)
            began = time.monotonic()
            self.taken = True
            self.began.set()
            client.write(self._frames + encoded(1, B.Ack(tag, True)))
            client.count(1, "crash.source")
            self.gathered = True
            client.send(1, T.Commit())
            self.commit_sent.set()
            client.expect(T.CommitOk)
            self.committed = True
            self.took_s = time.monotonic() - began
        self.began.set()
        self.commit_sent.set()


def check(served: AmqpServed, round_: int, committed: bool) -> bool:
    """Whether the transaction is there; it is there whole or not at all. Leaves the queues empty."""
    with peer(served.amqp_url, 1) as client:
        counts = [client.count(1, queue) for queue in QUEUES]
        there = counts == [EACH] * len(QUEUES)
        assert there or counts == [0] * len(QUEUES), f"part of a transaction: {counts}"
        assert there or not committed, "commit-ok came, and the messages are gone"
        assert client.count(1, "crash.source") == (0 if there else TAKEN)
        for number, queue in enumerate(QUEUES):
            assert [body for _, body in client.drain(1, queue)] == (wanted(round_, number) if there else [])
        client.end()
    return there


SPILL = "store.append.written"  # the bodies of a large transaction, perhaps before its commit
STEPS = [
    SPILL,
    "store.commit.begin",
    "store.commit.synced",
    "store.commit.executed",
    "store.commit.committed",
]
DURABLE = ["store.commit.committed", "committer.durable", "committer.published"]
STEPS += ["committer.planned", "committer.durable", "committer.published"]


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_this_step_of_a_commit_of_20000_all_or_nothing_is_in_every_queue(
    served: AmqpServed, step: str
) -> None:
    frames = publishes(0)
    declare(served)
    hit, over = 1, 0
    # what it writes on its own, and for deliveries, passes there too: the hit of the commit has to be found
    for _ in range(60):
        try:
            served.restart(f"{step}@{hit}=kill")
        except NotReady:  # killed in a commit that the broker made on its own, before it served
            hit += 1
            continue
        transaction = None
        with contextlib.suppress(Closed, ConnectionError):
            transaction = Transaction(served.amqp_url, frames)
            transaction.run()
        if transaction is not None and transaction.committed:
            served.restart()
            assert check(served, 0, committed=True)
            declare(served)
            over += 1
            # once more with the same: there is more to do after a commit than after a crash
            hit -= over % 2 == 0
        elif transaction is not None and (transaction.gathered or (step == SPILL and transaction.taken)):
            assert served.wait() == -9
            served.start()
            there = check(served, 0, committed=False)
            if there == (step in DURABLE):
                return
            # killed in a commit that the broker made on its own, before the one of the transaction
            assert not there
            declare(served)
            hit += 1
        else:
            assert served.wait() == -9
            hit += 1
    raise AssertionError(f"the commit of the transaction was not hit at {step}")


def commits_killed_at_random(served: AmqpServed, seed: int, rounds: int) -> None:
    choice = random.Random(seed)
    declare(served)
    transaction = Transaction(served.amqp_url, publishes(-1))
    transaction.run()
    assert transaction.committed and check(served, -1, committed=True)
    took_s = transaction.took_s
    outcomes: Counter[tuple[bool, bool]] = Counter()
    for round_ in range(rounds):
        declare(served)
        transaction = Transaction(served.amqp_url, publishes(round_))
        running = threading.Thread(target=transaction.run)
        running.start()
        from_commit = choice.random() < 0.6  # most of them while the commit is on its way
        assert (transaction.commit_sent if from_commit else transaction.began).wait(600)
        running.join(choice.random() * took_s * (0.8 if from_commit else 1.2))
        served.kill()
        running.join()
        served.start()
        outcomes[check(served, round_, transaction.committed), transaction.committed] += 1
    served.terminate()
    assert verify(served.directory).problems == []
    assert sum(outcomes.values()) == rounds


@pytest.mark.soak  # killed at each step above
def test_killed_at_random_moments_a_commit_of_20000_is_all_or_nothing(served: AmqpServed, seed: int) -> None:
    commits_killed_at_random(served, seed, 4)


@pytest.mark.soak
def test_soak_killed_at_random_moments_a_commit_of_20000_is_all_or_nothing(
    served: AmqpServed, seed: int, rounds: int
) -> None:
    commits_killed_at_random(served, seed, rounds)


# -- relays --------------------------------------------------------------------------------------------------

RING = ["ring.0", "ring.1", "ring.2"]
CIRCLING = 900
BATCH = 100


class Relay:
    """A worker process, and how many messages its acknowledged commits moved."""

    def __init__(self, served: AmqpServed, source: str, sink: str) -> None:
        command = [
            sys.executable,
            amqp_relay.__file__,
            served.host,
            str(served.port),
            source,
            sink,
            str(BATCH),
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.moved = 0
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self.moved += int(line.split()[1])

    def finish(self) -> int:
        """Ends it at the end of its input; its exit code."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            return self._process.wait(600)
        finally:
            self._process.kill()
            self._process.wait()
            self._reading.join()


def relays_killed(served: AmqpServed, seed: int, kills: int) -> None:
    """Every message goes round a ring of queues by three workers while the broker is killed ``kills``
    times.
    """
    choice = random.Random(seed)
    with peer(served.amqp_url, 1) as client:
        for queue in RING:
            client.call(1, Q.Declare(queue=queue, durable=True), Q.DeclareOk)
        client.call(1, T.Select(), T.SelectOk)
        for number in range(CIRCLING):
            client.publish(1, "", RING[number % len(RING)], b"%d:0" % number, delivery_mode=2)
        client.call(1, T.Commit(), T.CommitOk)
        client.end()
    workers: list[Relay] = []
    try:
        workers += [
            Relay(served, RING[number], RING[(number + 1) % len(RING)]) for number in range(len(RING))
        ]
        for _ in range(kills):
            before = [worker.moved for worker in workers]
            wait_until(
                lambda before=before: all(worker.moved > moved for worker, moved in zip(workers, before))
            )
            time.sleep(choice.random() * 0.3)
            served.restart()
        before = [worker.moved for worker in workers]
        wait_until(lambda: all(worker.moved > moved for worker, moved in zip(workers, before)))
    finally:
        codes = [worker.finish() for worker in workers]
    assert codes == [0] * len(RING)
    found: list[tuple[int, int]] = []
    served.restart()
    with peer(served.amqp_url, 1) as client:
        for queue in RING:
            for _, body in client.drain(1, queue):
                number, _, hops = body.decode().partition(":")
                found.append((int(number), int(hops)))
        client.end()
    assert sorted(number for number, _ in found) == list(range(CIRCLING)), "0 lost, 0 duplicated"
    acknowledged = sum(worker.moved for worker in workers)
    hops = sum(count for _, count in found)
    assert acknowledged <= hops <= acknowledged + (kills + 1) * len(RING) * BATCH


def test_relays_of_three_workers_lose_and_double_nothing_when_the_broker_is_killed(
    served: AmqpServed, seed: int
) -> None:
    relays_killed(served, seed, 3)


@pytest.mark.soak
def test_soak_relays_of_three_workers_lose_and_double_nothing_when_the_broker_is_killed(
    served: AmqpServed, seed: int, rounds: int
) -> None:
    relays_killed(served, seed, max(10, rounds // 5))


# -- a reader beside large commits ---------------------------------------------------------------------------

SEEN = ["seen.0", "seen.1"]
LARGE = 2_000


class Reader:
    """The reader as a process of its own: it must not wait for the writer."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, amqp_reader.__file__, url, *SEEN, str(LARGE)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None and self._process.stdout.readline() == "ready\n"

    def finish(self) -> str:
        """What it printed."""
        try:
            return self._process.communicate(timeout=600)[0]
        finally:
            self._process.kill()
            self._process.wait()


def commits_beside_a_reader(served: AmqpServed, commits: int) -> None:
    """Each commit publishes ``LARGE`` to two queues; every third transaction is rolled back and counts for
    nothing.
    """
    with peer(served.amqp_url, 1) as client:
        client.call(
            1, commands.Exchange.Declare(exchange="seen", exchange_type="fanout"), commands.Exchange.DeclareOk
        )
        for queue in SEEN:
            client.call(1, Q.Declare(queue=queue, durable=True), Q.DeclareOk)
            client.call(1, Q.Bind(queue=queue, exchange="seen", routing_key=""), Q.BindOk)
        client.call(1, T.Select(), T.SelectOk)
        reader = Reader(served.amqp_url)
        try:
            published = 0
            for number in range(commits):
                bodies = [b"%d" % (published + row) for row in range(LARGE)]
                frames = b"".join(
                    content(1, B.Publish(exchange="seen"), body, delivery_mode=2) for body in bodies
                )
                client.write(frames)
                if number % 3 == 2:
                    client.call(1, T.Rollback(), T.RollbackOk)
                else:
                    client.call(1, T.Commit(), T.CommitOk)
                    published += LARGE
        finally:
            output = reader.finish()
        seen = json.loads(output)
        assert seen["part"] == ""
        assert seen["polls"] > commits // 5 and seen["fetched"] > 100
        rest = [b"%d" % number for number in range(seen["fetched"], published)]
        assert [body for _, body in client.drain(1, SEEN[1])] == rest
        assert client.count(1, SEEN[0]) == published
        client.end()


def test_reader_never_sees_a_part_of_a_large_commit(served: AmqpServed) -> None:
    commits_beside_a_reader(served, int(os.environ.get("TXMQ_SOAK_ROUNDS", "50")))


@pytest.mark.soak
def test_soak_reader_never_sees_a_part_of_a_large_commit(served: AmqpServed, rounds: int) -> None:
    commits_beside_a_reader(served, max(1_000, rounds))


@pytest.mark.parametrize(
    "step", ["", *(f"store.commit.{name}" for name in ("begin", "synced", "executed", "committed"))]
)
def test_dead_lettering_is_at_least_once_by_construction(step: str, served: AmqpServed) -> None:
    """The message is rejected and the broker killed: it is in its queue or a dead letter, never neither."""
    strategy = {"x-queue-type": "quorum", "x-dead-letter-strategy": "at-least-once"}
    dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
    with peer(served.amqp_url, 1) as client:
        client.call(1, Q.Declare(queue="dead", durable=True), Q.DeclareOk)
        client.call(1, Q.Declare(queue="q", durable=True, arguments={**strategy, **dead}), Q.DeclareOk)
        client.call(1, T.Select(), T.SelectOk)
        client.publish(1, "", "q", b"1", delivery_mode=2)
        client.call(1, T.Commit(), T.CommitOk)
        client.end()
    rejected = False
    for hit in range(1, 9):  # the start commits too, and so does the upkeep
        with contextlib.suppress(NotReady, Closed, OSError):
            served.restart(f"{step}@{hit}=kill" if step else "")
            with peer(served.amqp_url, 1) as client:
                assert client.get(1, "q", no_ack=False) is not None
                client.send(1, B.Reject(delivery_tag=1, requeue=False))
                rejected = True
                client.count(1, "q")  # its answer comes behind the commit
        if rejected:
            break
    assert rejected
    served.restart()
    with peer(served.amqp_url, 1) as client:
        counts = client.count(1, "q"), client.count(1, "dead")
        client.end()
    assert sum(counts) == 1
    if not step:  # a kill may meet a commit of the upkeep before that of the rejection
        assert counts == (0, 1)
