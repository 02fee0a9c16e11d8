"""The run of hours in minutes: what it finds, and that it goes on where it was cut."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.endurance import growth
from tests.endurance.__main__ import KILLED, ROOT, first_time, wrong
from tests.progress import wait_for_end, wait_until

HOUR_S = 3600


def rows(kind: str, name: str, *lives: Callable[[float], float], seconds: float = 2 * HOUR_S) -> list[Any]:
    """A sample each 10 s, of one process after another; the value as a function of its age in hours."""
    each = seconds / len(lives)
    return [
        {"at": at, "lives": {name: int(at / each)}, kind: {name: lives[int(at / each)](at % each / HOUR_S)}}
        for at in np.arange(0, seconds, 10.0)
    ]


NOISE = np.random.default_rng(1).normal(0, 4, 1000)


@pytest.mark.parametrize(
    ("lives", "slope"),
    [
        ([lambda age: 100], 0),
        ([lambda age: 100 + 12 * age], 12),
        ([lambda age: 100 + 12 * age, lambda age: 100 + 12 * age], 12),  # killed, and begun anew
        ([lambda age: 100, lambda age: 300], 0),  # another process is no growth
        ([lambda age: 100 + 400 * min(age, 0.2)], 0),  # what it takes when it is young
        ([lambda age: 500 if 1 < age < 1.1 else 100], 0),  # a peak
        ([lambda age: 100 + 12 * age + NOISE[int(age * 360)]], 12),
    ],
)
def test_growth_is_what_an_hour_adds_to_a_process_that_is_warm(lives: list[Any], slope: float) -> None:
    found = growth.growth(rows("memory", "broker", *lives))
    assert found["memory", "broker"] == pytest.approx(slope, abs=1)


def test_a_disk_lives_as_long_as_the_run_whatever_process_has_its_name() -> None:
    found = growth.growth(
        rows("disk", "kafka", *(lambda age, start=start: start + 9 * age for start in (0, 9)))
    )
    assert found["disk", "kafka"] == pytest.approx(9, abs=1)
    assert len(growth.lives(rows("disk", "kafka", lambda _: 0, lambda _: 0), "disk", "kafka")) == 1


def test_what_lives_for_minutes_has_no_growth() -> None:
    assert growth.growth(rows("memory", "broker", lambda age: 1000 * age, seconds=1200)) == {}


def test_a_figure_that_grows_beyond_its_bound_is_named() -> None:
    leak = rows("files", "broker", lambda age: 60 + 4 * age)
    assert growth.too_fast(leak) == ["files of broker grows by 4.0 files an hour; its bound is 3"]
    assert growth.too_fast(rows("files", "broker", lambda age: 60 + 2 * age)) == []
    assert growth.too_fast(rows("memory", "driver.jvm", lambda age: 30 * age)) == []
    assert growth.too_fast(rows("memory", "driver", lambda age: 30 * age)) != []


def test_the_picture_has_a_panel_for_each_kind(tmp_path: Path) -> None:
    growth.draw(
        [*rows("memory", "broker", lambda age: age), {"at": 60, "event": "kill broker"}], tmp_path / "p.png"
    )
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_lost_doubled_or_never_sent_is_named() -> None:
    sent = np.arange(10)
    assert wrong("table", sent, sent[:8], np.array([0, 1, 2, 3, 4, 5, 6, 7, 9])) == []
    assert wrong("table", sent, sent, np.array([0, 1, 1, 2, 3, 5, 6, 7, 8, 9, 11])) == [
        "table: 1 lost, first 4", "table: 1 doubled, first 1", "table: 1 never sent, first 11",
    ]  # fmt: skip


def test_a_number_may_come_again_in_a_new_session_alone_and_soon() -> None:
    assert first_time(np.array([-1, 5, 6, -1, 6, 7])).tolist() == [5, 6, 7]
    assert first_time(np.array([-1, 5, 6, -1, -1, 6, 7])).tolist() == [5, 6, 7]
    assert first_time(np.array([-1, 5, 6, 6])).tolist() == [5, 6, 6]
    long_ago = np.array([-1, *range(1000), -1, 3])
    assert first_time(long_ago).tolist() == [*range(1000), 3]


def events(folder: Path) -> list[str]:
    return [row["event"] for row in growth.read(folder / "samples.jsonl") if "event" in row]


@pytest.mark.soak
@pytest.mark.spark
@pytest.mark.crash
@pytest.mark.slow
def test_soak_a_run_of_minutes_with_a_kill_of_each_kind_is_cut_and_goes_on(tmp_path: Path) -> None:
    def run(hours: float) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.endurance", "--dir", str(tmp_path), "--pace", "40"]
        with (tmp_path / "run.log").open("ab") as log:
            return subprocess.Popen([*command, "--hours", str(hours)], cwd=ROOT, stdout=log, stderr=log)

    def kills() -> set[str]:
        return {event.split()[1] for event in events(tmp_path) if event.startswith("kill ")}

    first = run(24)
    try:
        wait_until(lambda: first.poll() is not None or kills() == set(KILLED), "each was killed")
    finally:
        first.kill()
    assert first.wait() == -9, (tmp_path / "run.log").read_text()[-3000:]
    before = growth.read(tmp_path / "samples.jsonl")
    assert wait_for_end(run(0.0), "the run goes on") == 0, (tmp_path / "run.log").read_text()[-3000:]
    after = growth.read(tmp_path / "samples.jsonl")
    assert after[: len(before)] == before and after[len(before)]["at"] >= before[-1]["at"]
    assert json.loads((tmp_path / "ports.json").read_text())["kafka"]
    counted = [event for event in events(tmp_path) if event.startswith("check: ")]
    assert int(counted[-1].split()[1]) > 1000
    assert (tmp_path / "endurance.png").exists()
