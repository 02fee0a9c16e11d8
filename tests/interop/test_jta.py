"""A manager of distributed transactions, Narayana, over txmq and PostgreSQL: it or the broker is killed at each step
of a commit, and what it recovers makes queue and table agree.

Not here: the resource (``jta/TxmqResource.java``), and what it says to a manager (``jta/Codes.java``).
"""

from __future__ import annotations

import random
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from tests.amqp_server import AmqpServed, NotReady, serving
from tests.interop.jdk import class_path, compiled
from tests.interop.programs import Ended, checks_of, run
from tests.progress import GUARD_S, wait_until
from tests.spark.targets import postgres

HERE = Path(__file__).parent
SOURCES = [*(HERE / "jta").glob("*.java"), HERE / "java" / "Checks.java"]
MANAGER = (
    "org.jboss.narayana.jta:narayana-jta:7.2.2.Final",
    "org.jboss.logging:jboss-logging:3.6.1.Final",
    "org.postgresql:postgresql:42.7.10",
    "com.rabbitmq:amqp-client:5.37.0",
    "org.slf4j:slf4j-nop:2.0.17",
)
UNUSED = [
    "jakarta.annotation:jakarta.annotation-api",
    "jakarta.el:jakarta.el-api",
    "jakarta.enterprise:jakarta.enterprise.cdi-api",
    "jakarta.enterprise:jakarta.enterprise.lang-model",
    "jakarta.inject:jakarta.inject-api",
    "jakarta.interceptor:jakarta.interceptor-api",
    "org.checkerframework:checker-qual",
    "org.eclipse.microprofile.reactive-streams-operators:microprofile-reactive-streams-operators-api",
    "org.jboss.invocation:jboss-invocation",
    "org.reactivestreams:reactive-streams",
]
BEFORE, BETWEEN_PREPARES, BEFORE_LOG, AFTER_LOG, BETWEEN_COMMITS = STEPS = [
    "prepare 1",
    "prepared 1",
    "prepared 2",
    "commit 1",
    "committed 1",
]
ORDERS = 4
TABLES_OF_LOG = "SELECT tablename FROM pg_tables WHERE tablename LIKE '%jbosststxtable'"


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> str:
    jars = class_path(MANAGER, ",".join(UNUSED))
    return compiled(SOURCES, jars, tmp_path_factory.mktemp("classes"))


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with postgres() as address, psycopg.connect(address, autocommit=True) as connection:
        connection.execute("CREATE TABLE bookings (body text NOT NULL)")
        yield address


class Manager:
    """A JVM of the manager. It is killed at the end, and after GUARD_S."""

    def __init__(self, command: list[str], errors: Path) -> None:
        self._errors = errors
        with errors.open("w") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
            )
        self._limit = threading.Timer(GUARD_S, self._process.kill)
        self._limit.start()

    def wait_for(self, line: str) -> None:
        """Until it prints the line; it may say "failed" before it is done."""
        assert self._process.stdout is not None
        for found in self._process.stdout:
            if found.strip() == line:
                return
            assert (found.strip(), line) == ("failed", "done"), self._words()
        pytest.fail(f"it ended before {line!r}: {self._words()}")

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._limit.cancel()
        self._process.kill()
        self._process.communicate()

    def _words(self) -> str:
        return self._errors.read_text()[-5000:]


class Scene:
    """Orders in a queue of a broker, a table for them, and the log of a manager."""

    def __init__(self, served: AmqpServed, database: str, classes: str, errors: Path) -> None:
        self.served, self._database, self._classes, self._errors = served, database, classes, errors
        with psycopg.connect(database) as connection:
            for (table,) in connection.execute(TABLES_OF_LOG).fetchall():
                connection.execute(f"DROP TABLE {table}")
        self.fill()

    def fill(self) -> None:
        """The orders, and no bookings."""
        with (
            self.served.client() as client,
            client.channel() as channel,
            psycopg.connect(self._database) as connection,
        ):
            connection.execute("TRUNCATE bookings")
            for queue in ("orders", "invoices"):
                channel.queue_declare(queue)
                channel.queue_purge(queue)
            for number in range(ORDERS):
                channel.publish(b"%d" % number, routing_key="orders")

    def manager(self, first: str, step: str = "none") -> closing[Manager]:
        """``first``: queue or table, whichever is enlisted, prepared and committed first."""
        port = psycopg.conninfo.conninfo_to_dict(self._database)["port"]
        jdbc = f"jdbc:postgresql://127.0.0.1:{port}/postgres?user=txmq"
        command = ["java", "-XX:TieredStopAtLevel=1", "-cp", self._classes, "Manager"]
        return closing(Manager([*command, first, step, self.served.amqp_url, jdbc], self._errors))

    def in_doubt(self) -> list[str]:
        with self.served.client() as client:
            return [row.state for row in client.recover()]

    def prepared_rows(self) -> int:
        with psycopg.connect(self._database) as connection:
            return len(connection.execute("SELECT gid FROM pg_prepared_xacts").fetchall())

    def rows(self) -> list[str]:
        with psycopg.connect(self._database) as connection:
            return sorted(body for (body,) in connection.execute("SELECT body FROM bookings"))

    def logged(self) -> list[str]:
        """The transactions in the manager's log."""
        rows = "SELECT uidstring FROM logjbosststxtable WHERE typename LIKE '%AtomicAction'"
        with psycopg.connect(self._database) as connection:
            return [uid for (uid,) in connection.execute(rows)]

    def taken(self, queue: str) -> list[str]:
        found = []
        with self.served.client() as client, client.channel() as channel:
            while (delivery := channel.get(queue, no_ack=True)) is not None:
                found.append(delivery.message.body.decode())
        return sorted(found)

    def kill_manager(self, first: str, step: str) -> None:
        with self.manager(first, step) as manager:
            manager.wait_for(step)
            manager.kill()

    def kill_broker(self, first: str, step: str, returns: str) -> None:
        """It is back at once, or when the manager has noticed."""
        with self.manager(first, step) as manager:
            manager.wait_for(step)
            self.served.kill()
            if returns == "at once":
                self.served.start()
            manager.go_on()
            if returns == "later":
                manager.wait_for("failed")
                self.served.start()
            manager.wait_for("done")

    def finish(self) -> None:
        with self.manager("queue") as manager:
            manager.wait_for("done")

    def check(self) -> None:
        """Each order is a row and an invoice, once, and nothing is in doubt, nor in the log."""
        orders = [str(number) for number in range(ORDERS)]
        assert (self.in_doubt(), self.prepared_rows(), self.taken("orders")) == ([], 0, [])
        assert (self.rows(), self.taken("invoices")) == (orders, orders)
        assert self.logged() == []


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AmqpServed]:
    with serving(tmp_path_factory.mktemp("jta") / "data") as found:
        yield found


