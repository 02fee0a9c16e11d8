"""``txmq doctor``: what it finds, what it says to do, and its exit code."""

from __future__ import annotations

import getpass
import json
import os
import socket
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from broker_core.client import broker as client
from broker_core.launcher import Broker
from broker_core.server.listener_options import ListenerOptions
from broker_core.store.directory import DirectoryLock
from txmq import cli
from txmq.doctor import directory, java, port, python


def doctor(
    capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """The exit code, and the findings by check."""
    code = cli.main(["doctor", "--json", *arguments])
    captured = capsys.readouterr()
    assert captured.err == ""
    found: dict[str, list[dict[str, Any]]] = {}
    for each in json.loads(captured.out):
        found.setdefault(each["check"], []).append(each)
    return code, found


def states(findings: list[dict[str, Any]]) -> list[str]:
    return [each["state"] for each in findings]


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which this process listens, and is no broker."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def test_a_sound_installation_has_no_problems_and_the_exit_code_0(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = cli.main(
        ["doctor", "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0", "--amqp", "127.0.0.1:0"]
    )
    shown = capsys.readouterr().out
    assert (code, shown.splitlines()[-1]) == (0, "no problems"), shown
    for check in (
        "python",
        "worker",
        "packages",
        "java",
        "spark",
        "directory",
        "room",
        "files",
        "listen",
        "amqp",
    ):
        assert f"\nok       {check} " in f"\n{shown}", shown
    assert not (tmp_path / "data").exists() and list(tmp_path.iterdir()) == [], "it leaves nothing behind"


def test_problems_are_counted_have_advice_and_the_exit_code_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, taken: int
) -> None:
    (tmp_path / "file").touch()
    code = cli.main(["doctor", "--data", str(tmp_path / "file"), "--listen", f"127.0.0.1:{taken}"])
    lines = capsys.readouterr().out.splitlines()
    wrong = [number for number, line in enumerate(lines) if line.startswith("problem")]
    assert (code, lines[-1], len(wrong)) == (1, "2 problems", 2)
    assert all("-> " in lines[number + 1] for number in wrong)


# -- Python --------------------------------------------------------------------------------------------------


def test_a_python_of_spark_without_txmq_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bare = tmp_path / "python3"
    bare.write_text("#!/bin/sh\necho '[[3, 11, 0], [\"pyspark_txmq\"]]'\n")
    bare.chmod(0o755)
    monkeypatch.delenv("PYSPARK_PYTHON")
    monkeypatch.delenv("PYSPARK_DRIVER_PYTHON")
    monkeypatch.setenv("PATH", str(tmp_path))
    (found,) = python.spark_python()
    assert (found.state, found.found) == ("problem", f"Spark runs python3 ({bare}), which has no txmq")
    assert found.advice == f"before Spark starts, set PYSPARK_PYTHON={sys.executable}"


def test_a_package_of_another_version_or_none_is_a_problem_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    version = metadata.version
    old = {"delta-spark": "3.2.0", "kafka-python": "2.0.2"}

    def known(name: str) -> str:
        if name == "xxhash":
            raise metadata.PackageNotFoundError(name)
        return old.get(name) or version(name)

    monkeypatch.setattr(metadata, "version", known)
    monkeypatch.setattr(
        metadata, "requires", lambda _: ["delta-spark<4.5,>=4.4.0", "kafka-python<3.1,>=3.0.12", "xxhash"]
    )
    wrong = {each.found: each.advice for each in python.packages() if each.state == "problem"}
    assert wrong.keys() == {
        "delta-spark 3.2.0 is not <4.5,>=4.4.0",
        "kafka-python 2.0.2 is not <3.1,>=3.0.12",
        "xxhash is not installed",
    }
    assert wrong["delta-spark 3.2.0 is not <4.5,>=4.4.0"] == "pip install 'delta-spark<4.5,>=4.4.0'"


# -- Java ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "state", "expected"),
    [
        ('openjdk version "21.0.2" 2024-01-16', "ok", "JDK 21"),
        ('openjdk version "17" 2021-09-14', "ok", "JDK 17"),
        ('java version "1.8.0_402"', "problem", "is JDK 8"),
        ("no such thing", "problem", "does not print its version: no such thing"),
    ],
)
def test_the_jdk_that_spark_starts_is_asked_for_its_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, state: str, expected: str
) -> None:
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "java"
    fake.write_text(f"#!/bin/sh\necho '{said}' >&2\n")
    fake.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    (found,) = java.java()
    assert found.state == state and expected in found.found and str(fake) in found.found
    assert ("JAVA_HOME" in found.advice) == (state == "problem")


def test_no_jdk_is_a_problem_that_says_where_it_was_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    (found,) = java.java()
    assert (found.state, found.found) == ("problem", f"JAVA_HOME={tmp_path} has no bin/java")
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    (found,) = java.java()
    assert (found.state, found.found) == ("problem", "no java is on the PATH")


