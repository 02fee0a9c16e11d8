"""The Python blocks of all pages, and how each of them is run.

Not here: running them (``tests/test_page_blocks.py``, ``tests/spark/test_page_blocks.py``).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
HERE, SPARK = "tests/test_page_blocks.py", "tests/spark/test_page_blocks.py"
CLIENTS = "tests/interop/test_clients_page.py"
COMPILED = "is compiled; tests/spark/test_pipeline.py and others run streams of its kind"
NO_CLUSTER = "the same with `data` is run; tests/spark/test_from_kafka_source.py and others read topics"


class Block(NamedTuple):
    page: str
    words: str  # in this block alone of the page
    how: str  # the file that runs it, or why nothing does


BLOCKS = [
    Block("README.md", "def book(", "tests/spark/test_readme.py"),
    Block("README.md", "import pika", CLIENTS),
    Block("docs/after_commit.md", "def to_postgres", "tests/connector/test_recipes.py"),
    Block("docs/after_commit.md", "def to_http", "tests/connector/test_recipes.py"),
    Block("docs/clients.md", 'exchange_declare("flights"', CLIENTS),
    Block("docs/clients.md", "for number in range(1, 11)", CLIENTS),
    Block("docs/clients.md", "aio_pika", CLIENTS),
    Block("docs/clients.md", "import amqp\n", CLIENTS),
    Block("docs/clients.md", "from kombu", CLIENTS),
    Block("docs/clients.md", "# shop.py", CLIENTS),
    Block("docs/clients.md", "from celery import chain", CLIENTS),
    Block("docs/commit_tokens.md", "amq.transaction", CLIENTS),
    Block("docs/clients.md", "def hot(", COMPILED),
    Block("docs/clients.md", "Broker.open", HERE),
    Block("docs/handlers.md", "class Namespaces", HERE),
    Block("docs/handlers.md", "serve(", HERE),
    Block("docs/handlers.md", "class Tracer", "tests/server/amqp/test_handlers.py"),
    Block("docs/kafka.md", "kafka://", NO_CLUSTER),
    Block("docs/merge.md", "def customers(", SPARK),
    Block("docs/tls.md", "txmq.Credentials", "needs a certificate of example.org; tests/server/test_tls.py logs in so"),
    Block("docs/spark_reference.md", '"table", "apps"', COMPILED),
    Block("docs/spark.md", "checkpoint-mail", COMPILED),
    Block("docs/foreach_batch.md", "def enrich(", COMPILED),
    Block("docs/ledger.md", "resume_from", "needs an engine that lost its ledger; tests/spark/test_resume.py loses one"),
    Block("docs/ledger.md", '"batch": 17', "needs Kafka; tests/connector/test_ledger_start.py begins so"),
    Block("docs/observe.md", "txmq.observe", COMPILED),
    Block("docs/typed_messages.md", "amount double", COMPILED),
    Block("docs/schema_registry.md", "SchemaRegistry", "needs a registry; tests/spark/test_registry.py has one"),
]  # fmt: skip


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")])


def blocks_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def code(page: str, words: str) -> str:
    """The block of the page with these words, which says that it is run here."""
    assert any(block[:2] == (page, words) for block in BLOCKS), "the table does not have it"
    (found,) = [block for block in blocks_of(page) if words in block]
    return found
