"""A RabbitMQ of the Debian package for a test, and what it is given before its definitions are exported."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pika
import pytest

from bench.rabbitmq import Node, node
from bench.report import Skipped

RECORDED = Path(__file__).with_name("rabbitmq_3_10_definitions.json")
PASSWORDS = {"ann": "of ann", "ben": "of ben", "old": "of old", "cron": ""}


@contextlib.contextmanager
def rabbit(folder: Path, plugins: Sequence[str] = ()) -> Iterator[Node]:
    """Skips the test if there is none."""
    with contextlib.ExitStack() as stack:
        try:
            running = stack.enter_context(node(folder, plugins))
        except Skipped as why:
            pytest.skip(str(why))
        yield running


def fill(running: Node) -> None:
    """Something of each kind that definitions have."""
    ctl = running.ctl
    ctl("add_vhost", "sales/eu")
    for name in ("ann", "ben"):
        ctl("add_user", name, PASSWORDS[name])
    ctl("set_user_tags", "ann", "administrator", "management")
    ctl("set_user_tags", "ben", "monitoring", "impersonator", "policymaker")
    # a user of a time when hashes were others
    ctl("add_user", "old", PASSWORDS["old"])
    ctl("eval", 'rabbit_auth_backend_internal:change_password_hash(<<"old">>, <<1,2,3,4,5,6,7,8>>, '
        "rabbit_password_hashing_md5).")  # fmt: skip
    ctl("add_user", "cron", "x")
    ctl("clear_password", "cron")
    for vhost in ("/", "sales/eu"):
        ctl("set_permissions", "-p", vhost, "ann", ".*", ".*", ".*")
    ctl("set_permissions", "-p", "sales/eu", "ben", "^$", "^orders", "^(.)\\1")
    ctl("set_permissions", "-p", "/", "ben", "^ben-.*$", "^(orders|amq\\.topic)$", ".*")
    ctl("set_topic_permissions", "-p", "/", "ben", "amq.topic", "^{username}\\.", ".*")
    ctl("set_vhost_limits", "-p", "sales/eu", '{"max-connections": 50, "max-queues": 20}')
    ctl("set_user_limits", "ben", '{"max-channels": 10}')
    ctl(
        "set_policy",
        "-p",
        "/",
        "short",
        "^short",
        '{"message-ttl": 1000, "max-length": 5}',
        "--apply-to",
        "queues",
    )
    ctl("set_global_parameter", "colour", '"blue"')
    with pika.BlockingConnection(pika.URLParameters(running.uri)) as connection:
        channel = connection.channel()
        channel.exchange_declare("dead", "fanout", durable=True)
        channel.exchange_declare("orders", "topic", durable=True, arguments={"alternate-exchange": "dead"})
        channel.exchange_declare("inner", "headers", durable=True, internal=True)
        channel.queue_declare("dead", durable=True)
        channel.queue_declare(
            "orders",
            durable=True,
            arguments={
                "x-dead-letter-exchange": "dead",
                "x-message-ttl": 60_000,
                "x-max-priority": 5,
                "x-queue-master-locator": "min-masters",
                "team": "sales",
            },
        )
        channel.queue_declare("quorum", durable=True, arguments={"x-queue-type": "quorum", "x-delivery-limit": 3,
                              "x-quorum-initial-group-size": 1})  # fmt: skip
        channel.queue_declare("stream", durable=True, arguments={"x-queue-type": "stream"})
        channel.queue_bind("orders", "orders", "new.#")
        channel.queue_bind("stream", "orders", "#")
        channel.queue_bind("dead", "dead")
        channel.exchange_bind("inner", "orders", "eu.*")
        channel.queue_bind("quorum", "inner", arguments={"x-match": "any", "size": 10, "big": True})
    sales = running.uri.replace("%2f", "sales%2Feu")
    ctl("set_permissions", "-p", "sales/eu", "guest", ".*", ".*", ".*")
    with pika.BlockingConnection(pika.URLParameters(sales)) as connection:
        channel = connection.channel()
        channel.queue_declare("orders", durable=True, auto_delete=True)
        channel.queue_bind("orders", "amq.direct", "a")


def exported(running: Node, folder: Path) -> dict[str, Any]:
    path = folder / "definitions.json"
    running.ctl("export_definitions", str(path))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def record() -> None:
    """Writes the definitions of this RabbitMQ for the tests of machines without one."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder, node(Path(folder)) as running:
        running.ctl("await_startup")
        fill(running)
        RECORDED.write_text(json.dumps(exported(running, Path(folder)), indent=1) + "\n")


if __name__ == "__main__":
    record()
