"""Each limit from outside, with sockets and processes: the refusal names it, others are served, and nothing
that was acknowledged is lost.

Not here: connections that do not log in (``test_unauthenticated_limit.py``), transactions
(``commit/test_open_transactions.py``).
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.flight
import pytest
from pamqp import commands as c
from pamqp.body import ContentBody

from broker_core.arrow.parts import stream_of
from broker_core.broker.access.rights import Actor
from broker_core.core import errors, failpoint
from broker_core.core.credentials import Credentials
from broker_core.engine import BranchHeader
from broker_core.flight import contract
from broker_core.flight.authorization import Basic
from broker_core.launcher import Broker
from broker_core.message.message import MESSAGE_SCHEMA
from broker_core.server import quotas
from broker_core.server.alarm import AlarmLimits
from broker_core.server.flight.calls import Calls
from broker_core.server.quotas import Quota, QuotaLimits, UserLimit
from tests.amqp_peer import Closed, Peer, content, encoded, raw
from tests.amqp_server import AmqpServed, serving
from tests.progress import wait_until
from tests.server.flight.flight_calls import FILE, HEADER, Raw, messages, part_body
from txmq import BrokerClient

MiB = 1024 * 1024
USERS = ("ann", "bob", "carl")


@contextlib.contextmanager
def limited(folder: Path, *options: str) -> Iterator[AmqpServed]:
    """``txmq serve`` with these limits and three users, who may do everything."""
    users = folder / "users"
    users.write_text("".join(f"{user}:pw\n" for user in USERS))
    users.chmod(0o600)
    with serving(folder / "data", "--users", str(users), *options) as served:
        yield served


@contextlib.contextmanager
def in_process(folder: Path, limits: QuotaLimits) -> Iterator[tuple[Broker, Callable[[str], Peer]]]:
    """A broker of this process with these limits and the three users, and what connects one of them to it."""
    with contextlib.ExitStack() as stack:
        users = dict.fromkeys(USERS, "pw")
        broker = stack.enter_context(Broker.open(folder, users=users, quotas=limits, amqp=["127.0.0.1:0"]))
        where = broker.amqp_urls[0].removeprefix("amqp://")

        def client(user: str) -> Peer:
            return stack.enter_context(Peer(f"amqp://{user}:pw@{where}").opened(1))

        yield broker, client


def connected(served: AmqpServed, user: str, *channels: int) -> Peer:
    return Peer(f"amqp://{user}:pw@{served.host}:{served.port}").opened(*channels)


def refused(served: AmqpServed, user: str) -> str:
    """The text with which a connection is refused."""
    with Peer(f"amqp://{user}:pw@{served.host}:{served.port}") as client:
        client.tuned()
        client.send(0, c.Connection.TuneOk(2047, 131_072, 0), c.Connection.Open("/"))
        closed = client.expect(c.Connection.Close, 0)
        assert closed.reply_code == 530
        return str(closed.reply_text)


def confirmed(client: Peer, channel: int, queue: str, *bodies: bytes) -> None:
    """Publishes; each is durable and acknowledged when it returns."""
    client.call(channel, c.Queue.Declare(queue=queue, durable=True), c.Queue.DeclareOk)
    client.call(channel, c.Confirm.Select(), c.Confirm.SelectOk)
    for body in bodies:
        client.publish(channel, "", queue, body, delivery_mode=2)
        assert isinstance(client.receive()[1], c.Basic.Ack)


def works(client: Peer, channel: int = 1) -> None:
    client.call(channel, c.Basic.Qos(prefetch_count=1), c.Basic.QosOk)


def flight(served: AmqpServed, user: str) -> BrokerClient:
    return BrokerClient(served.url, credentials=Credentials(user=user, password="pw"))


def test_connections_of_a_user_and_in_total_are_limited_and_others_are_served(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(limited(tmp_path, "--user-connections", "2", "--connections", "3"))
        first, second = (stack.enter_context(connected(served, "ann", 1)) for _ in range(2))
        confirmed(first, 1, "q", b"1", b"2")
        for _ in range(3):
            assert refused(served, "ann") == (
                "NOT_ALLOWED - connection refused for user 'ann': user connection limit (2) is reached; raise "
                "--user-connections"
            )
        with connected(served, "bob", 1) as bob:
            works(bob)
            assert refused(served, "carl") == (
                "NOT_ALLOWED - connection refused: node connection limit (3) is reached; close some, or raise "
                "--connections"
            )
            works(first)
            works(second)
            bob.abort()  # a lost connection counts no more
        wait_until(lambda: _opens(served, "carl"))
        second.end()
        wait_until(lambda: _opens(served, "ann"))
        assert first.get(1, "q") is not None and first.get(1, "q") is not None
        said = (served.directory / "audit.log").read_text()
        assert "user connection limit (2)" in said and "node connection limit (3)" in said


def _opens(served: AmqpServed, user: str) -> bool:
    with Peer(f"amqp://{user}:pw@{served.host}:{served.port}") as client:
        client.tuned()
        client.send(0, c.Connection.TuneOk(2047, 131_072, 0), c.Connection.Open("/"))
        opened = isinstance(client.receive()[1], c.Connection.OpenOk)
        if opened:
            client.end()
        return opened


def closed_text(client: Peer) -> str:
    closed = client.expect(c.Connection.Close, 0)
    assert closed.reply_code == 530
    return str(closed.reply_text)


def test_channels_of_a_user_and_in_total_are_limited_at_both_listeners(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(
            limited(tmp_path, "--user-channels", "5", "--channels", "8", "--channel-max", "100")
        )
        first = stack.enter_context(connected_to_100(served, "ann", 1, 2, 3))
        with connected_to_100(served, "ann", 1, 2) as second:
            confirmed(second, 1, "q", b"1")
            second.send(3, c.Channel.Open())
            of_user = (
                "number of channels opened for user 'ann' has reached the maximum allowed user limit of (5)"
            )
            assert closed_text(second) == f"NOT_ALLOWED - {of_user}; raise --user-channels"
        with flight(served, "ann") as client:
            mine = [client.channel(), eventually_channel(client)]
            with pytest.raises(errors.NotAllowed, match=r"user limit of \(5\); raise --user-channels"):
                client.channel()
            bob = stack.enter_context(connected_to_100(served, "bob", 1, 2, 3))
            bob.send(4, c.Channel.Open())
            of_all = "number of channels opened on node 'txmq' has reached the maximum allowed limit of (8)"
            assert closed_text(bob) == f"NOT_ALLOWED - {of_all}; close some, or raise --channels"
            works(first)
            mine[0].queue_declare("mine")
            for each in mine:
                each.close()
        first.send(3, c.Channel.Close(200, "", 0, 0))
        first.expect(c.Channel.CloseOk, 3)
        for _ in range(20):  # a channel that was closed, by whomever, counts no more
            first.send(3, c.Channel.Open(), c.Basic.Get(queue="none"))
            first.expect(c.Channel.OpenOk, 3)
            assert first.expect(c.Channel.Close, 3).reply_code == 404
            first.send(3, c.Channel.CloseOk())
        again = stack.enter_context(connected_to_100(served, "ann", 1, 2))
        assert again.get(1, "q") is not None
        said = map(json.loads, (served.directory / "audit.log").read_text().splitlines())
        refusals = {
            (line["user"], line["listener"], line["why"]) for line in said if line["event"] == "refused"
        }
        user, node = f"{of_user}; raise --user-channels", f"{of_all}; close some, or raise --channels"
        assert refusals == {("ann", "amqp", user), ("ann", "flight", user), ("bob", "amqp", node)}


def connected_to_100(served: AmqpServed, user: str, *channels: int) -> Peer:
    return Peer(f"amqp://{user}:pw@{served.host}:{served.port}").opened(*channels, channel_max=100)


def eventually_channel(client: BrokerClient) -> Any:
    """The channels of the connection that was refused are ending."""
    found: list[Any] = []

    def opens() -> bool:
        try:
            found.append(client.channel())
        except errors.NotAllowed:
            return False
        return True

    wait_until(opens)
    return found[0]


def test_frame_channel_and_body_limits_are_offered_and_hold_at_both_listeners(tmp_path: Path) -> None:
    options = ("--frame-max", "8192", "--channel-max", "7", "--max-message-size", "1000")
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(limited(tmp_path, *options, "--connection-bytes", "20000"))

        def opened(*channels: int) -> Peer:
            peer = Peer(f"amqp://ann:pw@{served.host}:{served.port}")
            return stack.enter_context(peer).opened(*channels, frame_max=8192, channel_max=7)

        with Peer(f"amqp://ann:pw@{served.host}:{served.port}") as client:
            tune = client.tuned()
            assert (tune.frame_max, tune.channel_max) == (8192, 7)
        other = opened(1)
        confirmed(other, 1, "q", b"x" * 1000)
        for ending in (frame, channels, assembly):
            client = opened(1)
            assert ending(client) in _ENDS
        client = opened(1)
        client.publish(1, "", "q", b"x" * 1001)
        closed = client.expect(c.Channel.Close, 1)
        assert (closed.reply_code, closed.reply_text) == (
            406,
            "PRECONDITION_FAILED - message size 1001 is larger than configured max size 1000",
        )
        with flight(served, "ann") as far, far.channel() as channel:
            with pytest.raises(errors.TransactionTooLarge, match=r"limit of 1000.*--max-message-size"):
                channel.publish(b"x" * 1001, routing_key="q")
            channel.publish(b"x" * 1000, routing_key="q")
            header = contract.decode(BranchHeader, contract.encode(HEADER))
            with pytest.raises(errors.TransactionTooLarge, match=r"at most 1000.*--max-message-size"):
                far.stage(header, [messages(b"x", b"x" * 1001)])
            staged = far.stage(header, [messages(b"x" * 1000, routing_key="q")])
            assert far.commit_branches(HEADER["token"], [staged]) == 1
        assert other.count(1, "q") == 3


_ENDS = (
    (501, "FRAME_ERROR"),
    (530, "NOT_ALLOWED - number of channels opened (7) has reached the negotiated channel_max (7)"),
    (506, "RESOURCE_ERROR - contents in assembly need"),
)


def _ended(client: Peer) -> tuple[int, str]:
    closed = client.expect(c.Connection.Close, 0)
    code = int(closed.reply_code)
    if code == 506:
        assert "--connection-bytes" in closed.reply_text
    return code, {501: "FRAME_ERROR", 506: closed.reply_text[:42]}.get(code, closed.reply_text)


def frame(client: Peer) -> tuple[int, str]:
    client.write(raw(1, 1, bytes(8193)))
    return _ended(client)


def channels(client: Peer) -> tuple[int, str]:
    for number in range(2, 8):
        client.open(number)
    client.send(8, c.Channel.Open())
    return _ended(client)


def assembly(client: Peer) -> tuple[int, str]:
    """Contents on several channels, whose last byte never comes."""
    for number in range(2, 8):
        client.open(number)
    for number in range(1, 8):
        publish = c.Basic.Publish(exchange="", routing_key="x" * 255)
        head = raw(2, number, (60).to_bytes(2, "big") + bytes(2) + (1000).to_bytes(8, "big") + _HEADERS)
        client.write(encoded(number, publish) + head + raw(3, number, bytes(999)))
    return _ended(client)


# property flags: headers, and a table of one long string
_HEADERS = (
    (0x2000).to_bytes(2, "big")
    + (4000 + 7).to_bytes(4, "big")
    + b"\x01kS"
    + (4000).to_bytes(4, "big")
    + bytes(4000)
)


def test_calls_of_a_user_and_in_total_are_limited_and_a_client_tries_again(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(limited(tmp_path, "--user-calls", "2", "--calls", "3"))
        with flight(served, "bob") as client, client.channel() as channel:
            for queue in ("q", "r"):
                channel.queue_declare(queue)
        wait: dict[str, Any] = {"queues": ["q"], "ends": {"q": 0}, "timeout_s": 60.0}
        header = {user: Basic(user, "pw").header for user in USERS}

        def waiting(user: str, queue: str) -> threading.Thread:
            """A call that ends when something is published."""
            said = {**wait, "queues": [queue], "ends": {queue: 0}}
            thread = threading.Thread(target=Raw(served.url, header[user]).call, args=("engine.wait", said))
            thread.start()
            stack.callback(thread.join)
            return thread

        def asks(user: str) -> Any:
            return Raw(served.url, header[user]).call("engine.logs", {"queues": ["q"]})

        held = [waiting("ann", "q"), waiting("ann", "q")]
        wait_until(lambda: isinstance(asks("ann"), errors.Busy))
        text = str(asks("ann"))
        assert "2 calls of user 'ann' are in progress, which is the limit: raise --user-calls" in text
        assert not isinstance(asks("bob"), errors.TxmqError)
        held.append(waiting("bob", "r"))
        wait_until(lambda: isinstance(asks("bob"), errors.Busy))
        assert "3 calls are in progress, which is the limit: try again, or raise --calls" in str(asks("carl"))
        done = threading.Event()

        def patient() -> None:
            with flight(served, "carl") as client:
                assert client.logs(["q"]) == ["q"]
            done.set()

        client = threading.Thread(target=patient)
        client.start()
        stack.callback(client.join)
        assert not done.wait(0.5)
        with connected(served, "carl", 1) as amqp:  # the other listener has no part in it
            confirmed(amqp, 1, "q", b"1")
            confirmed(amqp, 1, "r", b"2")
            assert done.wait(60)
            for thread in held:
                thread.join()
            assert amqp.count(1, "q") == 1


def test_what_the_clients_of_a_user_leave_unread_is_limited(tmp_path: Path) -> None:
    """One message that is requested again and again would fill the memory for everybody."""
    limits = QuotaLimits(unread_bytes=UserLimit(total=50 * MiB, user=30 * MiB))
    with in_process(tmp_path, limits) as (broker, client):
        counted = broker.quotas.unread_bytes

        def unacknowledged() -> int:
            (queue,) = broker.queues()
            return queue.unacknowledged

        def getting(user: str) -> Peer:
            """It has requested the message and closed its channel, so that others may have the message too."""
            peer, connections = client(user), broker.quotas.connections
            opened = len(connections)
            peer.send(1, c.Basic.Get(queue="q"))
            wait_until(lambda: unacknowledged() == 1 or len(connections) < opened)  # or is refused and ended
            peer.send(1, c.Channel.Close(reply_code=200, reply_text="", class_id=0, method_id=0))
            wait_until(lambda: unacknowledged() == 0)
            return peer

        def reads(peer: Peer) -> int:
            """Up to the end of its channel."""
            size = 0
            while not isinstance(frame := peer.receive()[1], c.Channel.CloseOk):
                size += len(frame.value) if isinstance(frame, ContentBody) else 0
            return size

        with broker.channel() as channel:
            channel.queue_declare("q")
            channel.publish(bytes(12 * MiB), routing_key="q")
        clients = [getting("ann")]
        wait_until(lambda: counted.used_by.get("ann", 0) > 4 * MiB)
        while len(counted) == len(clients):
            assert counted.used_by["ann"] <= 30 * MiB
            clients.append(getting("ann"))
        with pytest.raises(Closed):
            reads(clients.pop())
        assert reads(getting("bob")) == 12 * MiB
        assert [reads(each) for each in clients] == [12 * MiB] * len(clients)
        wait_until(lambda: counted.used == 0)


def test_messages_that_do_not_come_whole_are_limited_by_their_bytes(tmp_path: Path) -> None:
    """Each connection may have some, and one peer may have many connections."""
    limits = QuotaLimits(content_bytes=UserLimit(total=8 * MiB, user=5 * MiB))
    with in_process(tmp_path, limits) as (broker, client):
        counted = broker.quotas.content_bytes

        def begun(user: str, size: int) -> Peer:
            """It has sent all but the end of a message."""
            peer = client(user)
            peer.write(content(1, c.Basic.Publish(routing_key="none"), b"x" * size)[:-9])
            return peer

        def published(user: str, size: int) -> None:
            peer = client(user)
            peer.call(1, c.Confirm.Select(), c.Confirm.SelectOk)
            peer.write(content(1, c.Basic.Publish(routing_key="none"), b"x" * size))
            peer.expect(c.Basic.Ack, 1)

        first = begun("ann", 3 * MiB)
        wait_until(lambda: counted.used > 2 * MiB)
        second = begun("ann", 3 * MiB)
        text = second.expect(c.Connection.Close).reply_text
        second.abort()  # a client that answers no close is waited for
        assert text.startswith("RESOURCE_ERROR - messages of user 'ann' that have not come whole take more")
        begun("bob", 4 * MiB)
        wait_until(lambda: counted.used > 6 * MiB)
        third = begun("carl", 3 * MiB)
        text = third.expect(c.Connection.Close).reply_text
        third.abort()
        assert text.startswith("RESOURCE_ERROR - messages that have not come whole take more")
        for user in USERS:  # what is small has no part in it
            published(user, 100_000)
        first.abort()
        wait_until(lambda: counted.used < 5 * MiB)
        published("ann", 3 * MiB)
        wait_until(lambda: counted.used < 5 * MiB)


def test_parts_in_flight_are_limited_by_their_bytes_and_what_was_begun_is_staged(tmp_path: Path) -> None:
    body = b"x" * 1000
    limits = QuotaLimits(part_bytes=UserLimit(total=20_000, user=12_000))
    users = dict.fromkeys(USERS, "pw")
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(Broker.open(tmp_path, users=users, quotas=limits))
        stack.callback(failpoint.disarm)
        with broker.channel() as channel:
            channel.queue_declare("in")
        reached, goes_on = threading.Semaphore(0), threading.Event()

        def hold(_name: str) -> None:
            reached.release()
            assert goes_on.wait(60)

        for hit in (1, 2):
            failpoint.arm("engine.stage.appended", hold, hit=hit)
        staged: list[Any] = []

        def stage(user: str, branch: str, rows: int) -> None:
            credentials = Credentials(user=user, password="pw")
            with BrokerClient(
                broker.url, credentials=credentials, reconnect_s=0.2, map_files=False
            ) as client:
                header = contract.decode(
                    BranchHeader, contract.encode({**HEADER, "token": user, "branch": branch})
                )
                try:
                    staged.append(client.stage(header, [messages(*[body] * rows)]))
                except errors.TxmqError as error:
                    staged.append(error)

        def begun(user: str, branch: str, rows: int) -> threading.Thread:
            thread = threading.Thread(target=stage, args=(user, branch, rows))
            thread.start()
            stack.callback(thread.join)
            stack.callback(goes_on.set)
            return thread

        threads = [begun("ann", "a", 10)]
        assert reached.acquire(timeout=60)
        stage("ann", "b", 5)
        assert isinstance(staged[0], errors.Busy) and "--user-part-bytes" in staged[0].message
        threads.append(begun("bob", "c", 8))
        assert reached.acquire(timeout=60)
        stage("carl", "d", 5)
        assert isinstance(staged[1], errors.Busy) and "raise --part-bytes" in staged[1].message
        goes_on.set()
        for thread in threads:
            thread.join()
        stage("carl", "e", 50)  # larger than the limit: where nothing else is staged
        assert [each.rows for each in staged[2:4]] in ([10, 8], [8, 10]) and staged[4].rows == 50
        for each in staged[2:]:
            user = {"a": "ann", "c": "bob", "e": "carl"}[each.branch]
            assert broker.engine.acting(Actor(user)).commit_branches(user, [each]) == each.rows
        assert [queue.messages for queue in broker.queues()] == [68]


def test_staged_bytes_of_a_user_are_limited_and_older_attempts_make_room(tmp_path: Path) -> None:
    def header(token: str, branch: str, app: str) -> BranchHeader:
        given = {**HEADER, "token": token, "branch": branch, "app_id": app, "query_id": "q", "batch_id": 0}
        return contract.decode(BranchHeader, contract.encode(given))

    body = b"x" * 1000
    with limited(tmp_path, "--staged-bytes", "10000") as served, flight(served, "ann") as client:
        with client.channel() as channel:
            channel.queue_declare("in")
        lost = client.open_batch("app", "q", 0, "fail").token
        client.stage(header(lost, "lost", "app"), [messages(*[body] * 5)])
        other = client.open_batch("other", "q", 0, "fail").token
        beside = client.stage(header(other, "other", "other"), [messages(*[body] * 2)])
        ours = client.open_batch("app", "q", 0, "fail").token
        first = client.stage(header(ours, "1", "app"), [messages(body)])
        assert staged(served) == [(lost, "app", 5), (other, "other", 2), (ours, "app", 1)]
        second = client.stage(header(ours, "2", "app"), [messages(*[body] * 3)])
        assert staged(served) == [(other, "other", 2), (ours, "app", 4)], "the older attempt makes room"
        with pytest.raises(errors.BatchDecided):
            client.stage(header(lost, "late", "app"), [messages(body)])
        for token, app in ((ours, "app"), (other, "other"), ("w", "")):
            with pytest.raises(errors.TransactionTooLarge, match=r"user 'ann' has staged 6.*--staged-bytes"):
                client.stage(header(token, "3", app), [messages(*[body] * 5)])
        with flight(served, "bob") as bob:
            write = bob.stage(header("w", "w", ""), [messages(*[body] * 8)])
            bob.commit_branches("w", [write])
        client.commit_batch("app", "q", 0, ours, [first, second])
        client.commit_batch("other", "q", 0, other, [beside])
        assert staged(served) == []
        following = client.open_batch("app", "q", 1, "fail").token
        last = {"branch": "4", "app_id": "app", "query_id": "q", "batch_id": 1}
        given = contract.encode({**HEADER, "token": following, **last})
        client.stage(contract.decode(BranchHeader, given), [messages(*[body] * 8)])
        with connected(served, "bob", 1) as amqp:
            assert amqp.count(1, "in") == 2 + 4 + 8


def test_rows_that_wait_for_a_table_are_limited_too_until_they_are_applied(tmp_path: Path) -> None:
    with limited(tmp_path, "--staged-bytes", "10000") as served, flight(served, "ann") as client:
        for batch in range(2):
            token = client.open_batch("app", "q", batch, "fail").token
            given = {
                **HEADER,
                "token": token,
                "branch": f"b{batch}",
                "kind": "append",
                "target": {"table": "t"},
            }
            header = contract.decode(
                BranchHeader, contract.encode({**given, "app_id": "app", "query_id": "q", "batch_id": batch})
            )
            if batch:
                with pytest.raises(errors.TransactionTooLarge, match="user 'ann' has staged"):
                    client.stage(header, [messages(b"x" * 6000)])
                client.mark_applied("app", 1)
            branch = client.stage(header, [messages(b"x" * 6000)])
            client.commit_batch("app", "q", batch, token, [branch])


def test_a_part_that_is_refused_for_its_bytes_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    with limited(tmp_path, "--staged-bytes", "1000000") as served, flight(served, "ann") as client:
        for number in range(20):
            header = contract.decode(BranchHeader, contract.encode({**HEADER, "token": f"t{number}"}))
            with contextlib.suppress(errors.TransactionTooLarge):
                client.stage(header, [messages(os.urandom(900_000))])
        files = (path for path in served.directory.rglob("*") if path.is_file())
        assert sum(path.stat().st_size for path in files) < 3_000_000


def staged(served: AmqpServed) -> list[tuple[str, str, int]]:
    """What ``txmq app staged`` lists."""
    command = [sys.executable, "-m", "txmq", "app", "staged", "--data", str(served.directory), "--json"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    listed = json.loads(found.stdout)
    assert all(row["idle_s"] >= 0 and row["size_bytes"] >= 1000 * row["rows"] for row in listed)
    return [(row["token"], row["app_id"], row["rows"]) for row in listed]


def test_publishers_of_flight_wait_while_memory_is_low_and_what_makes_room_goes_on() -> None:
    with Broker.memory() as broker, BrokerClient(broker.url) as client, client.channel() as channel:
        alarm = broker.quotas.alarm
        assert alarm is not None
        channel.queue_declare("q", durable=False)
        for _ in range(12):
            channel.publish(b"x" * quotas.MiB, routing_key="q")
        write = client.stage(_header("w"), [messages(b"staged", routing_key="q")])
        alarm.limits = AlarmLimits(memory_bytes=8 * quotas.MiB)
        raw = Raw(broker.url)
        wait_until(lambda: isinstance(raw.call("channel.publish", {"body": {"$bytes": ""}}), errors.Busy))
        rows = stream_of([messages(b"1")], MESSAGE_SCHEMA)
        head = {"header": {**HEADER, "token": "late"}, "part": 0}
        refusals = [
            raw.call("channel.publish_all", {"messages": []}),
            raw.action("stage", part_body(head, rows)),
            raw.call("adopt", {**head, "file": FILE}),
        ]
        for refusal in refusals:
            assert isinstance(refusal, errors.Busy), refusal
            assert "the broker is low on memory" in refusal.message
        descriptor = pyarrow.flight.FlightDescriptor.for_command(json.dumps(head["header"]).encode())
        with pytest.raises(
            pyarrow.flight.FlightServerError, match="TXMQ_BUSY"
        ):  # before it reads, or at the end
            raw.client.do_put(descriptor, MESSAGE_SCHEMA)[0].close()
        published = threading.Thread(target=channel.publish, args=(b"waits", "", "q"))
        published.start()
        assert client.commit_branches("w", [write]) == 1, "what is staged is committed"
        with client.channel() as consumer:
            assert consumer.queue_purge("q") == 13
            published.join()
            got = consumer.get("q", no_ack=True)
        assert got is not None and got.body == b"waits", "the client has tried again"


def test_publishers_of_flight_wait_while_the_disk_is_low_and_so_does_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is staged is committed, what is consumed makes room, and one that waits too long is told why."""
    limited, refused = Calls.limited, list[str]()

    def watched(self: Calls, name: str, user: str) -> contextlib.AbstractContextManager[None]:
        try:
            return limited(self, name, user)
        except errors.Busy:
            refused.append(name)
            raise

    monkeypatch.setattr(Calls, "limited", watched)
    with (
        Broker.open(tmp_path / "data") as broker,
        BrokerClient(broker.url) as client,
        client.channel() as channel,
    ):
        alarm = broker.quotas.alarm
        assert alarm is not None
        channel.queue_declare("q")
        channel.publish(b"first", routing_key="q")
        write = client.stage(_header("w"), [messages(b"staged", routing_key="q")])
        alarm.limits = AlarmLimits(disk_free_bytes=1 << 62)
        raw = Raw(broker.url)
        wait_until(lambda: isinstance(raw.call("channel.publish", {"body": {"$bytes": ""}}), errors.Busy))
        with (
            BrokerClient(broker.url, reconnect_s=0.5) as hasty,
            pytest.raises(errors.Busy, match=r"low on disk \(.* MiB free on the disk of .*, the limit is "),
        ):
            hasty.stage(_header("late"), [messages(b"late", routing_key="q")])
        refused.clear()
        command = [
            sys.executable,
            "-m",
            "txmq",
            "message",
            "publish",
            "--queue",
            "q",
            "--url",
            broker.url,
            "told",
        ]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as publishing:
            published = threading.Thread(target=channel.publish, args=(b"waits", "", "q"))
            published.start()
            wait_until(lambda: {"channel.publish", "channel.publish_all"} <= set(refused))
            assert client.commit_branches("w", [write]) == 1
            with client.channel() as consumer:
                got = [consumer.get("q", no_ack=True) for _ in range(3)]
            assert [one and one.message.body for one in got] == [b"first", b"staged", None]
            alarm.limits = AlarmLimits()
            assert (publishing.communicate(timeout=120), publishing.returncode) == (("published 1\n", ""), 0)
            published.join()
        assert sorted(each.messages for each in broker.queues()) == [2]


