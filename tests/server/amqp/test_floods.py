"""Whatever frames some clients send as fast as they can, others have their turn: every flood of the bench, by
counts of turns and frames instead of seconds.

Not here: seconds (``flood_p99_ms`` of the bench), and turns within one packet (``test_turns.py``).
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from pamqp import commands

from bench.floods import FLOODS, LOGIN, OPEN, Flood, _frame, _opened, _publish
from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.connection import AmqpConnection
from broker_core.amqp.v0_9_1.decoder import OPEN_BYTES, PIECE_BYTES, PIECE_FRAMES, PROTOCOL_HEADER, Decoder
from broker_core.amqp.v0_9_1.encoder import HEARTBEAT, encode_method
from broker_core.amqp.v0_9_1.events import Command, Failed, Violation
from broker_core.amqp.v0_9_1.negotiation import Offer
from broker_core.amqp.v0_9_1.states import ConnectionState
from broker_core.server import turns
from broker_core.server.amqp.input import Input
from broker_core.server.commit_queue import MOST, Lines
from broker_core.server.turns import SHARE_S, TURN_S, WINDOW_S, Turns
from tests.amqp_in_process import Served, serving
from tests.amqp_peer import Closed, Peer, content, peer
from tests.make import around
from tests.progress import wait_until

B, Q = commands.Basic, commands.Queue
BYTES = 48 * 1024  # of each flooding connection, that have come at once


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as found:
        yield found


def flooding(served: Served, flood: Flood, bytes_: int = BYTES) -> Peer:
    """A connection that has sent them; what it is answered is not read."""
    made = Peer(served.url)
    if flood.login:
        made.opened()
    else:
        made.write(PROTOCOL_HEADER)
    made.write(flood.begin + flood.again * (bytes_ // len(flood.again) + 1))
    return made


@pytest.mark.parametrize("name", FLOODS)
def test_a_client_waits_for_no_more_than_a_turn_of_each_that_floods(
    name: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each event is a turn: the bytes of ten that flood are thousands of turns."""
    for each in ("TURN_S", "SHARE_S", "WINDOW_S"):
        monkeypatch.setattr(turns, each, -1.0)
    with contextlib.ExitStack() as stack:
        victim = stack.enter_context(peer(served.url, 1))
        for queue in ("flooded", "empty", "victim"):
            victim.call(1, Q.Declare(queue=queue, durable=True), Q.DeclareOk)
        victim.call(1, commands.Confirm.Select(), commands.Confirm.SelectOk)
        taken: list[Input] = []
        turn = Input.turn

        def counted(self: Input, ends: float) -> bool:
            taken.append(self)
            return turn(self, ends)

        monkeypatch.setattr(Input, "turn", counted)
        flood = FLOODS[name]
        for _ in range(10):
            stack.enter_context(flooding(served, flood))
        waited = []
        for _ in range(5):
            victim.write(content(1, B.Publish(routing_key="victim"), b"x"))
            begun = len(taken)
            victim.expect(B.Ack, 1)
            waited.append(len(taken) - begun)
        assert min(waited) < 200, waited  # the least: between two looks of this thread others may go on


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("name", [name for name, flood in FLOODS.items() if flood.refused])
def test_what_no_honest_client_sends_is_refused_with_its_reason(name: str, cut: bool, served: Served) -> None:
    flood = FLOODS[name]
    with Peer(served.url) as client:
        if flood.login:
            client.opened()
        else:
            client.started()
        client.write(flood.begin)
        for _ in range(10_000):
            for piece in (
                [flood.again[at : at + 1] for at in range(len(flood.again))] if cut else [flood.again]
            ):
                client.socket.setblocking(True)
                with contextlib.suppress(OSError):
                    client.socket.sendall(piece)
            if served.in_loop(lambda: any(each.protocol.closing for each in served.server.connections)):
                break
        while not isinstance(frame := client.receive()[1], commands.Connection.Close):
            pass
        assert flood.refused in frame.reply_text


