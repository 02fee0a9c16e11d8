"""Everything that outlives a call is bounded: each row of the tables of state in ``docs`` is filled beyond
its bound, by one user and by a thousand.

Bounds are lowered, so that they are reached; the page must state those of the code.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from starlette.responses import Response

from broker_core.broker import channel as broker_channel
from broker_core.broker import commit
from broker_core.broker.access import rights
from broker_core.broker.access.rights import Rights
from broker_core.broker.access.shares import SHARE
from broker_core.broker.batch import owners
from broker_core.broker.batch.branch import StagedLimits
from broker_core.broker.batch.owners import Actor
from broker_core.broker.broker import BrokerState
from broker_core.broker.channel import Channel
from broker_core.broker.history.history import HistoryLimits
from broker_core.broker.transaction import heuristics, outcomes, transaction
from broker_core.broker.transaction.outcomes import OutcomeLimits
from broker_core.core import errors
from broker_core.core.change import Author, Change
from broker_core.core.records import ClaimRecord, LineageRecord, ReadRecord
from broker_core.engine import START, BranchHeader, Limit, Origin, ReadTicket
from broker_core.flight import contract
from broker_core.launcher import Broker
from broker_core.message import deduplication
from broker_core.message.properties import Properties
from broker_core.micro_batch import ledger, opening
from broker_core.micro_batch.claims import claim, next_range
from broker_core.node import channel_commit, upkeep
from broker_core.node.engine import EmbeddedEngine
from broker_core.routing import memory, route_cache
from broker_core.server import log_file
from broker_core.server.access import audit
from broker_core.server.access.audit import Audit
from broker_core.server.access.caller import Caller
from broker_core.server.access.identity import Identity
from broker_core.server.alarm import RECORD_BYTES
from broker_core.server.amqp import direct_reply
from broker_core.server.flight import channels, clients
from broker_core.server.http.state import answer_cache, history, page_sessions
from broker_core.server.http.state.history import PlotHistory
from broker_core.server.http.state.page_sessions import PageSessions
from tests.server import client_fills
from tests.server.flight.flight_calls import HEADER, messages

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (DOCS / "bounds.md", DOCS / "security_design.md")  # what a user notices, and the rest
LOW = 20  # a bound, here
USERS, THINGS = 1000, 2000  # that all users make together
Things = list[tuple[str, str]]  # user, and a name


class Fill(NamedTuple):
    """``stated``: the bound of the code, as the page writes it. ``fill``: makes all that it may, and returns
    how much is kept, and how much may be.
    """

    stated: str
    fill: Callable[[Broker, Things, pytest.MonkeyPatch, Path], tuple[int, int]]


def users_of(things: Things) -> int:
    return len({user for user, _ in things})


def memory_of(broker: Broker) -> int:
    """What the alarm counts."""
    assert broker.quotas.alarm is not None
    return {level.name: level.found for level in broker.quotas.alarm.levels()}["memory"]


def acting(broker: Broker, user: str) -> EmbeddedEngine:
    return broker.engine.acting(Actor(user, administers=False))


def ended_channels(broker: Broker, things: Things, low: pytest.MonkeyPatch, _: Path) -> tuple[int, int]:
    low.setattr(channels, "ENDED", LOW)
    held, state = broker.server.channels, broker.local.state
    for user, name in things:
        caller = Caller(Identity(user), Rights(state.users, user, owner=True), "", state)
        held.call("open", contract.ChannelCall(name, 0, {}), caller)
        held.call("close", contract.ChannelCall(name, 0, {}), caller)
    return held.ended(), LOW


def named_outcomes(broker: Broker, things: Things, _low: pytest.MonkeyPatch, _: Path) -> tuple[int, int]:
    known = broker.local.state.names.outcomes
    known.limits = OutcomeLimits(LOW)
    with broker.channel() as channel:
        channel.queue_declare("in")
        channel.tx_select()
        for _user, name in things:
            channel.publish(b"", routing_key="in")
            channel.tx_commit(name)
    return len(known), 2 * LOW


def heuristic_outcomes(broker: Broker, things: Things, low: pytest.MonkeyPatch, _: Path) -> tuple[int, int]:
    low.setattr(heuristics, "MOST_HEURISTIC", LOW)
    known = broker.local.state.names.heuristics
    users = broker.local.state.users
    users.file_users = frozenset()

    def add(_state: BrokerState, change: Change, _now: int) -> None:
        for user in {user for user, _ in things} | {"another"}:
            users.add(change, user, "a hash")

    broker.local.run(add)
    with broker.channel() as channel:
        channel.queue_declare("in")
    for user, name in things:
        with broker.local.channel(user=user) as channel:
            channel.tx_select()
            channel.publish(b"", routing_key="in")
            channel.prepare(name)
        broker.local.decide("rollback", name, Actor(user), None, "/", by_hand=True)
    assert max(map(len, known.keys_of.values())) <= LOW * SHARE
    return len(known.by_key), LOW


def channel_commits(broker: Broker, things: Things, _low: pytest.MonkeyPatch, _: Path) -> tuple[int, int]:
    known = broker.local.state.names.outcomes
    known.limits = OutcomeLimits(LOW)
    for _user, name in things:
        broker.local.run(lambda _state, change, now, name=name: known.remember_call(change, name, 1, now))  # type: ignore[misc]
    return len(known.channels), 2 * LOW


def apps(broker: Broker, things: Things, low: pytest.MonkeyPatch, _: Path) -> tuple[int, int]:
    low.setattr(owners, "USER_APPS", LOW)
    for user, name in things:
        with contextlib.suppress(errors.NotAllowed):
            acting(broker, user).open_batch(name, "q", 0, "fail")
    kept = len(broker.local.state.users.apps)
    assert memory_of(broker) >= RECORD_BYTES * 2 * kept  # their attempts too
    return kept, LOW * users_of(things)


def decided(broker: Broker, things: Things, low: pytest.MonkeyPatch, _: Path) -> tuple[int, int]:
    low.setattr(ledger, "KEPT_ENTRIES", LOW)
    batches: dict[str, int] = {}
    for user, _name in things:
        number = batches[user] = batches.get(user, -1) + 1
        engine = acting(broker, user)
        token = engine.open_batch(user, "q", number, "fail").token
        engine.commit_batch(user, "q", number, token, [])
    return broker.engine.batches.ledger.size(), LOW * users_of(things)


def claimed(broker: Broker, things: Things, low: pytest.MonkeyPatch, _: Path) -> tuple[int, int]:
    """Claims, and as many reads, of an app for each user."""
    low.setattr(claim, "KEPT_CLAIMS", LOW)
    engine, starts = broker.engine, dict[str, Mapping[str, Any]]()
    with broker.channel() as channel:
        for number, (user, name) in enumerate(things):
            start = starts.setdefault(user, {user: START})
            if start == {user: START}:
                channel.queue_declare(user)
            channel.publish(b"", routing_key=user)
            end = starts[user] = engine.claim(user, [user], start, Limit(), Origin(), "fail")
            ranges = engine.resolve(user, start, end)
            list(engine.read(ReadTicket(user, name, number, ranges, ((user, *ranges[user]),))))
    kept = sum(isinstance(each, ClaimRecord | ReadRecord) for each in engine.batches.claims.records())
    assert memory_of(broker) >= RECORD_BYTES * kept
    return kept, 2 * LOW * users_of(things)


def sources(broker: Broker, things: Things, low: pytest.MonkeyPatch, _: Path) -> tuple[int, int]:
    """Claims of an app for each user, each of another queue."""
    low.setattr(next_range, "KEPT_SOURCES", LOW)
    engine = broker.engine
    with broker.channel() as channel:
        for user, name in things:
            channel.queue_declare(name)
            channel.publish(b"", routing_key=name)
            with contextlib.suppress(errors.NotAllowed):
                engine.claim(user, [name], {name: START}, Limit(), Origin("earliest"), "fail")
    claims = engine.batches.claims
    assert memory_of(broker) >= RECORD_BYTES * claims.size()
    return claims.size(), 2 * LOW * users_of(things)


def queries(broker: Broker, things: Things, low: pytest.MonkeyPatch, _: Path) -> tuple[int, int]:
    """Each has decided a batch."""
    low.setattr(opening, "KEPT_LINEAGES", LOW)
    for user, name in things:
        engine = acting(broker, user)
        token = engine.open_batch(user, name, 0, "resume").token
        engine.commit_batch(user, name, 0, token, [])
    return sum(
        isinstance(each, LineageRecord) for each in broker.engine.batches.ledger.records()
    ), LOW * users_of(things)


def attempts(broker: Broker, things: Things, _low: pytest.MonkeyPatch, _: Path) -> tuple[int, int]:
    broker.engine.batches.branches.room.limits = StagedLimits(user_attempts=LOW)
    for user, name in things:
        with contextlib.suppress(errors.NotAllowed):
            acting(broker, user).open_batch(f"app of {user}", "q", 0, "fail", token=name)
    return len(broker.engine.staged_batches()), LOW * users_of(things)


def staged_bytes(broker: Broker, things: Things, _low: pytest.MonkeyPatch, _: Path) -> tuple[int, int]:
    broker.engine.batches.branches.room.limits = StagedLimits(user_bytes=LOW * 1000)
    with broker.channel() as channel:
        channel.queue_declare("in")
    for user, name in things:
        header: BranchHeader = contract.decode(
            BranchHeader, contract.encode({**HEADER, "token": name, "branch": name})
        )
        with contextlib.suppress(errors.TransactionTooLarge):
            acting(broker, user).stage(header, [messages(b"x" * 1000)])
    return sum(attempt.size_bytes for attempt in broker.engine.staged_batches()), LOW * 1000 * users_of(
        things
    )


def prepared_transactions(
    broker: Broker, things: Things, low: pytest.MonkeyPatch, _: Path
) -> tuple[int, int]:
    low.setattr(commit, "MOST_PREPARED", LOW)
    with broker.channel() as channel:
        channel.queue_declare("in")
        for _user, name in things:
            channel.tx_select()
            channel.publish(b"", routing_key="in")
            try:
                channel.prepare(name)
            except errors.PreconditionFailed:
                channel.tx_rollback()
    return len(broker.local.prepared()), LOW


def answers(broker: Broker, things: Things, low: pytest.MonkeyPatch, _: Path) -> tuple[int, int]:
    low.setattr(rights, "KEPT", LOW)
    users = broker.local.state.users
    users.file_users = frozenset()
    of = {user: Rights(users, user) for user, _ in things}

    def permit(_state: BrokerState, change: Change, _now: int) -> None:
        for user in of:
            users.add(change, user, "a hash")
            users.permit(change, user, "^a", "^a", "^a")

    broker.local.run(permit)
    for user, name in things:
        of[user].may("read", name)
    return max(len(each._now.answers) for each in of.values()), LOW


def named(broker: Broker, things: Things, low: pytest.MonkeyPatch, _: Path) -> tuple[int, int]:
    low.setattr(transaction, "NAMES_KEPT", LOW)
    with broker.channel() as channel:
        channel.queue_declare("q")
        channel.tx_select()
        for _user, name in things:
            channel.publish(b"", routing_key="q")
            channel.tx_commit(name)
    return len(broker.local.state.names.of_messages._by_time), LOW


def heard(broker: Broker, things: Things, low: pytest.MonkeyPatch, _: Path) -> tuple[int, int]:
    """Connections that have called over Flight, and attempts that they have opened."""
    low.setattr(clients, "KEPT", LOW)
    known, state = clients.FlightClients(), broker.local.state
    for user, name in things:
        caller = Caller(Identity(user), Rights(state.users, user, owner=True), "", state)
        known.called(f"ipv4:{name}", caller)
        known.staged(caller, name)
    return len(known.connections()) + len(known._attempts), 2 * LOW


def logged_errors(broker: Broker, things: Things, low: pytest.MonkeyPatch, _: Path) -> tuple[int, int]:
    low.setattr(upkeep, "LOGGED", LOW)
    for _user, name in things:
        broker.local.upkeep._log_once(f"queue {name}", ValueError())
    return len(broker.local.upkeep._logged), LOW


def routes(broker: Broker, things: Things, low: pytest.MonkeyPatch, _: Path) -> tuple[int, int]:
    room = broker.local.state.virtual_hosts.registry.routes
    low.setattr(route_cache, "ROUTE_BYTES", LOW * 1000)
    with broker.channel() as channel:
        for user, name in things:
            channel.exchange_declare(user, "direct")
            channel.publish(b"", user, name.ljust(200, "x"))
    return room.used, route_cache.ROUTE_BYTES


def audit_log(_broker: Broker, things: Things, low: pytest.MonkeyPatch, folder: Path) -> tuple[int, int]:
    low.setattr(audit, "MAX_BYTES", LOW * 100)
    log = Audit(str(folder))
    for user, name in things:
        log.record("refused", user, "10.0.0.1", asked=name)
    log.close()
    return sum(path.stat().st_size for path in folder.iterdir()), (audit.MOST + 1) * LOW * 100


def bindings(broker: Broker, things: Things, low: pytest.MonkeyPatch, _: Path) -> tuple[int, int]:
    topology = broker.local.state.topology
    low.setattr(memory, "NAMES_BYTES", 4 * (topology.memory.total + LOW * 1000))
    with broker.channel() as channel:
        channel.queue_declare("in")
        for user, name in things:
            with contextlib.suppress(errors.PreconditionFailed):
                channel.queue_bind("in", "amq.topic", f"{user}.{name}", {"name": name})
    kept = len(topology.exchanges["amq.topic"].bindings)
    assert topology.memory.total >= kept * 1000
    return kept, LOW


def queues_and_exchanges(broker: Broker, things: Things, low: pytest.MonkeyPatch, _: Path) -> tuple[int, int]:
    topology = broker.local.state.topology
    low.setattr(memory, "NAMES_BYTES", 4 * (topology.memory.total + LOW * memory.NAME_BYTES))
    predeclared = len(topology.exchanges)
    with broker.channel() as channel:
        for user, name in things:
            with contextlib.suppress(errors.PreconditionFailed):
                broker.channel().queue_declare(name)
            with contextlib.suppress(errors.PreconditionFailed):
                broker.channel().exchange_declare(name, "direct", arguments={"of": user})
        channel.queue_declare("0-user0")  # what is there may be declared again
    return len(topology.queues) + len(topology.exchanges) - predeclared, LOW


def consumers(broker: Broker, things: Things, low: pytest.MonkeyPatch, _: Path) -> tuple[int, int]:
    low.setattr(broker_channel, "QUEUE_CONSUMERS", LOW)
    with broker.channel() as channel:
        channel.queue_declare("q")
    state = broker.local.state
    for user, name in things:
        channel = Channel(state)
        channel.who = Author(user=user)
        with contextlib.suppress(errors.PreconditionFailed), broker.local.look:
            channel.consume(state.topology.queue("q"), name, lambda *_: 0, lambda _: None)
    return len(state.topology.queue("q").consumers), LOW


def broker_log(_broker: Broker, things: Things, low: pytest.MonkeyPatch, folder: Path) -> tuple[int, int]:
    low.setattr(log_file, "MAX_BYTES", LOW * 100)
    path = folder / "broker.log"
    with path.open("a") as stream:
        handler = log_file.LogFile(str(path), stream, (stream.fileno(),))
        for user, name in things:
            handler.emit(logging.makeLogRecord({"msg": f"{user} {name}"}))
            newest = path.read_text()
            assert name in newest or not newest, "the last line is in the newest file, or in the one before"
    assert {each.name for each in folder.iterdir()} == {"broker.log", "broker.log.1"}
    return sum(each.stat().st_size for each in folder.iterdir()), 2 * LOW * 100 + 200


def plots(_broker: Broker, things: Things, _low: pytest.MonkeyPatch, _: Path) -> tuple[int, int]:
    kept = PlotHistory(LOW)
    for at, (user, name) in enumerate(things):
        kept.begin(float(at))
        kept.add([(("queue", user, name), (at + 1.0, 0.0, 0.0)), (("vhost", name), (1.0, 0.0, 0.0))])
    return len(kept), LOW


def page_logins(_broker: Broker, things: Things, low: pytest.MonkeyPatch, _: Path) -> tuple[int, int]:
    low.setattr(page_sessions, "MOST", LOW)
    low.setattr(page_sessions, "OF_USER", LOW // 2)
    sessions = PageSessions()
    for user, _name in things:
        sessions.open(user, "basis")
    return len(sessions), LOW if users_of(things) > 1 else LOW // 2


def often_asked(_broker: Broker, things: Things, low: pytest.MonkeyPatch, _: Path) -> tuple[int, int]:
    low.setattr(answer_cache, "MOST", LOW)
    low.setattr(answer_cache, "LARGEST_BYTES", 1024)
    kept = answer_cache.AnswerCache(lambda: 0.0)
    for key in things:
        for size in (1024, 1025) * answer_cache.OFTEN:
            kept.find(key)
            kept.keep(key, Response(bytes(size)), 0)
        found = kept.find(key)
        assert found is not None and len(found.body) == 1024
    return len(kept), LOW


def commits(broker: Broker, things: Things, _low: pytest.MonkeyPatch, _: Path) -> tuple[int, int]:
    """Each of its own user, in its own queue."""
    kept = broker.local.state.transactions.history
    kept.limits = HistoryLimits(size_bytes=LOW * 1024)
    for user, name in things:
        with broker.local.channel(user=user) as channel:
            channel.queue_declare(name)
            channel.publish(b"", routing_key=name)
    alone, kept.size_bytes = kept.size_bytes, kept.size_bytes + 10**9
    assert memory_of(broker) >= 10**9
    kept.size_bytes = alone
    return kept.size_bytes, LOW * 1024


def message_ids(broker: Broker, things: Things, _low: pytest.MonkeyPatch, _: Path) -> tuple[int, int]:
    with broker.local.channel() as channel:
        channel.queue_declare("ids", arguments={"x-message-deduplication": True, "x-cache-size": LOW})
        for _user, name in things:
            channel.publish(b"", routing_key="ids", properties=Properties(message_id=name).encode())
    ids = broker.local.state.topology.queue("ids").log.ids
    assert ids is not None
    return len(ids), LOW


ROWS = {
    "the history of commits": Fill(f"{HistoryLimits().size_bytes >> 20} MiB", commits),
    "ids of ended channels of `BrokerClient`": Fill(f"{channels.ENDED:,}", ended_channels),
    "outcomes of named transactions": Fill(f"{OutcomeLimits().count:,}", named_outcomes),
    "heuristic outcomes": Fill(f"{heuristics.MOST_HEURISTIC:,}", heuristic_outcomes),
    "last commits of channels of `BrokerClient`": Fill(f"{outcomes.BLOCK:,} on their way", channel_commits),
    "apps": Fill(f"{owners.USER_APPS:,}", apps),
    "decided batches of an app that are applied": Fill(f"{ledger.KEPT_ENTRIES:,}", decided),
    "claims of an app for the same queues, and reads": Fill(f"{claim.KEPT_CLAIMS:,} of each", claimed),
    "sets of queues that an app has read": Fill(f"{next_range.KEPT_SOURCES:,}", sources),
    "queries of an app": Fill(f"{opening.KEPT_LINEAGES:,}", queries),
    "staged batches": Fill(f"{StagedLimits().user_attempts:,}", attempts),
    "staged bytes": Fill("`--staged-bytes`", staged_bytes),
    "prepared transactions": Fill(f"{commit.MOST_PREPARED:,}", prepared_transactions),
    "answers of permissions": Fill(f"{rights.KEPT:,}", answers),
    "names of transactions, for their dead letters": Fill(f"{transaction.NAMES_KEPT:,}", named),
    "who has called over Flight, and staged batches": Fill(f"{clients.KEPT:,} of each", heard),
    "errors of the upkeep that are logged once": Fill(f"{upkeep.LOGGED:,}", logged_errors),
    "cached routes": Fill(f"{route_cache.ROUTE_BYTES >> 20} MiB", routes),
    "lines of `broker.log`": Fill(f"2 files of {log_file.MAX_BYTES >> 20} MiB", broker_log),
    "bindings": Fill(f"{memory.NAMES_BYTES >> 20} MiB", bindings),
    "queues and exchanges": Fill(f"{memory.NAMES_BYTES >> 20} MiB", queues_and_exchanges),
    "ids of messages that a queue remembers": Fill(f"{deduplication.MOST:,}", message_ids),
    "bytes in consumers": Fill(
        f"{broker_channel.MOST_CONSUMER_BYTES >> 20} MiB", client_fills.consumer_bytes
    ),
    "unread direct replies": Fill(
        f"{direct_reply.MOST:,}, and {direct_reply.MOST_BYTES >> 20} MiB", client_fills.direct_replies
    ),
    "unread `basic.return` of transactions": Fill(
        f"{channel_commit.SPILL_BYTES >> 20} MiB in memory", client_fills.returned
    ),
    "consumers of a queue": Fill(f"{broker_channel.QUEUE_CONSUMERS:,}", consumers),
    "series of numbers for plots of the page": Fill(f"{history.SERIES:,} of half an hour", plots),
    "logins of browsers": Fill(f"{page_sessions.MOST:,}, of a user {page_sessions.OF_USER}", page_logins),
    "answers of HTTP that are requested often": Fill(
        f"{answer_cache.MOST} of {answer_cache.LARGEST_BYTES >> 10} KiB", often_asked
    ),
    "the audit log": Fill(
        f"{audit.MOST + 1} files of {audit.MAX_BYTES >> 20} MiB, {audit.KEPT_DAYS} days", audit_log
    ),
}


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker.memory() as found:
        found.local.upkeep.stop()
        yield found


def table() -> dict[str, str]:
    """What is kept, and its bound, as the pages have them."""
    found = [page.read_text().partition("| state | bound |")[2].partition("\n\n")[0] for page in PAGES]
    rows = re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|", "\n".join(found), re.MULTILINE)
    assert len(rows) == len(dict(rows)), "a row stands twice"
    return dict(rows)


def test_the_table_has_a_row_for_each_fill_and_the_bounds_of_the_code() -> None:
    stated = table()
    assert stated.keys() == ROWS.keys()
    assert {what: bound for what, bound in stated.items() if ROWS[what].stated not in bound} == {}


@pytest.mark.parametrize("users", [1, USERS])
@pytest.mark.parametrize("what", ROWS)
def test_what_outlives_a_call_is_bounded_for_one_user_and_for_a_thousand(
    what: str, users: int, broker: Broker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    people = [f"user{number}" for number in range(users)]
    broker.local.state.users.file_users = frozenset(people)
    things = [(user, f"{number}-{user}") for number in range(THINGS // users) for user in people]
    kept, bound = ROWS[what].fill(broker, things, monkeypatch, tmp_path)
    assert 0 < kept <= bound, (kept, bound)
    assert broker.failure is None
