"""What an installation brings, and what it leaves alone: the wheel, without Spark and beside a platform's own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from importlib import metadata, util
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import txmq
from broker_core import __version__
from tests.matrix import PYTHONS

ROOT = Path(__file__).parents[2]
CORE = ("click", "numpy", "packaging", "psutil", "pyarrow", "xxhash")
DATABRICKS = "docs/databricks.md"
OURS = ("txmq", "broker_core", "connector")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = target.glob("txmq-*.whl")
    return built


@pytest.fixture(scope="module")
def about(wheel: Path) -> Message:
    """The metadata of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (told,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(told).decode())


@pytest.fixture(scope="module")
def without_spark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages of ``pip install txmq`` and no other."""
    site = tmp_path_factory.mktemp("site")
    for name in CORE:
        spec = util.find_spec(name)
        assert spec is not None and spec.origin is not None
        package = Path(spec.origin).parent
        (site / name).symlink_to(package)
        if (package.parent / f"{name}.libs").exists():
            (site / f"{name}.libs").symlink_to(package.parent / f"{name}.libs")
    for name in OURS:
        (site / name).symlink_to(ROOT / name)
    return site


def _python(site: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs with ``site`` and the standard library alone."""
    command = [sys.executable, "-S", "-W", "error", "-c", program, *arguments]
    return subprocess.run(
        command, env={"PYTHONPATH": str(site), "PATH": os.environ["PATH"]}, capture_output=True, text=True
    )


# -- the wheel -----------------------------------------------------------------------------------------------


def test_the_wheel_states_version_licence_and_types(wheel: Path, about: Message) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert (about["Version"], about["License-Expression"]) == (__version__, "Apache-2.0")
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {f"{package}/py.typed" for package in OURS} <= set(names)
    assert txmq.__version__ == __version__


def test_the_wheel_names_the_pythons_of_the_matrix(about: Message) -> None:
    named = "Programming Language :: Python :: 3."
    told = {each.rpartition(" ")[2] for each in about.get_all("Classifier") or [] if each.startswith(named)}
    assert told == set(PYTHONS)
    assert about["Requires-Python"] == f">={PYTHONS[0]}"


def test_without_an_extra_nothing_of_spark_is_required(about: Message) -> None:
    parsed = [Requirement(text) for text in about.get_all("Requires-Dist") or []]
    assert {each.name for each in parsed if each.marker is None} == set(CORE)
    spark = {
        each.name for each in parsed if each.marker is not None and each.marker.evaluate({"extra": "spark"})
    }
    assert spark - set(CORE) == {"pyspark", "delta-spark", "pandas"}


def test_the_page_of_databricks_names_what_the_wheel_requires() -> None:
    (told,) = re.findall(r"The wheel requires (.*?), and nothing of Spark", (ROOT / DATABRICKS).read_text())
    assert sorted(re.findall(r"[a-z]{4,}", told)) == sorted(CORE)


@pytest.mark.parametrize("place", ["pythonpath", "site-packages"])
def test_an_installation_changes_no_package_of_a_platform(wheel: Path, tmp_path: Path, place: str) -> None:
    """A platform has a Spark of another version than the extra asks for, on PYTHONPATH or in site-packages."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    own = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    platform = tmp_path / "platform" if place == "pythonpath" else Path(own)
    for name, version in {**{name: metadata.version(name) for name in CORE}, "pyspark": "4.1.1"}.items():
        told = platform / f"{name}-{version}.dist-info"
        told.mkdir(parents=True)
        (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    pip = tmp_path / "pip"
    pip.mkdir()
    (pip / "pip").symlink_to(Path(sysconfig.get_path("purelib")) / "pip")
    done = subprocess.run(
        [python, "-m", "pip", "install", "--dry-run", "--no-index", "--quiet", "--report", "-", str(wheel)],
        env={**os.environ, "PYTHONPATH": f"{pip}:{platform}", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [each["metadata"]["name"] for each in json.loads(done.stdout)["install"]] == ["txmq"]


# -- without Spark -------------------------------------------------------------------------------------------

PUBLISHES = """\
import sys
import txmq
with txmq.Broker.open(sys.argv[1]) as broker, broker.channel() as channel:
    channel.queue_declare("orders")
    channel.tx_select()
    channel.publish(b"first", routing_key="orders")
    channel.tx_commit()
    print(channel.get("orders").body)
"""


def test_broker_and_channels_work_without_spark(without_spark: Path, tmp_path: Path) -> None:
    done = _python(without_spark, PUBLISHES, str(tmp_path / "data"))
    assert (done.stdout, done.stderr) == ("b'first'\n", "")


def test_the_command_line_works_without_spark(without_spark: Path) -> None:
    done = _python(without_spark, "from txmq.cli import main; main(['--version'])")
    assert (done.stdout, done.stderr) == (f"txmq {__version__}\n", "")


@pytest.mark.parametrize("name", ["Decoded", "When", "decode", "encode", "mirror_offsets", "transactional"])
def test_a_name_that_needs_spark_says_what_to_install(without_spark: Path, name: str) -> None:
    done = _python(without_spark, f"from txmq import {name}")
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: txmq.{name} needs Spark"), done.stderr
    assert "pip install 'txmq[spark]'" in done.stderr


def test_an_address_of_kafka_says_what_to_install(without_spark: Path) -> None:
    done = _python(
        without_spark, "from txmq.cli import main; main(['queues', '--url', 'kafka://127.0.0.1:1'])"
    )
    assert "needs the Python package" in done.stderr and "pip install 'txmq[kafka]'" in done.stderr, (
        done.stderr
    )


def test_the_doctor_asks_for_no_jdk_where_there_is_no_spark(without_spark: Path) -> None:
    program = "from txmq.cli import main; raise SystemExit(main(['doctor', '--listen', '127.0.0.1:0']))"
    done = _python(without_spark, program)
    assert "java" not in done.stdout and "for streams: pip install 'txmq[spark]'" in done.stdout, done.stdout
