"""Hours of everything at once: ``make soak HOURS=8``.

A broker, a node of Kafka, clients of both and two Spark drivers with two queries each (``parts.py``) run side by side. One
after another is killed; backups are made and verified, tables compacted. From time to time the senders pause until all
has arrived: then each number is where it belongs, once. At the end no figure may grow (``growth.py``).

A run that was cut, by SIGKILL too, goes on in its folder: the same command counts on to the same hours. With the
supervisor die all that it has started.
Invariant: what is wrong ends the run with exit code 1 and its name.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # for the parts of the demo

import numpy as np
import psutil
from flights import Part
from kafka.admin import KafkaAdminClient, NewTopic

from bench.broker import serve_command
from bench.jars import submit_arguments
from bench.kafka_server import PLAIN, cluster
from bench.ports import free_ports
from broker_core.engines import connect
from tests import jvm
from tests.endurance import growth
from tests.endurance.parts import CHUNK, PARTS, SENDERS, TOPICS, Place
from txmq import BrokerClient, TxmqError

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "pictures" / "endurance.png"
APPS = [f"{engine}{app}" for engine in ("", "kafka-") for app in ("book", "copy")]
KILLED = ("driver", "broker", "client", "kafka-driver", "kafka")  # in turn
CLIENTS = [name for name in PARTS if not name.endswith("driver") and name != "tables"]
# Seconds between two of a kind; --pace divides them.
EVERY_S = {"sample": 10.0, "kill": 480.0, "backup": 600.0, "tables": 900.0, "check": 3600.0}
STILL_S = 600.0  # nothing arrives any more
BACKUPS, MB = 2, 1e6
# What is kept for a while reaches its limit within minutes, so that what grows then is a leak.
SERVE = ("--history-bytes=1048576", "--history-hours=0.1", "--outcomes=1000", "--outcome-hours=0.1")
TOPIC = {"retention.ms": "900000", "segment.bytes": "1048576"}
SEGMENTS = ("log", "offsets.topic", "transaction.state.log")
KAFKA = {f"{log}.segment.bytes": "1048576" for log in SEGMENTS} | {"log.retention.check.interval.ms": "20000"}
KAFKA |= {f"{log}.num.partitions": "2" for log in SEGMENTS[1:]}
QUEUES: dict[str, dict[str, object]] = {name: {} for name in (*TOPICS, "dead")}
QUEUES["expired"] = {"x-max-length": 100}
for queue, letters in {"orders": "broken", "large": "dead"}.items():
    QUEUES[queue] = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": letters}
DEADLY = ("setpriv", "--pdeathsig", "KILL")  # a process dies with the supervisor
MARK = "TXMQ_ENDURANCE"  # in the environment of all processes of a run: its folder
AGAIN = 500  # acknowledgements that a lost connection may lose
# Which numbers of a stream come where: ``body``, ``drive`` and ``picky`` of parts.py.
PLACES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "notices": ("events", lambda n: n >= 0),
    "large": ("orders", lambda n: n % 20 == 10),
    "dead": ("orders", lambda n: n % 20 == 0),
    "kafka-notices": ("kafka-events", lambda n: n >= 0),
    "kafka-large": ("kafka-orders", lambda n: n % 10 == 0),
}
for engine in ("", "kafka-"):
    PLACES[f"{engine}broken"] = f"{engine}orders", lambda n: n % 50 == 7
    PLACES[f"{engine}table"] = f"{engine}orders", lambda n: n % 50 != 7


# -- what came -----------------------------------------------------------------------------------------------
def first_time(numbers: Any) -> Any:
    """The numbers of a receiver, without those that came again in a new session (-1) because their acknowledgement was
    lost: they are among the last of an earlier one.
    """
    sessions = np.cumsum(numbers == -1)
    order = np.argsort(numbers, kind="stable")
    later, before = order[1:], order[:-1]
    same = (numbers[later] == numbers[before]) & (sessions[later] > sessions[before])
    left_out = np.append(later[same & (later - before < AGAIN)], np.flatnonzero(numbers == -1))
    return np.delete(numbers, left_out)


def wrong(name: str, begun: Any, certain: Any, came: Any) -> list[str]:
    """``begun``: numbers that were sent, of which some are ``certain``."""
    values, counts = np.unique(came, return_counts=True)
    lost, strange = np.setdiff1d(certain, values), np.setdiff1d(values, begun)
    faults = {"lost": lost, "doubled": values[counts > 1], "never sent": strange}
    return [f"{name}: {len(each)} {word}, first {each[0]}" for word, each in faults.items() if len(each)]


def judged(place: Place, *, tables: bool) -> tuple[list[str], int]:
    """What is wrong, and how many numbers are where they belong."""
    faults: list[str] = []
    total = 0
    for name, (stream, belongs) in PLACES.items():
        came = place.numbers(name).read()
        if name.endswith("table"):
            if not tables:
                continue
        else:
            came = came[1::2] if name.startswith("kafka-") else first_time(came)
        firsts = (place.numbers(f"{stream}.{word}").read() for word in ("begun", "certain"))
        sent = ((first[:, None] + np.arange(CHUNK)).ravel() for first in firsts)
        faults += wrong(name, *(each[belongs(each)] for each in sent), came)
        total += len(came)
        if name == "notices":
            _, sizes = np.unique(came // CHUNK, return_counts=True)
            torn = np.sum(sizes % CHUNK > 0)
            faults += [f"{torn} transactions of {stream} are there in part"] if torn else []
    return faults, total


# -- processes -----------------------------------------------------------------------------------------------
def end_left_overs(folder: Path) -> None:
    """One that was about to start when its supervisor was killed may live on, over files that the next one opens."""
    os.environ.pop(MARK, None)
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == str(folder):
                process.kill()
                left.append(process)
    psutil.wait_procs(left, 60)
    os.environ[MARK] = str(folder)  # inherited by all that this run starts


def measure(part: Part, row: dict[str, Any]) -> None:
    """Its own process, its JVM, and all others that it has started."""
    own = psutil.Process(part.process.pid)  # a zombie has no figures
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            pid, name = own.pid, part.name
            if process != own:
                java = process.name() == "java"
                pid, name = (process.pid, f"{name}.jvm") if java else (pid, f"{name}.workers")
            row["files"][name] += process.num_fds()
            row["threads"][name] += process.num_threads()
            row["memory"][name] = round(row["memory"][name] + process.memory_info().rss / MB, 2)
            row["lives"][name] = pid


def size_mb(folder: Path) -> float:
    """On the disk; files may have holes, and may be deleted meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return round(total / MB, 2)


