"""What an operator prepares before the first use: the topics of txmq, and the rights of its users.

A use names the requests that a role sends about a resource; ``cluster/acls.py`` says which operations they
need.
Not here: making topics (``topics.py``), giving rights.
Invariant: nothing is made. A right without which nothing is lost is optional, and says what it adds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from broker_core.admin import Preparation
from broker_core.core import errors
from broker_core.kafka import names
from broker_core.kafka.cluster.acls import CLUSTER, GROUP, TOPIC, TRANSACTIONAL_ID, Kind, Right, operations_of
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.protocol import port
from broker_core.kafka.topics import topics
from broker_core.kafka.topics.topics import OwnTopic

TOPICS, DRIVER, EXECUTOR, OPERATOR = "topics", "driver", "executor", "operator"
NEEDED, OPTIONAL = "needed", "optional"
MISSING, THERE, WRONG, UNKNOWN = "missing", "there", "wrong", "unknown"
ADDRESS = "--bootstrap-server"

_LOOK = (port.Metadata, port.ListOffsets, port.Fetch)
_CHECK = (port.Metadata, port.DescribeTopic, port.ListOffsets)  # the last one until a new topic answers
_DECIDE = (port.Produce, port.AddPartitions)
_OWN = (port.FindCoordinator, port.InitProducer, port.EndTransaction, *_DECIDE)
_SIZES = "the bytes of a queue: maxBytesPerTrigger, and tasks of equal size"
_LOST_ENDS = "the ends that Kafka loses there when a node dies"
_FIRST_USE = "txmq makes its topics at first use"


class QueueUse(NamedTuple):
    name: str
    read: bool = True
    published: bool = True


@dataclass(frozen=True, slots=True)
class Use:
    """What a role does with a resource. ``why``: what for; if it is optional, what there is only with it."""

    role: str
    kind: str
    name: str
    why: str
    requests: tuple[Kind, ...]
    prefixed: bool = False
    optional: bool = False

    @property
    def right(self) -> Right:
        return Right(self.kind, self.name, operations_of(self.requests, self.kind), self.prefixed)


def own_topics(apps: Iterable[str]) -> list[OwnTopic]:
    """Returns the topics that txmq needs for these apps. Raises OptionError."""
    of_apps = [topic for app_id in apps for topic in (topics.app(app_id), topics.stage(app_id))]
    return [*of_apps, topics.stage(""), topics.topology()]


def uses(apps: Sequence[str], queues: Sequence[QueueUse]) -> Iterator[Use]:
    """Yields what the roles do, each with its resources one by one. Raises OptionError."""
    yield from _driver(apps, queues)
    yield from _executor(apps, queues)
    yield from _operator(queues)


def _driver(apps: Sequence[str], queues: Sequence[QueueUse]) -> Iterator[Use]:
    for app_id in apps:
        app, stage, own = names.app_topic(app_id), names.stage_topic(app_id), names.producer_of(app_id)
        yield Use(DRIVER, TOPIC, app, "the ledger and the journal", (*_LOOK, *_CHECK, *_DECIDE))
        yield Use(DRIVER, TOPIC, stage, "rows that are staged", (*_LOOK, *_CHECK, port.DeleteRecords))
        yield Use(DRIVER, TRANSACTIONAL_ID, own, "decisions", (*_OWN, port.DescribeTransaction))
        for topic in (app, stage):
            yield Use(DRIVER, TOPIC, topic, _FIRST_USE, (port.CreateTopic,), optional=True)
        requests = (port.FindCoordinator, port.CommitOffsets)
        yield Use(DRIVER, GROUP, own, "tools for consumer groups show the lag", requests, optional=True)
    yield Use(DRIVER, TOPIC, names.STAGE, "batch writes", (port.Metadata, port.Fetch))
    ends = (*_OWN, port.DescribeTransaction)
    yield Use(DRIVER, TRANSACTIONAL_ID, names.WRITES, "batch writes", ends, prefixed=True)
    for queue in queues:
        if queue.read:
            read = (*_LOOK, *_CHECK, port.CommitOffsets)
            yield Use(DRIVER, TOPIC, queue.name, "a queue that is read", read)
        if queue.published:
            decided = (port.Metadata, port.ListOffsets, *_DECIDE)
            yield Use(DRIVER, TOPIC, queue.name, "a queue that is published to", decided)
            yield Use(DRIVER, TOPIC, queue.name, _LOST_ENDS, (port.Fetch,), optional=True)
    yield Use(DRIVER, CLUSTER, "", _SIZES, (port.LogSizes,), optional=True)


def _executor(apps: Sequence[str], queues: Sequence[QueueUse]) -> Iterator[Use]:
    for app_id in apps:
        app, stage = names.app_topic(app_id), names.stage_topic(app_id)
        yield Use(EXECUTOR, TOPIC, app, "what a batch has read", (*_LOOK, port.Produce))
        yield Use(EXECUTOR, TOPIC, stage, "staging", (*_CHECK, port.Produce, port.Fetch))
        yield Use(EXECUTOR, TOPIC, stage, _FIRST_USE, (port.CreateTopic,), optional=True)
    yield Use(EXECUTOR, TOPIC, names.STAGE, "batch writes", (*_CHECK, port.Produce))
    yield Use(EXECUTOR, TOPIC, names.STAGE, _FIRST_USE, (port.CreateTopic,), optional=True)
    yield Use(EXECUTOR, TOPIC, names.TOPOLOGY, "exchanges", _LOOK)
    for queue in queues:
        if queue.read:
            yield Use(EXECUTOR, TOPIC, queue.name, "a queue that is read", (port.Metadata, port.Fetch))
        if queue.published:
            yield Use(EXECUTOR, TOPIC, queue.name, "a queue that is published to", (port.Metadata,))
            limit = "another max.message.bytes than Kafka's default"
            yield Use(EXECUTOR, TOPIC, queue.name, limit, (port.DescribeTopic,), optional=True)


def _operator(queues: Sequence[QueueUse]) -> Iterator[Use]:
    everything = (*_LOOK, *_CHECK, *_DECIDE)
    yield Use(OPERATOR, TOPIC, names.OURS, "the state of all apps", everything, prefixed=True)
    declared = "txmq makes its topics at first use, such as by txmq exchange declare"
    yield Use(OPERATOR, TOPIC, names.OURS, declared, (port.CreateTopic,), prefixed=True, optional=True)
    ends = (*_OWN, port.DescribeTransaction)
    yield Use(OPERATOR, TRANSACTIONAL_ID, names.IDS, "release and publish", ends, prefixed=True)
    for queue in queues:
        yield Use(OPERATOR, TOPIC, queue.name, "peek and publish", everything)
        yield Use(OPERATOR, TOPIC, queue.name, "txmq queue declare", (port.CreateTopic,), optional=True)


def prepare(
    client: Client,
    address: str,
    principal: str,
    apps: Sequence[str],
    sources: Sequence[str],
    targets: Sequence[str],
) -> list[Preparation]:
    """Returns the lines for a shell, in the order in which they are run. Raises OptionError."""
    if not re.fullmatch(r"[^:\s]+:.+", principal):
        raise errors.OptionError(f"the principal is {principal!r}", "write it as Kafka does: User:NAME")
    where = ADDRESS, address
    queues = [
        QueueUse(names.require_queue_name(name), read=name in sources, published=name in targets)
        for name in dict.fromkeys((*sources, *targets))
    ]
    return [
        *(_topic(client, topic, where) for topic in own_topics(apps)),
        *(_queue(client, queue.name, where) for queue in queues),
        *(
            Preparation(
                use.role, OPTIONAL if use.optional else NEEDED, use.right.command(principal, *where), use.why
            )
            for use in uses(apps, queues)
        ),
    ]


def _topic(client: Client, topic: OwnTopic, where: tuple[str, str]) -> Preparation:
    try:
        found = client.find_topic(topic.name)
        if found is None:
            return Preparation(TOPICS, MISSING, topic.command(*where))
        wrong = topic.wrong(client)
    except errors.AccessRefused as refused:
        return Preparation(TOPICS, UNKNOWN, topic.command(*where), refused.summary)
    if topic.exactly and len(found.partitions) != topic.partitions:
        text = f"it has {len(found.partitions)} partitions and needs {topic.partitions}: delete it first"
        return Preparation(TOPICS, WRONG, topic.command(*where), text)
    if wrong:
        text = "its records would be lost with " + ", ".join(f"{key}={value}" for key, value in wrong.items())
        return Preparation(TOPICS, WRONG, topic.correction(wrong, *where), text)
    return Preparation(TOPICS, THERE, topic.command(*where))


def _queue(client: Client, name: str, where: tuple[str, str]) -> Preparation:
    topic = topics.queue(name)
    command = topic.command(*where)
    try:
        topics.require_queue(client, name)
    except errors.QueueNotFound:
        return Preparation(TOPICS, MISSING, command, "a queue; choose its partitions and its retention")
    except errors.PreconditionFailed as refused:
        return Preparation(TOPICS, WRONG, topic.correction(topic.wrong(client), *where), refused.summary)
    except errors.AccessRefused as refused:
        return Preparation(TOPICS, UNKNOWN, command, refused.summary)
    return Preparation(TOPICS, THERE, command)
