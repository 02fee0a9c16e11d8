"""The recipe of docs/commit_tokens.md over a real PostgreSQL: its process is killed before each of its lines, and it
recovers while another books.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import psycopg
import pytest

from tests.amqp_server import AmqpServed
from tests.crash.two_phase_commit import recipe
from tests.forked import Forked
from tests.page_blocks import blocks_of
from tests.progress import wait_until
from tests.spark.targets import postgres

pytestmark = pytest.mark.crash

ORDERS = [b"0", b"1"]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres() as address:
        yield address


@pytest.fixture
def database(server: str) -> str:
    """The tables of the page, empty."""
    with psycopg.connect(server) as connection:
        connection.execute("DROP TABLE IF EXISTS decisions, bookings")
        for statement in "".join(blocks_of("docs/commit_tokens.md", "sql")).strip().split(";"):
            if statement:
                connection.execute(statement)
    return server


def fill(served: AmqpServed, orders: list[bytes] = ORDERS) -> None:
    with served.client() as client, client.channel() as channel:
        channel.queue_declare("orders")
        for body in orders:
            channel.publish(body, routing_key="orders")


def booked(database: str) -> list[bytes]:
    with psycopg.connect(database) as connection:
        return sorted(body for (body,) in connection.execute("SELECT body FROM bookings"))


def left(served: AmqpServed) -> tuple[int, int]:
    """How many orders there are, also in doubt, and how many transactions."""
    with served.client() as client:
        return client.queues()[0].messages, len(client.recover())


def run(served: AmqpServed, database: str, kill_at: int) -> int:
    """The exit code of a program that books all orders, and kills itself at a line."""
    program = Forked("tests.crash.two_phase_commit", [served.url, database, str(kill_at)], os.environ)
    try:
        return program.wait()
    finally:
        program.stdout.close()


@pytest.mark.slow
def test_20_the_recipe_books_each_order_once_whatever_line_it_is_killed_at(
    served: AmqpServed, database: str
) -> None:
    """Each run recovers what the one before it has left."""
    kills = in_doubt = 0
    fill(served, [b"0"])
    while run(served, database, kills + 1) == -9:
        kills += 1
        with served.client() as client:
            for row in client.channels():  # else its lease ends after a minute
                client.close_channel(row.id)
        in_doubt += left(served)[1]
        fill(served, [b"%d" % kills])
    assert (kills > 12, in_doubt > 2) == (True, True), "it was not killed at each line"
    assert (booked(database), left(served)) == (sorted(b"%d" % number for number in range(kills + 1)), (0, 0))


def test_20_a_recipe_that_recovers_first_rolls_back_and_the_booking_fails(
    served: AmqpServed, database: str
) -> None:
    fill(served)
    names = recipe(database)
    with served.client() as broker, broker.channel() as channel:
        channel.tx_select()

        def prepare(xid: str) -> None:
            channel.prepare(xid)
            names["recover"](broker)

        order = channel.get("orders")
        with pytest.raises(psycopg.errors.UniqueViolation):
            names["book"](broker, SimpleNamespace(ack=channel.ack, prepare=prepare), order)
        assert (booked(database), left(served)) == ([], (len(ORDERS), 0))


def test_20_a_recipe_that_recovers_while_another_books_waits_and_commits(
    served: AmqpServed, database: str
) -> None:
    fill(served)
    names = recipe(database)

    def is_waiting() -> bool:
        query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        with psycopg.connect(database) as connection:
            return connection.execute(query).fetchone() == (1,)

    with served.client() as broker, broker.channel() as channel, served.client() as other:
        recovering = threading.Thread(target=names["recover"], args=[other])

        class Message:
            @property
            def body(self) -> bytes:
                """Is read when the decision is inserted and not committed."""
                recovering.start()
                wait_until(is_waiting, "it waits for the other's decision")
                return ORDERS[0]

        channel.tx_select()
        delivery = channel.get("orders")
        assert delivery
        names["book"](broker, channel, SimpleNamespace(tag=delivery.tag, message=Message()))
        recovering.join()
        assert (booked(database), left(served)) == (ORDERS[:1], (len(ORDERS) - 1, 0))
