"""Every command of ``txmq``, as a process, against a broker in another process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bench.broker import serve_command
from bench.ports import free_ports
from broker_core.client.broker import BrokerClient
from broker_core.core import endpoint, errors
from broker_core.core.errors import CheckpointMismatch
from broker_core.engine import START, BranchHeader, Limit, Origin, Vector
from broker_core.launcher import Broker
from tests.cli.test_adversary import leaves
from tests.server.conftest import MicroBatch
from txmq import cli
from txmq.command.declare import ROOT


def _txmq(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "txmq", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        input=stdin,
        check=False,
    )


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The output of a command that succeeds, run in this process (an interpreter costs half a second)."""
    code = cli.main(arguments)
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    return captured.out


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return json.loads(_run(capsys, *arguments, "--json"))


def _fails(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 1) -> str:
    found = cli.main(arguments)
    captured = capsys.readouterr()
    assert (found, captured.out) == (code, "")
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("txmq: [TXMQ_")
    return captured.err


def test_help_shows_every_command_and_every_word_of_a_group() -> None:
    shown = _txmq("--help")
    assert shown.returncode == 0
    listed = shown.stdout.partition("Commands:")[2]
    assert sorted(re.findall(r"^  ([a-z-]+) +\w", listed, re.MULTILINE)) == sorted(ROOT.commands)
    assert re.findall(r"^  ([a-z-]+) +\w", listed, re.MULTILINE)[:2] == ["serve", "status"]
    described = re.split(r"^  (?=\w)", " ".join(listed.split("\n    ")), flags=re.MULTILINE)
    for text in described[1:]:
        name, *words = re.findall(r"[a-z-]+", re.sub(r"- +", "-", text))
        group = ROOT.commands[name]
        if isinstance(group, click.Group):
            assert sorted(words[-len(group.commands) :]) == sorted(group.commands), text


VERBS = (
    *("back", "bind", "change", "check", "close", "commit", "copy", "decide", "declare", "delete", "discard", "export", "forget"),
    *("give", "add", "import", "inspect", "limit", "list", "manage", "move", "print", "publish", "release", "remove"),
    *("replace", "roll", "run", "set", "show", "write"),
)  # fmt: skip


def test_help_begins_with_a_verb_and_its_object_and_facts_are_also_json() -> None:
    for words, command in leaves():
        verb, what = str(command.short_help).split(" ", 1)
        assert verb in VERBS and what, words
        prints_facts = words not in {("serve",), ("top",), ("completion",)}
        assert any("--json" in param.opts for param in command.params) == prints_facts, words
    for group in ROOT.commands.values():
        assert str(group.short_help).split(" ", 1)[0].strip(",") in VERBS, group.name
    prepared, committed = (
        cli.parsed([*words.split(), "--url", "u"]).command for words in ("tx list", "history list")
    )
    assert prepared is not committed


def test_a_group_alone_says_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["tx"])
    assert "usage: txmq tx list | recover | commit | rollback | forget" in capsys.readouterr().err


