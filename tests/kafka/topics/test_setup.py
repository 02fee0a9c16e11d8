"""``txmq broker setup``: what it prints is what the engine sends, what the page says, and what the cluster lacks."""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from broker_core.engine import START, BranchHeader, Limit, Origin, ReadTicket
from broker_core.kafka import engine as engines
from broker_core.kafka import names
from broker_core.kafka.admin import KafkaAdmin
from broker_core.kafka.cluster.acls import CLUSTER, GROUP, TOPIC, TRANSACTIONAL_ID, Kind
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.engine import KafkaEngine
from broker_core.kafka.protocol import port
from broker_core.kafka.protocol.codes import Code
from broker_core.kafka.protocol.port import NodeAddress, Request
from broker_core.kafka.sink.producer import ProducerEpoch, ReadyBatch
from broker_core.kafka.topics import entry as topic_entry
from broker_core.kafka.topics import setup, topics
from broker_core.kafka.topics.entry import Entry
from broker_core.kafka.topics.setup import DRIVER, EXECUTOR, OPERATOR, QueueUse
from broker_core.launcher import Broker
from tests.kafka.bench.fake_kafka import FakeKafka
from tests.page_blocks import blocks_of
from txmq import cli

URL = "kafka://fake:1,fake:2,fake:3"
APP, FROM, TO = "shop", "orders", "done"
WAIT_S = 60.0
Sent = dict[tuple[str, str], set[Kind]]


class Recorder:
    """A wire that notes which requests are sent about which resources."""

    def __init__(self, kafka: FakeKafka, sent: Sent, shown: threading.Event) -> None:
        self._wire = kafka.wire()
        self._sent = sent
        self._shown = shown

    def send(self, node: NodeAddress, request: Request[Any], lane: str = "") -> Any:
        for resource in resources(request):
            self._sent[resource].add(type(request))
        answer = self._wire.send(node, request, lane)
        if isinstance(request, port.CommitOffsets):
            self._shown.set()
        return answer

    def close(self) -> None:
        self._wire.close()


def resources(request: Request[Any]) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    if isinstance(request, port.LogSizes):
        return {(CLUSTER, "")}
    if isinstance(request, port.Metadata):
        return {(TOPIC, name) for name in request.topics or ()}
    for name in ("timestamps", "offsets", "batches", "before", "logs"):
        found |= {(TOPIC, log.topic) for log in getattr(request, name, ())}
    if getattr(request, "name", ""):
        found.add((TOPIC, request.name))  # type: ignore[attr-defined]
    if getattr(request, "transactional_id", None):
        found.add((TRANSACTIONAL_ID, request.transactional_id))  # type: ignore[attr-defined]
    if isinstance(request, port.FindCoordinator):
        found.add((GROUP if request.group else TRANSACTIONAL_ID, request.key))
    if isinstance(request, port.CommitOffsets):
        found.add((GROUP, request.group))
    return found


class Bench:
    """Processes of three roles on one FakeKafka."""

    def __init__(self, version: int, sent: dict[str, Sent]) -> None:
        self.kafka = FakeKafka(transaction_version=version)
        self.sent = sent
        self.shown = threading.Event()  # offsets of the group, which a thread commits
        client = Client(self.kafka.wire(), list(self.kafka.nodes.values()))
        for queue in (FROM, TO):
            client.create_topic(queue, 2)

    @contextlib.contextmanager
    def transaction_of_others(self) -> Iterator[None]:
        """Open in a queue that is published to: a driver that begins there looks whether it is its own."""
        epoch = ProducerEpoch(Client(self.kafka.wire(), list(self.kafka.nodes.values())), "others")
        epoch.fence()
        transaction, log = epoch.begin(), port.TopicPartition(TO, 0)
        transaction.join([log])
        transaction.append({log: ReadyBatch(topic_entry.batch([Entry("k", "v")], 0, transactional=True), 1)})
        transaction.wait()
        yield
        transaction.abort()

    def engine(self, role: str) -> KafkaEngine:
        return KafkaEngine(URL, None, lambda _: Recorder(self.kafka, self.sent[role], self.shown))


