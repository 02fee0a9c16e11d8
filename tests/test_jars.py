"""The jars of tests and benchmarks are those whose checksums are committed."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import jars
from tests import advisories

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A jar in the cache of Ivy that is pinned, and is what resolves."""
    jar, sums = tmp_path / "org.example_it-1.0.jar", tmp_path / "jars.sha256"
    jar.write_bytes(b"PK the code")
    sums.write_text(f"{hashlib.sha256(b'PK the code').hexdigest()}  {jar.name}\n")
    monkeypatch.setattr(jars, "pinned", lambda given=sums: _pinned(given))
    monkeypatch.setattr(jars.sys, "prefix", str(tmp_path))
    monkeypatch.setattr(jars, "_ask_ivy", lambda _asked: [str(jar)])
    return jar


_pinned = jars.pinned


def test_a_jar_that_is_not_the_pinned_one_is_refused_each_time(cached: Path) -> None:
    """Also one that is changed after it has been resolved once."""
    assert jars.resolve(["org.example:it:1.0"]) == [str(cached)]
    for changed in (b"PK other code", b"PK the code "):
        cached.write_bytes(changed)
        with pytest.raises(SystemExit) as refused:
            jars.resolve(["org.example:it:1.0"])
        said = str(refused.value)
        assert said.startswith(f"{cached} is not the jar that is pinned: its SHA-256 is ")
        assert hashlib.sha256(changed).hexdigest() in said and "\n" not in said
    cached.write_bytes(b"PK the code")
    assert jars.resolve(["org.example:it:1.0"]) == [str(cached)]


def test_a_jar_without_a_checksum_is_refused(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jars, "pinned", dict)
    with pytest.raises(SystemExit, match=r"has no checksum in bench/jars\.sha256"):
        jars.resolve(["org.example:it:1.0"])


def test_pin_adds_and_changes_nothing(cached: Path) -> None:
    sums, other = cached.with_name("jars.sha256"), cached.with_name("org.example_a-1.0.jar")
    other.write_bytes(b"PK")
    jars.pin([str(other), str(cached)], sums)
    assert list(_pinned(sums)) == [other.name, cached.name]
    cached.write_bytes(b"PK other code")
    before = sums.read_text()
    with pytest.raises(SystemExit, match="is not the jar that is pinned"):
        jars.pin([str(cached)], sums)
    assert sums.read_text() == before


def test_all_jars_that_the_project_asks_for_are_pinned() -> None:
    """The artifacts that it names; those that they depend on are refused by ``resolve`` where they are not."""
    named = {jars.delta()}
    for source in (*(ROOT / "bench").glob("*.py"), *(ROOT / "tests").rglob("*.py")):
        if source.name != Path(__file__).name:
            named |= set(re.findall(r'"((?:io|org|com)\.[\w.]+:[\w.-]+:\d[\w.]*)"', source.read_text()))
    names = {"{}_{}-{}.jar".format(*coordinate.split(":")) for coordinate in named}
    assert len(names) > 5 and names <= set(_pinned()), names - set(_pinned())


def test_the_packages_that_read_foreign_bytes_are_among_those_that_are_audited(tmp_path: Path) -> None:
    """The lock that ``make lint`` and ``make audit`` give has them, and pip-audit reads them from it."""
    makefile = (ROOT / "Makefile").read_text()
    assert re.findall(r"tests\.advisories (?:--strict )?(\S+)", makefile) == ["requirements.lock"] * 2
    locked = set(re.findall(r"^([\w.-]+)==", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    assert {"protobuf", "jsonschema", "fastavro", "crc32c", "kafka-python", "pyarrow"} <= locked


def test_the_audit_is_the_last_of_lint_and_says_so_where_it_could_not_ask() -> None:
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    assert recipe[1].splitlines()[-1].strip() == "$(BIN)/python -m tests.advisories requirements.lock"
    away = "http://127.0.0.1:9/v1/query"
    code = f"import sys; from tests import advisories; sys.exit(advisories.main('requirements.lock', {away!r}, strict=%s))"
    for strict in (False, True):
        ended = subprocess.run(
            [sys.executable, "-c", code % strict], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert ended.stdout.splitlines()[-1].startswith("not audited: "), ended.stderr
        assert ended.returncode == int(strict)
    assert advisories.OSV.startswith("https://")
