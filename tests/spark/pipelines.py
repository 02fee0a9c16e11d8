"""Brokers and drivers as child processes, and what a pipeline left behind, read without Spark.

Not here: Spark itself; drivers run :mod:`tests.spark.jobs`.
Invariant: whatever is started here is ended here, by its id.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from bench.broker import serve_command
from bench.ports import free_ports
from broker_core.client.broker import BrokerClient
from tests.progress import GUARD_S, wait_for_end, wait_until
from tests.spark.sessions import CONNECT

ROOT = Path(__file__).resolve().parents[2]


class Served:
    """``txmq serve`` in a child process."""

    def __init__(self, data: Path, *, failpoints: str = "") -> None:
        self._data = data
        self._listen = f"127.0.0.1:{free_ports(1)[0]}"
        self._process: subprocess.Popen[str] | None = None
        self.start(failpoints)

    def start(self, failpoints: str = "") -> None:
        """On the same port as before, with other failpoints."""
        environment = {**os.environ, "TXMQ_FAILPOINTS": failpoints}
        command = serve_command(self._data, "--amqp", "none", listen=self._listen)
        self._close_output()
        with (self._data.parent / "broker.err").open("a") as errors:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=ROOT
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("ready "), (
            f"the broker did not start: {line!r} {(self._data.parent / 'broker.err').read_text()[-2000:]}"
        )
        self.url = line.split()[1]

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(GUARD_S)
            self._close_output()
            self._process = None

    def _close_output(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()


@dataclass
class Pipeline:
    """One app from queue ``queue`` to queue ``out`` and the Delta tables ``tables`` under ``lake``."""

    app: str
    url: str
    lake: str
    checkpoint: str
    fn: str = "effects"
    call: str = "directly"  # how foreachBatch calls it, see user_code.py
    tables: list[str] = field(default_factory=lambda: ["first"])
    queue: str = ""
    out: str = ""
    source: str = "txmq"  # or "rate", "files", "both": messages and files
    checkpoint_of: str = "query"  # who is told where it is: or "session", "function" (and the session)
    ledger: str | None = None
    ledger_sync: bool = False
    on_new_checkpoint: str = "fail"
    resume_from: str | None = None
    persist: bool = False
    batches: int | None = None
    options: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)  # the login, of source and function
    before: list[list[str]] = field(default_factory=list)  # see jobs.prepare
    shape: str = ""  # of the query, see shapes.py
    targets: dict[str, str] = field(default_factory=dict)  # recipe -> its address

    @classmethod
    def create(cls, app: str, url: str, scratch: Path, messages: Iterable[str] = (), **more: Any) -> Pipeline:
        """With its own queues, and ``messages`` in the first."""
        made = cls(
            app,
            url,
            str(scratch / app),
            str(scratch / f"{app}.checkpoint"),
            queue=f"{app}.in",
            out=f"{app}.out",
            **more,
        )
        made.declare()
        made.send(messages)
        return made

    @property
    def files(self) -> str:
        return f"{self.lake}.files"

    def declare(self) -> None:
        with BrokerClient(self.url) as client, client.channel() as channel:
            channel.queue_declare(self.queue)
            channel.queue_declare(self.out)

    def send(self, messages: Iterable[str]) -> None:
        """Each one its own transaction."""
        with BrokerClient(self.url) as client, client.channel() as channel:
            channel.tx_select()
            for message in messages:
                channel.publish(message.encode(), routing_key=self.queue)
                channel.tx_commit()

    # -- what is left ----------------------------------------------------------------------------------------
    def published(self) -> list[str]:
        """The bodies in ``out``."""
        with BrokerClient(self.url) as client:
            held = client.available([self.out])[self.out]
            batches = client.browse([(self.out, held.start, held.end)])
            return sorted(body.decode() for batch in batches for body in batch.column("body").to_pylist())

    def entries(self) -> int:
        with BrokerClient(self.url) as client:
            last = client.last_entry(self.app)
            return 0 if last is None else last.sequence

    def depth(self) -> int:
        with BrokerClient(self.url) as client:
            return client.available([self.queue])[self.queue].rows

    def table(self, name: str) -> list[dict[str, Any]]:
        return delta_rows(Path(self.lake) / name)

    def ledger_rows(self) -> list[dict[str, Any]]:
        assert self.ledger is not None
        return delta_rows(Path(self.ledger))

    def collected(self) -> list[tuple[int, list[str]]]:
        path = Path(f"{self.lake}.collected")
        return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    def require_once(self, messages: Iterable[str]) -> None:
        """Every message once in ``out`` and in each table, all from the same attempt; functions in order;
        one Delta commit a batch.
        """
        wanted = sorted(messages)
        published = dict(text.split(":") for text in self.published())
        assert sorted(published) == wanted and len(self.published()) == len(wanted)
        for name in self.tables:
            rows = self.table(name)
            assert sorted(row["body"] for row in rows) == wanted, name
            assert {row["body"]: row["marker"] for row in rows} == published, (
                f"{name} has rows of another attempt than was published"
            )
            assert hidden_files(Path(self.lake) / name) == [], "files of attempts are left"
            versions = [
                version
                for app, version in delta_transactions(Path(self.lake) / name)
                if app.rpartition("@")[0] == self.app
            ]
            assert versions == sorted(set(versions)) and set(versions) == {row["sequence"] for row in rows}
        calls = self.collected()
        assert [sequence for sequence, _ in calls] == sorted(sequence for sequence, _ in calls), (
            "functions are called in order"
        )
        assert sorted(body for bodies in dict(calls).values() for body in bodies) == wanted
        if self.source == "txmq":
            assert self.depth() == 0

    def require_changed(self, messages: Iterable[str]) -> None:
        """``jobs.changes`` was done once: each operation, in the order of the calls, with the rows of one
        attempt.
        """
        marker = dict(text.split(":") for text in self.published())
        changed = [(row["body"], row["marker"], row["n"]) for row in self.table("changed")]
        merged = [(body, marker[body] * 2, 12) for body in {*messages} - {"b", "c"}]
        assert sorted(changed) == sorted([*merged, ("c", marker["c"], 3)])
        commits = delta_transactions(Path(self.lake) / "changed")
        assert len(commits) == len(set(commits)) == 4 * self.entries()


APPENDED = {"body": "string", "marker": "string", "sequence": "integer"}  # those of ``jobs.effects``
CHANGED = {"body": "string", "marker": "string", "n": "integer"}  # the table of ``jobs.changes``


def empty_table(table: Path, columns: Mapping[str, str]) -> None:
    """A Delta table without rows, made without Spark; ``columns`` by name, with the types of Delta's log."""
    fields = [
        {"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in columns.items()
    ]
    protocol = {"minReaderVersion": 1, "minWriterVersion": 2}
    metadata = {
        "id": str(uuid.uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": fields}),
        "partitionColumns": [],
        "configuration": {},
        "createdTime": 0,
    }
    counted = {"tableSizeBytes": 0, "numFiles": 0, "numMetadata": 1, "numProtocol": 1}
    nothing: dict[str, list[Any]] = {"setTransactions": [], "domainMetadata": []}
    log = table / "_delta_log"
    log.mkdir(parents=True)
    actions = [{"protocol": protocol}, {"metaData": metadata}]
    (log / f"{0:020d}.json").write_text("".join(f"{json.dumps(action)}\n" for action in actions))
    checksum = {**counted, **nothing, "metadata": metadata, "protocol": protocol}
    (log / f"{0:020d}.crc").write_text(json.dumps(checksum))


def delta_actions(table: Path) -> list[dict[str, Any]]:
    """The actions of a table's commits, in order (no checkpoints: tables of tests are small)."""
    files = sorted((table / "_delta_log").glob("*.json"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def delta_rows(table: Path) -> list[dict[str, Any]]:
    live: dict[str, None] = {}
    for action in delta_actions(table):
        if "add" in action:
            live[action["add"]["path"]] = None
        if "remove" in action:
            live.pop(action["remove"]["path"], None)
    return [row for path in live for row in pq.ParquetFile(table / path).read().to_pylist()]


def hidden_files(table: Path) -> list[str]:
    """The data files that no commit of the table names yet."""
    return sorted(str(path.relative_to(table)) for path in (table / "_txmq").rglob("*.parquet"))


def delta_transactions(table: Path) -> list[tuple[str, int]]:
    return [
        (action["txn"]["appId"], action["txn"]["version"])
        for action in delta_actions(table)
        if "txn" in action
    ]


def specification(
    scratch: Path,
    pipelines: list[Pipeline],
    *,
    session: dict[str, str] | None = None,
    death: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What :mod:`tests.spark.jobs` is told."""
    return {
        "session": session or {},
        "scratch": str(scratch),
        "death": death,
        "pipelines": [{**asdict(each), "files": each.files} for each in pipelines],
    }


class Driver:
    """A child process that runs :mod:`tests.spark.jobs`. ``at``: for each pipeline the failpoint, and its hit,
    where the driver's death finds it (see ``jobs.die``). ``then``: what it runs until its next death.
    """

    def __init__(
        self,
        scratch: Path,
        pipelines: list[Pipeline],
        *,
        at: Sequence[tuple[str, int]] = (),
        how: str = "group",
        then: Mapping[str, Any] | None = None,
        session: dict[str, str] | None = None,
    ) -> None:
        name = uuid.uuid4().hex[:8]
        self._reached = scratch / f"{name}.reached"
        self._errors = scratch / f"{name}.err"
        self._output = scratch / f"{name}.out"
        sources = scratch / f"{name}.failpoints"  # of the process that runs a query's source
        sources.touch()
        places = {"reached": str(self._reached), "sources": str(sources)}
        death = {"at": at, "how": how, **places, "then": then and {**then, **places}} if at else None
        told = scratch / f"{name}.json"
        chosen = {**({"connect": "true"} if CONNECT else {}), **(session or {})}
        told.write_text(json.dumps(specification(scratch, pipelines, session=chosen, death=death)))
        command = [sys.executable, "-m", "tests.spark.jobs", str(told)]
        python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, "TXMQ_FAILPOINTS": f"@{sources}", "PYTHONPATH": python_path}
        with self._errors.open("w") as errors, self._output.open("w") as output:
            # a session of its own: its process group is the driver with its JVM, and is killed as one
            self.process = subprocess.Popen(
                command,
                cwd=scratch,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )

    def wait(self) -> int:
        try:
            return wait_for_end(self.process, "the driver ends")
        finally:
            self.end()

    def require_killed(self) -> None:
        """It died at its failpoints."""
        code = self.wait()
        assert code == -signal.SIGKILL and self._reached.exists(), f"ended with {code}: {self._tail()}"

    def require_done(self) -> dict[str, str | None]:
        """It ran to its end: app -> error of its last run."""
        return dict(self._ended())

    def require_done_each(self) -> list[str | None]:
        """It ran to its end: the error of each run, in order."""
        return [error for _, error in self._ended()]

    def _ended(self) -> list[tuple[str, str | None]]:
        code = self.wait()
        assert code == 0, f"ended with {code}: {self._tail()}"
        return self._told()

    def errors(self) -> dict[str, str | None]:
        """Of the runs that have ended until now: app -> error of its last run."""
        return dict(self._told())

    def _told(self) -> list[tuple[str, str | None]]:
        lines = map(json.loads, self._output.read_text().splitlines())
        return [(line["app"], line["error"]) for line in lines]

    def wait_stopped(self) -> None:
        """Until it has suspended itself at its failpoints."""

        def stopped() -> bool:
            assert self.process.poll() is None, self._tail()
            return (
                self._reached.exists()
                and "\nState:\tT" in Path(f"/proc/{self.process.pid}/status").read_text()
            )

        wait_until(stopped, "the driver reaches its failpoints")

    def end(self) -> None:
        """The whole group, whatever is left of it."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(GUARD_S)

    def _tail(self) -> str:
        return self._errors.read_text()[-3000:] + self._output.read_text()[-1000:]


def run_once(scratch: Path, pipelines: list[Pipeline], **more: Any) -> dict[str, str | None]:
    """Run pipelines to the end of what is there: app -> error."""
    return Driver(scratch, pipelines, **more).require_done()
