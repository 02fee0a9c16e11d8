"""Nobody waits for another client's long work: a packet of many commands has turns, and what is too much for
one commit is several, in order.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from pamqp import commands

from broker_core.broker.message import purge
from broker_core.broker.message.purge import Purge
from broker_core.broker.transaction import transaction
from broker_core.core.errors import ResourceShortage
from broker_core.message.message import Message
from broker_core.node import channel_commit
from broker_core.node.channel_commit import ChannelCommits
from broker_core.server import turns
from broker_core.server.amqp.input import Input
from broker_core.store.memory import MemoryStore
from tests.amqp_in_process import Leader, Served, ended, serving
from tests.amqp_peer import Peer, content, encoded, peer

Q, B, X, T = commands.Queue, commands.Basic, commands.Exchange, commands.Tx
COUNT = 120


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as found:
        yield found


@pytest.fixture
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command is a turn."""
    for name in ("TURN_S", "SHARE_S", "WINDOW_S"):
        monkeypatch.setattr(turns, name, -1.0)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purge, "PARTS", 10)
    for name, value in {"MANY_ENTRIES": 100, "COST": 100, "ENTRY": 1, "DROP": 1, "LETTER": 2}.items():
        monkeypatch.setattr(channel_commit, name, value)
    for name in ("PIECE_SETTLES", "PIECE_REJECTS"):
        monkeypatch.setattr(channel_commit, name, 10)


def fanned(client: Peer, queues: int, **last: object) -> list[str]:
    """Queues that all get what is published to ``f``; the last has these arguments."""
    names = [f"q{number}" for number in range(queues)]
    client.call(1, X.Declare(exchange="f", exchange_type="fanout"), X.DeclareOk)
    for name in names:
        arguments = dict(last) if name == names[-1] else {}
        client.call(1, Q.Declare(queue=name, durable=True, arguments=arguments), Q.DeclareOk)
        client.call(1, Q.Bind(queue=name, exchange="f"), Q.BindOk)
    return names


def publishes(numbers: Sequence[int], exchange: str, routing_key: str = "") -> bytes:
    publish = B.Publish(exchange=exchange, routing_key=routing_key)
    return b"".join(content(1, publish, b"%d" % number, delivery_mode=2) for number in numbers)


def unlike(numbers: Sequence[int]) -> bytes:
    """Each with a key of its own, so that each is a command."""
    return b"".join(publishes([number], "f", f"{number}") for number in numbers)


def bodies(client: Peer, queue: str) -> list[bytes]:
    return [body for _, body in client.drain(1, queue)]


def sent(numbers: Sequence[int]) -> list[bytes]:
    return [b"%d" % number for number in numbers]


def hold_all(client: Peer) -> None:
    """Publishes ``COUNT`` messages to ``q``, which the channel holds then."""
    client.write(publishes(range(COUNT), "", "q"))
    client.call(1, B.Consume(queue="q", consumer_tag="c"), B.ConsumeOk)
    for _ in range(COUNT):
        client.expect(B.Deliver, 1)
        client.content(1)
    client.call(1, B.Cancel("c"), B.CancelOk)


def confirmed(client: Peer, count: int) -> list[int]:
    """The numbers of acks, which are in order, until ``count`` is confirmed."""
    found: list[int] = []
    while not found or found[-1] < count:
        ack = client.expect(B.Ack, 1)
        assert ack.delivery_tag > (found[-1] if found else 0)
        assert ack.multiple or ack.delivery_tag == (found[-1] if found else 0) + 1
        found.append(ack.delivery_tag)
    assert found[-1] == count
    return found


@contextlib.contextmanager
def busy(served: Served) -> Iterator[None]:
    """The loop does nothing else meanwhile."""
    begun, over = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        over.wait(600)

    served.server.loop.call_soon_threadsafe(wait)
    assert begun.wait(600)
    try:
        yield
    finally:
        over.set()


def test_others_have_their_turn_between_the_commands_of_one_packet(served: Served, short_turns: None) -> None:
    with peer(served.url, 1) as client, peer(served.url, 1) as other:
        fanned(client, 1)
        client.call(1, commands.Confirm.Select(), commands.Confirm.SelectOk)
        look = encoded(1, Q.Declare(queue="q0", passive=True))
        with busy(served):  # so that both packets are there
            client.write(unlike(range(COUNT)))
            other.write(look * COUNT)
        seen = [other.expect(Q.DeclareOk, 1).message_count for _ in range(COUNT)]
        assert sum(count < COUNT for count in seen) > COUNT // 4
        confirmed(client, COUNT)
        assert bodies(client, "q0") == sent(range(COUNT))


