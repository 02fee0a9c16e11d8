"""The rights (ACLs) that a user of Kafka needs: the one place that says which operation a request asks for.

Not here: which role sends which requests (``topics/setup.py``).
Invariant: a refusal names what is refused to whom: the operation, the resource, and the line that allows it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from broker_core.admin import NOBODY
from broker_core.core import errors
from broker_core.kafka import names
from broker_core.kafka.lost import ledger_lost
from broker_core.kafka.protocol import port
from broker_core.kafka.protocol.codes import GONE, Code, error_of

# kinds of resources, as kafka-acls.sh names them
TOPIC, TRANSACTIONAL_ID, GROUP, CLUSTER = "topic", "transactional-id", "group", "cluster"
READ, WRITE, CREATE, DELETE = "Read", "Write", "Create", "Delete"
DESCRIBE, DESCRIBE_CONFIGS = "Describe", "DescribeConfigs"

Kind = type[port.AnyRequest]

# Kafka protocol guide and KafkaApis: what a broker authorizes before it answers
NEEDED: Mapping[Kind, Mapping[str, str]] = {
    port.ApiVersions: {},
    port.Metadata: {TOPIC: DESCRIBE},
    port.FindCoordinator: {TRANSACTIONAL_ID: DESCRIBE, GROUP: DESCRIBE},
    port.ListOffsets: {TOPIC: DESCRIBE},
    port.Fetch: {TOPIC: READ},
    port.Produce: {TOPIC: WRITE, TRANSACTIONAL_ID: WRITE},
    port.DeleteRecords: {TOPIC: DELETE},
    port.InitProducer: {TRANSACTIONAL_ID: WRITE},
    port.AddPartitions: {TOPIC: WRITE, TRANSACTIONAL_ID: WRITE},
    port.EndTransaction: {TRANSACTIONAL_ID: WRITE},
    port.DescribeTransaction: {TRANSACTIONAL_ID: DESCRIBE},
    port.CreateTopic: {TOPIC: CREATE},
    port.DeleteTopic: {TOPIC: DELETE},
    port.DescribeTopic: {TOPIC: DESCRIBE_CONFIGS},
    port.LogSizes: {CLUSTER: DESCRIBE},
    port.CommitOffsets: {TOPIC: READ, GROUP: READ},
}
_IMPLY_DESCRIBE = frozenset({READ, WRITE, DELETE})  # AclOperation: who may do one of these may describe
_KINDS = {
    Code.TOPIC_AUTHORIZATION_FAILED: TOPIC,
    Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: TRANSACTIONAL_ID,
    Code.GROUP_AUTHORIZATION_FAILED: GROUP,
    Code.CLUSTER_AUTHORIZATION_FAILED: CLUSTER,
}


class Right(NamedTuple):
    """Operations on one resource, or on all whose names begin with ``name``."""

    kind: str
    name: str
    operations: tuple[str, ...]
    prefixed: bool = False

    def command(self, principal: str, *more: str) -> str:
        """Returns the line for a shell that gives this right. ``more``: arguments such as the address."""
        resource = ["--cluster"] if self.kind == CLUSTER else [f"--{self.kind}", self.name]
        pattern = ["--resource-pattern-type", "prefixed"] if self.prefixed else []
        operations = [word for operation in self.operations for word in ("--operation", operation)]
        return shlex.join(
            [
                "kafka-acls.sh",
                *more,
                "--add",
                "--allow-principal",
                principal,
                *operations,
                *resource,
                *pattern,
            ]
        )


def operations_of(requests: Iterable[Kind], kind: str) -> tuple[str, ...]:
    """Returns the operations that these requests need on a resource of a kind, without those that others
    imply.
    """
    found = {NEEDED[request][kind] for request in requests if kind in NEEDED[request]}
    if found & _IMPLY_DESCRIBE:
        found.discard(DESCRIBE)
    return tuple(sorted(found))


def error(
    request: port.AnyRequest, code: Code, what: str, *, topic: str = "", message: str | None = None
) -> errors.TxmqError:
    """Returns our error for a final answer to ``request``; ``what`` is the thing it is about, and ``topic``
    the topic where it is about one.
    """
    kind = _KINDS.get(code)
    app_id = names.app_of(topic) if code in GONE else None
    if app_id is not None:
        return ledger_lost(app_id)
    if kind is None:
        return error_of(code, what, message)
    right = Right(kind, _name(request, kind, topic), (NEEDED[type(request)][kind],))
    there = ", or there is none of that name" if right.operations == (DESCRIBE,) and kind == TOPIC else ""
    return errors.AccessRefused(
        f"{kind.replace('-', ' ')} {right.name}: this user may not {right.operations[0]} it{there} (Kafka "
        f"answers {code.name})",
        f"allow it with {right.command(NOBODY)} ; `txmq broker setup` prints all rights that are needed",
    )


def _name(request: port.AnyRequest, kind: str, topic: str) -> str:
    if kind == TOPIC:
        return topic
    if kind == CLUSTER:
        return "kafka-cluster"
    return str(getattr(request, "key", None) or getattr(request, kind.replace("-", "_"), ""))
