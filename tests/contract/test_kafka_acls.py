"""The rights that ``txmq broker setup`` prints, on a real node with an authorizer: with them everything works, and
without any one of them a call says so, and nothing is lost.

Not here: what is printed (``tests/kafka/topics/test_setup.py``).
"""

from __future__ import annotations

import contextlib
import itertools
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pytest
from kafka.admin import (
    ACL,
    ACLFilter,
    ACLOperation,
    ACLPermissionType,
    ACLResourcePatternType,
    KafkaAdminClient,
    ResourcePattern,
    ResourcePatternFilter,
    ResourceType,
)

from bench.kafka_server import PLAIN
from broker_core.core import errors
from broker_core.engine import (
    START,
    BranchHeader,
    BranchKind,
    Limit,
    Origin,
    ReadTicket,
    StagedBranch,
    Vector,
)
from broker_core.kafka import names
from broker_core.kafka.admin import KafkaAdmin
from broker_core.kafka.cluster.acls import CLUSTER, DESCRIBE, TRANSACTIONAL_ID
from broker_core.kafka.engine import KafkaEngine
from broker_core.kafka.protocol.port import NodeAddress, TopicPartition
from broker_core.kafka.record.encode import encode
from broker_core.kafka.topics import setup, topics
from broker_core.kafka.topics.setup import DRIVER, EXECUTOR, NEEDED, OPERATOR, OPTIONAL, QueueUse, Use
from tests.kafka.bench.real_node import position, real_cluster
from tests.progress import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.product]

WAIT_S = 120.0
ROLES = (DRIVER, EXECUTOR, OPERATOR)
PASSWORD = "wonderland"
FROM, TO, EXCHANGE = "orders", "done", "events"
QUERY = "q"
_PLAIN_LOGIN = "org.apache.kafka.common.security.plain.PlainLoginModule required"
_tokens = itertools.count()


@dataclass(frozen=True)
class Node:
    plain: NodeAddress  # where everybody may do everything
    sasl: NodeAddress


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    users = " ".join(f'user_{role}="{PASSWORD}"' for role in ROLES)
    settings = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
        "auto.create.topics.enable": "false",
        "offsets.topic.num.partitions": "1",
        "transaction.state.log.num.partitions": "1",
        "listener.name.sasl.sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl.plain.sasl.jaas.config": f"{_PLAIN_LOGIN} {users};",
    }
    folder = tmp_path_factory.mktemp("kafka")
    with real_cluster(
        folder, listeners={"SASL": "SASL_PLAINTEXT"}, settings=settings, heap="512m"
    ) as started:
        ports = started.nodes[0].ports
        yield Node(NodeAddress("127.0.0.1", ports[PLAIN]), NodeAddress("127.0.0.1", ports["SASL"]))


# -- rights --------------------------------------------------------------------------------------------------


class Rights:
    """The ACLs of the node, one operation each."""

    def __init__(self, node: Node) -> None:
        self._admin = KafkaAdminClient(bootstrap_servers=str(node.plain))

    def close(self) -> None:
        self._admin.close()

    def give(self, *acls: ACL) -> None:
        done = self._admin.create_acls(list(acls))
        assert done["failed"] == [], done
        wait_until(lambda: all(self._there(acl) for acl in acls))

    def take(self, *acls: ACL) -> None:
        self._admin.delete_acls([_filter(acl) for acl in acls])
        wait_until(lambda: not any(self._there(acl) for acl in acls))

    def _there(self, acl: ACL) -> bool:
        """As the broker sees it, which learns of a change a moment later."""
        return acl in self._admin.describe_acls(_filter(acl))[0]

    @contextlib.contextmanager
    def given(self, *acls: ACL) -> Iterator[None]:
        self.give(*acls)
        try:
            yield
        finally:
            self.take(*acls)

    @contextlib.contextmanager
    def without(self, *acls: ACL) -> Iterator[None]:
        self.take(*acls)
        try:
            yield
        finally:
            self.give(*acls)


def _filter(acl: ACL) -> ACLFilter:
    found = acl.resource_pattern
    pattern = ResourcePatternFilter(found.resource_type, found.resource_name, found.pattern_type)
    return ACLFilter(acl.principal, acl.host, acl.operation, acl.permission_type, pattern)