def test_a_connection_has_one_turn_in_an_iteration_of_the_loop(
    served: Served, short_turns: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where publishes that came together have to be carried out one by one."""
    going = []
    turn = Input.turn

    def counted(self: Input, ends: float) -> bool:
        going.append(1)
        served.server.loop.call_soon(going.append, 0)
        return turn(self, ends)

    with peer(served.url, 1) as client:
        fanned(client, 1)
        client.call(1, commands.Confirm.Select(), commands.Confirm.SelectOk)
        publish = B.Publish(exchange="f")
        alike = b"".join(content(1, publish, b"%d" % at, expiration="60000") for at in range(COUNT))
        monkeypatch.setattr(Input, "turn", counted)
        client.write(alike)
        confirmed(client, COUNT)
        assert going.count(1) >= COUNT - 10
        # what comes may be carried out before the round of the iteration
        assert sum(left == right == 1 for left, right in pairwise(going)) <= 1
        assert bodies(client, "q0") == sent(range(COUNT))


def test_what_waits_behind_a_commit_has_turns_and_stays_in_order(served: Served, short_turns: None) -> None:
    with peer(served.url, 1) as client, peer(served.url, 1) as other:
        fanned(client, 1)
        client.call(1, T.Select(), T.SelectOk)
        with Leader(served):
            client.write(
                unlike([0])
                + encoded(1, T.Commit())
                + unlike(range(1, 10))
                + encoded(1, T.Rollback())
                + unlike(range(10, COUNT))
                + encoded(1, T.Commit())
                + encoded(1, Q.Declare(queue="q0", passive=True))
            )
        for answer in (T.CommitOk, T.RollbackOk, T.CommitOk):
            client.expect(answer, 1)
        assert client.expect(Q.DeclareOk, 1).message_count == COUNT - 9
        assert bodies(other, "q0") == sent([0, *range(10, COUNT)])


def test_a_client_that_ends_its_half_behind_a_packet_of_many_turns_has_published_all(
    served: Served, short_turns: None
) -> None:
    with peer(served.url, 1) as other:
        fanned(other, 1)
        with peer(served.url, 1) as client:
            client.write(unlike(range(COUNT)))
            client.shutdown()
            while other.count(1, "q0") < COUNT:
                pass
        assert bodies(other, "q0") == sent(range(COUNT))


@pytest.mark.parametrize("last", [{}, {"x-max-length": 10 * COUNT}, {"x-max-length": 40}])
def test_publishes_to_very_many_queues_are_several_commits_in_order(
    served: Served, small_pieces: None, last: dict[str, object]
) -> None:
    with peer(served.url, 1) as client, peer(served.url, 1) as other:
        names = fanned(client, 20, **last)
        client.call(1, commands.Confirm.Select(), commands.Confirm.SelectOk)
        client.call(1, Q.Declare(queue="after"), Q.DeclareOk)
        done = COUNT // 2
        client.write(publishes(range(done), "f"))
        client.write(publishes(range(done, COUNT), "f") + publishes([COUNT], "", "after"))
        confirmed(client, COUNT + 1)
        assert other.count(1, "after") == 1
        for name in names[:-1]:
            assert bodies(client, name) == sent(range(COUNT))
        kept = 40 if last.get("x-max-length") == 40 else COUNT
        assert bodies(client, names[-1]) == sent(range(COUNT - kept, COUNT))


def test_an_alike_route_to_very_many_queues_is_one_run_of_each(served: Served, small_pieces: None) -> None:
    with peer(served.url, 1) as client:
        names = fanned(client, 20)
        client.call(1, commands.Confirm.Select(), commands.Confirm.SelectOk)
        client.write(publishes(range(COUNT), "f"))
        confirmed(client, COUNT)
        runs = [len(served.broker.state.topology.queue(name).log.runs) for name in names]
        assert max(runs) <= 1 + COUNT // 60 and bodies(client, "q7") == sent(range(COUNT))


def test_a_piece_that_fails_takes_the_rest_of_its_tick_with_it(
    served: Served, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    spill_large = ChannelCommits.spill_large

    def fails(self: ChannelCommits, transaction: object, **named: bool) -> None:
        calls.append(transaction)
        if len(calls) == 3:
            raise ResourceShortage("the disk is full", "make room")
        spill_large(self, transaction, **named)  # type: ignore[arg-type]

    with peer(served.url, 1) as client, peer(served.url, 1) as other:
        fanned(client, 20, **{"x-max-length": 10 * COUNT})
        client.call(1, commands.Confirm.Select(), commands.Confirm.SelectOk)
        monkeypatch.setattr(ChannelCommits, "spill_large", fails)
        client.write(publishes(range(COUNT), "f"))
        acked = nacked = 0
        while True:
            _, frame = client.receive()
            if isinstance(frame, B.Ack):
                acked = frame.delivery_tag
            elif isinstance(frame, B.Nack):
                nacked += 1
            else:
                assert isinstance(frame, commands.Channel.Close), frame
                break
        assert 0 < acked < COUNT and nacked > 0 and acked + nacked <= COUNT
        monkeypatch.undo()
        found = bodies(other, "q0")
        assert found[:acked] == sent(range(acked)) and found == sent(range(len(found)))


def test_a_requeue_beside_very_many_rejects_is_one_commit_among_theirs(
    served: Served, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_commit, "MANY_REJECTS", 20)
    with peer(served.url, 1) as client:
        client.call(1, Q.Declare(queue="dead"), Q.DeclareOk)
        dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
        client.call(1, Q.Declare(queue="q", arguments=dead), Q.DeclareOk)
        hold_all(client)
        taken: list[list[str]] = []
        pieces = ChannelCommits.pieces

        def noted(self: ChannelCommits, whole: transaction.Transaction) -> list[transaction.Transaction]:
            found = pieces(self, whole)
            taken.extend([settle.outcome for settle in piece.settles] for piece in found)
            return found

        monkeypatch.setattr(ChannelCommits, "pieces", noted)
        requeues = [B.Reject(delivery_tag=tag, requeue=True) for tag in range(1, 31)]
        client.send(1, *requeues, B.Nack(delivery_tag=0, multiple=True, requeue=False))
        assert client.count(1, "q") == 30 and client.count(1, "dead") == COUNT - 30
        assert taken == [*[["reject"] * 10] * 9, ["requeue"] * 30]
        assert bodies(client, "q") == sent(range(30)) and bodies(client, "dead") == sent(range(30, COUNT))


def test_a_purge_is_several_commits_and_counts_all(
    served: Served, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with peer(served.url, 1) as client, peer(served.url, 1) as other:
        client.call(1, Q.Declare(queue="q"), Q.DeclareOk)
        hold_all(client)
        for tag in range(1, COUNT, 4):
            client.send(1, B.Ack(delivery_tag=tag))
        for tag in range(3, COUNT + 1, 4):
            client.send(1, B.Reject(delivery_tag=tag, requeue=True))
        assert client.count(1, "q") == COUNT // 4  # the others are held
        steps = []
        step = Purge.step
        monkeypatch.setattr(Purge, "step", lambda *them: steps.append(step(*them)) or steps[-1])
        assert other.call(1, Q.Purge(queue="q"), Q.PurgeOk).message_count == COUNT // 4
        assert steps == [False, False, True]
        assert other.count(1, "q") == 0
        client.send(1, B.Nack(delivery_tag=0, multiple=True, requeue=True))
        assert client.count(1, "q") == COUNT // 2
        assert bodies(client, "q") == sent(range(1, COUNT, 2))


def test_a_purge_does_not_go_on_in_a_queue_of_the_same_name(served: Served, small_pieces: None) -> None:
    with served.broker.channel() as channel, served.broker.channel() as holder:
        channel.queue_declare("q")
        for number in range(40):
            channel.publish(b"%d" % number, "", "q")
        held = [holder.get("q") for _ in range(40)]
        for each in held[::2]:
            assert each is not None
            holder.nack(each.tag, requeue=True)
        going = Purge(served.broker.state.topology, "q")
        assert not served.broker.run(going.step)
        assert going.count == 10
        channel.queue_delete("q")
        channel.queue_declare("q")
        channel.publish(b"new", "", "q")
        assert served.broker.run(going.step) and going.count == 10
        found = channel.get("q")
        assert found is not None and found.message == Message(b"new", "q", "", b"")


@pytest.mark.parametrize("way", ["recover", "close", "lost", "ack"])
def test_what_a_channel_holds_is_given_back_or_acked_in_parts(
    served: Served, small_pieces: None, way: str
) -> None:
    """Two consumers hold every second message each."""
    with peer(served.url, 1, 2) as client, peer(served.url, 1) as other:
        client.call(1, Q.Declare(queue="q"), Q.DeclareOk)
        held: dict[bytes, int] = {}
        for channel in (1, 2):
            client.call(channel, B.Consume(queue="q", consumer_tag=f"c{channel}"), B.ConsumeOk)
        client.write(publishes(range(COUNT), "", "q"))
        for _ in range(COUNT):
            channel, deliver = client.receive()
            assert isinstance(deliver, B.Deliver) and not deliver.redelivered
            held[client.content(channel)[1]] = channel
        mine = [body for body in sent(range(COUNT)) if held[body] == 1]
        assert 30 < len(mine) < 90
        for channel in (1, 2):
            client.call(channel, B.Cancel(f"c{channel}"), B.CancelOk)
        if way == "recover":
            client.call(1, B.Recover(requeue=True), B.RecoverOk)
        elif way == "close":
            client.call(1, commands.Channel.Close(200, "bye", 0, 0), commands.Channel.CloseOk)
        elif way == "ack":
            client.send(1, B.Ack(delivery_tag=0, multiple=True))
            client.count(1, "q")
        else:
            client.abort()
            ended(served, other)
            mine = sent(range(COUNT))
        wanted = [] if way == "ack" else mine
        assert other.count(1, "q") == len(wanted)
        assert other.drain(1, "q") == [(True, body) for body in wanted]
        if way == "ack":
            client.abort()
            ended(served, other)
            assert bodies(other, "q") == [body for body in sent(range(COUNT)) if held[body] == 2]


def test_a_client_that_is_lost_while_its_transaction_is_written_leaves_nothing(
    small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    entered, go_on = threading.Event(), threading.Event()
    write = ChannelCommits.write

    def slow(self: ChannelCommits, transaction: object) -> object:
        entered.set()
        assert go_on.wait(600)
        return write(self, transaction)  # type: ignore[arg-type]

    with serving(store=store) as served, peer(served.url, 1) as client, peer(served.url, 1) as other:
        fanned(client, 20)
        client.call(1, T.Select(), T.SelectOk)
        client.write(publishes(range(COUNT), "f"))
        with monkeypatch.context() as patch:
            patch.setattr(ChannelCommits, "write", slow)
            client.send(1, T.Commit())
            assert entered.wait(600)
            assert other.count(1, "q0") == 0  # nobody waits for it
            client.abort()
            while len(served.server.connections) > 1:
                threading.Event().wait(0.005)
            go_on.set()
            ended(served, other)
        assert served.counts()["q0"] == 0
        assert not store.staged and not store.content.blocks


@pytest.mark.parametrize("way", ["nack", "recover", "close", "lost"])
def test_what_is_given_back_comes_before_what_was_published_later(
    served: Served, small_pieces: None, way: str
) -> None:
    """A consumer waits behind the single active one, which has its prefetch limit."""
    with peer(served.url, 1) as client, peer(served.url, 1) as other:
        single = {"x-single-active-consumer": True}
        client.call(1, Q.Declare(queue="q", arguments=single), Q.DeclareOk)
        client.call(1, B.Qos(prefetch_count=COUNT), B.QosOk)
        client.call(1, B.Consume(queue="q", consumer_tag="c"), B.ConsumeOk)
        other.call(1, B.Consume(queue="q", consumer_tag="c"), B.ConsumeOk)
        client.write(publishes(range(2 * COUNT), "", "q"))
        for _ in range(COUNT):
            client.expect(B.Deliver, 1)
            client.content(1)
        if way == "lost":
            client.abort()
        elif way == "close":
            client.send(1, commands.Channel.Close(200, "bye", 0, 0))
        elif way == "nack":
            client.send(1, B.Cancel("c"), B.Nack(delivery_tag=0, multiple=True, requeue=True))
        else:
            client.send(1, B.Cancel("c"), B.Recover(requeue=True))
        found = []
        for _ in range(2 * COUNT):
            other.expect(B.Deliver, 1)
            found.append(other.content(1)[1])
        first = found.index(b"0")
        assert found[first : first + COUNT] == sent(range(COUNT))
        assert found[:first] + found[first + COUNT :] == sent(range(COUNT, 2 * COUNT))
        assert first == 0 or way in ("nack", "recover")
