"""A connection that ends while what it asked for waits for another thread's commit, over random histories
against a model.

After every loss each message is in exactly one place: ready, held by a prepared transaction, settled, or
dead-lettered.
"""

from __future__ import annotations

import contextlib
import random
import threading
from typing import Any

import pytest
from pamqp import base, commands

from tests.amqp_in_process import Leader, Served, ended, serving
from tests.amqp_peer import Closed, Peer, content, encoded, peer

B, C, H, Q, T = commands.Basic, commands.Connection, commands.Channel, commands.Queue, commands.Tx
ENDINGS = ("commit", "token", "prepare", "prepare", "rollback", "nothing")
LOSSES = ("abort", "abort", "channel.close", "connection.close", "connection error", "channel error")


def until(client: Peer, kind: type[base.Frame]) -> Any:
    """The next frame of this kind; what comes before is not looked at."""
    while not isinstance(frame := client.receive()[1], kind):
        pass
    return frame


def fence(client: Peer) -> None:
    """The broker has read all that was sent, whatever its channels wait for."""
    client.send(0, C.UpdateSecret(new_secret="s", reason="r"))
    until(client, C.UpdateSecretOk)


class History:
    """What should be where: bodies by place."""

    def __init__(self, seed: int, served: Served) -> None:
        self.random, self.served = random.Random(seed), served
        self.ready: set[bytes] = set()
        self.out: list[bytes] = []
        self.dead: list[bytes] = []
        self.prepared: dict[str, tuple[dict[bytes, str], list[bytes]]] = {}
        self.made = 0
        with contextlib.closing(served.broker.channel()) as channel:
            channel.queue_declare("out")
            channel.queue_declare("dead")
            channel.queue_declare(
                "in", arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
            )
            for number in range(self.random.randint(3, 20)):
                channel.publish(b"m%d" % number, routing_key="in")
                self.ready.add(b"m%d" % number)

    # -- the model -------------------------------------------------------------------------------------------

    def settle(self, settles: dict[bytes, str]) -> None:
        for body, outcome in settles.items():
            if outcome == "requeue":
                self.ready.add(body)
            elif outcome == "reject":
                self.dead.append(body)

    def done(
        self, taken: list[bytes], settles: dict[bytes, str], published: list[bytes], ending: str
    ) -> None:
        if ending in ("rollback", "nothing"):
            self.ready |= set(taken)
            return
        self.ready |= set(taken) - set(settles)
        if ending.startswith("prepare") and (settles or published):
            self.prepared[ending] = (settles, published)
        elif not ending.startswith("prepare"):
            self.settle(settles)
            self.out += published

    def decide(self, xid: str) -> None:
        settles, published = self.prepared.pop(xid)
        if self.random.random() < 0.5:
            self.served.broker.commit(xid)
            self.settle(settles)
            self.out += published
        else:
            self.served.broker.rollback(xid)
            self.ready |= set(settles)

    def check(self) -> None:
        held = sum(len(settles) for settles, _ in self.prepared.values())
        found = {queue.name: (queue.messages, queue.unacknowledged) for queue in self.served.broker.queues()}
        assert found == {
            "in": (len(self.ready) + held, held),
            "out": (len(self.out), 0),
            "dead": (len(self.dead), 0),
        }
        assert {info.xid for info in self.served.broker.prepared()} == set(self.prepared)

    def drained(self, queue: str) -> list[bytes]:
        with contextlib.closing(self.served.broker.channel()) as channel:
            bodies = []
            while (delivery := channel.get(queue, no_ack=True)) is not None:
                bodies.append(delivery.body)
            return sorted(bodies)

    # -- what is done ----------------------------------------------------------------------------------------

    def take(self, client: Peer) -> dict[int, bytes]:
        count = self.random.randint(0, min(6, len(self.ready)))
        taken: dict[int, bytes] = {}
        if not count:
            return taken
        if self.random.random() < 0.5:
            client.call(1, B.Qos(prefetch_count=count, global_=self.random.random() < 0.5), B.QosOk)
            client.call(1, B.Consume(queue="in"), B.ConsumeOk)
            while len(taken) < count:
                tag = client.expect(B.Deliver).delivery_tag
                taken[tag] = client.content()[1]
        else:
            for _ in range(count):
                found = client.get(1, "in", no_ack=False)
                assert found is not None
                taken[found[0].delivery_tag] = found[1]
        self.ready -= set(taken.values())
        return taken

    def settled(self, taken: dict[int, bytes]) -> tuple[dict[bytes, str], bytes]:
        """The outcome for some of them, and the commands that say so."""
        settles: dict[bytes, str] = {}
        said = b""
        for tag, body in taken.items():
            outcome = self.random.choice(("ack", "requeue", "reject", ""))
            if outcome:
                settles[body] = outcome
                said += encoded(
                    1, B.Ack(tag) if outcome == "ack" else B.Nack(tag, False, outcome == "requeue")
                )
        return settles, said

    def published(self) -> tuple[list[bytes], bytes]:
        bodies = [b"p%d" % number for number in range(self.made, self.made + self.random.randint(0, 3))]
        self.made += len(bodies)
        return bodies, b"".join(content(1, B.Publish(routing_key="out"), body) for body in bodies)

    def ending(self, transactional: bool) -> tuple[str, bytes]:
        if not transactional:
            return "at once", b""
        word = self.random.choice(ENDINGS)
        self.made += 1
        name = f"{word}-{self.made}"
        if word in ("token", "prepare"):
            named = content(1, B.Publish(exchange="amq.transaction", routing_key=word), name.encode())
            return name, named + encoded(1, T.Commit())
        return word, {"commit": encoded(1, T.Commit()), "rollback": encoded(1, T.Rollback())}.get(word, b"")

    def lose(self, client: Peer) -> None:
        how = self.random.choice(LOSSES)
        if how == "connection.close":
            client.send(0, C.Close(200, "", 0, 0))
        elif how == "connection error":
            client.send(9, B.Get(queue="in"))  # connection.close comes when what came before is answered
            connections = self.served.server.connections
            while not any(each.protocol.stopped or each.protocol.closing for each in list(connections)):
                threading.Event().wait(0.001)
        elif how == "channel error":
            client.send(1, B.Ack(99))
            fence(client)
        elif how == "channel.close":
            client.send(1, H.Close(200, "", 0, 0))
            fence(client)
        if how == "abort" or self.random.random() < 0.7:
            client.abort()

    def round(self) -> None:
        transactional = self.random.random() < 0.7
        with peer(self.served.url, 1) as client:
            if transactional:
                client.call(1, T.Select(), T.SelectOk)
            taken = self.take(client)
            settles, said = self.settled(taken)
            published, sent = self.published()
            ending, last = self.ending(transactional)
            with Leader(self.served):
                client.write(said + sent + last)
                fence(client)
                self.lose(client)
            self.done(list(taken.values()), settles, published, ending)
        ended(self.served)
        self.check()