def header(token: str, kind: Any = "publish", batch: int = 0, **target: str) -> BranchHeader:
    return BranchHeader(token, os.urandom(16).hex(), kind, target, APP if batch >= 0 else "", "q", batch)


def rows(*bodies: bytes) -> list[pa.RecordBatch]:
    return [pa.record_batch({"body": pa.array(bodies, pa.binary())})]


def run(bench: Bench, *, native: bool) -> None:
    """What a pipeline and an operator do, all of it. ``native``: the tasks stage before the driver opens, as
    with the native sink.
    """
    driver, task = bench.engine(DRIVER), bench.engine(EXECUTOR)
    # a batch write
    branch = task.stage(header("write", batch=-1, exchange="", routing_key=TO), rows(b"4"))
    driver.commit_branches("write", [branch])
    operator, admin = bench.engine(OPERATOR), KafkaAdmin(bench.engine(OPERATOR))
    admin.declare_queue("paid")
    admin.declare_exchange("events", "fanout")
    admin.bind(TO, "events")
    admin.publish([b"1", b"2"], "", FROM)
    # a micro-batch
    driver.identity(APP)
    driver.offsets([FROM], Origin())
    limit = Limit(max_bytes=1 << 30, min_rows=1, max_delay_s=0)
    end = driver.claim(APP, [FROM], {FROM: START}, limit, Origin(), "fail")
    driver.wait([FROM], {log: int(at) for log, at in end.items()}, 0.01)
    token = "token" if native else driver.open_batch(APP, "q", 0, "fail").token
    ranges = driver.resolve(APP, {FROM: START}, end)
    driver.count(APP, ranges)
    slices = tuple((log, first, last) for log, (first, last) in ranges.items())
    read = pa.Table.from_batches(task.read(ReadTicket(APP, "q", 0, ranges, slices)))
    assert read.num_rows == 2
    staged = [
        task.stage(header(token, exchange="", routing_key=TO), rows(b"1")),
        task.stage(header(token, exchange="events"), rows(b"2")),
        task.stage(header(token, "append", table="t"), rows(b"3")),
    ]
    if native:
        driver.open_batch(APP, "q", 0, "fail", token=token)
    with bench.transaction_of_others():
        committed = driver.commit_batch(APP, "q", 0, token, staged)
    for entry in driver.unapplied(APP):
        for each in entry.to_apply:
            assert sum(part.num_rows for part in task.read_branches(each.branches)) == 1
    assert operator.unapplied(APP)[0].sequence == 1
    operator.skip(APP, 1, [branch for each in entry.to_apply for branch in each.branches], "elsewhere")
    driver.mark_applied(APP, committed.entry.sequence)
    driver.unmirrored(APP)
    driver.mark_mirrored(APP, committed.entry.sequence)
    driver.last_entry(APP)
    driver.app(APP)
    driver.ack(APP, end)
    assert bench.shown.wait(WAIT_S)
    driver.rollback_batch(driver.open_batch(APP, "q", 1, "fail").token)
    # an operator
    admin.queues()
    operator.apps()
    operator.staged_batches()
    operator.rollback_batch("nothing")
    for queue in (FROM, TO):
        admin.publish([b"5"], "", queue)
        found = operator.available(operator.logs([queue]))
        list(operator.browse([(log, one.start, one.end) for log, one in found.items()]))
    operator.release(APP, FROM)


@pytest.fixture(scope="module")
def sent() -> dict[str, Sent]:
    """By role and resource: the requests, of both transaction versions."""
    found: dict[str, Sent] = defaultdict(lambda: defaultdict(set))
    for version in (1, 2):
        run(Bench(version, found), native=version == 2)
    return found


def used(role: str) -> list[setup.Use]:
    queues = [QueueUse(FROM, published=False), QueueUse(TO, read=False)]
    return [use for use in setup.uses([APP], queues) if use.role == role]