class Run:
    """``clock`` is the seconds of the run, also those before it was cut."""

    def __init__(self, folder: Path, pace: float) -> None:
        self.folder, self.file = folder, folder / "samples.jsonl"
        rows = growth.read(self.file)
        with self.file.open("ab") as file:
            file.truncate(self.file.read_bytes().rfind(b"\n") + 1)
        self.kills = sum(row.get("event", "").startswith("kill ") for row in rows)
        self.before, self.began = rows[-1]["at"] if rows else 0.0, time.monotonic()
        self.every = {name: seconds / pace for name, seconds in EVERY_S.items()}
        self.due = {name: self.before + seconds for name, seconds in self.every.items()}
        self.parts: dict[str, Part] = {}
        self.read: dict[str, int] = {}  # of the files of numbers
        self.decided: dict[str, int] = {}  # the last batch of each app
        self.started: dict[str, int] = {}  # where it was when its driver started

    @property
    def clock(self) -> float:
        return self.before + time.monotonic() - self.began

    def write(self, **row: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps({"at": round(self.clock, 2), **row}) + "\n")

    def note(self, event: str) -> None:
        self.write(event=event)
        print(f"{self.clock / growth.HOUR_S:7.3f} h  {event}", flush=True)

    # -- starts ------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Servers first; in a new folder, with their queues and topics."""
        if not (self.folder / "ports.json").exists():
            self.make_kafka()
        (self.folder / "drain").unlink(missing_ok=True)
        self.place = Place(self.folder)
        at = self.place.ports
        listen = f"127.0.0.1:{at['flight']}"
        serve = serve_command(self.folder / "data", f"--amqp=127.0.0.1:{at['amqp']}", *SERVE, listen=listen)
        commands = {"broker": serve, "kafka": at["command"]} | {name: self.command(name) for name in PARTS}
        del commands["tables"]
        for name, command in commands.items():
            self.parts[name] = Part(name, [*DEADLY, *command], self.folder / f"{name}.log")
            self.parts[name].start()
            if name == "broker":
                self.declare()

    def make_kafka(self) -> None:
        folder = self.folder / "kafka"
        shutil.rmtree(folder, ignore_errors=True)  # half of it, where the first start was cut
        folder.mkdir()
        with cluster(folder, settings=KAFKA, heap="384m", options=jvm.of_kafka()) as started:
            topics = [NewTopic(name, logs, 1, topic_configs=TOPIC) for name, logs in TOPICS.items()]
            with contextlib.closing(KafkaAdminClient(bootstrap_servers=started.bootstrap)) as admin:
                admin.create_topics(topics)
        flight, amqp = free_ports(2)
        (node,) = started.nodes
        ports = {"flight": flight, "amqp": amqp, "kafka": node.ports[PLAIN], "command": list(node.command)}
        (self.folder / "ports.new").write_text(json.dumps(ports))
        (self.folder / "ports.new").rename(self.folder / "ports.json")

    def declare(self) -> None:
        with BrokerClient(self.place.urls[""], connect_s=120) as client, client.channel() as channel:
            for name, arguments in QUEUES.items():
                channel.queue_declare(name, arguments=arguments)
        self.client = BrokerClient(self.place.urls[""], reconnect_s=0.5, connect_s=0.5)

    def command(self, name: str) -> list[str]:
        return [sys.executable, "-m", "tests.endurance.parts", name, str(self.folder)]

    # -- what is done from time to time ------------------------------------------------------------------------
    def step(self, *kinds: str) -> None:
        for part in self.parts.values():
            starts = part.starts
            part.keep()
            if part.starts > starts:
                self.note(f"{part.name} ended by itself")
        for kind in kinds:
            if self.clock >= self.due[kind]:
                self.due[kind] = self.clock + self.every[kind]
                getattr(self, kind)()
        time.sleep(min(0.5, self.every["sample"]))

    def sample(self) -> None:
        row: dict[str, Any] = {kind: defaultdict(int) for kind in ("lives", *growth.OF_PROCESSES)}
        for part in self.parts.values():
            measure(part, row)
        for engine in self.place.urls:
            for used in self.fresh(f"{engine}driver.heap"):
                row["heap"][f"{engine}driver.jvm"] = round(used / MB, 2)
        disk = {name: size_mb(self.folder / name) for name in ("data", "kafka", "tables", "checkpoints")}
        waits = self.fresh("confirm") / 1e3
        confirm = {f"p{at}": round(np.percentile(waits, at), 2) for at in (50, 99) if len(waits)}
        self.write(**row, disk=disk, confirm=confirm, **self.waiting())

    def fresh(self, name: str) -> Any:
        """The numbers of a file since the last look."""
        numbers = self.place.numbers(name)
        fresh = numbers.read(self.read.setdefault(name, len(numbers)))
        self.read[name] += len(fresh)
        return fresh

    def waiting(self) -> dict[str, dict[str, float]]:
        """Depths and ages of queues, and the lags of apps; of a server that is down, none."""
        depth: dict[str, float] = {}
        age: dict[str, float] = {}
        with contextlib.suppress(TxmqError):
            for queue in self.client.queues():
                if not queue.name.startswith("temporary."):
                    depth[queue.name], age[queue.name] = queue.messages, queue.oldest_s or 0
        for engine, url in self.place.urls.items():
            with contextlib.suppress(TxmqError):
                for app in (connect(url) if engine else self.client).apps():
                    name = f"{engine}{app.app_id}"
                    self.decided[name] = app.sequence
                    self.started.setdefault(name, app.sequence)
                    depth[name], age[name] = app.lag + app.unapplied, app.lag_s or 0
        return {"depth": depth, "age": age}

    def kill(self) -> None:
        """The next one. A driver, once each of its apps has decided something since its start.

        Each second hour has none: what grows is seen in processes that live long enough.
        """
        if int(self.clock / self.every["check"]) % 2:
            return
        kind = KILLED[self.kills % len(KILLED)]
        name = CLIENTS[self.kills // len(KILLED) % len(CLIENTS)] if kind == "client" else kind
        if name.endswith("driver"):
            apps = [app for app in APPS if app.startswith("kafka-") == name.startswith("kafka-")]
            if any(self.decided.get(app, 0) <= self.started.get(app, 0) for app in apps):
                self.due["kill"] = self.clock
                return
            self.started |= {app: self.decided[app] for app in apps}
        self.parts[name].kill()
        self.kills += 1
        self.note(f"kill {kind}" if kind == name else f"kill {kind} {name}")
        self.parts[name].start()

    def backup(self) -> None:
        target = self.folder / "backups" / f"{int(self.clock):08}"
        target.parent.mkdir(exist_ok=True)
        txmq = [sys.executable, "-m", "txmq", "broker"]
        where = ["--timeout=60", "--url", self.place.urls[""], "--to", str(target)]
        self.run("backup", [*txmq, "backup", *where])
        self.run("backup", [*txmq, "verify", str(target)])
        for old in sorted(target.parent.iterdir())[:-BACKUPS]:
            shutil.rmtree(old)
        self.note(f"backup of {size_mb(target)} MB")

    def tables(self) -> None:
        self.run("tables", self.command("tables"), "kill")

    def run(self, name: str, command: list[str], *kinds: str) -> None:
        """To its end, while samples are taken."""
        log = self.folder / f"{name}.log"
        with log.open("ab") as out:
            process = subprocess.Popen([*DEADLY, *command], stdout=out, stderr=out)
        while process.poll() is None:
            self.step("sample", *kinds)
        if process.returncode:
            raise SystemExit(f"{name} failed:\n{log.read_text()[-3000:]}")

    def check(self) -> None:
        """Once all has arrived that was sent, nothing is lost and nothing doubled."""
        (self.folder / "drain").touch()
        senders = [self.parts.pop(f"send-{stream}") for stream in SENDERS]
        for part in senders:
            part.signal_group(signal.SIGTERM)
            part.finish(120)
        before, moved = -1, time.monotonic()
        while True:
            depth = self.waiting()["depth"]
            faults, total = judged(self.place, tables=False)
            left = [name for name in (*TOPICS, "dead", *APPS) if depth.get(name) != 0] + faults
            if not left:
                break
            before, moved = total, moved if total == before else time.monotonic()
            if time.monotonic() - moved > STILL_S:
                raise SystemExit("\n".join(["nothing arrives any more:", *left]))
            self.step("sample")
        self.run("tables", self.command("tables"))
        faults, total = judged(self.place, tables=True)
        if faults:
            raise SystemExit("\n".join(faults))
        self.note(f"check: {total} numbers, each once")
        (self.folder / "drain").unlink()
        for part in senders:
            part.start()
            self.parts[part.name] = part


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hours", type=float, required=True, help="of all runs in this folder together")
    parser.add_argument("--dir", type=Path, default=ROOT / ".venv" / "endurance", help="a run in it goes on")
    parser.add_argument("--pace", type=float, default=1.0, help="so much more often than in hours")
    parser.add_argument("--write", action="store_true", help="the picture of the pages")
    options = parser.parse_args()
    folder = options.dir.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_SUBMIT_ARGS", submit_arguments("-XX:+UseSerialGC"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    end_left_overs(folder)
    run = Run(folder, options.pace)
    try:
        run.start()
        run.note("start")
        while run.clock < options.hours * growth.HOUR_S:
            run.step(*EVERY_S)
        run.check()
    finally:
        for part in run.parts.values():
            part.kill()
        growth.draw(growth.read(run.file), folder / "endurance.png")
    rows = growth.read(run.file)
    for (kind, name), slope in sorted(growth.growth(rows).items()):
        print(f"{slope:+10.2f} {growth.KINDS[kind][0]}/h  {kind} of {name}")
    faults = growth.too_fast(rows)
    print("\n".join(faults or [f"{run.clock / growth.HOUR_S:.2f} hours: nothing lost, doubled or growing"]))
    if options.write:
        shutil.copyfile(folder / "endurance.png", PICTURE)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