SPARK, DELTA = "4.2.0", "4.4.0"
OF_DELTA = "delta-spark_4.2_2.13"


@pytest.fixture
def spark_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A Spark of its own with one jar, and a home without Ivy's jars."""
    versions = {"pyspark": SPARK, "delta-spark": DELTA}
    monkeypatch.setattr(metadata, "version", versions.__getitem__)
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / f"spark-core_2.13-{SPARK}.jar").touch()
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("PYSPARK_SUBMIT_ARGS", "SPARK_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def deltas() -> list[tuple[str, str]]:
    return [(each.state, each.found) for each in java.jars() if each.check == "delta"]


def test_a_spark_home_of_another_version_is_a_problem(spark_home: Path) -> None:
    (spark_home / "jars" / f"spark-core_2.13-{SPARK}.jar").rename(
        spark_home / "jars" / "spark-core_2.12-3.5.1.jar"
    )
    (found,) = java.jars()
    assert found.state == "problem" and found.advice.startswith("unset SPARK_HOME")
    assert found.found == f"{spark_home}/jars has spark-core_2.12-3.5.1.jar, and pyspark is 4.2.0"


def test_the_jar_of_delta_may_be_spark_s_or_ivy_s_or_still_to_come(spark_home: Path) -> None:
    ((state, found),) = deltas()
    assert state == "hint" and found.startswith(f"{OF_DELTA}-{DELTA}.jar is not on this machine yet")
    cache = spark_home / ".ivy2.5.2" / "cache" / "io.delta" / OF_DELTA / "jars"
    cache.mkdir(parents=True)
    (cache / f"{OF_DELTA}-{DELTA}.jar").touch()
    assert [state for state, _ in deltas()] == ["ok"]
    (spark_home / "jars" / f"{OF_DELTA}-{DELTA}.jar").touch()
    assert deltas() == [("ok", f"{spark_home}/jars/{OF_DELTA}-{DELTA}.jar")]


def test_a_delta_that_does_not_fit_is_a_problem_wherever_it_is_named(
    spark_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (spark_home / "jars" / "delta-spark_2.13-4.0.0.jar").touch()
    (spark_home / "conf").mkdir()
    defaults = spark_home / "conf" / "spark-defaults.conf"
    defaults.write_text(
        "# spark.jars.packages io.delta:delta-spark_2.12:1.0.0\nspark.jars.packages io.delta:delta-spark_2.13:4.0.0\n"
    )
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--packages io.delta:delta-core_2.12:2.4.0 pyspark-shell")
    ((state, found),) = deltas()
    assert (state, found) == (
        "problem",
        "PYSPARK_SUBMIT_ARGS names delta-core_2.12:2.4.0; "
        f"{defaults} names delta-spark_2.13:4.0.0; {spark_home}/jars has delta-spark_2.13-4.0.0.jar",
    )


# -- directory -----------------------------------------------------------------------------------------------


def found_in(data: Path) -> dict[str, tuple[str, str, str]]:
    return {each.check: (each.state, each.found, each.advice) for each in directory.directory(str(data))}


def test_a_directory_with_other_files_is_a_problem_and_one_above_it_is_not(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    state, text, advice = found_in(tmp_path)["directory"]
    assert state == "problem" and "it has thesis.tex" in text
    assert advice == "name another directory with --data"
    assert found_in(tmp_path / "data")["directory"][0] == "ok"


def test_a_name_that_no_file_system_takes_is_a_problem_with_another_as_its_remedy(tmp_path: Path) -> None:
    state, text, advice = found_in(tmp_path / ("a" * 10_000))["directory"]
    assert state == "problem" and text.endswith("File name too long")
    assert advice == "name another directory with --data"


def test_a_directory_that_cannot_be_written_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    state, text, advice = found_in(tmp_path / "data")["directory"]
    assert state == "problem" and "no permission to write" in text
    assert advice.startswith(f"let {getpass.getuser()} write there")


def test_a_file_that_another_user_has_left_is_a_problem_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "catalog.db").touch()
    monkeypatch.setattr(os, "access", lambda path, _mode: not str(path).endswith("catalog.db"))
    texts = [each.found for each in directory.directory(str(tmp_path)) if each.state == "problem"]
    assert texts == [
        f"{tmp_path / 'catalog.db'} belongs to {getpass.getuser()}, and {getpass.getuser()} may not write it"
    ]


def test_permissions_that_a_broker_would_stumble_on_are_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    (tmp_path / "lock").touch()
    if os.geteuid() == 0:
        os.chown(tmp_path, 65534, 65534)
    texts = [(each.state, each.found) for each in directory.directory(str(tmp_path))]
    assert ("hint", f"every user of this machine may write to {tmp_path}") in texts
    if os.geteuid() == 0:
        assert any(text.endswith("and this is root") for state, text in texts if state == "hint")


@pytest.mark.parametrize("token_only", [False, True])
def test_the_broker_of_a_directory_is_named_and_nothing_disturbs_it(tmp_path: Path, token_only: bool) -> None:
    with Broker.open(tmp_path, listeners=ListenerOptions(token_only=token_only)) as broker:
        state, text, _ = found_in(tmp_path)["broker"]
        assert state == "ok" and f"process {os.getpid()} (" in text and broker.url in text
    assert found_in(tmp_path)["broker"] == ("ok", f"no broker has {tmp_path}", "")


def test_a_broker_that_does_not_answer_is_named_with_its_log(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)  # as before it listens
    try:
        state, text, advice = found_in(tmp_path)["broker"]
    finally:
        lock.release()
    assert state == "hint" and f"process {os.getpid()} (" in text and "broker.log" in advice


def test_too_little_room_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)

    def nearly_full(blocks: int) -> Any:
        values = list(real)
        values[4] = blocks  # f_bavail
        return os.statvfs_result(values)

    for megabytes, state in ((10, "problem"), (500, "hint"), (5000, "ok")):
        blocks = megabytes * 1024 * 1024 // real.f_frsize
        monkeypatch.setattr(os, "statvfs", lambda _path, blocks=blocks: nearly_full(blocks))
        assert found_in(tmp_path)["room"][0] == state


@pytest.mark.parametrize(
    ("kind", "state"), [("ext4", "ok"), ("nfs4", "problem"), ("tmpfs", "hint"), ("overlay", "hint")]
)
def test_a_file_system_is_judged_by_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, state: str
) -> None:
    monkeypatch.setattr(directory, "_kind", lambda _place: kind)
    monkeypatch.setattr(directory, "_map_parts", lambda _scratch: None)
    monkeypatch.setattr(directory, "_sync_s", lambda _scratch: 0.001)
    assert found_in(tmp_path)["files"][0] == state


