"""The files of ``examples/production``: their commands are commands of txmq, and systemd takes the unit."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from txmq.cli import parsed

FOLDER = Path(__file__).parents[1] / "examples" / "production"
UNIT = FOLDER / "txmq.service"


def _unit() -> dict[str, str]:
    lines = [line for line in UNIT.read_text().splitlines() if "=" in line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def test_the_unit_runs_a_command_of_txmq_in_its_own_directory() -> None:
    unit = _unit()
    program, *arguments = shlex.split(unit["ExecStart"])
    options = parsed(arguments)
    assert program.endswith("/bin/txmq") and options.command.__name__ == "serve"
    assert options.data == f"/var/lib/{unit['StateDirectory']}" and unit["StateDirectoryMode"] == "0700"
    assert unit["User"] != "root" and unit["Restart"] == "on-failure"


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    program = Path(sys.executable).with_name("txmq")
    here = tmp_path / UNIT.name
    here.write_text(UNIT.read_text().replace("/opt/txmq/bin/txmq", str(program)))
    done = subprocess.run([analyze, "verify", str(here)], capture_output=True, text=True, check=False)
    about = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert (done.returncode, about) == (0, []), done.stderr


def test_the_container_runs_commands_of_txmq() -> None:
    text = (FOLDER / "Containerfile").read_text()
    found = {
        name: json.loads(arguments)
        for name, arguments in re.findall(
            r"^(?:HEALTHCHECK.*?)?(CMD|ENTRYPOINT) (\[.*\])$", text, re.MULTILINE
        )
    }
    (check,) = re.findall(r"^HEALTHCHECK .*\\\n CMD (\[.*\])$", text, re.MULTILINE)
    program, *arguments = found["ENTRYPOINT"] + found["CMD"]
    options = parsed(arguments)
    assert program == "txmq" and options.command.__name__ == "serve" and options.tls_cert
    assert re.search(rf"^VOLUME {options.data}$", text, re.MULTILINE), "the data is in a volume"
    assert set(re.findall(r"\d+", re.findall(r"^EXPOSE (.*)$", text, re.MULTILINE)[0])) == {
        address.rpartition(":")[2] for address in (options.listen, *options.http, *options.amqps)
    }
    shell, flag, line = json.loads(check)
    status, rule = line.split("; ")
    assert (shell, flag) == ("sh", "-c") and rule == "[ $? -ne 4 ]", "an alarm is no reason to start it again"
    probe = parsed(shlex.split(status)[1:])
    assert probe.data == options.data and probe.command.__name__ == "_status"
    assert re.search(r"^USER \d+$", text, re.MULTILINE), "not root, and a number, which Kubernetes can check"
