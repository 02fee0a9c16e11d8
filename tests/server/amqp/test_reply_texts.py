"""What a client of AMQP reads of an error: 255 bytes, with what is wrong, with which thing, and what to do."""

from __future__ import annotations

import ast
import errno
from pathlib import Path

import pytest

from broker_core.amqp.v0_9_1.channels import reply_text
from broker_core.core import errors
from broker_core.core.errors import ChannelError, ConnectionException, StoreFailed, TxmqError
from broker_core.server.amqp.session import as_amqp
from broker_core.store.failure import disk_full, store_error

ROOT = Path(__file__).resolve().parents[3]
REACHED = (
    "broker/broker.py", "broker/channel.py", "broker/commit.py", "broker/decision.py",
    "broker/message", "broker/queue", "routing", "broker/topology", "broker/transaction",
    "server/amqp", "server/quotas.py", "server/threads.py", "server/commit_queue.py", "amqp", "message",
    "node/committer.py", "node/loaded_blocks.py", "store/failure.py", "store/blocks.py", "store/durable.py", "store/segment.py",
)  # fmt: skip
NAME = "n" * 255  # the longest name there is, in place of each value
# RabbitMQ says no more, or the text is long and has what to do in its middle
ELSEWHERE = {
    "cannot obtain exclusive access to locked ": "It could be originally declared on another connection",
    " is damaged at ": "see `txmq broker salvage`",
    "the volume of the data directory ": "make the file system",
    "whether ": "if it began later it was not committed",
}


def filled(node: ast.expr) -> tuple[str, str]:
    """The text with names as values, and the last words of its own."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    text = last = ""
    for part in parts:
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            text += part.value
            last = part.value.strip() if len(part.value.strip()) > 3 else last
        else:
            text += NAME
    return text, last[-24:]


def texts() -> dict[str, tuple[type[TxmqError], list[ast.expr]]]:
    found = {}
    for place in REACHED:
        path = ROOT / "broker_core" / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                    kind = getattr(errors, node.func.id, None)
                    if isinstance(kind, type) and issubclass(kind, TxmqError):
                        name = f"{file.relative_to(ROOT)}:{node.lineno}"
                        found[name] = (kind, node.args)
    return found


TEXTS = texts()


@pytest.mark.parametrize("place", TEXTS)
def test_the_end_of_a_text_is_read_whatever_the_names_in_it(place: str) -> None:
    kind, given = TEXTS[place]
    if isinstance(given[0], ast.Starred) or given[0].__class__ is ast.Name:
        pytest.skip("a text made elsewhere")
    parts = [filled(each) for each in given[:2]]
    error = kind(*(text for text, _ in parts))
    shown = as_amqp(error)
    assert isinstance(shown, (ChannelError, ConnectionException))
    read = reply_text(shown.reply_name, shown.summary)
    assert len(read.encode()) <= 255
    advised = issubclass(kind, (ChannelError, ConnectionException))  # RabbitMQ's text, or with its advice
    end = parts[0 if advised else -1][1]
    words = next((words for part, words in ELSEWHERE.items() if part in error.summary), end)
    assert words in read, (words, read)


def test_there_are_texts() -> None:
    assert len(TEXTS) > 100 and len({place.partition(":")[0] for place in TEXTS}) > 25


LONG = Path("/var/lib/" + "a-long-name-of-a-directory/" * 6)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (disk_full(LONG, "database or disk is full"), ("no space to write to", "free some space")),
        (store_error(OSError(errno.EFBIG, "File too large"), LONG), ("no space to write", "(ulimit -f)")),
        (store_error(OSError(errno.EROFS, "Read-only"), LONG), ("read-only", "make the file system")),
        (store_error(OSError(errno.EIO, "Input/output error"), LONG), ("a write to the data directory",)),
        (errors.ResourceShortage(f"{LONG} cannot be used now", "try again"), ("cannot be used", "try again")),
    ],
)
def test_a_broker_whose_disk_fails_says_what_to_do(
    error: TxmqError, told: tuple[str, ...], wrapped: bool
) -> None:
    shown = as_amqp(StoreFailed.of(error) if wrapped else error)
    assert isinstance(shown, (ChannelError, ConnectionException))
    read = reply_text(shown.reply_name, shown.summary)
    assert all(each in read for each in told), read
    assert not wrapped or "start it again" in read


@pytest.mark.parametrize("name", ["é" * 127, "a b " * 60, "'" * 255, "\udcff" * 200, "x"])
def test_a_text_that_fits_is_whole_and_a_longer_one_is_text(name: str) -> None:
    text = reply_text("NOT_FOUND", f"no queue '{name}' in vhost '/'")
    assert len(text.encode(errors="surrogateescape")) <= 255
    if len(name) == 1:
        assert text == "NOT_FOUND - no queue 'x' in vhost '/'"
    if "'" not in name and "\udcff" not in name:
        assert text.endswith("' in vhost '/'")