def test_a_file_system_is_judged_by_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any) -> None:
        return None  # an flock that keeps nobody out

    monkeypatch.setattr(directory.fcntl, "flock", no_locks)
    state, text, advice = found_in(tmp_path)["files"]
    assert state == "problem" and "flock: a lock does not keep others out" in text and "--data" in advice
    assert list(tmp_path.iterdir()) == []


def test_a_task_can_pass_a_file_to_the_broker_where_the_store_takes_it(tmp_path: Path) -> None:
    assert not [each for each in directory.directory(str(tmp_path)) if "leases" in each.found]


def test_the_kind_of_a_file_system_is_known(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "deeper"):
        assert not found_in(place)["files"][1].startswith("the file system")


# -- ports and brokers ---------------------------------------------------------------------------------------


def test_a_port_in_use_names_its_holder(taken: int) -> None:
    (found,) = port.port("amqp", f"127.0.0.1:{taken}", "--amqp", chosen=True)
    assert found.state == "problem" and f"process {os.getpid()} (" in found.found and "--amqp" in found.advice
    (found,) = port.port("amqp", f"127.0.0.1:{taken}", "--amqp", chosen=False)
    assert found.state == "hint", "a Spark job with data=DIR needs no fixed port"


def test_a_port_of_a_broker_is_no_problem_for_its_own_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Broker.open(tmp_path) as broker:
        address = f"127.0.0.1:{broker.port}"
        (own,) = port.port("listen", address, "--listen", chosen=True, data=str(tmp_path))
        (other,) = port.port("listen", address, "--listen", chosen=True, data=str(tmp_path / "other"))
        monkeypatch.setattr(port, "_listener", lambda _number: None)  # as of another user
        (unseen,) = port.port("listen", address, "--listen", chosen=True)
    assert (own.state, own.found) == ("ok", f"the broker of {tmp_path} listens on {address}")
    assert other.state == unseen.state == "problem"
    assert unseen.found.startswith(
        f"the broker of {tmp_path}, process {os.getpid()} of another user, listens"
    )


def test_an_address_of_another_machine_is_a_problem() -> None:
    (found,) = port.port("listen", "203.0.113.1:5673", "--listen", chosen=True)
    assert found.state == "problem" and "cannot be used" in found.found


def test_a_broker_elsewhere_answers_or_not(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Broker.open(tmp_path) as broker:
        _, found = doctor(capsys, "--url", broker.url)
        assert states(found["broker"]) == ["ok"] and "directory" not in found and "listen" not in found
    monkeypatch.setattr(client, "CONNECT_S", 0.1)
    code, found = doctor(capsys, "--url", "txmq://127.0.0.1:1")
    assert code == 1 and states(found["broker"]) == ["problem"]


@pytest.mark.parametrize("wrong", [["--listen", "5673"], ["--url", "http://somewhere"]])
def test_a_wrong_option_is_one_clear_error(capsys: pytest.CaptureFixture[str], wrong: list[str]) -> None:
    assert cli.main(["doctor", *wrong]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("txmq: [TXMQ_OPTION] ")
