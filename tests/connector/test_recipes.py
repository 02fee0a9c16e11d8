"""The recipes of docs/after_commit.md, against a real PostgreSQL and a real HTTP server; without Spark. That a killed
driver repeats a call with the same token and the same rows is tested in tests/crash/test_spark_crash.py.
"""

from __future__ import annotations

import threading
import urllib.error
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.spark.recipes import recipe
from tests.spark.targets import Api, postgres

ROWS = [{"offset": number, "body": f"order {number}"} for number in range(5)]


class Rows:
    """What a recipe needs of a DataFrame. ``reached`` is called before the last row."""

    def __init__(self, reached: Any = lambda: None) -> None:
        self._reached = reached

    def toLocalIterator(self) -> Iterator[dict[str, Any]]:
        yield from ROWS[:-1]
        self._reached()
        yield ROWS[-1]


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with postgres() as address:
        yield address


@pytest.fixture
def orders(database: str) -> Any:
    """The bodies in the table, which is empty at first."""
    import psycopg

    def read() -> list[str]:
        with psycopg.connect(database) as connection:
            return sorted(body for (body,) in connection.execute("SELECT body FROM orders"))

    with psycopg.connect(database) as connection:
        connection.execute("TRUNCATE orders, txmq_tokens")
    return read


@pytest.fixture
def api() -> Iterator[Api]:
    with Api() as api:
        yield api


ONCE = [row["body"] for row in ROWS]


@pytest.mark.slow
def test_postgresql_gets_the_rows_of_a_token_once(database: str, orders: Any) -> None:
    to_postgres = recipe("to_postgres", database)
    first, second = str(uuid.uuid4()), str(uuid.uuid4())
    to_postgres(Rows(), 1, token=first)
    to_postgres(Rows(), 1, token=first)
    assert orders() == ONCE
    to_postgres(Rows(), 1, token=second)  # as the first batch of a data directory that was made again
    assert orders() == sorted(ONCE * 2)


def test_postgresql_keeps_neither_rows_nor_token_of_a_call_that_fails(database: str, orders: Any) -> None:
    to_postgres = recipe("to_postgres", database)
    token = str(uuid.uuid4())

    def fail() -> None:
        raise ConnectionError("in the middle of the rows")

    with pytest.raises(ConnectionError):
        to_postgres(Rows(fail), 1, token=token)
    assert orders() == []
    to_postgres(Rows(), 1, token=token)
    assert orders() == ONCE


@pytest.mark.parametrize("fails", [False, True])
def test_postgresql_lets_a_second_driver_wait_for_the_first(database: str, orders: Any, fails: bool) -> None:
    to_postgres = recipe("to_postgres", database)
    token = str(uuid.uuid4())
    second = threading.Thread(target=to_postgres, args=(Rows(), 1), kwargs={"token": token})

    def meanwhile() -> None:
        second.start()
        second.join(0.5)
        assert second.is_alive(), "it does not wait"
        if fails:
            raise ConnectionError("the first driver is lost")

    if fails:
        with pytest.raises(ConnectionError):
            to_postgres(Rows(meanwhile), 1, token=token)
    else:
        to_postgres(Rows(meanwhile), 1, token=token)
    second.join()
    assert orders() == ONCE


def test_an_api_with_idempotency_keys_has_the_effect_of_each_row_once(api: Api) -> None:
    to_http = recipe("to_http", api.url)
    token = str(uuid.uuid4())
    to_http(Rows(), 1, token=token)
    to_http(Rows(), 1, token=token)
    assert len(api.requests) == 2 * len(ROWS) and [charge["order"] for charge in api.charges] == ONCE


def test_an_api_whose_answer_is_lost_in_the_middle_has_each_effect_once_after_the_next_call(api: Api) -> None:
    to_http = recipe("to_http", api.url)
    token = str(uuid.uuid4())
    api.fail_at = 2
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        to_http(Rows(), 1, token=token)
    assert len(api.charges) == 3
    to_http(Rows(), 1, token=token)
    assert [charge["order"] for charge in api.charges] == ONCE
