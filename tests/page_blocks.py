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


class Block(NamedTuple):
    page: str
    words: str  # in this block alone of the page
    how: str  # the file that runs it


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
    Block("docs/deduplication.md", "def send(", "tests/crash/test_deduplication_crash.py"),
    Block("docs/delays.md", "def remind(", "tests/crash/test_delays_crash.py"),
    Block("docs/clients.md", "def hot(", SPARK),
    Block("docs/clients.md", "Broker.open", HERE),
    Block("docs/handlers.md", "class Namespaces", HERE),
    Block("docs/handlers.md", "serve(", HERE),
    Block("docs/handlers.md", "class Tracer", "tests/server/amqp/test_handlers.py"),
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


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")])


def blocks_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def code(page: str, words: str) -> str:
    """The block of the page with these words, which says that it is run here."""
    assert any(block[:2] == (page, words) for block in BLOCKS), "the table does not have it"
    (found,) = [block for block in blocks_of(page) if words in block]
    return found
