"""What an installation brings, and what it leaves alone: the wheel, without Spark and beside a platform's own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable
from email.message import Message
from email.parser import Parser
from importlib import metadata, util
from pathlib import Path

import pytest
import typing_extensions
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import txmq
from broker_core import __version__
from tests.matrix import PYTHONS, SPARKS, Spark

ROOT = Path(__file__).parents[2]
CORE = ("click", "grpcio", "numpy", "packaging", "psutil", "pyarrow", "xxhash")
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
    for name in (*({*CORE} - {"grpcio"}), "grpc"):
        spec = util.find_spec(name)
        assert spec is not None and spec.origin is not None
        package = Path(spec.origin).parent
        (site / name).symlink_to(package)
        if (package.parent / f"{name}.libs").exists():
            (site / f"{name}.libs").symlink_to(package.parent / f"{name}.libs")
    for name in OURS:
        (site / name).symlink_to(ROOT / name)
    (site / "typing_extensions.py").symlink_to(str(typing_extensions.__file__))  # of grpcio
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


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """The Python of an environment without a package."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    return tmp_path / "env" / "bin" / "python"


def _site_packages(python: Path) -> Path:
    program = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def _tell_installed(folder: Path, name: str, about: str) -> None:
    """What pip looks at to know that a package is there."""
    told = folder / f"{name}-{Parser().parsestr(about)['Version']}.dist-info"
    told.mkdir(parents=True)
    (told / "METADATA").write_text(about)


