"""Whose an app is: each call proves its right to the apps whose reads, attempts, branches and entries it
touches. Ids are known to everybody here: mallory is told each query, token and branch.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from broker_core.broker.access.users import own_id
from broker_core.client.broker import BrokerClient
from broker_core.core import errors
from broker_core.core import password as passwords
from broker_core.core.credentials import Credentials
from broker_core.engine import START, BranchHeader, Limit, Origin, ReadTicket, StagedBranch, Vector
from broker_core.launcher import Broker
from broker_core.message.message import MESSAGE_SCHEMA
from broker_core.message.properties import Properties
from txmq.cli import main

PASSWORD = "secret of all"
ANN, MALLORY, ROOT = "ann", "mallory", "root"
QUERY = "11111111-2222-3333-4444-555555555555"  # Spark's page shows it
ROWS = pa.record_batch({"name": ["ann", "bob"], "salary": [90_000, 120_000]})


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker.open(tmp_path / "data") as made:
        with made.channel() as channel:
            for queue in ("in", "hers"):
                channel.queue_declare(queue)
        for user, (configure, write, read) in {
            ANN: ("", ".*", "^in$"),
            MALLORY: ("^$", "^$", "^hers$"),
            ROOT: (".*", ".*", ".*"),
        }.items():
            made.accounts.add_user(user, passwords.hashed(PASSWORD, passwords.Cost(4)))
            made.accounts.set_permissions(user, configure, write, read)
        made.accounts.set_tags(ROOT, ["administrator"])
        yield made


@pytest.fixture
def of(broker: Broker) -> Iterator[Callable[[str], BrokerClient]]:
    made: dict[str, BrokerClient] = {}

    def client(user: str) -> BrokerClient:
        if user not in made:
            made[user] = BrokerClient(broker.url, credentials=Credentials(user=user, password=PASSWORD))
        return made[user]

    yield client
    for each in made.values():
        each.close()


def put(broker: Broker, queue: str, count: int = 1) -> None:
    with broker.channel() as channel:
        for number in range(count):
            channel.publish(str(number).encode(), routing_key=queue)


def claimed(client: BrokerClient, app: str, start: Vector) -> Vector:
    return client.claim(app, list(start), start, Limit(), Origin("earliest"), "fail")


def read(client: BrokerClient, app: str, start: Vector, end: Vector, batch_id: int = 0) -> int:
    ranges = client.resolve(app, start, end)
    slices = tuple((log, first, last) for log, (first, last) in ranges.items())
    return sum(batch.num_rows for batch in client.read(ReadTicket(app, QUERY, batch_id, ranges, slices)))


def refused(call: Callable[[], Any], user: str = MALLORY) -> None:
    with pytest.raises(errors.AccessRefused, match=f"refused for user '{user}'"):
        call()


def staged(client: BrokerClient, token: str, branch: str = "b") -> StagedBranch:
    return client.stage(BranchHeader(token, branch, "append", {"table": "/lake/salaries"}), [ROWS])


def test_asking_for_an_app_takes_nothing(broker: Broker, of: Callable[[str], BrokerClient]) -> None:
    """Each call that only asks, or that fails, leaves the id to who claims or opens it."""
    mallory, records = of(MALLORY), len(broker.engine.state.users.apps)
    assert mallory.last_entry("app") is None and mallory.app("app") is None
    assert mallory.unapplied("app") == mallory.unmirrored("app") == []
    mallory.mark_applied("app", 1)
    mallory.mark_mirrored("app", 1)
    start: Vector = {"hers": START}
    for call in (
        lambda: mallory.resolve("app", start, {"hers": 1}),
        lambda: mallory.count("app", {"hers": (0, 1)}),
        lambda: mallory.ack("app", {"hers": 1}),
        lambda: mallory.claim("app", ["hers"], {"hers": 5}, Limit(), Origin(), "fail"),
        lambda: mallory.open_batch("app", QUERY, 7, "fail"),
        lambda: mallory.commit_batch("app", QUERY, 0, "t", []),
        lambda: list(mallory.read(ReadTicket("app", QUERY, 0, {"hers": (0, 1)}, (("hers", 0, 1),)))),
    ):
        with pytest.raises(errors.TransactionError):
            call()
    assert len(broker.engine.state.users.apps) == records
    put(broker, "in")
    assert claimed(of(ANN), "app", {"in": START}) == {"in": 1}
    refused(lambda: mallory.last_entry("app"))


@pytest.mark.parametrize("owner", [ROOT, "the directory"])
def test_the_app_of_an_administrator_and_of_the_directory_belongs_to_nobody_else(
    broker: Broker, of: Callable[[str], BrokerClient], owner: str, tmp_path: Path
) -> None:
    mine = of(ROOT) if owner == ROOT else BrokerClient(data=str(tmp_path / "data"))
    opened = mine.open_batch("salaries", QUERY, 0, "fail")
    decided = mine.commit_batch("salaries", QUERY, 0, opened.token, [staged(mine, opened.token)])
    (rows,) = decided.entry.to_apply
    for user in (MALLORY, ANN):
        client = of(user)
        refused(lambda: client.unapplied("salaries"), user)  # noqa: B023
        refused(lambda: list(client.read_branches(rows.branches)), user)  # noqa: B023
        refused(lambda: client.mark_applied("salaries", 1), user)  # noqa: B023
    (entry,) = mine.unapplied("salaries")
    assert [batch.to_pydict() for batch in mine.read_branches(entry.to_apply[0].branches)] == [
        ROWS.to_pydict()
    ]
    mine.mark_applied("salaries", 1)
    assert mine.unapplied("salaries") == []
    if mine is not of(ROOT):
        mine.close()


def test_a_batch_consumes_what_apps_of_its_owner_have_read_and_nothing_else(
    broker: Broker, of: Callable[[str], BrokerClient]
) -> None:
    """By query and batch, mallory can neither consume what ann reads nor stop her."""
    ann, mallory = of(ANN), of(MALLORY)
    put(broker, "in", 5)
    # 1. mallory's reads and decision for ann's batches, before ann begins
    begin: Vector = {"hers": START}
    for batch_id in range(3):
        put(broker, "hers")
        her_end = claimed(mallory, "poison", begin)
        assert read(mallory, "poison", begin, her_end, batch_id) == 1
        begin = her_end
    early = mallory.open_batch("early", QUERY, 0, "resume")
    hers = mallory.commit_batch("early", QUERY, 0, early.token, []).entry.ranges
    assert hers == {"hers": (0, 1)}  # both apps are of one owner
    # 2. ann reads with one app and decides with another; between, mallory decides her batch
    end = claimed(ann, "source", {"in": START})
    opened = ann.open_batch("sink", QUERY, 0, "fail")
    assert read(ann, "source", {"in": START}, end) == 5
    stolen = mallory.open_batch("thief", QUERY, 0, "resume")
    with pytest.raises(
        errors.CheckpointMismatch, match="'hers' is consumed up to 1"
    ):  # by her first decision
        mallory.commit_batch("thief", QUERY, 0, stolen.token, [])
    entry = ann.commit_batch("sink", QUERY, 0, opened.token, []).entry
    assert entry.ranges == {"in": (0, 5)} and entry.messages == 5
    # 3. the next one
    put(broker, "in", 2)
    last = claimed(ann, "source", end)
    opened = ann.open_batch("sink", QUERY, 1, "fail")
    assert read(ann, "source", end, last, 1) == 2
    assert ann.commit_batch("sink", QUERY, 1, opened.token, []).entry.ranges == {"in": (5, 7)}


def test_an_administrator_who_decides_is_not_poisoned_by_reads_of_others(
    broker: Broker, of: Callable[[str], BrokerClient]
) -> None:
    """It may use each app, and its batches still consume only what its own have read."""
    root, mallory = of(ROOT), of(MALLORY)
    put(broker, "in")
    put(broker, "hers")
    start: Vector = {"hers": START}
    assert read(mallory, "poison", start, claimed(mallory, "poison", start)) == 1
    opened = root.open_batch("app", QUERY, 0, "fail")
    assert read(root, "app", {"in": START}, claimed(root, "app", {"in": START})) == 1
    assert root.commit_batch("app", QUERY, 0, opened.token, []).entry.ranges == {"in": (0, 1)}


def test_apps_of_administrators_and_of_the_directory_share_a_batch(
    broker: Broker, of: Callable[[str], BrokerClient]
) -> None:
    """Each of them may use every app: another login for the source than for the sink changes nothing."""
    engine, root = broker.engine, of(ROOT)
    put(broker, "in", 2)
    opened = root.open_batch("sink", QUERY, 0, "fail")
    end = engine.claim("source", ["in"], {"in": START}, Limit(), Origin("earliest"), "fail")
    ranges = engine.resolve("source", {"in": START}, end)
    rows = engine.read(ReadTicket("source", QUERY, 0, ranges, (("in", 0, 2),)))
    assert sum(batch.num_rows for batch in rows) == 2
    assert root.commit_batch("sink", QUERY, 0, opened.token, []).entry.ranges == {"in": (0, 2)}


def test_who_knows_a_token_or_a_branch_of_another_can_do_nothing_with_it(
    broker: Broker, of: Callable[[str], BrokerClient]
) -> None:
    ann, mallory = of(ANN), of(MALLORY)
    ann.open_batch("app", QUERY, 0, "fail", token="of ann")
    first = staged(ann, "of ann", "one")
    mine = mallory.open_batch("hers", "her query", 0, "fail", token="of mallory")
    # 1. an open attempt: mallory's of the same token, and her branches, are her own
    staged(mallory, "of ann", "one")
    staged(mallory, mine.token, "two")
    mallory.rollback_batch("of ann")
    with pytest.raises(errors.TransactionState):
        mallory.commit_branches("of ann", [])
    with pytest.raises(errors.MissingBranch):
        list(mallory.read_branches(["one"]))
    refused(lambda: list(mallory.read_branches([own_id(ANN, "one")])))
    assert [(each.token, each.user) for each in broker.engine.staged_batches()] == [
        ("of ann", ANN),
        ("of mallory", MALLORY),
    ]
    with pytest.raises(
        errors.CheckpointMismatch, match="token of mallory was opened for batch 0 of app 'hers'"
    ):
        mallory.open_batch("others", "her query", 0, "fail", token=mine.token)
    # 2. a decided one, whose rows are yet to be applied
    entry = ann.commit_batch("app", QUERY, 0, "of ann", [first]).entry
    assert entry.token == "of ann"
    assert mallory.open_batch("hers", "her query", 0, "fail", token="of ann").token == "of ann"
    with pytest.raises(errors.MissingBranch, match="should have 2 rows under token of ann, but 0"):
        mallory.commit_batch("hers", "her query", 0, "of ann", [first])
    assert mallory.commit_batch("hers", "her query", 0, "of ann", []).entry.to_apply == ()
    with pytest.raises(errors.CheckpointMismatch, match="was opened for batch 0 of app 'app'"):
        ann.open_batch("app", QUERY, 1, "fail", token="of ann")
    (rows,) = entry.to_apply
    refused(lambda: list(mallory.read_branches(rows.branches)))
    assert sum(batch.num_rows for batch in ann.read_branches(rows.branches)) == 2


def test_an_operator_drops_an_attempt_and_names_its_user_where_two_have_the_token(
    broker: Broker, of: Callable[[str], BrokerClient], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ("--data", str(tmp_path / "data"))
    for user in (ANN, MALLORY):
        staged(of(user), "t")
    assert main(["app", "discard", "t", "--yes", *data]) != 0
    assert "the users 'ann', 'mallory' have the token t: name the user: --of" in capsys.readouterr().err
    refused(lambda: of(MALLORY).rollback_batch("t", of=ANN))
    assert main(["app", "discard", "t", "--yes", "--of", MALLORY, *data]) == 0
    assert [each.user for each in broker.engine.staged_batches()] == [ANN]
    assert main(["app", "discard", "t", "--yes", *data]) == 0
    assert broker.engine.staged_batches() == []
    assert main(["app", "discard", "t", "--yes", "--of", ANN, *data]) != 0


def test_an_administrator_gives_an_app_to_another_user(
    broker: Broker, of: Callable[[str], BrokerClient], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(broker, "in")
    assert claimed(of(ANN), "app", {"in": START}) == {"in": 1}
    data = ("--data", str(tmp_path / "data"))
    assert main(["app", "chown", "app", MALLORY, *data]) == 0
    assert capsys.readouterr().out == f"app app belongs to user {MALLORY}\n"
    refused(lambda: of(ANN).last_entry("app"), ANN)
    assert of(MALLORY).last_entry("app") is None
    assert main(["app", "chown", "app", "unknown", *data]) != 0
    assert "[TXMQ_OPTION]" in capsys.readouterr().err
    broker.accounts.give_app("app", ANN)
    assert of(ANN).app("app") is not None
    refused(lambda: of(MALLORY).app("app"))


def test_an_app_that_is_given_away_before_its_first_run_is_said_to_be_none_yet(
    broker: Broker, of: Callable[[str], BrokerClient], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is a reservation, or a name that was mistyped."""
    chown = ["app", "chown", "ahead", ANN, "--data", str(tmp_path / "data")]
    assert main(chown) == 0
    assert capsys.readouterr().out == f"app ahead belongs to user {ANN}: no such app has run so far\n"
    assert main([*chown, "--json"]) == 0 and not json.loads(capsys.readouterr().out)["ran"]
    put(broker, "in")
    refused(lambda: of(MALLORY).claim("ahead", ["hers"], {"hers": START}, Limit(), Origin(), "fail"))
    assert claimed(of(ANN), "ahead", {"in": START}) == {"in": 1}
    assert main(chown) == 0
    assert capsys.readouterr().out == f"app ahead belongs to user {ANN}\n"


