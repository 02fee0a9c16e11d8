"""Two runs of one history: honest users and an operator alone, and the same with an attacker's calls in
between. What the honest are answered and see is the same in both, but for what a right of the attacker permits:
alone, an administrator does that. And two runs of one history with other secrets
of ann: what mallory is answered is the same in both.

Each run has a virtual host of its own on one real broker, so names and ids are the same in both. Mallory knows
every id before it is used, and uses it first: but for apps, which belong to who first claims or opens them.
Not here: what mallory tries (``attacks.py``), and the histories (``test_non_interference.py``).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from pamqp import commands as c

from broker_core.client.broker import BrokerClient
from broker_core.core import errors
from broker_core.core import password as passwords
from broker_core.core.credentials import Credentials
from broker_core.engine import START, BranchHeader, Limit, Origin, ReadTicket, StagedBranch
from broker_core.flight.authorization import Basic
from broker_core.launcher import Broker
from tests.amqp_peer import Peer
from tests.model.attacks import (
    ANN,
    APP,
    CHANNEL,
    MALLORY,
    NAMED,
    PASSWORD,
    QUERY,
    ROOT,
    ROWS,
    TOKEN,
    WRITE,
    XID,
    Attacks,
)
from tests.model.grants import Grant
from tests.server.flight.flight_calls import Raw
from tests.server.http.http_client import Api

OLGA = "olga"
SECRET_ROWS = [ROWS, pa.record_batch({"body": pa.array([b"no row"], pa.binary())})]  # by secret


class Site:
    """A broker with the users; a virtual host for each run."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.runs = 0
        for user, tags in ((ANN, ()), (OLGA, ("operator",)), (MALLORY, ()), (ROOT, ("administrator",))):
            broker.accounts.add_user(user, passwords.hashed(PASSWORD, passwords.Cost(4)), tags)

    def run(self, steps: Sequence[str], grant: Grant, *, alone: bool = False) -> list[Any]:
        """Carries out the steps, and returns what the honest were answered, and see at the end. ``alone``:
        without mallory, but root does what a right of mallory permits.
        """
        return self._ran(steps, grant, 0, alone)[0]

    def learnt(self, steps: Sequence[str], grant: Grant, secret: int) -> list[str]:
        """Carries out the steps, and returns what mallory was answered."""
        return self._ran(steps, grant, secret, False)[1]

    def _ran(
        self, steps: Sequence[str], grant: Grant, secret: int, alone: bool
    ) -> tuple[list[Any], list[str]]:
        self.runs += 1
        vhost, side = f"run{self.runs}", f"side{self.runs}"
        accounts = self.broker.accounts
        for host in (vhost, side):
            self.broker.vhosts.add_vhost(host)
            accounts.set_permissions(ANN, ".*", ".*", ".*", host)
            accounts.set_permissions(ROOT, ".*", ".*", ".*", host)
            accounts.set_permissions(OLGA, "^$", "^amq.transaction$", "^$", host)
            if grant.patterns is not None and (host == vhost or grant.side):
                accounts.set_permissions(MALLORY, *grant.patterns, host)
        if grant.topic is not None:
            accounts.set_topic_permissions(MALLORY, "t", *grant.topic, vhost)
        accounts.set_tags(MALLORY, grant.tags)
        try:
            with contextlib.closing(Run(self.broker, vhost, side, grant, secret, alone)) as run:
                return run.carried_out(steps), [_usual(told, vhost, side) for told in run.learnt]
        finally:
            for host in (vhost, side):
                self.broker.vhosts.delete_vhost(host)


def _usual(told: str, vhost: str, side: str) -> str:
    """An answer without what differs from run to run: names of virtual hosts, random ids, numbers of commits."""
    told = re.sub(rf"\b({vhost}|{side})\b", "HOST", told)
    told = re.sub(r"\b[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}\b", "ID", told)
    told = re.sub(r"datetime\.datetime\([^()]*(\([^()]*\))?\)", "TIME", told)
    return re.sub(r"(committed_at(?:_us)?|commit_sequence|age_s|idle_s)=[\d.]+", r"\1=N", told)


class Heard:
    """Writes down each answer of ``of``, a client of mallory or a channel of it."""

    def __init__(self, of: Any, learnt: list[str]) -> None:
        self.of, self._learnt = of, learnt

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.of, name)
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
        self.of.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.of.__exit__(*exception)


class Run(Attacks):
    """``secret``: 0 or 1; ann has other bodies, things and numbers of messages by it."""

    def __init__(self, broker: Broker, vhost: str, side: str, grant: Grant, secret: int, alone: bool) -> None:
        self.broker, self.vhost, self.side, self.secret = broker, vhost, side, secret
        self.grant, self.alone = grant, alone
        self._ends = contextlib.ExitStack()
        self.learnt: list[str] = []
        self.ann, self.olga, self.root = (self._client(user) for user in (ANN, OLGA, ROOT))
        mallory = self._client(MALLORY)
        self.mallory: Any = Heard(mallory, self.learnt)
        raw = Raw(broker.url, Basic(MALLORY, PASSWORD).header, vhost)
        self._ends.callback(raw.client.close)
        self.raw: Any = Heard(raw, self.learnt)
        self.http = self._ends.enter_context(
            contextlib.closing(Api(broker.http_urls[0], ROOT if alone else MALLORY, PASSWORD))
        )
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
        local = broker.engine.local
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
        start = self.end
        end = self.ann.claim(APP, ["in"], start, Limit(), Origin("earliest"), "fail")
        self.shown |= {APP, QUERY}
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
            for found in self.olga.staged_batches()
            if found.user not in (MALLORY, ROOT) and not (found.app_id or found.token).startswith("m")
        ]
        prepared = [info.xid for info in self.olga.prepared() if info.user == ANN]
        local = self.broker.engine.local
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


HONEST = tuple(name for name in vars(Run) if name.startswith("h_"))
ATTACKS = tuple(name for name in vars(Attacks) if name.startswith("m_"))
