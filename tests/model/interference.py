"""Two runs of one history: honest users and an operator alone, and the same with an attacker's calls in
between. What the honest are answered and see is the same in both. And two runs of one history with other secrets
of ann: what mallory is answered is the same in both.

Each run has a virtual host of its own on one real broker, so names and ids are the same in both. Mallory knows
every id before it is used, and uses it first: but for apps, which belong to who first claims or opens them.
Not here: the histories (``test_non_interference.py``).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from pamqp import commands as c

from broker_core import errors
from broker_core import password as passwords
from broker_core.client.broker import BrokerClient
from broker_core.credentials import Credentials
from broker_core.engine import START, BranchHeader, Limit, Origin, ReadTicket, StagedBranch
from broker_core.flight.authorization import Basic
from broker_core.launcher import Broker
from tests.amqp_peer import Peer
from tests.server.flight.flight_calls import Raw
from tests.server.http.http_client import Api
from tests.server.http.http_rows import rows as http_rows

PASSWORD = "secret of all"
ANN, OLGA, MALLORY = "ann", "olga", "mallory"
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
SECRET_ROWS = [ROWS, pa.record_batch({"body": pa.array([b"no row"], pa.binary())})]  # by secret
GRANTS: dict[
    str, tuple[tuple[str, str, str], tuple[str, ...]]
] = {  # of mallory: configure, write, read; tags
    "enters": (("^$", "^$", "^$"), ()),
    "has names of its own": (("^m", "^m", "^m"), ()),
    "names transactions": (("^m", "^(m|amq.transaction)", "^m"), ()),
    "looks": (("^m", "^(m|amq.transaction)", "^m"), ("monitoring",)),
    "publishes in public": (("^m", "^(m|t$|amq.transaction)", "^m"), ()),
    "impersonates": (("^m", "^(m|t$)", "^m"), ("impersonator",)),
    "manages": (("^m", "^(m|t$)", "^m"), ("management",)),
}
# rights that mallory has to the same queues: what stays refused is refused because of whose a thing is
SHARES = "shares queues"
GRANTS[SHARES] = (("^m", "^(m|amq.default$)", "^(m|in$)"), ())


class Site:
    """A broker with the users; a virtual host for each run."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.runs = 0
        for user, tags in ((ANN, ()), (OLGA, ("operator",)), (MALLORY, ())):
            broker.accounts.add_user(user, passwords.hashed(PASSWORD, passwords.Cost(4)), tags)

    def run(self, steps: Sequence[str], grant: str) -> list[Any]:
        """Carries out the steps, and returns what the honest were answered, and see at the end."""
        return self._ran(steps, grant, 0)[0]

    def learnt(self, steps: Sequence[str], grant: str, secret: int) -> list[str]:
        """Carries out the steps, and returns what mallory was answered."""
        return self._ran(steps, grant, secret)[1]

    def _ran(self, steps: Sequence[str], grant: str, secret: int) -> tuple[list[Any], list[str]]:
        self.runs += 1
        vhost, side = f"run{self.runs}", f"side{self.runs}"
        patterns, tags = GRANTS[grant]
        accounts = self.broker.accounts
        for host in (vhost, side):
            self.broker.vhosts.add_vhost(host)
            accounts.set_permissions(ANN, ".*", ".*", ".*", host)
            accounts.set_permissions(OLGA, "^$", "^amq.transaction$", "^$", host)
            accounts.set_permissions(MALLORY, *patterns, host)
        accounts.set_topic_permissions(MALLORY, "t", "^public", "^public", vhost)
        accounts.set_tags(MALLORY, tags)
        try:
            with contextlib.closing(Run(self.broker, vhost, side, secret)) as run:
                return run.carried_out(steps), [_usual(told, vhost, side) for told in run.learnt]
        finally:
            for host in (vhost, side):
                self.broker.vhosts.delete_vhost(host)