def test_the_app_of_a_deleted_user_is_for_administrators_alone(
    tmp_path: Path, broker: Broker, of: Callable[[str], BrokerClient]
) -> None:
    """It is not lost: it belongs to the administrator, or the owner of the directory, who goes on with it."""
    put(broker, "in")
    assert claimed(of(ANN), "app", {"in": START}) == {"in": 1}
    broker.accounts.delete_user(ANN)
    broker.accounts.add_user(ANN, passwords.hashed(PASSWORD, passwords.Cost(4)))  # another person
    broker.accounts.set_permissions(ANN, ".*", ".*", ".*")
    refused(lambda: of(ANN).last_entry("app"), ANN)
    refused(lambda: of(ANN).open_batch("app", QUERY, 0, "fail"), ANN)
    refused(lambda: of(MALLORY).app("app"))
    assert of(ROOT).app("app") is not None and broker.engine.state.users.apps == {}
    of(ROOT).open_batch("app", QUERY, 0, "fail")
    assert broker.engine.state.users.apps == {("/", "app"): ROOT}


def test_owners_are_durable(tmp_path: Path) -> None:
    with Broker.open(tmp_path) as broker:
        broker.engine.open_batch("of the directory", QUERY, 0, "fail")
        with BrokerClient(broker.url) as guest:  # nobody has added a user
            guest.open_batch("of guest", QUERY, 0, "fail")
    with Broker.open(tmp_path) as broker:
        assert broker.engine.state.users.apps == {("/", "of the directory"): "", ("/", "of guest"): "guest"}


