"""What mallory tries, whatever it is answered. Each step says which of its calls a right of mallory permits to
change what others have; ``Run.tries`` leaves out the others where the honest are alone.

A call that touches mallory's own things alone is never permitted to change anything of others.
Not here: the honest, and both runs (``interference.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pamqp import commands as c

from broker_core.broker.access.users import own_id, write_key
from broker_core.client.broker import BrokerClient
from broker_core.core import errors
from broker_core.engine import START, BranchHeader, Limit, Origin, ReadTicket, StagedBranch
from broker_core.launcher import Broker
from tests.amqp_peer import Closed, Peer
from tests.model.grants import Grant
from tests.server.http.http_client import Api
from tests.server.http.http_rows import Row
from tests.server.http.http_rows import rows as http_rows

PASSWORD = "secret of all"
ANN, MALLORY, ROOT = "ann", "mallory", "root"
APP, QUERY, TOKEN, WRITE, XID, CHANNEL = "app", "q-of-ann", "t-of-ann", "w-of-ann", "x", "c-of-ann"
NAMED = "amq.transaction"
ROWS = pa.record_batch({"body": pa.array([b"row"], pa.binary())})
HTTP_BODY = {
    "count": 1,
    "ackmode": "ack_requeue_true",
    "encoding": "auto",
    "properties": {"headers": {"CC": ["secret.a"]}},
    "routing_key": "public",
    "payload": "forged",
    "payload_encoding": "string",
    "arguments": {},
    "type": "topic",
    "durable": True,
    "password": "guessed",
    "tags": "administrator",
    "configure": ".*",
    "write": ".*",
    "read": ".*",
}
Call = Callable[[Any], object]  # with a client of who calls


class Attacks:
    """``root`` does, where the honest are ``alone``, what a right of mallory permits."""

    broker: Broker
    vhost: str
    grant: Grant
    alone: bool
    mallory: Any
    root: BrokerClient
    raw: Any
    late: Any
    held: Any
    http: Api
    learnt: list[str]
    shown: set[str]
    staged: dict[str, StagedBranch]
    batch: int

    def tries(self, *calls: Call, permitted: bool = False) -> None:
        """Each call as mallory; as root where the honest are alone, if it is ``permitted``."""
        who = self.root if self.alone else self.mallory
        for call in calls if permitted or not self.alone else ():
            with contextlib.suppress(errors.TxmqError):
                call(who)

    def on_channel(self, word: str, *given: Any, **named: Any) -> Call:
        def call(who: Any) -> None:
            with who.channel() as channel:
                getattr(channel, word)(*given, **named)

        return call

    def may_read(self, queue: str) -> bool:
        return queue != "private" and self.grant.may("read", queue)  # that one is of a connection

    def may_configure(self, queue: str) -> bool:
        return queue != "private" and self.grant.may("configure", queue)

    def m_asks(self) -> None:
        self.tries(
            lambda who: who.last_entry(APP),
            lambda who: who.app(APP),
            lambda who: who.unapplied(APP),
            lambda who: who.committed("invoice"),
            lambda who: who.outcome(XID, of=ANN),
            lambda who: who.recover(),
            lambda who: who.recover(of=ANN),
            lambda who: who.resolve(APP, {"in": START}, {"in": 3}),
        )

    def m_applies(self) -> None:
        grant = self.grant
        self.tries(
            lambda who: who.ack(APP, {"in": 3}), permitted=grant.administers and grant.may("read", "in")
        )
        self.tries(
            lambda who: who.mark_applied(APP, 1),
            lambda who: who.mark_applied(APP, 2),
            lambda who: who.skip(APP, 1, ["b0"], "/tmp"),
            permitted=grant.administers,
        )

    def m_steals(self) -> None:
        """By query and batch."""

        def steal(who: Any) -> None:
            opened = who.open_batch("m-app", QUERY, self.batch, "resume")
            who.commit_batch("m-app", QUERY, self.batch, opened.token, [])

        if QUERY in self.shown:
            self.tries(steal)

    def m_poisons(self) -> None:
        if not self.alone:
            with contextlib.suppress(errors.TxmqError), self.mallory.channel() as channel:
                channel.queue_declare("m-in")
            with contextlib.suppress(errors.TxmqError), self.broker.channel(vhost=self.vhost) as channel:
                channel.publish(b"bait", routing_key="m-in")
            self.tries(self._reads_as_ann)

    def _reads_as_ann(self, who: Any) -> None:
        start = {"m-in": START}
        end = who.claim("m-source", ["m-in"], start, Limit(), Origin("earliest"), "resume")
        ranges = who.resolve("m-source", start, end)
        for batch in range(3):
            slices = tuple((log, first, last) for log, (first, last) in ranges.items())
            list(who.read(ReadTicket("m-source", QUERY, batch, ranges, slices)))

    def m_opens(self) -> None:
        token = f"{TOKEN}{self.batch}"
        self.tries(
            lambda who: who.open_batch("m-app", "m-query", 0, "resume", token=token),
            lambda who: who.commit_batch("m-app", "m-query", 0, token, []),
        )

    def m_opens_app(self) -> None:
        if APP in self.shown:
            self.tries(
                lambda who: who.open_batch(APP, "m-query", 0, "resume"), permitted=self.grant.administers
            )

    def m_stages(self) -> None:
        for token, branch in ((f"{TOKEN}{self.batch}", "m-b"), (WRITE, "m-w"), ("m-t", f"b{self.batch}")):
            header = BranchHeader(token, branch, "append", {"table": "m"})
            self.tries(lambda who, header=header: who.stage(header, [ROWS]))

    def m_squats(self) -> None:
        """Uses the ids of ann's attempts, writes and branches, before ann does or after."""
        token = f"{TOKEN}{self.batch}"
        staged: list[tuple[str, StagedBranch]] = []
        for used, branch in ((token, "m-b"), (WRITE, "w"), ("m-t", f"b{self.batch}"), ("m-t", "w")):
            header = BranchHeader(used, branch, "append", {"table": "m"})
            self.tries(lambda who, used=used, header=header: staged.append((used, who.stage(header, [ROWS]))))
        self.tries(lambda who: who.open_batch("m-app", "m-query", 0, "resume", token=token))
        for used, found in staged:
            self.tries(lambda who, used=used, found=found: who.commit_branches(used, [found]))
        for used in (token, WRITE):
            self.tries(
                lambda who, used=used: who.commit_branches(used, []),
                lambda who, used=used: who.rollback_batch(used, of=MALLORY),
            )

    def m_drops(self) -> None:
        for token in (f"{TOKEN}{self.batch}", WRITE):
            self.tries(
                lambda who, token=token: who.rollback_batch(token, of=ANN), permitted=self.grant.operates
            )
            if not self.grant.operates:
                self.tries(lambda who, token=token: who.rollback_batch(token))

    def m_writes(self) -> None:
        if WRITE in self.staged:
            self.tries(lambda who: who.commit_branches(WRITE, [self.staged[WRITE]]))

    def m_commits(self) -> None:
        for of in (None, ANN, ""):
            self.tries(
                lambda who, of=of: who.commit(XID, of=of),
                lambda who, of=of: who.rollback(XID, of=of),
                permitted=self.grant.operates,
            )

    def m_rolls_back(self) -> None:
        permitted = self.grant.operates and self.grant.may("write", NAMED)
        self.over_amqp(permitted, lambda peer: peer.publish(1, NAMED, "rollback", XID.encode()))

    def m_names(self) -> None:
        """The names that ann will use, and the keys of the broker's own. Not that of a transaction which
        mallory may decide for ann: an operator who has the name too decides its own.
        """
        names = ("invoice", write_key(self.vhost, own_id(ANN, WRITE)), f"{TOKEN}0")
        for name in names if self.grant.operates else (*names, XID):
            self.tries(
                lambda who, name=name: self._transaction(who, lambda channel: channel.tx_commit(name)),
                lambda who, name=name: self._transaction(who, lambda channel: channel.prepare(name)),
            )

    def _transaction(self, who: Any, end: Call) -> None:
        """Publishes to what is mallory's own."""
        with who.channel() as channel:
            channel.queue_declare("m-q")
            channel.exchange_declare("m-x", "fanout")
            channel.queue_bind("m-q", "m-x")
            channel.tx_select()
            channel.publish(b"m", "m-x")
            end(channel)

    def m_browses(self) -> None:
        for queue in ("private", "in", "secret"):
            may = self.may_read(queue)
            self.tries(
                lambda who, queue=queue: list(who.browse([(queue, 0, 5)])),
                self.on_channel("get", queue),
                self.on_channel("get_at", queue, range(5)),
                self.on_channel("queue_purge", queue),
                permitted=may,
            )
            self.tries(self.on_channel("queue_delete", queue), permitted=self.may_configure(queue))

    def m_copies(self) -> None:
        permitted = self.grant.may("write", "t") and self.grant.may_topic("write", "public", "secret.a")
        for name in ("CC", "BCC"):
            headers = {name: ["secret.a"]}
            self.over_amqp(
                permitted,
                lambda peer, headers=headers: peer.publish(1, "t", "public", b"forged", headers=headers),
            )

    # -- what leads from mallory's own things to those of others -----------------------------------------------
    def m_binds(self) -> None:
        """``secret`` to an exchange of mallory, and ``t`` behind one."""
        grant = self.grant
        own = grant.may("configure", "m-e") and grant.may("write", "m-e") and grant.may("read", "m-e")

        def through(who: Any, queue: str) -> None:
            with who.channel() as channel:
                channel.exchange_declare("m-e", "fanout")
                channel.queue_bind(queue, "m-e")
                channel.publish(b"bound", "m-e", "secret.a")
                channel.queue_unbind(queue, "m-e")

        for queue in ("secret", "private"):
            permitted = own and queue != "private" and grant.may("write", queue)
            self.tries(lambda who, queue=queue: through(who, queue), permitted=permitted)
        self.over_amqp(
            own and grant.may("write", "t"),
            c.Exchange.Declare(exchange="m-f", exchange_type="fanout"),
            c.Exchange.Bind(destination="t", source="m-f"),
            lambda peer: peer.publish(1, "m-f", "secret.a", b"bound"),
            c.Exchange.Unbind(destination="t", source="m-f"),
        )

    def m_unbinds(self) -> None:
        grant = self.grant
        permitted = (
            grant.may("write", "secret") and grant.may("read", "t") and grant.may_topic("read", "secret.#")
        )
        self.tries(self.on_channel("queue_unbind", "secret", "t", "secret.#"), permitted=permitted)

    def m_lets_die(self) -> None:
        """A message of mallory's own queue is dead-lettered to ``t``; it was published by ``m-x``."""
        grant = self.grant
        own = all(grant.may(each, "m-d", "m-x") for each in ("configure", "write", "read"))

        def let_die(who: Any) -> None:
            arguments = {"x-dead-letter-exchange": "t", "x-dead-letter-routing-key": "secret.a"}
            with who.channel() as channel:
                channel.exchange_declare("m-x", "fanout")
                channel.queue_declare("m-d", arguments=arguments)
                channel.queue_bind("m-d", "m-x")
                channel.publish(b"died", "m-x")
                channel.reject(channel.get("m-d").tag, requeue=False)
                channel.queue_delete("m-d")

        self.tries(let_die, permitted=own and grant.may("write", "t"))

    def m_diverts(self) -> None:
        """What an exchange of mallory's own routes nowhere comes to ``t``."""
        grant = self.grant
        own = all(grant.may(each, "m-a") for each in ("configure", "write", "read"))

        def divert(who: Any) -> None:
            with who.channel() as channel:
                channel.exchange_declare("m-a", "direct", arguments={"alternate-exchange": "t"})
                channel.publish(b"diverted", "m-a", "secret.a")

        self.tries(divert, permitted=own and grant.may("write", "t"))

    def m_writes_rows(self) -> None:
        """Publishes by a batch write."""
        grant = self.grant
        permitted = grant.may("write", "t") and grant.may_topic("write", "secret.a")

        def write(who: Any) -> None:
            header = BranchHeader("m-w", "m-w", "publish", {"exchange": "t", "routing_key": "secret.a"})
            who.commit_branches("m-w", [who.stage(header, [ROWS])])

        self.tries(write, permitted=permitted)

    # -- what is asked for by name --------------------------------------------------------------------------
    def m_probes(self) -> None:
        """Whether things are there, by each call that names one. Not: a passive declare, which needs no right in
        RabbitMQ, and ids that all users share (of apps, and of who made it: tokens, branches, channels).
        """
        for name in ("hidden", "other", "neither"):
            self.tries(
                lambda who, name=name: who.logs([name]),
                lambda who, name=name: who.available([name]),
                lambda who, name=name: who.offsets([name], Origin("earliest")),
                lambda who, name=name: who.wait([name], {name: 0}, 0.0),
                lambda who, name=name: who.dead_letter_route(name),
                lambda who, name=name: who.browse([(name, 0, 1)]),
                lambda who, name=name: who.claim(
                    "m-app", [name], {name: START}, Limit(), Origin("earliest"), "fail"
                ),
                lambda who, name=name: who.outcome(f"{name}-xid"),
                lambda who, name=name: who.outcome(f"{name}-xid", of=ANN),
                lambda who: who.queues(),
                lambda who: who.apps(),
                lambda who: who.staged_batches(),
                lambda who: who.prepared(),
            )
            self.tries(
                lambda who, name=name: who.commit(f"{name}-xid"),
                lambda who, name=name: who.rollback(f"{name}-xid", of=ANN),
                lambda who, name=name: who.forget(f"{name}-xid", of=ANN),
                permitted=self.grant.operates,
            )
            for word, given in _probing_words(name):
                self.tries(self.on_channel(word, *given))
            for frame in _probing_frames(name) if not self.alone and self.grant.enters else ():
                with self._amqp(MALLORY) as peer:
                    peer.send(1, frame)
                    self.learnt.append(f"{frame.name}: {_fields(peer.receive()[1])}")

    def m_asks_http(self) -> None:
        """Each route of the listener of HTTP, with names of ann's things. Not what an administrator may do: that is
        everything.
        """
        host = {"{vhost}": self.vhost, "{user}": ANN, "{app}": APP, "{xid}": XID, "{source}": "t"}
        host |= {"{kind}": "q", "{key}": "public"}
        for row in http_rows():
            if row.need == "administrator" and self.grant.administers:
                continue
            for thing in ("in", "t", "hidden", "other", "neither", "private") if "{" in row.path else ("",):
                if self.alone and not self.permitted_http(row, thing):
                    continue
                path = row.path
                for param, value in (*host.items(), ("{name}", thing), ("{destination}", thing)):
                    path = path.replace(param, value)
                body = HTTP_BODY if row.method in ("PUT", "POST") else None
                answer = self.http.ask(row.method, path, body)
                if row.need in ("vhost", "names", "administrator"):  # not: numbers of the whole, and the time
                    told = answer.body if answer.status >= 400 else _names(answer.body)
                    self.learnt.append(f"{row.method} {path}: {answer.status} {told}")

    def permitted_http(self, row: Row, thing: str) -> bool:
        """Whether mallory may change what is not its own by this route."""
        grant = self.grant
        what = f"{row.method} {row.path.removeprefix('/api/').replace('{vhost}/', '')}"
        topic = thing != "t" or grant.may_topic("write", "public", "secret.a")
        bound = grant.may("write", thing) and grant.may("read", "t") and grant.may_topic("read", "public")
        return grant.manages and {
            "DELETE queues/{name}": self.may_configure(thing),
            "DELETE queues/{name}/contents": self.may_read(thing),
            "POST queues/{name}/get": self.may_read(thing),
            "POST txmq/prepared/{xid}/commit": grant.operates,
            "POST txmq/prepared/{xid}/rollback": grant.operates,
            "DELETE exchanges/{name}": grant.may("configure", thing),
            "POST exchanges/{name}/publish": grant.may("write", thing) and topic,
            "DELETE bindings/e/{source}/{kind}/{destination}/{key}": bound and thing != "private",
            "PUT queues/{name}": self.may_configure(thing),
            "PUT exchanges/{name}": grant.may("configure", thing),
            "POST bindings/e/{source}/{kind}/{destination}": bound and thing != "private",
        }.get(what, False)

    def m_takes_channel(self) -> None:
        if CHANNEL in self.shown and not self.alone:
            self.raw.of.channel_id = self.held.id
            for word in ("tx_rollback", "close"):
                self.raw.call(f"channel.{word}", {})

    def m_closes(self) -> None:
        """The channel that holds ann's transaction. Not who may: it would end ann's client at any time."""
        if CHANNEL in self.shown and not self.grant.operates:
            for found in self.broker.engine.local.channels(self.vhost):
                self.tries(lambda who, id=found.id: who.close_channel(id))

    def m_releases(self) -> None:
        for force in (False, True):
            self.tries(
                lambda who, force=force: who.release(APP, "in", force=force), permitted=self.grant.operates
            )

    def m_prepares_late(self) -> None:
        """On a channel of a virtual host that is deleted."""
        if "side" in self.shown:
            self.tries(lambda _who: self.late.prepare("late"))

    # -- the listener of AMQP -----------------------------------------------------------------------------------
    def over_amqp(self, permitted: bool, *steps: Any) -> None:
        """``steps``: calls without an answer, and frames with one, until one is refused. All is carried out, or
        refused, when this returns.
        """
        if self.alone and not (permitted and self.grant.enters):
            return
        refused = (Closed,) if self.grant.enters else (Closed, AssertionError)  # the login too
        with contextlib.suppress(*refused), self._amqp(ROOT if self.alone else MALLORY) as peer:
            for step in (*steps, c.Tx.Select()):
                if callable(step):
                    step(peer)
                    continue
                peer.send(1, step)
                if isinstance(peer.receive()[1], c.Channel.Close):
                    return

    @contextlib.contextmanager
    def _amqp(self, user: str) -> Iterator[Peer]:
        with Peer(self.broker.amqp_urls[0]) as peer:
            peer.user, peer.password = user, PASSWORD
            yield peer.opened(1, vhost=self.vhost)