@pytest.mark.parametrize("role", [DRIVER, EXECUTOR, OPERATOR])
def test_the_rights_of_a_role_are_those_that_its_requests_need(sent: dict[str, Sent], role: str) -> None:
    def allowed(kind: str, name: str) -> set[Kind]:
        return {
            request
            for use in used(role)
            if use.kind == kind and (name.startswith(use.name) if use.prefixed else name == use.name)
            for request in use.requests
        }

    beyond = {
        resource: missing
        for resource, requests in sent[role].items()
        if (missing := requests - allowed(*resource)) and resource[1] != "paid"
    }
    if role == OPERATOR:
        assert beyond.pop((CLUSTER, "")) == {port.LogSizes}  # peek shows no sizes, and does without
    assert beyond == {}


@pytest.mark.parametrize("role", [DRIVER, EXECUTOR, OPERATOR])
def test_no_role_has_a_right_that_it_does_not_use(sent: dict[str, Sent], role: str) -> None:
    for use in used(role):
        requests = {
            request
            for (kind, name), found in sent[role].items()
            if kind == use.kind
            and (name.startswith(use.name) if use.prefixed else name in (use.name, "paid"))
            for request in found
        }
        assert set(use.requests) - requests == set(), use


# -- what is printed -----------------------------------------------------------------------------------------