def test_skipped_rows_are_in_files_before_the_broker_forgets_them(
    broker: Broker, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = broker.engine
    opened = engine.open_batch("app", "q", 0, "fail")
    staged = []
    for name in ("lake/a", "lake/b"):
        header = BranchHeader(
            opened.token,
            f"branch of {name}",
            "append",
            {"table": name},
            app_id="app",
            query_id="q",
            batch_id=0,
        )
        staged.append(engine.stage(header, [pa.record_batch({"v": [name, None]})]))
    engine.commit_batch("app", "q", 0, opened.token, staged)
    listed = _json(capsys, "app", "unapplied", "app", "--url", url)
    told = [(row["sequence"], row["kind"], row["to"], row["rows"]) for row in listed]
    assert told == [(1, "append", "lake/a", 2), (1, "append", "lake/b", 2)]
    assert {(row["since"], row["error"], row["rows_to"]) for row in listed} == {("", "", "")}
    rows = (
        "app",
        "skip",
        "--yes",
        "app",
        "1",
        "--refused",
        "--table",
        "lake/a",
        "--to",
        str(tmp_path / "refused"),
        "--url",
        url,
    )
    assert _json(capsys, *rows)["rows_to"] == str(tmp_path / "refused")
    engine.note("app", 1, ["branch of lake/a"], "refused", "no")
    first, second = _json(capsys, "app", "unapplied", "app", "--rows", "1", "--url", url)
    assert (first["error"], first["rows_to"]) == ("no", str(tmp_path / "refused")) and first["since"] > "2026"
    assert (second["error"], second["examples"]) == ("", [{"v": "lake/b"}])
    to = tmp_path / "skipped"
    (to / "app.1.0.parquet").mkdir(parents=True)
    assert "nothing was skipped" in _fails(
        capsys, "app", "skip", "--yes", "app", "1", "--to", str(to), "--url", url
    )
    assert "nothing for 'lake/c'" in _fails(
        capsys, "app", "skip", "--yes", "app", "1", "--to", str(to), "--table", "lake/c", "--url", url
    )
    assert len(engine.unapplied("app")[0].to_apply) == 2
    (file,) = _json(
        capsys,
        "app",
        "skip",
        "--yes",
        "app",
        "1",
        "--to",
        str(tmp_path / "b"),
        "--table",
        "lake/b",
        "--url",
        url,
    )["files"]
    assert pq.read_table(file).to_pylist() == [{"v": "lake/b"}, {"v": None}]
    assert json.loads(pq.read_schema(file).metadata[b"txmq"])["to"] == "lake/b"
    assert [row["to"] for row in _json(capsys, "app", "unapplied", "app", "--url", url)] == ["lake/a"]
    (file,) = _json(capsys, "app", "skip", "--yes", "app", "1", "--to", str(tmp_path / "a"), "--url", url)[
        "files"
    ]
    assert pq.read_table(file).to_pylist() == [{"v": "lake/a"}, {"v": None}] and engine.unapplied("app") == []
    assert "has nothing to apply" in _fails(
        capsys, "app", "skip", "--yes", "app", "1", "--to", str(to), "--url", url
    )


def test_declare_bind_publish_and_peek(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        _run(capsys, "exchange", "declare", "flights", "topic", "--url", url)
        == "exchange flights of type topic\n"
    )
    assert (
        _run(capsys, "queue", "declare", "late", "--url", url, "--argument", "x-max-length=100")
        == "queue late\n"
    )
    assert _json(capsys, "exchange", "bind", "flights", "late", "JFK.#", "--url", url) == {
        "exchange": "flights",
        "queue": "late",
        "key": "JFK.#",
    }
    assert _json(
        capsys,
        "message",
        "publish",
        "--exchange",
        "flights",
        "--routing-key",
        "JFK.UA",
        "--url",
        url,
        "one",
        "two",
    ) == {"published": 2}
    shown = _json(capsys, "message", "peek", "late", "--url", url)
    assert [(row["offset"], row["routing_key"], row["body"], row["properties"]) for row in shown] == [
        (0, "JFK.UA", "one", {"delivery_mode": 2}),
        (1, "JFK.UA", "two", {"delivery_mode": 2}),
    ]
    assert [
        row["body"]
        for row in _json(capsys, "message", "peek", "late", "--url", url, "--limit", "1", "--offset", "1")
    ] == ["two"]
    header, first, _second = _run(capsys, "message", "peek", "late", "--url", url).splitlines()
    assert header.split() == [
        "queue",
        "partition",
        "offset",
        "exchange",
        "routing_key",
        "timestamp",
        "redelivered",
        "properties",
        "body",
    ]
    assert first.endswith("one")


def test_queues_are_an_aligned_table_or_json(
    broker: Broker, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with broker.channel() as channel:
        channel.queue_declare("a", arguments={"x-max-length": 5})
        channel.queue_declare("much-longer-name")
        channel.publish(b"x", routing_key="a")
    lines = re.sub(
        r"\d\.\d$", "AGE", _run(capsys, "queue", "list", "--url", url), flags=re.MULTILINE
    ).splitlines()
    assert lines == [
        "name              messages  unacknowledged  next_offset  consumers  owner  durable  arguments       logs"
        "  oldest_s",
        "a                        1               0            1          0         yes      x-max-length=5     1"
        "       AGE",
        "much-longer-name         0               0            0          0         yes                         1",
    ]
    assert [queue["name"] for queue in _json(capsys, "queue", "list", "--url", url)] == [
        "a",
        "much-longer-name",
    ]


def test_publish_takes_each_line_of_the_input(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    _run(capsys, "queue", "declare", "q", "--url", url)
    published = _txmq("message", "publish", "--queue", "q", "--url", url, "-", stdin="a\nb\nc\n")
    assert (published.returncode, published.stdout, published.stderr) == (0, "published 3\n", "")
    assert [row["body"] for row in _json(capsys, "message", "peek", "q", "--url", url)] == ["a", "b", "c"]


def test_publish_to_no_queue_is_an_error(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "[TXMQ_UNROUTABLE] 2 of 2 messages reached no queue" in _fails(
        capsys, "message", "publish", "--queue", "nowhere", "--url", url, "a", "b"
    )
    for queue, way in ((("--queue", "new"), "declare queue 'new'"), ((), "the name of a queue")):
        words = ("message", "publish", *queue, "--url", url, "a")
        assert _fails(capsys, *words).endswith(way + "\n")
    _run(capsys, "queue", "declare", "new", "--url", url)
    assert _run(capsys, "message", "publish", "--queue", "new", "--url", url, "a") == "published 1\n"


def test_booleans_are_arguments_of_queues_exchanges_and_bindings(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    on = ("--url", url)
    dedup = ("--argument", "x-message-deduplication=yes")
    assert "give true or false" in _fails(capsys, "queue", "declare", "dq", *dedup, *on)
    for name, argument in (("dq", "x-message-deduplication"), ("sq", "x-single-active-consumer")):
        _run(capsys, "queue", "declare", name, "--argument", f"{argument}=true", *on)
    _run(capsys, "exchange", "declare", "h", "headers", "--argument", "mine=false", *on)
    _run(capsys, "exchange", "bind", "h", "dq", "--argument", "paid=true", *on)
    queues = {row["name"]: row["arguments"] for row in _json(capsys, "queue", "list", *on)}
    assert queues == {"dq": {"x-message-deduplication": True}, "sq": {"x-single-active-consumer": True}}
    (found,) = (row for row in _json(capsys, "exchange", "list", *on) if row["name"] == "h")
    assert found["arguments"] == {"mine": False}
    assert (
        _run(capsys, "message", "publish", "--exchange", "h", "--header", "paid=true", *on, "a")
        == "published 1\n"
    )


def test_prepared_transactions_are_listed_committed_and_rolled_back(
    broker: Broker, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with broker.channel() as channel:
        channel.queue_declare("q")
        channel.tx_select()
        for xid in ("first", "second"):
            channel.publish(xid.encode(), routing_key="q")
            channel.prepare(xid)
    assert {row["xid"]: row["publishes"] for row in _json(capsys, "tx", "list", "--url", url)} == {
        "first": 1,
        "second": 1,
    }
    assert _run(capsys, "tx", "commit", "--yes", "first", "--url", url) == "committed first\n"
    assert _json(capsys, "tx", "rollback", "--yes", "second", "--url", url) == {
        "xid": "second",
        "state": "rolled_back",
    }
    assert _json(capsys, "tx", "list", "--url", url) == []
    assert [row["body"] for row in _json(capsys, "message", "peek", "q", "--url", url)] == ["first"]
    assert "[TXMQ_UNKNOWN_TRANSACTION]" in _fails(capsys, "tx", "commit", "--yes", "third", "--url", url)
    assert "[TXMQ_TRANSACTION_STATE]" in _fails(capsys, "tx", "commit", "--yes", "second", "--url", url)


def test_apps_are_listed_and_their_queues_released(
    broker: Broker, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with broker.channel() as channel:
        channel.queue_declare("orders")
        channel.publish(b"x", routing_key="orders")
    broker.engine.claim("alerts", ["orders"], {"orders": START}, Limit(), Origin(), "fail")
    (app,) = _json(capsys, "app", "list", "--url", url)
    assert (app["app_id"], app["queues"], app["lag"]) == ("alerts", ["orders"], 1)
    assert "[TXMQ_PRECONDITION_FAILED]" in _fails(
        capsys, "app", "release", "--yes", "another", "orders", "--url", url
    )
    release = ("app", "release", "--yes", "alerts", "orders", "--url", url)
    refused = _fails(capsys, *release)
    assert "1 messages are claimed and not decided" in refused and "--force" in refused
    assert _run(capsys, *release, "--force") == "released queue orders from app alerts\n"
    (app,) = _json(capsys, "app", "list", "--url", url)
    assert (app["queues"], app["lag"]) == ([], 1)
    with pytest.raises(CheckpointMismatch, match="released from app 'alerts' by guest at 20"):
        broker.engine.ack("alerts", {"orders": 1})
    assert broker.queues()[0].owner == ""


def test_the_ledger_of_an_app_is_a_row_for_each_log_of_each_batch(
    broker: Broker, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    end: Vector = {"a": START, "b": START}
    with BrokerClient(url) as client, client.channel() as channel:
        for queue in ("a", "b", "out"):
            channel.queue_declare(queue)
        for number in range(2):
            for queue in ("a", "b"):
                channel.publish(b"x", routing_key=queue)
            end = MicroBatch(client, "", "out", app="sums", batch_id=number).run(end)
    rows = _json(capsys, "app", "ledger", "sums", "--url", url)
    assert [(row["sequence"], row["log"], row["start"], row["end"]) for row in rows] == [
        (1, "a", 0, 1),
        (1, "b", 0, 1),
        (2, "a", 1, 2),
        (2, "b", 1, 2),
    ]
    assert {(row["batch_id"], row["messages"], row["published"]) for row in rows} == {(0, 2, 2), (1, 2, 2)}
    assert _json(capsys, "app", "ledger", "sums", "--batch", "2", "--url", url) == rows[2:]


def test_attempts_are_listed_and_discarded(
    broker: Broker, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with broker.channel() as channel:
        channel.queue_declare("out")
    batch = pa.RecordBatch.from_pydict({"body": pa.array([b"x"] * 3, pa.binary())})
    staged = broker.engine.stage(BranchHeader("token", "branch", "publish", {"routing_key": "out"}), [batch])
    (attempt,) = _json(capsys, "app", "staged", "--url", url)
    assert (attempt["token"], attempt["app_id"], attempt["branches"], attempt["rows"]) == ("token", "", 1, 3)
    assert "[TXMQ_UNKNOWN_TRANSACTION]" in _fails(capsys, "app", "discard", "--yes", "another", "--url", url)
    assert _run(capsys, "app", "discard", "--yes", "token", "--url", url) == "discarded token\n"
    assert _json(capsys, "app", "staged", "--url", url) == []
    with pytest.raises(errors.TransactionState):
        broker.engine.commit_branches("token", [staged])


def test_data_finds_the_broker_that_owns_the_directory(
    broker: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(capsys, "queue", "declare", "q", "--data", str(tmp_path / "data"))
    assert [queue.name for queue in broker.queues()] == ["q"]


def test_looking_at_a_data_directory_that_is_not_there_creates_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "there is no data directory" in _fails(capsys, "queue", "list", "--data", str(tmp_path / "absent"))
    assert not (tmp_path / "absent").exists()


def test_verify_says_whether_everything_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Broker.open(tmp_path / "data") as broker, broker.channel() as channel:
        channel.queue_declare("q")
        channel.tx_select()
        for _ in range(2_000):
            channel.publish(b"x" * 1_000, routing_key="q")
        channel.tx_commit()
    found = _json(capsys, "broker", "verify", str(tmp_path / "data"))
    assert (found["ok"], found["problems"], found["rows"]) == (True, [], 2_000)
    assert _run(capsys, "broker", "verify", str(tmp_path / "data")).endswith(
        "every checksum and reference holds\n"
    )
    (segment,) = (tmp_path / "data" / "segments").glob("*.arrow")
    with segment.open("r+b") as file:
        file.seek(100_000)
        file.write(b"?")
    assert cli.main(["broker", "verify", str(tmp_path / "data")]) == 1
    assert segment.name in capsys.readouterr().out
    assert "[TXMQ_DATA_DIRECTORY_INVALID]" in _fails(capsys, "broker", "verify", str(tmp_path))


def test_serve_prints_one_ready_line_and_ends_cleanly_on_sigterm(tmp_path: Path) -> None:
    command = serve_command(tmp_path / "data")
    command += ["--amqp", "127.0.0.1:0", "--amqp", "[::1]:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        ready = process.stdout.readline()
        found = endpoint.read_endpoint(str(tmp_path / "data"))
        if found is None or not re.fullmatch(
            rf"ready txmq://127\.0\.0\.1:{found.port} amqp://127\.0\.0\.1:\d+ amqp://\[::1\]:\d+\n", ready
        ):
            process.kill()
            raise AssertionError(ready)
        assert found.pid == process.pid
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(600) == 0
        assert process.stdout.read() == ""
        assert all(" INFO " in line for line in process.stderr.read().splitlines())
    assert endpoint.read_endpoint(str(tmp_path / "data")) is None


def test_serve_on_a_taken_port_is_one_clear_error(broker: Broker, tmp_path: Path) -> None:
    taken = _txmq(
        "serve", "--data", str(tmp_path / "other"), "--listen", f"127.0.0.1:{broker.port}", "--amqp", "none"
    )
    assert taken.returncode == 1
    assert f"[TXMQ_CONNECTION] cannot listen on 127.0.0.1:{broker.port}" in taken.stderr
    *before, _ = taken.stderr.splitlines()
    assert all(" INFO recovered " in line for line in before)


@pytest.mark.parametrize(
    "arguments",
    [
        ["queue", "list"],
        ["queue", "list", "--url", "txmq://h:1", "--data", "d"],
        ["nonsense"],
        [],
        ["serve"],
        ["message", "peek", "q", "--url", "txmq://h:1", "--limit", "-1"],
        ["serve", "--data", "d", "--idle-timeout", "0"],
    ],
)
def test_wrong_command_line_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: txmq" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("tx list --url kafka://h:9092", "'kafka://h:9092', but Kafka has no channels"),
        ("queue list --url txmq://h:1 --settings missing", "--settings is 'missing', which cannot"),
        ("queue list --url txmqs://u:secret@h:1", "--url has a password, which other users of this"),
        ("queue list --url txmqs://h:1 --user u", "the user is 'u', and there is no password"),
        ("queue list --url txmqs://h:1 --tls-ca missing", "option 'tlsCa' is"),
        ("queue list --url txmq://h:1 --tls-ca ca", "use txmqs://host:port, or leave out tlsCa"),
        ("queue list --url http://h:1", "it must be txmq://[user:password@]host:port"),
        ("queue list --url txmq://h:99999", "'txmq://h:99999'; its port must be a number"),
        ("serve --data d --listen nowhere", "--listen is 'nowhere'; it must be HOST:PORT"),
    ],
)
def test_wrong_value_is_one_line_that_names_it(
    command: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in _fails(capsys, *command.split())


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("message publish --queue q --exchange e x", "--queue was given with --exchange or --routing-key"),
        ("message publish --queue q --transient --property delivery_mode=2 x", "with another delivery_mode"),
        ("tx rollback", "rollback takes an XID or --all"),
        ("vhost limit v", "no limit is named"),
        ("app skip a 1 --queue q", "--queue is for --refused"),
        ("message move a --to a", "--to is 'a', the queue itself"),
        ("broker backup d --data e --to f", "both DIR and --data are given"),
        ("serve --data d --tls-cert c", "one of --tls-cert and --tls-key is missing"),
        ("serve --data d --frame-max 1", "--frame-max is 1: give at least 4096"),
    ],
)
def test_a_command_line_that_is_wrong_without_its_broker_has_an_exit_code_of_its_own(
    command: str, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TXMQ_URL", "txmq://127.0.0.1:1")  # where nothing listens
    assert text in _fails(capsys, *command.split(), code=2)


def test_settings_come_from_a_file_and_are_for_kafka(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "kafka.properties"
    settings.write_text("# only for us\n\nkafka.sasl.password = secret=1\n")
    for command in ("queue", "app", "tx"):
        found = _fails(capsys, command, "list", "--url", url, "--settings", str(settings))
        assert "option 'kafka.sasl.password' is for connections to Kafka" in found and "secret" not in found
    settings.write_text("kafka.sasl.password\n")
    assert "line 1 of" in _fails(capsys, "app", "list", "--url", url, "--settings", str(settings))


def test_a_command_starts_without_pandas_which_would_double_its_time() -> None:
    loaded = "import sys, txmq.cli; print([name for name in ('pandas', 'pyspark', 'kafka') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_an_import_of_txmq_loads_no_arrow_which_would_be_most_of_its_time() -> None:
    heavy = ("pyarrow", "numpy", "pandas", "pyspark", "kafka", "ssl", "asyncio", "sqlite3")
    loaded = f"import sys, txmq; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_broker_that_does_not_listen_is_said_at_once_or_waited_for(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    url = f"txmq://127.0.0.1:{port}"
    Broker.open(tmp_path / "data", port=port).close()
    looking = subprocess.Popen(
        [sys.executable, "-m", "txmq", "queue", "list", "--json", "--url", url, "--timeout", "600"],
        stdout=subprocess.PIPE,
        text=True,
    )
    refused = _txmq("queue", "list", "--url", url)
    assert (refused.returncode, refused.stdout) == (1, "") and "nothing listens at" in refused.stderr
    with Broker.open(tmp_path / "data", port=port):
        assert looking.communicate(timeout=600) == ("[]\n", None)
    assert looking.returncode == 0


def test_the_environment_names_the_broker(
    broker: Broker, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TXMQ_URL", url)
    assert json.loads(_run(capsys, "queue", "declare", "q", "--json")) == {"queue": "q"}
    assert [row["name"] for row in json.loads(_run(capsys, "queue", "list", "--json"))] == ["q"]