@pytest.mark.parametrize("seed", range(60))
def test_each_message_is_in_one_place_when_a_connection_ends_with_work_in_flight(seed: int) -> None:
    with serving() as served:
        history = History(seed, served)
        for _ in range(6):
            history.round()
            for xid in list(history.prepared):
                if history.random.random() < 0.4:
                    history.decide(xid)
                    history.check()
        for xid in list(history.prepared):
            history.decide(xid)
        assert history.drained("in") == sorted(history.ready)
        assert history.drained("out") == sorted(history.out)
        assert history.drained("dead") == sorted(history.dead)


def test_a_prepared_transaction_keeps_its_deliveries_though_its_connection_was_lost_meanwhile() -> None:
    with serving() as served, peer(served.url, 1) as client:
        client.call(1, Q.Declare(queue="in"), Q.DeclareOk)
        client.publish(1, "", "in", b"job")
        client.call(1, T.Select(), T.SelectOk)
        assert client.get(1, "in", no_ack=False) is not None
        with Leader(served):
            client.write(
                encoded(1, B.Ack(1))
                + content(1, B.Publish(exchange="amq.transaction", routing_key="prepare"), b"xid")
            )
            client.send(1, T.Commit())
            fence(client)
            client.abort()
            while served.server.connections:
                threading.Event().wait(0.001)
        ended(served)
        assert [info.xid for info in served.broker.prepared()] == ["xid"]
        with contextlib.closing(served.broker.channel()) as other:
            assert other.get("in") is None
            served.broker.rollback("xid")
            delivery = other.get("in")
            assert delivery is not None and delivery.redelivered


def test_a_socket_that_ends_behind_a_close_of_the_client_does_not_cut_off_what_it_asked_for() -> None:
    with serving() as served, peer(served.url, 1) as client:
        client.call(1, Q.Declare(queue="q"), Q.DeclareOk)
        client.call(1, T.Select(), T.SelectOk)
        with Leader(served):
            work = content(1, B.Publish(routing_key="q"), b"x") + encoded(1, T.Commit())
            client.write(work + work + work)
            fence(client)
            client.send(0, C.Close(200, "", 0, 0))
            with contextlib.suppress(Closed):
                client.shutdown()
        ended(served)
        assert served.counts() == {"q": 3}
