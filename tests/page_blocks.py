"""The Python and shell blocks of all pages, and how each of them is run.

Not here: running them (``tests/test_page_blocks.py``, ``tests/spark/test_page_blocks.py``).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
HERE, SPARK = "tests/test_page_blocks.py", "tests/spark/test_page_blocks.py"
CLIENTS = "tests/interop/test_clients_page.py"


class Block(NamedTuple):
    page: str
    words: str  # in this block alone of the page
    how: str  # the file that runs it


BLOCKS = [
    Block("README.md", "def book(", "tests/spark/test_readme.py"),
    Block("README.md", "import pika", CLIENTS),
    Block("docs/after_commit.md", "def to_postgres", "tests/connector/test_recipes.py"),
    Block("docs/after_commit.md", "def to_http", "tests/connector/test_recipes.py"),
    Block("docs/clients.md", "for number in range(1, 11)", CLIENTS),
    Block("docs/clients.md", "# shop.py", CLIENTS),
    Block("docs/clients.md", "from celery import chain", CLIENTS),
    Block("docs/commit_tokens.md", "amq.transaction", CLIENTS),
    Block("docs/commit_tokens.md", "def book(", "tests/crash/test_two_phase_commit.py"),
    Block("docs/deduplication.md", "def send(", "tests/crash/test_deduplication_crash.py"),
    Block("docs/delays.md", "def remind(", "tests/crash/test_delays_crash.py"),
    Block("docs/clients.md", "Broker.open", HERE),
    Block("docs/handlers.md", "class Namespaces", HERE),
    Block("docs/handlers.md", "serve(", HERE),
    Block("docs/kafka.md", "kafka://", SPARK),
    Block("docs/merge.md", "def customers(", SPARK),
    Block("docs/tls.md", "txmq.Credentials", HERE),
    Block("docs/spark_reference.md", '"table", "apps"', SPARK),
    Block("docs/spark.md", "checkpoint-mail", SPARK),
    Block("docs/foreach_batch.md", "def enrich(", SPARK),
    Block("docs/ledger.md", "resume_from", SPARK),
    Block("docs/ledger.md", '"batch": 17', SPARK),
    Block("docs/observe.md", "txmq.observe", SPARK),
    Block("docs/typed_messages.md", "amount double", SPARK),
    Block("docs/schema_registry.md", "SchemaRegistry", SPARK),
]  # fmt: skip


_SERVE = {"serve --data data": "serve --data data --amqp 127.0.0.1:PORT1 --listen 127.0.0.1:PORT2"}
_PAGE = {**_SERVE, ":15672": ":PORT3"}
_SECRET = "echo secret > secret; "


class Shell(NamedTuple):
    page: str
    words: str  # in this block alone of the page
    how: str = HERE  # the file that runs it, or why nothing does
    before: str = ""  # what the reader has at that place
    changed: dict[str, str] = {}  # what differs where a test runs it


SHELL = [
    Shell("README.md", "pip install", changed={"python3 -m venv ../env && . ../env/bin/activate && pip install '.[http]' pika": ":", **_PAGE}),
    Shell("docs/backup.md", "broker backup", before="txmq queue declare orders --data data",
          changed={"/var/lib/txmq": "data", "/backup/": "copy-", "\ntxmq broker backup --url txmqs://host:5673 --user root": "\nrm -r copy-txmq-monday\ntxmq broker backup --url $TXMQ_URL"}),
    Shell("docs/clients.md", "# AMQP: 127.0.0.1:5672", changed=_SERVE),
    Shell("docs/clients.md", "celery -A", CLIENTS),
    Shell("docs/delays.md", "exchange declare later", before="txmq queue declare orders"),
    Shell("docs/from_rabbitmq.md", "export_definitions", before="echo '{\"queues\": []}' > definitions.json",
          changed={"rabbitmqctl": ": rabbitmqctl", "txmq serve --data data &": ""}),
    Shell("docs/from_rabbitmq.md", "rabbitmq_shovel", "tests/interop/test_shovel.py"),
    Shell("docs/http.md", "pip install", changed={"pip install": ": pip install", **_PAGE}),
    Shell("docs/kafka_operations.md", "broker setup", "tests/kafka/topics/test_setup.py"),
    Shell("docs/permissions.md", "permission set", before=_SECRET + "txmq user add ann --password-file secret --data data; txmq vhost add sales --data data"),
    Shell("docs/policies.md", "policy set caps"),
    Shell("docs/production.md", "useradd", "it needs root and systemd: tests/test_production.py reads the unit"),
    Shell("docs/runbook.md", "txmq status", changed={"txmq top": ": txmq top"}),
    Shell("docs/runbook.md", "user passwd", before=_SECRET + "txmq user add orders --password-file secret --data data",
          changed={"/run/secrets/orders-new": "secret --data data"}),
    Shell("docs/runbook.md", "--refused --queue", "tests/spark/test_skip_rows.py"),
    Shell("docs/runbook.md", "/backup/skipped", "tests/spark/test_merge.py"),
    Shell("docs/security.md", "user add ann", before=_SECRET, changed={"--tag administrator": "--tag administrator --password-file secret", "/run/secrets/billing": "secret"}),
    Shell("docs/tls.md", "--tls-cert", changed={"0.0.0.0:5673": "127.0.0.1:PORT2", "0.0.0.0:5671": "127.0.0.1:PORT3 --amqp 127.0.0.1:PORT1"}),
    Shell("examples/bundle/README.md", "bundle validate", "it needs the CLI of Databricks and a workspace: tests/test_bundle.py reads the bundle"),
    Shell("examples/pipeline/README.md", "spark-pipelines", "tests/spark/test_pipeline.py"),
    Shell("examples/wheel_task/README.md", "pip wheel", "it downloads hatchling: tests/spark/test_wheel_task.py builds the wheel with its own"),
    Shell("docs/virtual_hosts.md", "vhost add", before=_SECRET + "txmq user add ann --password-file secret --data data"),
]  # fmt: skip


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")])


def blocks_of(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def code(page: str, words: str) -> str:
    """The block of the page with these words, which says that it is run here."""
    assert any(block[:2] == (page, words) for block in BLOCKS), "the table does not have it"
    (found,) = [block for block in blocks_of(page) if words in block]
    return found