def _would_install(
    python: Path, folder: Path, *words: str, path: str = ""
) -> subprocess.CompletedProcess[str]:
    """``pip install --dry-run``, with the pip of this environment; its report is the output."""
    pip = folder / "pip"
    pip.mkdir(exist_ok=True)
    if not (pip / "pip").exists():
        (pip / "pip").symlink_to(Path(sysconfig.get_path("purelib")) / "pip")
    return subprocess.run(
        [python, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", *words],
        env={**os.environ, "PYTHONPATH": f"{pip}:{path}", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("place", ["pythonpath", "site-packages"])
def test_an_installation_changes_no_package_of_a_platform(
    wheel: Path, environment: Path, tmp_path: Path, place: str
) -> None:
    """A platform has a Spark of another version than the extra asks for, on PYTHONPATH or in site-packages."""
    platform = tmp_path / "platform" if place == "pythonpath" else _site_packages(environment)
    for name, version in {**{name: metadata.version(name) for name in CORE}, "pyspark": "4.1.1"}.items():
        _tell_installed(platform, name, f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    done = _would_install(environment, tmp_path, "--no-index", str(wheel), path=str(platform))
    assert done.returncode == 0, done.stderr
    assert [each["metadata"]["name"] for each in json.loads(done.stdout)["install"]] == ["txmq"]


# -- the extra of Spark --------------------------------------------------------------------------------------

# delta-spark -> what it requires of pyspark; a new version is added here
DELTA = {
    "4.3.0": ">=4.0.1,<=4.1.1",
    "4.3.1": ">=4.0.1,<=4.1.1",
    "4.4.0": ">=4.0.1,<=4.2.0",
    "4.4.1": ">=4.0.1,<=4.2.0",
}
PYSPARK = ("4.0.1", "4.0.5", "4.1.0", "4.1.1", "4.1.2", "4.1.3", "4.1.4", "4.2.0", "4.2.1", "4.3.0")


@pytest.fixture(scope="module")
def ranges(about: Message) -> dict[str, SpecifierSet]:
    """What ``txmq[spark]`` allows, by package."""
    parsed = [Requirement(text) for text in about.get_all("Requires-Dist") or []]
    extra = [each for each in parsed if each.marker is not None and each.marker.evaluate({"extra": "spark"})]
    return {each.name: each.specifier for each in extra}


def _newest_first(versions: Iterable[str], allowed: SpecifierSet) -> list[str]:
    return sorted(allowed.filter(versions), key=Version, reverse=True)


def test_the_newest_delta_of_the_extra_takes_its_newest_pyspark_so_pip_never_steps_back(
    ranges: dict[str, SpecifierSet],
) -> None:
    """pip tries the newest of each; a step back costs an archive of 450 MB, which is loaded and thrown away."""
    newest, *_ = _newest_first(PYSPARK, ranges["pyspark"])
    deltas = _newest_first(DELTA, ranges["delta-spark"])
    assert newest in SpecifierSet(DELTA[deltas[0]])
    for delta in deltas:  # who asks for an older one gets a pyspark that both allow
        assert _newest_first(PYSPARK, ranges["pyspark"] & SpecifierSet(DELTA[delta])), delta


def test_the_extra_allows_the_sparks_of_the_matrix_and_none_beside_their_range(
    ranges: dict[str, SpecifierSet],
) -> None:
    for each in SPARKS:
        assert each.spark in ranges["pyspark"] and each.delta in ranges["delta-spark"]
        assert each.spark in SpecifierSet(DELTA[each.delta])
    newest, *_, oldest = sorted(SPARKS, key=lambda each: Version(each.spark), reverse=True)
    for found, (first, last) in {
        "pyspark": (newest.spark, oldest.spark),
        "delta-spark": (newest.delta, oldest.delta),
    }.items():
        resolved = _newest_first(PYSPARK if found == "pyspark" else DELTA, ranges[found])
        assert (resolved[0], resolved[-1]) == (first, last)


def test_what_is_written_here_of_delta_is_what_the_installed_one_says() -> None:
    said = [Requirement(text) for text in metadata.requires("delta-spark") or []]
    (of_spark,) = [each.specifier for each in said if each.name == "pyspark"]
    assert of_spark == SpecifierSet(DELTA[metadata.version("delta-spark")])


@pytest.mark.slow
def test_pip_resolves_the_extra_at_once_and_loads_no_source_archive(
    wheel: Path, environment: Path, tmp_path: Path, ranges: dict[str, SpecifierSet]
) -> None:
    """Beside the newest pyspark that the extra allows, which is there: no other one is wanted."""
    newest, *_ = _newest_first(PYSPARK, ranges["pyspark"])
    if metadata.version("pyspark") != newest:
        pytest.skip(f"needs pyspark {newest}")
    index = ("--timeout", "20", "--retries", "1", "--only-binary", ":all:")
    if _would_install(environment, tmp_path, *index, "--no-deps", "py4j").returncode:
        pytest.skip("no package index can be reached")
    for name in ("pandas", "pyspark", *CORE):  # large, and not looked at here
        text = metadata.distribution(name).read_text("METADATA")
        assert text is not None
        _tell_installed(_site_packages(environment), name, text)
    done = _would_install(environment, tmp_path, *index, f"{wheel}[spark]")
    assert done.returncode == 0, done.stderr
    found = {each["metadata"]["name"]: each for each in json.loads(done.stdout)["install"]}
    assert "pyspark" not in found and {"txmq", "delta_spark"} <= {name.replace("-", "_") for name in found}
    assert all(each["download_info"]["url"].endswith(".whl") for each in found.values())


@pytest.mark.soak
def test_the_extra_is_installed_in_an_empty_environment_where_a_first_stream_runs(
    wheel: Path, environment: Path, tmp_path: Path
) -> None:
    """From the wheel alone: 850 MB, of an index or of the cache of pip. The program is that of the README."""
    if _would_install(
        environment, tmp_path, "--timeout", "20", "--retries", "1", "--no-deps", "py4j"
    ).returncode:
        pytest.skip("no package index can be reached")
    pip = [sys.executable, "-m", "pip", "--python", str(environment), "--disable-pip-version-check"]
    installed = subprocess.run(
        [*pip, "install", "--quiet", f"{wheel}[spark]"], capture_output=True, text=True
    )
    assert installed.returncode == 0, installed.stderr
    listed = subprocess.run([*pip, "list", "--format", "json"], capture_output=True, text=True, check=True)
    versions = {each["name"].replace("_", "-"): each["version"] for each in json.loads(listed.stdout)}
    assert Spark(versions["pyspark"], versions["delta-spark"]) in SPARKS
    names = ("PYTHONPATH", "SPARK_HOME", "SPARK_SUBMIT_OPTS", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")
    done = subprocess.run(
        [environment, ROOT / "examples" / "first_stream.py", tmp_path / "stream"],
        cwd=tmp_path, env={name: value for name, value in os.environ.items() if name not in names}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with txmq.Broker.open(tmp_path / "stream" / "data"):  # ends the one that the program has started
        pass
    shutil.rmtree(tmp_path / "env")
    shown = re.search(r"```\n(table: .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown is not None and done.stdout.endswith(shown[1])


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
    assert "pip install '.[spark]'" in done.stderr


def test_an_address_of_kafka_says_what_to_install(without_spark: Path) -> None:
    done = _python(
        without_spark, "from txmq.cli import main; main(['queue', 'list', '--url', 'kafka://127.0.0.1:1'])"
    )
    assert "needs the Python package" in done.stderr and "pip install '.[kafka]'" in done.stderr, done.stderr


def test_the_doctor_asks_for_no_jdk_where_there_is_no_spark(without_spark: Path) -> None:
    program = "from txmq.cli import main; raise SystemExit(main(['doctor', '--listen', '127.0.0.1:0']))"
    done = _python(without_spark, program)
    assert "java" not in done.stdout and "for streams: pip install '.[spark]'" in done.stdout, done.stdout