@pytest.fixture
def output(
    kafka: FakeKafka, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What ``txmq broker setup`` prints about the cluster."""
    engine = KafkaEngine(URL, None, lambda _: kafka.wire())
    monkeypatch.setattr(engines, "connect", lambda *_: engine)

    def run(*arguments: str, code: int = 0) -> str:
        assert cli.main(["broker", "setup", "--url", URL, *arguments]) == code
        captured = capsys.readouterr()
        return captured.err if code else captured.out

    return run


def test_the_command_of_the_page_prints_topics_and_rights(output: Callable[..., str]) -> None:
    (block,) = blocks_of("docs/kafka_operations.md", "sh")
    command, address, arguments = block.partition(" --url kafka://host1:9092 ")
    assert command == "txmq broker setup" and address
    printed = output(*shlex.split(arguments))
    assert [
        word for word in ("kafka-topics", "kafka-acls", "User:shop", "_txmq.app.shop") if word not in printed
    ] == []


def test_what_is_printed_makes_every_topic_as_txmq_does(
    kafka: FakeKafka, client: Client, output: Callable[..., str]
) -> None:
    lines = [line for line in output("--app", APP, "--queue", FROM).splitlines() if "kafka-topics" in line]
    for words in map(shlex.split, lines):
        assert words[:4] == ["kafka-topics.sh", "--bootstrap-server", "fake:1,fake:2,fake:3", "--create"]
        given = dict(zip(words[4::2], words[5::2]))
        configs = [pair.split("=") for key, pair in zip(words[4::2], words[5::2]) if key == "--config"]
        client.create_topic(given["--topic"], int(given.get("--partitions", -1)), configs=dict(configs))
    assert set(kafka.topics) == {
        names.app_topic(APP),
        names.stage_topic(APP),
        names.STAGE,
        names.TOPOLOGY,
        FROM,
    }
    made = {name: topic.id for name, topic in kafka.topics.items()}
    for topic in setup.own_topics([APP]):
        assert topics.ensure(client, topic).id == made[topic.name]
    again = output("--app", APP, "--queue", FROM)
    assert not [line for line in again.splitlines() if line.startswith("kafka-topics")]
    assert again.count("# there") == 5


def test_what_is_wrong_is_said_with_the_line_that_sets_it_right(
    client: Client, output: Callable[..., str]
) -> None:
    for topic, configs in ((topics.stage(APP), {"retention.ms": "1000"}), (topics.topology(), {})):
        client.create_topic(topic.name, 3, configs={**topic.configs, **configs})
    client.create_topic(FROM, 1, configs={"cleanup.policy": "compact"})
    found = output("--app", APP, "--source", FROM)
    assert "# wrong: its records would be lost with retention.ms=1000\n" in found
    assert (
        f"\nkafka-configs.sh --bootstrap-server fake:1,fake:2,fake:3 --alter --entity-type topics "
        f"--entity-name {names.stage_topic(APP)} --add-config retention.ms=-1\n"
    ) in found
    assert "# wrong: it has 3 partitions and needs 1: delete it first\n" in found
    assert "# wrong: queue 'orders' is a topic with cleanup.policy=compact" in found
    assert "--entity-name orders --add-config cleanup.policy=delete\n" in found


def test_the_rights_are_printed_for_who_is_named_and_optional_ones_are_comments(
    output: Callable[..., str],
) -> None:
    found = output("--app", APP, "--source", FROM, "--target", TO, "--principal", "User:alice")
    needed = [line for line in found.splitlines() if line.startswith("kafka-acls.sh")]
    assert all("--add --allow-principal User:alice --operation" in line for line in needed)
    expected = [use for role in (DRIVER, EXECUTOR, OPERATOR) for use in used(role)]
    assert len(needed) == sum(not use.optional for use in expected)
    assert found.count("#   kafka-acls.sh") == sum(use.optional for use in expected)
    assert (
        f"--operation DescribeConfigs --operation Read --operation Write --topic {names.app_topic(APP)}\n"
        in found
    )
    assert "--operation Write --transactional-id txmq.write. --resource-pattern-type prefixed\n" in found
    assert "put the user" not in found and "put the user of the role in place of User:NAME" in output()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--principal", "alice"], "the principal is 'alice': write it as Kafka does: User:NAME"),
        (["--queue", "_txmq.stage"], "begins with '_txmq'"),
        (["--app", ""], "appId is empty"),
        (["--app", "x" * 300], "too long for a topic of Kafka"),
    ],
)
def test_what_cannot_be_prepared_is_one_line(
    output: Callable[..., str], arguments: list[str], says: str
) -> None:
    assert says in output(*arguments, code=1)


def test_a_topic_that_may_not_be_seen_is_printed_as_unknown(
    kafka: FakeKafka, output: Callable[..., str]
) -> None:
    kafka.fault = lambda node, request: (
        Code.TOPIC_AUTHORIZATION_FAILED if isinstance(request, port.Metadata) and request.topics else None
    )
    found = output("--app", APP)
    assert f"# unknown: topic {names.app_topic(APP)}: this user may not Describe it" in found
    assert "\nkafka-topics.sh" in found


def test_the_embedded_broker_needs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Broker.open(tmp_path / "data") as broker:
        assert cli.main(["broker", "setup", "--url", f"txmq://127.0.0.1:{broker.port}"]) == 0
    assert capsys.readouterr().out == "# nothing to prepare: the embedded broker makes what it needs\n"


def table() -> str:
    """The rights of all roles as the page has them: a row for each resource, what is optional in parentheses."""
    roles = (DRIVER, EXECUTOR, OPERATOR)
    rows: dict[str, dict[str, list[str]]] = {}
    everything = setup.uses(["APP"], [QueueUse("SOURCE", published=False), QueueUse("TARGET", read=False)])
    for use in sorted(everything, key=lambda use: use.optional):  # what is needed first
        name = f" `{use.name}{'*' if use.prefixed else ''}`" if use.name else ""
        resource = f"{use.kind.replace('-', ' ')}{name}"
        cell = rows.setdefault(resource, {role: [] for role in roles})[use.role]
        cell += [f"({each})" if use.optional else each for each in use.right.operations if each not in cell]
    lines = [f"| resource | {' | '.join(roles)} |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {' | '.join(', '.join(row[role]) for role in roles)} |" for name, row in rows.items()
    ]
    return "\n".join(lines)


def test_the_page_has_the_rights_of_the_code() -> None:
    page = (Path(__file__).parents[3] / "docs" / "kafka_operations.md").read_text()
    assert table() in page.split("## Rights", 1)[1].split("\n## ", 1)[0]
