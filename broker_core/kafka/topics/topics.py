"""The topics of txmq: made on first use, and refused where their settings would lose data.

Not here: names (``names.py``), and what the records mean.
Invariant: a topic that :func:`ensure` returned keeps what is written to it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from broker_core.core import errors
from broker_core.kafka import names
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.protocol.port import TopicMetadata

POLICY, DELETE, COMPACT = "cleanup.policy", "delete", "compact"
LARGEST, TOMBSTONES = "max.message.bytes", "delete.retention.ms"
ASKED_S = 10.0  # how long a setting of a topic is believed
STAGED_BYTES = 2 << 20  # of one staged record, at least
MADE_BYTES = 16 << 20  # the same, for a stage topic that txmq makes
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS  # a journal that was not read for so long is read anew
WEEK_MS = 7 * DAY_MS

Keeps = Callable[[str | None], bool]


@dataclass(frozen=True, slots=True)
class OwnTopic:
    """A topic as txmq makes it, -1 partitions: as the cluster does. ``keeps``: the settings without which
    data is lost, and which values do.
    """

    name: str
    partitions: int
    configs: Mapping[str, str]
    keeps: Mapping[str, Keeps] = field(repr=False)
    exactly: bool = True  # the number of partitions has a meaning

    def command(self, *more: str) -> str:
        """Returns the line for a shell that makes it. ``more``: arguments such as the address."""
        configs = [word for key, value in self.configs.items() for word in ("--config", f"{key}={value}")]
        shape = ["--topic", self.name]
        if self.partitions > 0:
            shape += ["--partitions", str(self.partitions)]
        return shlex.join(["kafka-topics.sh", *more, "--create", *shape, *configs])

    def wrong(self, client: Client) -> dict[str, str | None]:
        """Returns the settings with which records would be lost. Raises QueueNotFound, AccessRefused."""
        values = client.configs(self.name, *self.keeps)
        return {key: values.get(key) for key, keeps in self.keeps.items() if not keeps(values.get(key))}

    def correction(self, wrong: Mapping[str, str | None], *more: str) -> str:
        """Returns the line for a shell that sets what is wrong."""
        values = ",".join(f"{key}={self.configs[key]}" for key in wrong)
        entity = ["--entity-type", "topics", "--entity-name", self.name]
        return shlex.join(["kafka-configs.sh", *more, "--alter", *entity, "--add-config", values])


def _is(exactly: str) -> Keeps:
    return lambda value: value == exactly


def _at_least(least: int) -> Keeps:
    return lambda value: value is not None and int(value) >= least


_COMPACTED = {
    POLICY: COMPACT,
    "segment.ms": str(HOUR_MS),
    "min.cleanable.dirty.ratio": "0.1",
    TOMBSTONES: str(DAY_MS),
}
_STAGED = {POLICY: DELETE, "retention.bytes": "-1", "segment.bytes": str(128 << 20), LARGEST: str(MADE_BYTES)}


def app(app_id: str) -> OwnTopic:
    """Decisions and journal. Raises OptionError for an app id that no topic can be named after."""
    return OwnTopic(
        names.app_topic(app_id), 2, _COMPACTED, {POLICY: _is(COMPACT), TOMBSTONES: _at_least(DAY_MS)}
    )


def topology() -> OwnTopic:
    return OwnTopic(names.TOPOLOGY, 1, _COMPACTED, {POLICY: _is(COMPACT), TOMBSTONES: _at_least(DAY_MS)})


def stage(app_id: str) -> OwnTopic:
    """Staged branches, which are deleted by name and never by age. "" : of batch writes."""
    keeps = {POLICY: _is(DELETE), "retention.bytes": _is("-1"), LARGEST: _at_least(STAGED_BYTES)}
    if not app_id:
        return OwnTopic(names.STAGE, 6, {**_STAGED, "retention.ms": str(WEEK_MS)}, keeps, exactly=False)
    keeps |= {"retention.ms": _is("-1")}
    return OwnTopic(names.stage_topic(app_id), 6, {**_STAGED, "retention.ms": "-1"}, keeps, exactly=False)


def queue(name: str) -> OwnTopic:
    """A topic of users. Raises OptionError for a name that no queue on Kafka can have."""
    keeps = {POLICY: lambda value: COMPACT not in (value or "")}
    return OwnTopic(names.require_queue_name(name), -1, {POLICY: DELETE}, keeps, exactly=False)


def ensure(client: Client, topic: OwnTopic) -> TopicMetadata:
    """Returns the topic, which is created if it is missing. Raises AccessRefused, and PreconditionFailed
    where it is another one than txmq makes.
    """
    try:
        found = client.topic(topic.name)
        wrong = topic.wrong(client)
    except errors.QueueNotFound:  # also one that was deleted since it was looked for
        found = _create(client, topic)
        wrong = topic.wrong(client)
    if topic.exactly and len(found.partitions) != topic.partitions:
        raise errors.PreconditionFailed(
            f"topic {topic.name} of txmq has {len(found.partitions)} partitions, "
            f"and needs {topic.partitions}",
            "delete it if nothing of it is needed; txmq makes it again",
        )
    if wrong:
        raise errors.PreconditionFailed(
            f"topic {topic.name} of txmq has {_settings(wrong)}, with which its records would be lost",
            f"set {_settings({key: topic.configs[key] for key in wrong})}: {topic.correction(wrong)}",
        )
    return found


def _create(client: Client, topic: OwnTopic) -> TopicMetadata:
    try:
        return client.create_topic(topic.name, topic.partitions, configs=topic.configs)
    except errors.AccessRefused as refused:
        raise errors.AccessRefused(refused.summary, f"allow Create, or run: {topic.command()}") from None


def require_queue(client: Client, name: str) -> TopicMetadata:
    """Returns the topic of a queue. Raises QueueNotFound, and PreconditionFailed where compaction would
    remove rows between two reads of one range.
    """
    topic = queue(name)
    found = client.topic(topic.name)
    wrong = topic.wrong(client)
    if wrong:
        raise errors.PreconditionFailed(
            f"queue {name!r} is a topic with {_settings(wrong)}: compaction removes rows, so a "
            "batch that is run again could read others",
            f"set {POLICY}={DELETE}, or read a topic that is not compacted",
        )
    return found


def _settings(values: Mapping[str, str | None]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items())
