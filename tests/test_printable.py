"""What reaches a terminal or a log has no escape sequences and no forged lines, whatever names users chose."""

from __future__ import annotations

import ast
import io
import logging
from pathlib import Path

import pytest

from broker_core.core.errors import printable
from broker_core.launcher import Broker
from broker_core.server.log_file import LineFormatter
from txmq import cli

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e\x7f\udc80\r\n2026-01-01 WARNING login of 'root' accepted"


def test_only_what_is_printable_stays_and_the_rest_is_an_escape() -> None:
    assert printable(HOSTILE) == (
        "\\x1b]0;title\\x07\\x1b[2J\\x9b31m\\u202e\\x7f\\udc80\\r\\n2026-01-01 WARNING login of 'root' accepted"
    )
    for text in ("", "orders.eu-1", "grün 日本 ☃", printable(HOSTILE)):
        assert printable(text) == text


def test_a_record_of_the_log_is_one_line_and_its_traceback_has_no_escapes() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter("%(levelname)s %(message)s"))
    logger = logging.Logger("txmq.test")
    logger.addHandler(handler)
    logger.warning("login of %r refused, from %s", "ann", HOSTILE)
    assert stream.getvalue() == f"WARNING login of 'ann' refused, from {printable(HOSTILE)}\n"
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logger.exception("failed")
    lines = stream.getvalue().splitlines()[1:]
    assert lines[:2] == ["ERROR failed", "Traceback (most recent call last):"]
    assert all(map(str.isprintable, lines))


def test_names_of_users_are_printed_without_escape_sequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = HOSTILE.replace("\udc80", "")
    directory = str(tmp_path / "data")
    with Broker.open(directory) as broker:
        with broker.channel() as channel:
            channel.queue_declare(name)
        broker.engine.open_batch(name, name, 0, "fail")
        for command in (["queue", "list"], ["app", "list"], ["app", "staged"]):
            assert cli.main([*command, "--data", directory]) == 0
            printed = capsys.readouterr().out
            assert "\\x1b[2J" in printed and all(map(str.isprintable, printed.splitlines()))
        assert cli.main(["app", "release", "nobody", name, "--data", directory]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.isprintable()


def test_commands_write_to_the_terminal_in_one_place() -> None:
    root = Path(cli.__file__).parent
    printing = {
        path.name
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name) and node.id == "print"
    }
    assert printing == {"output.py", "views.py"}  # the second one in a notebook, tests/notebook/test_views.py