def test_a_batch_write_belongs_to_who_staged_its_first_rows(
    tmp_path: Path, broker: Broker, of: Callable[[str], BrokerClient]
) -> None:
    """By its token and branches, mallory can neither read, extend, commit nor drop it, also after a restart."""
    body = pa.record_batch({"body": pa.array([b"ann's"], pa.binary())})
    mine = of(ANN).stage(BranchHeader("write", "b", "publish", {"routing_key": "in"}), [body])
    mallory = of(MALLORY)
    with pytest.raises(errors.MissingBranch):
        mallory.commit_branches("write", [mine])
    mallory.rollback_batch("write")
    refused(lambda: list(mallory.read_branches([own_id(ANN, "b")])))
    mallory.stage(BranchHeader("write", "c", "append", {"table": "t"}), [ROWS])  # a write of her own
    broker.close()
    with Broker.open(tmp_path / "data") as again:
        clients = [
            BrokerClient(again.url, credentials=Credentials(user=user, password=PASSWORD))
            for user in (MALLORY, ANN)
        ]
        with pytest.raises(errors.MissingBranch):
            clients[0].commit_branches("write", [mine])
        clients[0].rollback_batch("write")
        assert clients[1].commit_branches("write", [mine]) == 1
        assert clients[1].commit_branches("write", [mine]) == 1  # its answer was lost
        assert again.engine.state.users.writes == {}
        for client in clients:
            client.close()