def _usual(told: str, vhost: str, side: str) -> str:
    """An answer without what differs from run to run: names of virtual hosts, random ids, numbers of commits."""
    told = re.sub(rf"\b({vhost}|{side})\b", "HOST", told)
    told = re.sub(r"\b[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}\b", "ID", told)
    told = re.sub(r"datetime\.datetime\([^()]*(\([^()]*\))?\)", "TIME", told)
    return re.sub(r"(committed_at_us|commit_sequence|age_s|idle_s)=[\d.]+", r"\1=N", told)


class Heard:
    """Writes down each answer of ``of``, a client of mallory or a channel of it."""

    def __init__(self, of: Any, learnt: list[str]) -> None:
        self._of, self._learnt = of, learnt

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._of, name)
        return partial(self._told, name, found) if callable(found) else found

    def _told(self, name: str, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        try:
            answer = call(*given, **named)
            if isinstance(answer, Iterator):
                answer = [batch.to_pylist() for batch in answer]
        except errors.TxmqError as error:
            self._learnt.append(f"{name}: {type(error).__name__} {error}")
            raise
        if name == "channel":
            return Heard(answer, self._learnt)
        told = f"{type(answer).__name__} {answer}" if isinstance(answer, Exception) else repr(answer)
        self._learnt.append(f"{name}: {told}")
        return answer

    def __enter__(self) -> Heard:
        self._of.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._of.__exit__(*exception)


class Run:
    """``secret``: 0 or 1; ann has other bodies, things and numbers of messages by it."""

    def __init__(self, broker: Broker, vhost: str, side: str, secret: int = 0) -> None:
        self.broker, self.vhost, self.side, self.secret = broker, vhost, side, secret
        self._ends = contextlib.ExitStack()
        self.learnt: list[str] = []
        self.ann, self.olga, mallory = (self._client(user) for user in (ANN, OLGA, MALLORY))
        self.mallory: Any = Heard(mallory, self.learnt)
        raw = Raw(broker.url, Basic(MALLORY, PASSWORD).header, vhost)
        self._ends.callback(raw.client.close)
        self.raw: Any = Heard(raw, self.learnt)
        self.http = self._ends.enter_context(contextlib.closing(Api(broker.http_urls[0], MALLORY, PASSWORD)))
        self.peer = self._ends.enter_context(Peer(broker.amqp_urls[0]))
        self.peer.user, self.peer.password = ANN, PASSWORD
        self.peer.opened(1, vhost=vhost)
        self.held = self._ends.enter_context(self.ann.channel())
        for queue in ("in", "out", "secret"):
            self.held.queue_declare(queue)
        self.held.exchange_declare("t", "topic")
        self.held.queue_bind("secret", "t", "secret.#")
        hidden = ("hidden", "other")[secret]  # each is asked for by mallory
        self.held.queue_declare(hidden)
        self.held.exchange_declare(f"{hidden}-x", "topic")
        self.held.queue_bind(hidden, f"{hidden}-x", "#")
        for _ in range(secret + 1):
            self.held.publish(b"hidden", routing_key=hidden)
        with self.ann.channel() as channel:
            channel.tx_select()
            channel.publish(b"hidden", routing_key=hidden)
            channel.prepare(f"{hidden}-xid")
        self.peer.call(1, c.Queue.Declare(queue="private", exclusive=True), c.Queue.DeclareOk)
        local = broker.engine._local
        self.late = self._ends.enter_context(local.channel(vhost=side, user=MALLORY))
        self.late.queue_declare("m")
        self.late.tx_select()
        self.late.publish(b"late", routing_key="m")
        self.shown: set[str] = set()
        self.staged: dict[str, StagedBranch] = {}
        self.end: Any = {"in": START}
        self.batch = 0

    def _client(self, user: str) -> BrokerClient:
        login = Credentials(user=user, password=PASSWORD)
        client = BrokerClient(f"{self.broker.url}/{self.vhost}", credentials=login, reconnect_s=1.0)
        return self._ends.enter_context(client)

    def close(self) -> None:
        self._ends.close()

    def carried_out(self, steps: Sequence[str]) -> list[Any]:
        answers = []
        for step in (*steps, "h_see", "h_drain"):
            call: Callable[[], Any] = getattr(self, step)
            try:
                answer = call()
            except errors.TxmqError as error:
                answer = type(error).__name__
            if step.startswith("h_"):
                answers.append((step, answer))
        return answers

    # -- the honest ------------------------------------------------------------------------------------------
    def h_publish(self) -> Any:
        with self.ann.channel() as channel:
            for number in range(3):
                channel.publish(f"{number}.{self.secret}".encode(), routing_key="in")

    def h_publish_private(self) -> Any:
        self.peer.publish(1, "", "private", b"mine")
        return self.peer.count(1, "private")

    def h_claim(self) -> Any:
        self.shown.add(APP)
        start = self.end
        end = self.ann.claim(APP, ["in"], start, Limit(), Origin("earliest"), "fail")
        self.shown.add(QUERY)
        ranges = self.ann.resolve(APP, start, end)
        slices = tuple((log, first, last) for log, (first, last) in ranges.items())
        ticket = ReadTicket(APP, QUERY, self.batch, ranges, slices)
        rows = [row for part in self.ann.read(ticket) for row in part.column("body").to_pylist()]
        self.end = end
        return end, rows

    def h_open(self) -> Any:
        opened = self.ann.open_batch(APP, QUERY, self.batch, "fail", token=f"{TOKEN}{self.batch}")
        self.shown |= {APP, QUERY, TOKEN}
        return opened

    def h_stage(self) -> Any:
        header = BranchHeader(f"{TOKEN}{self.batch}", f"b{self.batch}", "append", {"table": "t"})
        if TOKEN in self.shown:
            self.staged[TOKEN] = self.ann.stage(header, [SECRET_ROWS[self.secret]])
            return self.staged[TOKEN]
        return None

    def h_commit(self) -> Any:
        branches = [self.staged.pop(TOKEN)] if TOKEN in self.staged else []
        token = f"{TOKEN}{self.batch}" if TOKEN in self.shown else ""
        entry = self.ann.commit_batch(APP, QUERY, self.batch, token, branches).entry
        self.shown |= {APP, QUERY}
        self.shown.discard(TOKEN)
        self.batch += 1
        return entry.ranges, entry.messages, entry.published

    def h_apply(self) -> Any:
        entries = self.ann.unapplied(APP)
        found = [
            part.to_pylist()
            for entry in entries
            for step in entry.to_apply
            for part in self.ann.read_branches(step.branches)
        ]
        for entry in entries:
            self.ann.mark_applied(APP, entry.sequence)
        return found

    def h_write(self) -> Any:
        header = BranchHeader(WRITE, "w", "publish", {"routing_key": "out"})
        self.staged[WRITE] = self.ann.stage(header, [SECRET_ROWS[self.secret]])
        self.shown.add(WRITE)
        return self.staged[WRITE]

    def h_commit_write(self) -> Any:
        if WRITE in self.staged:
            return self.ann.commit_branches(WRITE, [self.staged[WRITE]])
        return None

    def h_token(self) -> Any:
        with self.ann.channel() as channel:
            channel.tx_select()
            channel.publish(b"tx", routing_key="out")
            channel.tx_commit("invoice")

    def h_asks(self) -> Any:
        told = self.peer.get(1, f"{NAMED}.invoice")
        return self.ann.committed("invoice"), self.ann.committed(XID), told and told[1]

    def h_prepare(self) -> Any:
        with self.ann.channel() as channel:
            channel.tx_select()
            channel.publish(b"xa", routing_key="out")
            return channel.prepare(XID)

    def h_decide(self) -> Any:
        return self.ann.commit(XID)

    def h_operate(self) -> Any:
        return self.olga.rollback(XID, of=ANN)

    def h_hold(self) -> Any:
        self.held.tx_select()
        self.held.publish(b"held", routing_key="out")
        self.shown.add(CHANNEL)

    def h_end_held(self) -> Any:
        return self.held.tx_commit() if CHANNEL in self.shown else None

    def h_remake(self) -> Any:
        self.broker.vhosts.delete_vhost(self.side)
        self.broker.vhosts.add_vhost(self.side)
        self.shown.add("side")

    def h_see(self) -> Any:
        queues = [
            (queue.name, queue.messages, queue.unacknowledged, queue.owner)
            for queue in self.olga.queues()
            if not queue.name.startswith("m")
        ]
        apps = [app for app in self.olga.apps() if not app.app_id.startswith("m")]
        attempts = [
            (found.token, found.app_id, found.rows)
            for found in self.olga.attempts()
            if found.user != MALLORY and not (found.app_id or found.token).startswith("m")
        ]
        prepared = [info.xid for info in self.olga.prepared() if info.user == ANN]
        local = self.broker.engine._local
        remade = [info.xid for info in local.prepared(self.side)] if "side" in self.shown else []
        return (
            queues,
            apps,
            attempts,
            prepared,
            remade,
            self.ann.app(APP),
            self.ann.last_entry(APP) is not None,
        )

    def h_drain(self) -> Any:
        found = {}
        with self.ann.channel() as channel:
            for queue in ("out", "secret"):
                bodies = iter(lambda queue=queue: channel.get(queue, no_ack=True), None)
                found[queue] = [delivery.body for delivery in bodies]
        return found, self.peer.count(1, "private")

    # -- mallory: whatever the answer ------------------------------------------------------------------------
    def m_asks(self) -> None:
        mallory = self.mallory
        for call in (
            lambda: mallory.last_entry(APP),
            lambda: mallory.app(APP),
            lambda: mallory.unapplied(APP),
            lambda: mallory.committed("invoice"),
            lambda: mallory.outcome(XID, of=ANN),
            lambda: mallory.resolve(APP, {"in": START}, {"in": 3}),
        ):
            with contextlib.suppress(errors.TxmqError):
                call()

    def m_applies(self) -> None:
        with contextlib.suppress(errors.TxmqError):
            self.mallory.ack(APP, {"in": 3})
        for sequence in (1, 2):
            with contextlib.suppress(errors.TxmqError):
                self.mallory.mark_applied(APP, sequence)
        self.mallory.skip(APP, 1, ["b0"], "/tmp")

    def m_steals(self) -> None:
        """By query and batch."""
        if QUERY in self.shown:
            opened = self.mallory.open_batch("m-app", QUERY, self.batch, "resume")
            self.mallory.commit_batch("m-app", QUERY, self.batch, opened.token, [])

    def m_poisons(self) -> None:
        with self.mallory.channel() as channel:
            channel.queue_declare("m-in")
        with self.broker.channel(vhost=self.vhost) as channel:
            channel.publish(b"bait", routing_key="m-in")
        start = {"m-in": START}
        end = self.mallory.claim("m-source", ["m-in"], start, Limit(), Origin("earliest"), "resume")
        ranges = self.mallory.resolve("m-source", start, end)
        for batch in range(3):
            slices = tuple((log, first, last) for log, (first, last) in ranges.items())
            list(self.mallory.read(ReadTicket("m-source", QUERY, batch, ranges, slices)))

    def m_opens(self) -> None:
        token = f"{TOKEN}{self.batch}"
        with contextlib.suppress(errors.TxmqError):
            self.mallory.open_batch("m-app", "m-query", 0, "resume", token=token)
        self.mallory.commit_batch("m-app", "m-query", 0, token, [])

    def m_opens_app(self) -> None:
        if APP in self.shown:
            self.mallory.open_batch(APP, "m-query", 0, "resume")

    def m_stages(self) -> None:
        for token, branch in ((f"{TOKEN}{self.batch}", "m-b"), (WRITE, "m-w"), ("m-t", f"b{self.batch}")):
            with contextlib.suppress(errors.TxmqError):
                self.mallory.stage(BranchHeader(token, branch, "append", {"table": "m"}), [ROWS])

    def m_squats(self) -> None:
        """Uses the ids of ann's attempts, writes and branches, before ann does or after."""
        token = f"{TOKEN}{self.batch}"
        staged = []
        for used, branch in ((token, "m-b"), (WRITE, "w"), ("m-t", f"b{self.batch}"), ("m-t", "w")):
            with contextlib.suppress(errors.TxmqError):
                staged.append(
                    (used, self.mallory.stage(BranchHeader(used, branch, "append", {"table": "m"}), [ROWS]))
                )
        with contextlib.suppress(errors.TxmqError):
            self.mallory.open_batch("m-app", "m-query", 0, "resume", token=token)
        for used, branch in staged:
            with contextlib.suppress(errors.TxmqError):
                self.mallory.commit_branches(used, [branch])
        for used in (token, WRITE):
            for call in (
                lambda used=used: self.mallory.commit_branches(used, []),
                lambda used=used: self.mallory.rollback_batch(used),
            ):
                with contextlib.suppress(errors.TxmqError):
                    call()

    def m_drops(self) -> None:
        for token in (f"{TOKEN}{self.batch}", WRITE):
            with contextlib.suppress(errors.TxmqError):
                self.mallory.rollback_batch(token)

    def m_writes(self) -> None:
        if WRITE in self.staged:
            self.mallory.commit_branches(WRITE, [self.staged[WRITE]])

    def m_commits(self) -> None:
        for call in (self.mallory.commit, self.mallory.rollback):
            for of in (None, ANN, ""):
                with contextlib.suppress(errors.TxmqError):
                    call(XID, of=of)

    def m_rolls_back(self) -> None:
        with self._amqp() as peer:
            peer.publish(1, NAMED, "rollback", XID.encode())
            peer.send(1, c.Tx.Select())
            peer.receive()  # it is carried out, or refused

    def m_names(self) -> None:
        """The names that ann will use, and the keys of the broker's own."""
        for name in ("invoice", XID, f"batch:{WRITE}", f"batch@{self.vhost}:{WRITE}", f"{TOKEN}0"):
            with contextlib.suppress(errors.TxmqError), self.mallory.channel() as channel:
                self._publish(channel)
                channel.tx_commit(name)
            with contextlib.suppress(errors.TxmqError), self.mallory.channel() as channel:
                self._publish(channel)
                channel.prepare(name)

    def _publish(self, channel: Any) -> None:
        """In a transaction, to what is mallory's own."""
        channel.queue_declare("m-q")
        channel.exchange_declare("m-x", "fanout")
        channel.queue_bind("m-q", "m-x")
        channel.tx_select()
        channel.publish(b"m", "m-x")

    def m_browses(self) -> None:
        for queue in ("private", "in", "secret"):
            with contextlib.suppress(errors.TxmqError):
                list(self.mallory.browse([(queue, 0, 5)]))
            for word in ("get", "queue_purge", "queue_delete"):
                with contextlib.suppress(errors.TxmqError), self.mallory.channel() as channel:
                    getattr(channel, word)(queue)
            with contextlib.suppress(errors.TxmqError), self.mallory.channel() as channel:
                channel.get_at(queue, range(5))

    def m_copies(self) -> None:
        for name in ("CC", "BCC"):
            with self._amqp() as peer:
                peer.publish(1, "t", "public", b"forged", headers={name: ["secret.a"]})
                peer.send(1, c.Tx.Select())
                peer.receive()  # it is published, or refused

    def m_probes(self) -> None:
        """Whether things are there, by each call that names one. Not: a passive declare, which needs no right in
        RabbitMQ, and ids that all users share (of apps, and of who made it: tokens, branches, channels).
        """
        for name in ("hidden", "other", "neither"):
            for call in (
                lambda name=name: self.mallory.logs([name]),
                lambda name=name: self.mallory.available([name]),
                lambda name=name: self.mallory.offsets([name], Origin("earliest")),
                lambda name=name: self.mallory.wait([name], {name: 0}, 0.0),
                lambda name=name: self.mallory.dead_letter_route(name),
                lambda name=name: self.mallory.browse([(name, 0, 1)]),
                lambda name=name: self.mallory.claim(
                    "m-app", [name], {name: START}, Limit(), Origin("earliest"), "fail"
                ),
                lambda name=name: self.mallory.outcome(f"{name}-xid"),
                lambda name=name: self.mallory.outcome(f"{name}-xid", of=ANN),
                lambda name=name: self.mallory.commit(f"{name}-xid"),
                lambda name=name: self.mallory.rollback(f"{name}-xid", of=ANN),
                self.mallory.queues,
                self.mallory.apps,
                self.mallory.attempts,
                self.mallory.prepared,
            ):
                with contextlib.suppress(errors.TxmqError):
                    call()
            for word, given in (
                ("get", (name,)),
                ("queue_purge", (name,)),
                ("queue_delete", (name,)),
                ("queue_declare", (name,)),
                ("queue_bind", (name, "t", "k")),
                ("queue_bind", ("m-q", f"{name}-x", "k")),
                ("exchange_declare", (f"{name}-x", "fanout")),
                ("exchange_delete", (f"{name}-x",)),
                ("publish", (b"m", f"{name}-x", "k")),
            ):
                with contextlib.suppress(errors.TxmqError), self.mallory.channel() as channel:
                    getattr(channel, word)(*given)
            for frame in (
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
            ):
                with self._amqp() as peer:
                    peer.send(1, frame)
                    self.learnt.append(f"{frame.name}: {_fields(peer.receive()[1])}")

    def m_asks_http(self) -> None:
        """Each route of the door of HTTP, with names of ann's things."""
        host = {"{vhost}": self.vhost, "{user}": ANN, "{app}": APP, "{xid}": XID, "{source}": "t"}
        for row in http_rows():
            for thing in ("in", "t", "hidden", "other", "neither", "private") if "{" in row.path else ("",):
                path = row.path
                for param, value in (*host.items(), ("{name}", thing), ("{destination}", thing)):
                    path = path.replace(param, value)
                body = HTTP_BODY if row.method in ("PUT", "POST") else None
                answer = self.http.ask(row.method, path, body)
                if row.need not in ("vhost", "names", "administrator"):
                    continue  # numbers of the whole broker, and the time
                told = answer.body
                if answer.status < 400:
                    told = (
                        sorted(each["name"] for each in told if "name" in each)
                        if isinstance(told, list)
                        else ""
                    )
                self.learnt.append(f"{row.method} {path}: {answer.status} {told}")

    def m_takes_channel(self) -> None:
        if CHANNEL in self.shown:
            self.raw._of._channel = self.held._id
            for word in ("tx_rollback", "close"):
                self.raw.call(f"channel.{word}", {})

    def m_releases(self) -> None:
        for force in (False, True):
            with contextlib.suppress(errors.TxmqError):
                self.mallory.release(APP, "in", force=force)

    def m_prepares_late(self) -> None:
        """On a channel of a virtual host that is deleted."""
        if "side" in self.shown:
            self.late.prepare("late")

    @contextlib.contextmanager
    def _amqp(self) -> Iterator[Peer]:
        with Peer(self.broker.amqp_urls[0]) as peer:
            peer.user, peer.password = MALLORY, PASSWORD
            yield peer.opened(1, vhost=self.vhost)


def _fields(frame: Any) -> dict[str, Any]:
    return {"frame": frame.name} | {name: getattr(frame, name) for name in frame.attributes()}


HONEST = tuple(name for name in vars(Run) if name.startswith("h_"))
ATTACKS = tuple(name for name in vars(Run) if name.startswith("m_"))