def acls_of(command: str) -> list[ACL]:
    """What kafka-acls.sh would add, for a line of ``txmq broker setup``."""
    words = shlex.split(command.removeprefix("#").strip())
    assert words[0] == "kafka-acls.sh" and words[3] == "--add" and words[4] == "--allow-principal"
    options = dict(zip(words[6::2], words[7::2]))
    operations = [word for option, word in zip(words[6::2], words[7::2]) if option == "--operation"]
    if "--cluster" in words:
        kind, name = "cluster", "kafka-cluster"
    else:
        ((kind, name),) = (
            (option[2:], name)
            for option, name in options.items()
            if option[2:] in ("topic", "group", TRANSACTIONAL_ID)
        )
    pattern = ResourcePattern(
        ResourceType[kind.replace("-", "_").upper()],
        name,
        ACLResourcePatternType[options.get("--resource-pattern-type", "literal").upper()],
    )
    return [
        ACL(words[5], "*", ACLOperation[_upper(operation)], ACLPermissionType.ALLOW, pattern)
        for operation in operations
    ]


def _upper(operation: str) -> str:
    return "".join(f"_{letter}" if letter.isupper() else letter for letter in operation).lstrip("_").upper()


# -- a pipeline ----------------------------------------------------------------------------------------------


@dataclass
class Pipeline:
    """A stream from FROM to TO, whose driver, tasks and operator are users of their own; its checkpoint is
    here.
    """

    node: Node
    rights: Rights
    app: str
    root: KafkaEngine
    batch: int = 0
    start: Vector = field(default_factory=lambda: {FROM: START})
    offsets: dict[int, Vector] = field(default_factory=dict)  # Spark's log
    read: dict[int, list[bytes]] = field(default_factory=dict)  # by batch
    expected: list[bytes] = field(default_factory=list)
    applied: set[bytes] = field(default_factory=set)
    engines: dict[str, KafkaEngine] = field(default_factory=dict)

    def engine(self, role: str) -> KafkaEngine:
        """The engine of the role's process."""
        if role not in self.engines:
            settings = {
                "kafka.security.protocol": "SASL_PLAINTEXT",
                "kafka.sasl.mechanism": "PLAIN",
                "kafka.sasl.username": role,
                "kafka.sasl.password": PASSWORD,
                "kafka.default.api.timeout.ms": str(int(WAIT_S * 1000)),
            }
            self.engines[role] = KafkaEngine(f"kafka://{self.node.sasl}", settings)
        return self.engines[role]

    def restart(self) -> None:
        """All processes end, and with them what they know."""
        for engine in self.engines.values():
            engine.close()
        self.engines.clear()

    def send(self) -> None:
        batch = encode(pa.array([b"%d" % self.batch], pa.binary()), timestamp=time.time_ns() // 1_000_000)
        self.root.client.produce({TopicPartition(FROM, 0): batch})

    def run(self) -> None:
        """One micro-batch with every kind of branch, and a batch write; all of it may be repeated."""
        driver, task, batch = self.engine(DRIVER), self.engine(EXECUTOR), self.batch
        driver.wait([FROM], {}, 0)
        if batch not in self.offsets:
            self.offsets[batch] = driver.claim(self.app, [FROM], self.start, Limit(), Origin(), "fail")
        end = self.offsets[batch]
        ranges = driver.resolve(self.app, self.start, end)
        driver.count(self.app, ranges)
        opened = driver.open_batch(self.app, QUERY, batch, "fail")
        if opened.already:
            driver.commit_batch(self.app, QUERY, batch, "", [])
        else:
            self._decide(driver, task, opened.token, ranges)
        for entry in driver.unapplied(self.app):
            for each in entry.to_apply:
                self.applied |= {
                    body for rows in task.read_branches(each.branches) for body in rows["body"].to_pylist()
                }
            driver.mark_applied(self.app, entry.sequence)
        driver.mark_mirrored(self.app, batch + 1)
        driver.ack(self.app, end)
        driver.identity(self.app)
        token = f"{self.app}-{batch}"
        written = self._staged(
            task, "publish", token, [b"w%d" % batch], batch=-1, exchange="", routing_key=TO
        )
        driver.commit_branches(token, [written])
        self.expected += [*self.read[batch], *(b"e" + body for body in self.read[batch]), b"w%d" % batch]
        self.start, self.batch = end, batch + 1

    def _decide(
        self, driver: KafkaEngine, task: KafkaEngine, token: str, ranges: dict[str, tuple[int, int]]
    ) -> None:
        batch = self.batch
        slices = tuple((log, first, last) for log, (first, last) in ranges.items())
        ticket = ReadTicket(self.app, QUERY, batch, ranges, slices)
        bodies = [body for rows in task.read(ticket) for body in rows.column("body").to_pylist()]
        self.read[batch] = bodies
        staged = [
            self._staged(task, "publish", token, bodies, exchange="", routing_key=TO),
            self._staged(task, "publish", token, [b"e" + body for body in bodies], exchange=EXCHANGE),
            self._staged(task, "append", token, bodies, table="t"),
        ]
        driver.commit_batch(self.app, QUERY, batch, token, staged)

    def _staged(
        self,
        task: KafkaEngine,
        kind: BranchKind,
        token: str,
        bodies: list[bytes],
        batch: int | None = None,
        **target: str,
    ) -> StagedBranch:
        number = self.batch if batch is None else batch
        app = self.app if number >= 0 else ""
        header = BranchHeader(token, f"{next(_tokens)}", kind, target, app, QUERY, number)
        return task.stage(header, [pa.record_batch({"body": pa.array(bodies, pa.binary())})])

    def operate(self) -> None:
        """What an operator does; all of it may be repeated."""
        operator = self.engine(OPERATOR)
        admin = KafkaAdmin(operator)
        assert "ops" in [info.app_id for info in operator.apps()]
        operator.staged_batches()
        operator.unapplied(self.app)
        admin.declare_exchange(EXCHANGE, "fanout")
        admin.bind(TO, EXCHANGE)
        for queue in (FROM, TO):
            found = operator.available(operator.logs([queue]))
            list(operator.browse([(log, one.start, one.end) for log, one in found.items()]))
        if self._ops_claims():
            operator.release("ops", FROM, force=True)
        body = b"o%d" % next(_tokens)
        for queue in (FROM, TO):  # what is in FROM is read by the next batch
            assert admin.publish([body], "", queue) == 1
        self.expected.append(body)

    def _ops_claims(self) -> bool:
        """Whether app "ops", of another driver, has a claim to release."""
        known = self.root.app("ops")
        return known is not None and FROM in known.queues

    def claim_for_operator(self) -> None:
        if not self._ops_claims():
            self.root.claim("ops", [FROM], {FROM: START}, Limit(), Origin(), "resume")

    def require_once(self) -> None:
        """Every message is there, once; a row for a table came at least once: Delta drops the second."""
        wait_until(lambda: len(self.bodies(TO)) >= len(self.expected))
        assert self.bodies(TO) == sorted(self.expected)
        assert self.applied == {body for bodies in self.read.values() for body in bodies}

    def bodies(self, queue: str) -> list[bytes]:
        found = self.root.available(self.root.logs([queue]))
        slices = [(log, one.start, one.end) for log, one in found.items()]
        return sorted(body for rows in self.root.browse(slices) for body in rows.column("body").to_pylist())


def printed(root: KafkaEngine, role: str, state: str, *apps: str) -> list[str]:
    """The lines of ``txmq broker setup`` for the user of a role."""
    prepared = KafkaAdmin(root).prepare(f"User:{role}", apps, [FROM], [TO])
    return [each.command for each in prepared if (each.part, each.state) == (role, state)]


@pytest.fixture(scope="module")
def pipeline(node: Node) -> Iterator[Pipeline]:
    rights = Rights(node)
    root = KafkaEngine(f"kafka://{node.plain}")
    for topic in (*setup.own_topics(["shop"]), topics.queue(FROM), topics.queue(TO)):
        root.client.create_topic(topic.name, topic.partitions, configs=topic.configs)
    KafkaAdmin(root).declare_exchange(EXCHANGE, "fanout")
    KafkaAdmin(root).bind(TO, EXCHANGE)
    for role in ROLES:
        rights.give(*(acl for line in printed(root, role, NEEDED, "shop") for acl in acls_of(line)))
    made = Pipeline(node, rights, "shop", root)
    yield made
    made.restart()
    root.close()
    rights.close()


def test_with_the_rights_that_are_printed_everything_works(pipeline: Pipeline) -> None:
    for _ in range(2):
        pipeline.claim_for_operator()
        pipeline.operate()
        pipeline.send()
        pipeline.run()
        pipeline.require_once()


CASES = [
    (use, operation)
    for use in setup.uses(["shop"], [QueueUse(FROM, published=False), QueueUse(TO, read=False)])
    if not use.optional
    for operation in use.right.operations
]


@pytest.mark.parametrize(
    ("use", "operation"), CASES, ids=[f"{use.role}-{use.name}-{operation}" for use, operation in CASES]
)
def test_without_any_one_right_a_call_says_so_and_nothing_is_lost(
    pipeline: Pipeline, use: Use, operation: str
) -> None:
    given = acls_of(use.right.command(f"User:{use.role}", setup.ADDRESS, "h:1"))
    (acl,) = (each for each in given if each.operation is ACLOperation[_upper(operation)])

    def run() -> None:
        if use.role == OPERATOR:
            pipeline.claim_for_operator()
            pipeline.operate()
        else:
            pipeline.run()

    # processes that begin, and the same ones when the right is back
    pipeline.restart()
    pipeline.send()
    with pipeline.rights.without(acl), pytest.raises(errors.AccessRefused) as refused:
        run()
    text = str(refused.value)
    assert use.name in text and "kafka-acls.sh --add" in text and "txmq broker setup" in text
    # who may not read may not describe either, and that is asked first
    assert f"may not {operation} it" in text or (
        operation in ("Read", "Write", "Delete") and f"may not {DESCRIBE} it" in text
    )
    run()
    pipeline.require_once()
    # processes that lose it while they run: what they remember may be enough
    pipeline.send()
    before = pipeline.batch
    with pipeline.rights.without(acl), contextlib.suppress(errors.AccessRefused):
        run()
    if pipeline.batch == before:
        run()
    pipeline.require_once()


def test_before_version_2_a_refusal_names_the_topic_too(pipeline: Pipeline) -> None:
    """AddPartitions is answered for all logs at once."""
    pipeline.restart()
    pipeline.send()
    pipeline.engine(DRIVER).client.transaction_version = lambda: 1  # type: ignore[method-assign]
    (acl,) = (
        acl
        for line in printed(pipeline.root, DRIVER, NEEDED, "shop")
        if f"--topic {TO}" in line
        for acl in acls_of(line)
    )
    with (
        pipeline.rights.without(acl),
        pytest.raises(errors.AccessRefused, match=f"topic {TO}: this user may not Write it"),
    ):
        # the topic may still be described
        with pipeline.rights.given(
            ACL(acl.principal, "*", ACLOperation.DESCRIBE, acl.permission_type, acl.resource_pattern)
        ):
            pipeline.run()
    pipeline.run()
    pipeline.require_once()


# -- what is optional ----------------------------------------------------------------------------------------


def optional(root: KafkaEngine, role: str, what: str, *apps: str) -> list[ACL]:
    return [acl for line in printed(root, role, OPTIONAL, *apps) if what in line for acl in acls_of(line)]


def test_a_topic_that_may_not_be_made_is_an_error_with_the_line_that_makes_it(pipeline: Pipeline) -> None:
    root, rights, driver = pipeline.root, pipeline.rights, pipeline.engine(DRIVER)
    rights.give(*(acl for line in printed(root, DRIVER, NEEDED, "fresh") for acl in acls_of(line)))
    with pytest.raises(errors.AccessRefused) as refused:
        driver.open_batch("fresh", QUERY, 0, "fail")
    line = topics.app("fresh").command()
    assert (
        f"may not Create it (Kafka answers TOPIC_AUTHORIZATION_FAILED): allow Create, or run: {line}"
        in str(refused.value)
    )
    rights.give(*optional(root, DRIVER, "--operation Create", "fresh"))
    assert not driver.open_batch("fresh", QUERY, 0, "fail").already
    for topic in (topics.app("fresh"), topics.stage("fresh")):
        assert topic.wrong(root.client) == {}


def test_without_the_right_to_ask_for_sizes_only_a_limit_in_bytes_is_refused(pipeline: Pipeline) -> None:
    driver = pipeline.engine(DRIVER)
    logs = driver.logs([FROM])
    limit = Limit(max_bytes=1000)
    pipeline.send()
    found = driver.available(logs)[logs[0]]
    assert found.size_bytes == 0 < found.rows
    with pytest.raises(errors.AccessRefused, match="--operation Describe --cluster"):
        driver.claim("shop", [FROM], pipeline.start, limit, Origin(), "fail")
    pipeline.rights.give(*optional(pipeline.root, DRIVER, f"--{CLUSTER}"))
    pipeline.restart()
    driver = pipeline.engine(DRIVER)
    assert driver.available(logs)[logs[0]].size_bytes > 0
    pipeline.offsets[pipeline.batch] = driver.claim("shop", [FROM], pipeline.start, limit, Origin(), "fail")
    pipeline.run()
    pipeline.require_once()


def test_the_lag_is_shown_to_tools_where_the_group_may_be_written(pipeline: Pipeline) -> None:
    group, log = names.producer_of("shop"), TopicPartition(FROM, 0)
    assert position(pipeline.node.plain, group, log) == -1
    pipeline.rights.give(*optional(pipeline.root, DRIVER, "--group", "shop"))
    pipeline.send()
    pipeline.run()
    wait_until(lambda: position(pipeline.node.plain, group, log) > 0)