def test_a_later_user_of_the_name_does_not_get_the_batch_write_of_a_deleted_one(
    broker: Broker, of: Callable[[str], BrokerClient]
) -> None:
    mine = staged(of(ANN), "write")
    broker.accounts.delete_user(ANN)
    broker.accounts.add_user(ANN, passwords.hashed(PASSWORD, passwords.Cost(4)))
    broker.accounts.set_permissions(ANN, ".*", ".*", ".*")
    refused(lambda: of(ANN).commit_branches("write", [mine]), ANN)
    of(ROOT).rollback_batch("write")
    assert broker.engine.staged_batches() == [] and broker.engine.state.users.writes == {}


def test_staged_rows_name_no_other_user_as_user_id(
    broker: Broker, of: Callable[[str], BrokerClient], tmp_path: Path
) -> None:
    """As for a publish; with the tag impersonator, or the token of the directory, they may."""

    def publish(client: BrokerClient, user_id: str) -> None:
        properties = [b"", Properties(user_id=user_id).encode()]
        rows = pa.record_batch(
            {
                "exchange": ["", ""],
                "routing_key": ["in", "in"],
                "body": pa.array([b"1", b"2"], pa.binary()),
                "properties": pa.array(properties, pa.binary()),
            },
            schema=MESSAGE_SCHEMA,
        )
        token = uuid.uuid4().hex
        client.commit_branches(token, [client.stage(BranchHeader(token, token, "publish", {}), [rows])])

    publish(of(ANN), ANN)
    for user in (ANN, ROOT):
        with pytest.raises(errors.PreconditionFailed, match=rf"row 1: user_id .* '{MALLORY}' .* '{user}'"):
            publish(of(user), MALLORY)
    with BrokerClient(data=str(tmp_path / "data")) as owner:
        publish(owner, MALLORY)
    broker.accounts.set_tags(ANN, ["impersonator"])
    publish(of(ANN), MALLORY)
    with pytest.raises(errors.AccessRefused):  # it is no tag to look with
        of(ANN).apps()
    assert [queue.messages for queue in broker.queues() if queue.name == "in"] == [6]
