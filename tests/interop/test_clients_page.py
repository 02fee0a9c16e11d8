"""The quickstart and ``docs/clients.md`` are true: their Python blocks print what is shown below them.

Not here: the Java and Go programs (``test_java.py``, ``test_go.py``).
Invariant: blocks run in the order of the pages, against one broker, each in a process of its own, as a reader
would run them who keeps the data directory.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.amqp_server import AmqpServed, serving
from tests.page_blocks import code as page_code
from tests.progress import GUARD_S

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/clients.md", "docs/commit_tokens.md")
PAGE = "".join((ROOT / name).read_text() for name in PAGES)
# a block, and right below it what it prints
SHOWN = r"```python\n((?:(?!```).)*)```\n```\n((?:(?!```).)*)```"


class Block(NamedTuple):
    section: str
    code: str
    output: str


def blocks() -> list[Block]:
    """Python blocks that are followed by what they print."""
    found = []
    for section in PAGE.split("\n## ")[1:]:
        title = section.splitlines()[0]
        found += [Block(title, code, output) for code, output in re.findall(SHOWN, section, re.DOTALL)]
    return found


PLAIN = [block for block in blocks() if block.section not in ("Quickstart: Spark", "Celery")]


@pytest.fixture(scope="module")
def page_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AmqpServed]:
    with serving(tmp_path_factory.mktemp("page") / "broker") as broker:
        yield broker


def here(code: str, broker: AmqpServed) -> str:
    """``code`` with the addresses of ``broker``."""
    return code.replace("127.0.0.1:5672", f"127.0.0.1:{broker.port}").replace(
        "127.0.0.1:5673", f"127.0.0.1:{broker.flight_port}"
    )


def run_block(code: str, directory: Path) -> str:
    environment = {**os.environ, "PYTHONWARNINGS": "error::DeprecationWarning"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=GUARD_S,
        cwd=directory,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_has_a_running_block_for_each_client() -> None:
    assert {block.section for block in blocks()} >= {"pika", "Celery"}


@pytest.mark.txmq_only
@pytest.mark.parametrize(
    "block", PLAIN, ids=[f"{block.section} {number}" for number, block in enumerate(PLAIN)]
)
def test_a_python_block_prints_what_the_page_says(
    block: Block, page_broker: AmqpServed, tmp_path: Path
) -> None:
    assert run_block(here(block.code, page_broker), tmp_path) == block.output


@pytest.mark.txmq_only
def test_the_quickstart_runs_again_and_programs_of_other_pages_run_at_its_broker(
    page_broker: AmqpServed, tmp_path: Path
) -> None:
    (quickstart,) = [block for block in PLAIN if block.section == "Quickstart: AMQP"]
    assert quickstart.output.startswith("1 in ")
    assert run_block(here(quickstart.code, page_broker), tmp_path).startswith("2 in ")
    for page, function, more in (("deduplication", "send", ""), ("delays", "remind", ", 0")):
        program = page_code(f"docs/{page}.md", f"def {function}(")
        run_block(f"{program}\n{function}({page_broker.amqp_url!r}, b'again'{more})", tmp_path)


@pytest.mark.txmq_only
def test_the_celery_blocks_run_with_a_worker(page_broker: AmqpServed, tmp_path: Path) -> None:
    module = re.search(r"```python\n(# shop\.py\n.*?)```", PAGE, re.DOTALL)
    (client,) = [block for block in blocks() if block.section == "Celery"]
    assert module is not None
    (tmp_path / "shop.py").write_text(here(module[1], page_broker))
    command = [sys.executable, "-m", "celery", "-A", "shop", "worker", "--pool=solo"]
    with (tmp_path / "log").open("wb") as log:
        worker = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
    try:
        assert run_block(client.code, tmp_path) == client.output
    finally:
        worker.terminate()
        worker.wait(GUARD_S)