@pytest.fixture
def scene(shared: AmqpServed, database: str, classes: str, tmp_path: Path) -> Scene:
    if not shared.running:  # the test before has failed
        shared.restart()
    return Scene(shared, database, classes, tmp_path / "errors")


pytestmark = [pytest.mark.crash, pytest.mark.txmq_only]


@pytest.mark.slow
def test_20_a_jta_manager_that_is_killed_rolls_back_what_it_has_not_logged_and_commits_what_it_has(
    scene: Scene,
) -> None:
    scene.kill_manager("queue", BETWEEN_PREPARES)
    assert (scene.in_doubt(), scene.prepared_rows()) == (["prepared"], 0)
    scene.kill_manager("table", BETWEEN_COMMITS)  # it has rolled back the first one
    assert (scene.in_doubt(), len(scene.rows()), len(scene.logged())) == (["prepared"], 1, 1)
    scene.kill_broker("queue", BEFORE_LOG, "at once")
    scene.check()


@pytest.mark.soak
@pytest.mark.parametrize("first", ["queue", "table"])
@pytest.mark.parametrize("step", STEPS)
def test_20_queue_and_table_agree_after_a_jta_manager_was_killed_at_each_step(
    scene: Scene, step: str, first: str
) -> None:
    for _ in range(2):  # the second recovers what the first has left
        scene.kill_manager(first, step)
    scene.finish()
    scene.check()


@pytest.mark.soak
@pytest.mark.parametrize("first", ["queue", "table"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("returns", ["at once", "later"])
def test_20_queue_and_table_agree_after_the_broker_was_killed_at_each_step_of_a_jta_manager(
    scene: Scene, step: str, first: str, returns: str
) -> None:
    scene.kill_broker(first, step, returns)
    scene.check()


@pytest.mark.soak
def test_20_queue_and_table_agree_after_the_broker_was_killed_within_its_commits_for_a_jta_manager(
    scene: Scene, seed: int, rounds: int
) -> None:
    chosen = random.Random(seed)
    kills = 0
    for _ in range(10 * rounds):
        scene.fill()
        point = chosen.choice(["begin", "synced", "executed", "committed"])
        try:  # two commits for each order, and those of a start
            scene.served.restart(f"store.commit.{point}@{chosen.randint(1, 2 * ORDERS)}=kill")
        except NotReady:
            scene.served.start()
        with scene.manager(chosen.choice(["queue", "table"])) as manager:
            wait_until(lambda: not scene.served.running or manager.has_ended, "either of them has ended")
            if not scene.served.running:
                kills += 1
                if chosen.random() < 0.5:
                    manager.kill()
                scene.served.restart()
                if chosen.random() < 0.5:
                    scene.served.restart()  # while it recovers
        scene.finish()
        scene.check()
    assert kills > 0


@pytest.mark.soak
@pytest.mark.parametrize(("step", "rows"), [(BEFORE_LOG, ORDERS - 1), (AFTER_LOG, ORDERS)])
def test_20_a_jta_manager_hears_of_a_commit_by_hand_and_forgets_it(
    scene: Scene, step: str, rows: int
) -> None:
    """Before the log it rolls the row back: what somebody has decided by hand may leave the two apart."""
    scene.kill_manager("queue", step)
    with scene.served.client() as client:
        (branch,) = client.recover()
        client.commit(branch.xid, by_hand=True)
    assert scene.in_doubt() == ["heuristically_committed"]
    scene.finish()
    assert (scene.in_doubt(), len(scene.taken("invoices")), len(scene.rows())) == ([], ORDERS, rows)


CHECKS = checks_of(HERE / "jta" / "Codes.java")


@pytest.fixture(scope="module")
def codes(shared: AmqpServed, classes: str) -> Ended:
    return run(["java", "-cp", classes, "Codes", shared.amqp_url], HERE)


@pytest.mark.soak
@pytest.mark.parametrize("check", CHECKS)
def test_20_the_resource_of_jta_says_in_codes_of_xa(codes: Ended, check: str) -> None:
    codes.verdict(check)


@pytest.mark.soak
def test_20_the_program_of_codes_comes_to_all_its_checks_and_no_others(codes: Ended) -> None:
    codes.complete(CHECKS)