def _names(told: Any) -> Any:
    return sorted(each["name"] for each in told if "name" in each) if isinstance(told, list) else ""


def _fields(frame: Any) -> dict[str, Any]:
    return {"frame": frame.name} | {name: getattr(frame, name) for name in frame.attributes()}


def _probing_words(name: str) -> Sequence[tuple[str, tuple[Any, ...]]]:
    return (
        ("get", (name,)),
        ("queue_purge", (name,)),
        ("queue_delete", (name,)),
        ("queue_declare", (name,)),
        ("queue_bind", (name, "t", "k")),
        ("queue_bind", ("m-q", f"{name}-x", "k")),
        ("exchange_declare", (f"{name}-x", "fanout")),
        ("exchange_delete", (f"{name}-x",)),
        ("publish", (b"m", f"{name}-x", "k")),
    )


def _probing_frames(name: str) -> Sequence[Any]:
    return (
        c.Queue.Declare(queue=name),
        c.Queue.Bind(queue=name, exchange="t", routing_key="k"),
        c.Queue.Unbind(queue=name, exchange="t", routing_key="k"),
        c.Queue.Purge(queue=name),
        c.Queue.Delete(queue=name),
        c.Exchange.Declare(exchange=f"{name}-x"),
        c.Exchange.Delete(exchange=f"{name}-x"),
        c.Exchange.Bind(destination=f"{name}-x", source="t"),
        c.Basic.Get(queue=name),
        c.Basic.Get(queue=f"{NAMED}.{name}-xid", no_ack=True),
        c.Basic.Consume(queue=name, consumer_tag="m"),
        c.Queue.Declare(queue="m-letters", arguments={"x-dead-letter-exchange": f"{name}-x"}),
        c.Exchange.Declare(exchange="m-alternate", arguments={"alternate-exchange": f"{name}-x"}),
    )
