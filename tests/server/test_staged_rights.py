"""What is staged is asked again when it is decided: rights that were taken meanwhile publish and consume nothing.

Not here: what is asked when rows are staged (``flight/test_flight_permissions.py``), and transactions of
channels (``interop/test_permissions.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from broker_core.broker.access.rights import Rights
from broker_core.client.broker import BrokerClient
from broker_core.core import errors
from broker_core.core import password as passwords
from broker_core.core.credentials import Credentials
from broker_core.engine import START, BranchHeader, Limit, Origin, ReadTicket, StagedBranch
from broker_core.launcher import Broker
from broker_core.message.message import MESSAGE_SCHEMA
from broker_core.message.properties import Properties

PASSWORD = "secret of all"
ANN, QUERY, APP = "ann", "11111111-2222-3333-4444-555555555555", "app"
TOPIC, LARGE = "events", 70_000  # rows of two parts, which go as a file, or by DoPut
COPIED = Properties(headers={"CC": ["b.copy"]}).encode()
RELAYED = Properties(user_id="bob").encode()

Take = Callable[[Broker], None]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def broker(data: Path) -> Iterator[Broker]:
    with Broker.open(data) as made:
        with made.channel() as channel:
            channel.exchange_declare(TOPIC, type="topic")
            for queue in ("in", "out"):
                channel.queue_declare(queue)
            channel.queue_bind("out", TOPIC, "#")
        made.accounts.add_user(ANN, passwords.hashed(PASSWORD, passwords.Cost(4)))
        give_all(made)
        yield made


def give_all(broker: Broker) -> None:
    broker.accounts.set_permissions(ANN, "^$", f"^({TOPIC}|amq.default)$", "^in$")
    broker.accounts.set_topic_permissions(ANN, TOPIC, "^[ab]", "^$")
    broker.accounts.set_tags(ANN, ["impersonator"])


@contextlib.contextmanager
def ann(broker: Broker, files: bool = True) -> Iterator[BrokerClient]:
    credentials = Credentials(user=ANN, password=PASSWORD)
    with BrokerClient(broker.url, credentials=credentials, map_files=files) as made:
        yield made


def batch(rows: int = 1, exchange: str = TOPIC, properties: bytes = b"", first: str = "ab") -> pa.RecordBatch:
    """The last row has the properties."""
    columns = [
        [exchange] * rows,
        [f"{first[row % len(first)]}.{row % 50}" for row in range(rows)],
        [b"x"] * rows,
        [b""] * (rows - 1) + [properties],
    ]
    return pa.RecordBatch.from_pydict(dict(zip(MESSAGE_SCHEMA.names, columns, strict=True)), MESSAGE_SCHEMA)


def stage(client: BrokerClient, token: str, rows: pa.RecordBatch, app: str = "") -> StagedBranch:
    given = (app, QUERY, 0) if app else ()
    return client.stage(BranchHeader(token, f"branch of {token}", "publish", {}, *given), [rows])


def messages(broker: Broker, queue: str) -> int:
    (found,) = (each for each in broker.queues() if each.name == queue)
    return found.messages


def write_taken(broker: Broker) -> None:
    broker.accounts.set_permissions(ANN, "^$", "^amq.default$", "^in$")


def key_taken(broker: Broker) -> None:
    broker.accounts.set_topic_permissions(ANN, TOPIC, "^a", "^$")


def tag_taken(broker: Broker) -> None:
    broker.accounts.set_tags(ANN, [])


FEW: dict[str, tuple[Take, pa.RecordBatch, str]] = {
    "exchange": (write_taken, batch(1), f"exchange '{TOPIC}'"),
    "key": (key_taken, batch(2), "topic 'b.1'"),
    "key of CC": (key_taken, batch(1, properties=COPIED), "topic 'b.copy'"),
}
MANY: dict[str, tuple[Take, pa.RecordBatch, str]] = {
    "exchange of many": (write_taken, batch(LARGE), f"exchange '{TOPIC}'"),
    "key of many": (key_taken, batch(LARGE), "topic 'b.1'"),
    "key of CC of many": (key_taken, batch(LARGE, properties=COPIED, first="a"), "topic 'b.copy'"),
}
WAYS = [
    *(pytest.param(*row, False, id=name) for name, row in (FEW | MANY).items()),
    *(pytest.param(*row, True, id=f"{name}, as a file") for name, row in MANY.items()),
]


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize(("take", "rows", "refused", "files"), WAYS)
def test_a_right_that_is_taken_after_staging_stops_the_commit(
    broker: Broker, data: Path, take: Take, rows: pa.RecordBatch, refused: str, files: bool, restarted: bool
) -> None:
    """Of a batch write and of a micro-batch; nothing is published, and with the right it goes on."""
    with ann(broker, files) as client:
        written = stage(client, "write", rows)
        client.open_batch(APP, QUERY, 0, "fail", token="token")
        of_app = stage(client, "token", rows, APP)
    take(broker)
    if restarted:
        broker.close()
        broker = Broker.open(data)
    try:
        with ann(broker) as client:
            for _ in range(2):
                with pytest.raises(errors.AccessRefused, match=refused):
                    client.commit_branches("write", [written])
                with pytest.raises(errors.AccessRefused, match=refused):
                    client.commit_batch(APP, QUERY, 0, "token", [of_app])
            assert messages(broker, "out") == 0
            give_all(broker)
            assert client.commit_branches("write", [written]) == rows.num_rows
            client.commit_batch(APP, QUERY, 0, "token", [of_app])
            assert messages(broker, "out") == 2 * rows.num_rows
            take(broker)  # what is decided is decided: the answer may be lost
            assert client.commit_branches("write", [written]) == rows.num_rows
            assert client.commit_batch(APP, QUERY, 0, "token", [of_app]).already
    finally:
        broker.close()


@pytest.mark.parametrize("rows", [1, LARGE])
def test_the_tag_impersonator_is_asked_again(broker: Broker, rows: int) -> None:
    with ann(broker) as client:
        written = stage(client, "write", batch(rows, properties=RELAYED))
        tag_taken(broker)
        with pytest.raises(errors.PreconditionFailed, match="user_id property set to 'bob'"):
            client.commit_branches("write", [written])
        assert messages(broker, "out") == 0


def test_the_read_right_of_what_a_batch_consumes_is_asked_again(broker: Broker) -> None:
    with broker.channel() as channel:
        channel.publish(b"1", routing_key="in")
    with ann(broker) as client:
        end = client.claim(APP, ["in"], {"in": START}, Limit(), Origin("earliest"), "fail")
        ranges = client.resolve(APP, {"in": START}, end)
        slices = tuple((log, first, last) for log, (first, last) in ranges.items())
        assert sum(one.num_rows for one in client.read(ReadTicket(APP, QUERY, 0, ranges, slices))) == 1
        client.open_batch(APP, QUERY, 0, "fail", token="token")
        broker.accounts.set_permissions(ANN, "^$", f"^{TOPIC}$", "^$")
        with pytest.raises(errors.AccessRefused, match="queue 'in'"):
            client.commit_batch(APP, QUERY, 0, "token", [])
        assert messages(broker, "in") == 1
        give_all(broker)
        assert client.commit_batch(APP, QUERY, 0, "token", []).entry.messages == 1


def test_each_address_is_asked_once_and_none_while_rights_are_as_they_were(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A branch of many rows has few addresses, and a part that was asked with the rights of now is not read."""
    asked: list[str] = []
    require_topic = Rights.require_topic

    def count(self: Rights, permission: str, exchange: str, routing_key: str) -> None:
        asked.append(routing_key)
        require_topic(self, permission, exchange, routing_key)  # type: ignore[arg-type]

    with ann(broker) as client:
        first, second = (stage(client, token, batch(LARGE)) for token in ("1", "2"))
        monkeypatch.setattr(Rights, "require_topic", count)
        client.commit_branches("1", [first])
        assert asked == []
        broker.accounts.set_tags(ANN, [])
        client.commit_branches("2", [second])
        assert len(asked) <= 2 * 50 and set(asked) == {f"{'ab'[key % 2]}.{key}" for key in range(50)}


def test_who_decides_decides_what_it_has_staged_itself(broker: Broker) -> None:
    """An administrator may use each app: its attempts are its own, also under the same token."""
    broker.accounts.add_user("root", passwords.hashed(PASSWORD, passwords.Cost(4)), ["administrator"])
    broker.accounts.set_permissions("root", "^$", "^amq.fanout$", "^$")
    with (
        ann(broker) as client,
        BrokerClient(broker.url, credentials=Credentials(user="root", password=PASSWORD)) as root,
    ):
        client.open_batch(APP, QUERY, 0, "fail", token="token")
        header = BranchHeader("token", "of root", "publish", {}, APP, QUERY, 0)
        mine = stage(client, "token", batch(1), APP)
        hers = root.stage(header, [batch(1, "amq.fanout")])
        for each in (client, root):
            with pytest.raises(errors.MissingBranch):
                each.commit_batch(APP, QUERY, 0, "token", [mine, hers], on_unroutable="drop")
        client.commit_batch(APP, QUERY, 0, "token", [mine])
        assert messages(broker, "out") == 1
        assert broker.engine.staged_batches() == []  # of a batch that is decided