def _header(token: str) -> BranchHeader:
    header: BranchHeader = contract.decode(BranchHeader, contract.encode({**HEADER, "token": token}))
    return header


def test_connections_leave_the_store_the_files_that_it_needs(tmp_path: Path) -> None:
    """With 256 files, 128 may be connections, and 64 wait for their login, at most for a second."""
    shell = 'ulimit -n 256 && exec "$@"'
    command = [sys.executable, "-m", "txmq", "serve", "--data", str(tmp_path / "data")]
    command += ["--listen", "127.0.0.1:0", "--amqp", "127.0.0.1:0", "--handshake-timeout", "1"]
    process = subprocess.Popen(
        ["bash", "-c", shell, "-", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    with contextlib.ExitStack() as stack:
        stack.callback(process.stderr.close)
        stack.callback(process.stdout.close)
        stack.callback(process.wait)
        stack.callback(process.kill)
        url = process.stdout.readline().split()[2]
        first = stack.enter_context(Peer(url).opened(1))
        idle = [stack.enter_context(Peer(url)) for _ in range(100)]
        codes = []
        for number in range(200):
            client = stack.enter_context(Peer(url))
            client.tuned()
            client.send(0, c.Connection.TuneOk(2047, 131_072, 0), c.Connection.Open("/"))
            answer = client.receive()[1]
            codes.append(getattr(answer, "reply_code", 0))
            confirmed(first, 1, "q", b"%d" % number) if number % 50 == 0 else works(first)
        assert codes[:127] == [0] * 127 and codes[127:] == [530] * 73
        assert len(idle) == 100 and process.poll() is None
        assert first.count(1, "q") == 4
        late = stack.enter_context(Peer(url))
        late.tuned()
        with pytest.raises(Closed):  # it does not open the connection
            late.receive()


# -- a quota -------------------------------------------------------------------------------------------------


def test_what_leaves_a_quota_twice_counts_once_and_a_refusal_takes_nothing() -> None:
    refusal: Callable[[str, int, bool], errors.TxmqError] = lambda *said: errors.Busy(str(said))  # noqa: E731
    quota = Quota(UserLimit(total=3, user=2), refusal)
    quota.enter("a1", "a")
    quota.enter("a2", "a")
    for _ in range(3):
        with pytest.raises(errors.Busy, match="True"):
            quota.enter("a3", "a")
    quota.enter("b1", "b")
    for user in ("b", "c", "a"):
        with pytest.raises(errors.Busy):
            quota.enter("x", user)
    for _ in range(3):
        quota.leave("a1")
        quota.leave("never")
    quota.enter("c1", "c")
    with pytest.raises(errors.Busy, match="False"):
        quota.enter("c2", "c")
    quota.enter("nothing", "d", 0)
    for holder in ("a2", "b1", "c1", "nothing"):
        quota.leave(holder)
    assert len(quota) == 0 and quota.used == 0 and quota.used_by == {}


def test_half_of_the_files_are_for_connections() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert quotas.sockets() == (hard // 2 if hard != resource.RLIM_INFINITY else 1 << 30)
