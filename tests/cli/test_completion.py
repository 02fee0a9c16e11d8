"""Words that a shell completes: commands, options, and names of a broker that answers in time."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from broker_core.launcher import Broker
from tests.amqp_server import serving
from txmq import cli

SHELLS = ("bash", "zsh", "fish")
# what bash does for a Tab behind the last of these words
TAB = """
source <(txmq completion bash)
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
"$(complete -p txmq | sed -E 's/.*-F ([^ ]+).*/\\1/')" "$1"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed(folder: Path, *words: str) -> list[str]:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    program = folder / "bin" / "txmq"
    if not program.exists():
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m txmq "$@"\n')
        program.chmod(0o755)
    environment = {"PATH": f"{program.parent}:/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [bash, "--norc", "-c", TAB, "bash", *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_commands_options_and_values(tmp_path: Path) -> None:
    assert completed(tmp_path, "txmq", "que") == ["queue"]
    assert completed(tmp_path, "txmq", "user", "pa") == ["passwd"]
    assert completed(tmp_path, "txmq", "message", "peek", "--li") == ["--limit"]
    assert set(completed(tmp_path, "txmq", "completion", "")) == set(SHELLS)


def test_names_come_from_the_broker_but_none_that_a_shell_would_expand(
    broker: Broker, url: str, tmp_path: Path
) -> None:
    with broker.channel() as channel:
        for name in ("orders", "orders.late", "other", "o$(touch /)", "o rders", "o\x1b[2J"):
            channel.queue_declare(name)
    broker.engine.open_batch("etl", "query", 0, "fail")
    assert completed(tmp_path, "txmq", "message", "peek", "--url", url, "o") == [
        "orders",
        "orders.late",
        "other",
    ]
    assert completed(tmp_path, "txmq", "queue", "purge", "--url", url, "orders.") == ["orders.late"]
    assert completed(tmp_path, "txmq", "app", "release", "--url", url, "e") == ["etl"]
    assert completed(tmp_path, "txmq", "message", "peek", "--data", str(tmp_path / "data"), "or") == [
        "orders",
        "orders.late",
    ]
    assert completed(tmp_path, "txmq", "message", "peek", "--data", str(tmp_path / "absent"), "or") == []
    assert not (tmp_path / "absent").exists()


def test_a_broker_that_is_gone_or_hangs_completes_nothing(tmp_path: Path) -> None:
    assert completed(tmp_path, "txmq", "message", "peek", "--url", "txmq://127.0.0.1:1", "o") == []
    with serving(tmp_path / "d") as hung:
        os.kill(hung.pid, signal.SIGSTOP)
        assert completed(tmp_path, "txmq", "message", "peek", "--url", hung.url, "o") == []


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_each_shell_is_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    assert "_TXMQ_COMPLETE" in capsys.readouterr().out