@pytest.mark.parametrize("name", FLOODS)
def test_a_piece_is_bounded_whatever_the_bytes_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flood = FLOODS[name]
    frames: list[int] = []

    def counted(frame: Any, *them: Any) -> None:
        frames.append(1)
        frame(*them)

    around(monkeypatch, Decoder, "_frame", counted)
    fed = Decoder(handshake=not flood.login)
    fed.add(
        (b"" if flood.login else PROTOCOL_HEADER)
        + flood.begin
        + flood.again * ((1 << 20) // len(flood.again))
    )
    pieces = 0
    while fed.undecoded and pieces < 100:
        events, pieces = fed.piece(), pieces + 1
        assert len(frames) <= PIECE_FRAMES
        # the shortest frame of a command on the fast path is one of qos
        assert len(events) <= PIECE_FRAMES + PIECE_BYTES // 12
        frames.clear()
    assert pieces > 10 or fed._over or name.startswith("publishes")  # publishes alike are one event


def test_heartbeats_that_came_while_the_client_was_not_read_are_no_flood() -> None:
    for passed_s, count, refused in (
        (3600, 7200, 0),
        (60, 6_000, 0),
        (60, 6_001, 1),
        (1, 200, 0),
        (1, 201, 1),
        (0, 101, 1),
    ):
        now, failed = 100.0, 0
        connection = AmqpConnection(Offer(), now)
        for data in (PROTOCOL_HEADER, LOGIN, OPEN, HEARTBEAT * count):
            connection.receive(data, now)
            while connection.due:
                for event in connection.piece(now):
                    failed += isinstance(event, Failed)
                    if isinstance(event, Command):
                        connection.authenticated()
            if data is OPEN:
                assert connection.state is ConnectionState.open
                now += passed_s  # it was not read
        assert failed == refused


class _Loop:
    def __init__(self) -> None:
        self.calls: list[object] = []

    def call_soon(self, function: object) -> None:
        self.calls.append(function)

    def iterate(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()  # type: ignore[operator]


class _Taker:
    """It always has more, ``cost_s`` at a time; ``once``: nothing is left after its turn. ``window_s``: nothing
    is left after so much time.
    """

    def __init__(
        self, clock: list[float], cost_s: float, *, once: bool = False, window_s: float = 0.0
    ) -> None:
        self.clock, self.cost_s, self.once, self.window_s = clock, cost_s, once, window_s
        self.spent, self.waits, self.reads, self.had = 0.0, False, True, 0.0
        self._windows = 1  # that have come

    def turn(self, ends: float) -> bool:
        while True:
            self.clock[0] += self.cost_s
            self.had += self.cost_s
            if self.window_s and self.had >= self._windows * self.window_s:
                self._windows += 1
                return False
            if self.once or self.clock[0] > ends:
                return not self.once

    def abort(self) -> None:
        raise AssertionError

    def stop_reading(self) -> None:
        self.reads = False


@pytest.mark.parametrize("count", [1, 50, 500])
@pytest.mark.parametrize("cost_s", [1e-6, 1e-4, 0.02])
def test_who_asks_for_little_is_next_and_the_rest_is_shared(count: int, cost_s: float) -> None:
    """By a clock of its own: a turn takes what it does."""
    clock = [0.0]
    loop = _Loop()
    line = Turns(loop, lambda: clock[0], lambda: clock[0])  # type: ignore[arg-type]
    floods = [_Taker(clock, cost_s) for _ in range(count)]
    victim = _Taker(clock, 1e-6, once=True)
    line.come(victim)
    for flood in floods:
        line.come(flood)
    for _ in range(count):  # all of them have come at once
        loop.iterate()
    for _ in range(200):
        began = clock[0]
        loop.iterate()
        assert clock[0] - began <= TURN_S + SHARE_S + 2 * cost_s + 1e-4
        had, began = victim.had, clock[0]
        line.come(victim)
        while victim.had == had:
            loop.iterate()
        assert clock[0] - began <= TURN_S + SHARE_S + 2 * cost_s + 1e-4  # it is within the next round
    shares = sorted(flood.had for flood in floods)
    assert shares[-1] - shares[0] <= 2 * (TURN_S + SHARE_S + cost_s)
    assert not any(flood.reads for flood in floods)


def test_a_turn_that_took_long_is_forgiven() -> None:
    """Another thread held the interpreter for a second: all others have had less, and do not go first for
    fifty.
    """
    clock = [0.0]
    loop = _Loop()
    line = Turns(loop, lambda: clock[0], lambda: clock[0])  # type: ignore[arg-type]
    floods = [_Taker(clock, 1e-4) for _ in range(50)]
    for flood in floods:
        line.come(flood)
    victim = _Taker(clock, 1.0, once=True)
    for _ in range(50):
        loop.iterate()
    for _ in range(5):
        had = victim.had
        line.come(victim)
        began = clock[0]
        while victim.had == had:
            loop.iterate()
        assert clock[0] - began - victim.cost_s < 50 * 3 * SHARE_S + TURN_S


@pytest.mark.parametrize("count", [1, 50])
def test_who_asks_for_little_is_in_the_commit_that_comes(count: int) -> None:
    """Others have come before it, and had all the time of the iteration: it has its share nevertheless, before
    what the loop does next.
    """
    clock = [0.0]
    loop = _Loop()
    line = Turns(loop, lambda: clock[0], lambda: clock[0])  # type: ignore[arg-type]
    victim = _Taker(clock, 1e-6, once=True)
    floods = [_Taker(clock, 1.5 * TURN_S / count, once=True) for _ in range(count)]
    line.come(victim)
    for _ in range(50):
        for flood in floods:
            line.come(flood)
        loop.iterate()
    for _ in range(10):
        for flood in floods:
            line.come(flood)
        had = victim.had
        line.come(victim)
        assert victim.had > had
        loop.iterate()


@pytest.mark.parametrize("caused", [0.0, 1.0, 4.0, 100.0])
def test_turns_are_shorter_where_the_commit_behind_them_takes_long(caused: float) -> None:
    """What the loop does between two rounds takes ``caused`` times as long as the turns."""
    clock = [0.0]
    loop = _Loop()
    line = Turns(loop, lambda: clock[0], lambda: clock[0])  # type: ignore[arg-type]
    floods = [_Taker(clock, 1e-5) for _ in range(5)]
    for flood in floods:
        line.come(flood)
    took = []
    for _ in range(100):
        began = clock[0]
        loop.iterate()
        took.append(clock[0] - began)
        clock[0] += caused * took[-1]
    share = max(TURN_S / (1 + caused), SHARE_S)
    assert took[-1] == pytest.approx(share, rel=0.2, abs=2e-5)


class _Rotating(_Taker):
    """Each turn replaces as many objects as it makes, as 25,000 channels do whose publishes wait in line: the
    collector, which counts what is made less what is freed, would come when all of them are new.
    """

    def __init__(self, clock: list[float]) -> None:
        super().__init__(clock, 2 * SHARE_S)
        self.line: deque[list[object]] = deque([[]] for _ in range(100_000))

    def turn(self, ends: float) -> bool:
        for _ in range(1000):
            self.line.popleft()
            self.line.append([[]])
        return super().turn(ends)


def test_the_collector_never_has_more_to_look_at_than_comes_within_two_turns() -> None:
    clock = [0.0]
    loop = _Loop()
    line = Turns(loop, lambda: clock[0], lambda: clock[0])  # type: ignore[arg-type]
    young: list[int] = []

    def looks(phase: str, _about: object) -> None:
        if phase == "start":
            young.append(len(gc.get_objects(generation=0)))

    line.come(_Rotating(clock))
    gc.collect()
    gc.callbacks.append(looks)
    before = gc.get_threshold()
    gc.set_threshold(5_000, 1, 5_000)  # as ``serve`` does
    try:
        for _ in range(50):
            loop.iterate()
        young.append(len(gc.get_objects(generation=0)))  # which the next one would look at
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(looks)
    assert max(young) < 40_000, young


@pytest.mark.parametrize("caused", [0.0, 4.0, 100.0])
def test_what_one_client_sends_at_a_time_is_not_split_over_commits(caused: float) -> None:
    """Nobody waits for a turn while it waits for its confirms, however long the commit takes."""
    clock = [0.0]
    loop = _Loop()
    line = Turns(loop, lambda: clock[0], lambda: clock[0])  # type: ignore[arg-type]
    client = _Taker(clock, 1e-5, window_s=0.9 * WINDOW_S)
    for _ in range(100):
        began = clock[0]
        line.come(client)
        loop.iterate()
        assert not client.waits, "the rest of its window is in another commit"
        clock[0] += caused * (clock[0] - began)


def test_places_in_a_commit_are_given_by_turns() -> None:
    line: Lines[tuple[str, int]] = Lines()
    for number in range(2000):
        line.put("many channels", ("many", number))
    for number in range(3):
        line.put("few", ("few", number))
    first = line.take(MOST)
    assert [each for each in first if each[0] == "few"] == [("few", number) for number in range(3)]
    assert len(first) == MOST and [number for who, number in first if who == "many"] == list(range(MOST - 3))
    rest = line.take(10_000)
    assert rest == [("many", number) for number in range(MOST - 3, 2000)] and not line


def test_who_had_nothing_in_line_is_first_and_the_others_have_a_quarter_of_the_places() -> None:
    """A commit takes as many works as there is time for: the first ones."""
    line: Lines[str] = Lines()
    for _ in range(100):
        for owner in range(50):
            line.put(owner, f"many {owner}")
    assert line.take(50) == [f"many {owner}" for owner in range(50)]
    line.put("few", "few")
    assert line.take(2) == ["few", "many 0"]
    served: list[str] = []
    for number in range(20):  # and so on, as fast as they are carried out
        for each in range(64):
            line.put(("few", number, each), "few")
        taken = line.take(16)
        assert taken[:12] == ["few"] * 12
        served += taken[12:]
    assert served == [f"many {number % 50}" for number in range(1, 81)]


@pytest.mark.parametrize("name", [name for name in FLOODS if name.startswith("500")])
def test_many_channels_have_no_more_works_in_a_commit_than_their_turn(name: str, served: Served) -> None:
    """A client on one channel is in each group, however many channels others have."""
    groups: list[int] = []
    commits = served.server.commits
    next_works = commits._next_works

    def noted() -> list[Any]:
        found = next_works()
        groups.append(len(found))
        return found

    with contextlib.ExitStack() as stack:
        victim = stack.enter_context(peer(served.url, 1))
        for queue in ("flooded", "victim"):
            victim.call(1, Q.Declare(queue=queue, durable=True), Q.DeclareOk)
        victim.call(1, commands.Confirm.Select(), commands.Confirm.SelectOk)
        commits._next_works = noted  # type: ignore[method-assign]
        clients = [flooding(served, FLOODS[name], 1) for _ in range(3)]
        for client in clients:
            stack.enter_context(client)
        for _ in range(20):
            victim.write(content(1, B.Publish(routing_key="victim"), b"x"))
            victim.expect(B.Ack, 1)
        assert max(groups) <= MOST
        for client in clients:  # all of them are answered: nobody is forgotten
            client.send(500, commands.Basic.Qos(prefetch_count=1))
            with contextlib.suppress(Closed):
                while not (isinstance(frame := client.receive(), tuple) and isinstance(frame[1], B.QosOk)):
                    pass


# -- before connection.open, and behind a refusal --------------------------------------------------------------


UNOPENED: dict[str, bytes] = {
    "heartbeats": HEARTBEAT,
    "start-ok": LOGIN,
    "tune-ok": encode_method(0, m.ConnectionTuneOk(0, 4096, 0)),
    "update-secret": encode_method(0, m.ConnectionUpdateSecret(b"x" * 4000, "")),
    "close-ok": encode_method(0, m.ConnectionCloseOk()),
    "secure-ok": encode_method(0, m.ConnectionSecureOk(b"x" * 3000)),
}


@pytest.mark.parametrize("cut", [1, 7, 1 << 20])
@pytest.mark.parametrize("name", UNOPENED)
def test_before_open_so_many_bytes_may_come_however_they_are_cut(name: str, cut: int) -> None:
    frame = UNOPENED[name]
    fed = Decoder()
    data = PROTOCOL_HEADER + frame * (2 * OPEN_BYTES // len(frame))
    events = [event for at in range(0, len(data), cut) for event in fed.feed(data[at : at + cut])]
    assert len(events) == 2 + OPEN_BYTES // len(frame)  # the header, and the violation
    assert isinstance(events[-1], Violation) and f"more than {OPEN_BYTES} bytes" in str(events[-1].error)
    assert not fed.undecoded


def test_what_comes_behind_open_has_no_such_bound() -> None:
    fed = Decoder()
    opened = PROTOCOL_HEADER + LOGIN + OPEN
    events = fed.feed(opened + HEARTBEAT * OPEN_BYTES + _opened(1))
    assert len(events) == 4 + OPEN_BYTES + 1 and isinstance(events[-1], Command)


REFUSED = {
    "heartbeats": PROTOCOL_HEADER + HEARTBEAT * 200,
    "no protocol": b"GET / HTTP/1.1\r\n\r\n",
    "a body": PROTOCOL_HEADER + _frame(3, b"x"),
    "a header": PROTOCOL_HEADER + _frame(2, bytes(14)),
    "a method of a channel": PROTOCOL_HEADER + _opened(1),
    "an unknown frame": PROTOCOL_HEADER + _frame(7, b"x"),
    "a large frame": PROTOCOL_HEADER + _frame(1, bytes(5000), 0),
    "a wrong password": PROTOCOL_HEADER
    + encode_method(0, m.ConnectionStartOk({}, "PLAIN", b"\0guest\0wrong", "en_US")),
    "a step too early": PROTOCOL_HEADER + OPEN,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_client_without_a_login_that_was_refused_is_read_no_further(name: str, served: Served) -> None:
    """Whatever it sends then, and also in single bytes: its socket fills, and is closed when its time is over."""
    for whole in (True, False):
        with Peer(served.url) as client:
            data = REFUSED[name]
            for at in range(0, len(data), len(data) if whole else 1):
                client.write(data[at : at + len(data)] if whole else data[at : at + 1])

            def refused() -> Any:
                return served.in_loop(
                    lambda: [each for each in served.server.connections if each.protocol.closing],
                )

            (connection,) = wait_until(refused, f"{name} is refused")
            client.socket.setblocking(False)
            sent = 0

            def stuck(connection: Any = connection) -> bool:
                """Nothing more can be sent, in two looks."""
                nonlocal sent
                before = sent
                with contextlib.suppress(BlockingIOError, OSError):
                    while True:
                        sent += client.socket.send(b"x" * 65_536)
                return sent == before and not connection.input._reads

            wait_until(stuck, "it is not read any more", poll_s=0.05)
            assert OPEN_BYTES < connection.input._late < OPEN_BYTES + 1024 * 1024
            connection.input.abort()


@pytest.mark.parametrize("megabytes", [0, 8])
def test_a_client_that_has_sent_much_behind_an_error_still_comes_to_its_close_ok(
    megabytes: int, served: Served
) -> None:
    with peer(served.url, 1) as client:
        client.write(_frame(7, b"unknown"))
        sender = threading.Thread(target=client.write, args=(_publish(1) * (megabytes << 20 >> 6),))
        sender.start()
        while not isinstance(client.receive()[1], commands.Connection.Close):
            pass
        sender.join()
        client.send(0, commands.Connection.CloseOk())
        with pytest.raises(Closed):
            client.receive()
        client.abort()
        wait_until(lambda: not served.server.connections, "its socket is closed")


def test_who_answers_a_close_does_not_wait_for_others(served: Served) -> None:
    """However many are closed at once."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(peer(served.url, 1)) for _ in range(20)]
        drained: list[object] = []
        served.server.turns.drain = drained.append  # type: ignore[method-assign]
        for client in clients:
            client.write(_frame(7, b"unknown"))
            while not isinstance(client.receive()[1], commands.Connection.Close):
                pass
            client.send(0, commands.Connection.CloseOk())
        for client in clients:
            with pytest.raises(Closed):
                client.receive()
            client.abort()
        wait_until(lambda: not served.server.connections, "all sockets are closed")
        assert drained == []


def test_closed_connections_are_read_one_at_a_time() -> None:
    calls: list[Any] = []
    read: list[int] = []

    class Later:
        def call_later(self, _seconds: float, function: Any) -> None:
            calls.append(function)

    class Reader:
        def __init__(self, number: int) -> None:
            self.number = number

        def read(self) -> None:
            read.append(self.number)
            if len(read) < 20:
                line.drain(self)  # type: ignore[arg-type]

    line = Turns(Later())  # type: ignore[arg-type]
    for number in range(5):
        line.drain(Reader(number))  # type: ignore[arg-type]
    while calls:
        assert len(calls) == 1
        calls.pop()()
    assert read[:20] == [0, 1, 2, 3, 4] * 4 and len(read) == 24
    line.drain(Reader(9))  # type: ignore[arg-type]
    assert len(calls) == 1
