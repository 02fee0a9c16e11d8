"""The operations of a function in threads, without Spark: none is lost between its call and the decision."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from broker_core.core.errors import OptionError
from connector.batch.operations import Operations, log


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


def publish(operations: Operations, act: Callable[[], object] = bool) -> None:
    with operations.one("publish"):
        act()


def test_an_operation_between_the_return_and_the_decision_fails_the_batch(pool: ThreadPoolExecutor) -> None:
    operations = Operations()
    operations.finish()
    with pytest.raises(OptionError, match="after the function returned"):
        pool.submit(publish, operations).result()
    with pytest.raises(OptionError, match="after the function returned"):
        operations.seal()


def test_an_operation_after_the_decision_is_refused_and_says_what_it_is_no_part_of(
    pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    operations = Operations()
    operations.finish()
    operations.seal()
    with pytest.raises(OptionError, match="after the function returned"):
        pool.submit(publish, operations).result()
    assert "is not part of the micro-batch" in caplog.text


def test_whoever_waits_for_an_operation_sees_its_failure(pool: ThreadPoolExecutor) -> None:
    """Its thread has ended the operation, and does not go on."""
    operations = Operations()
    told, over = threading.Event(), threading.Event()

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.set()
            assert over.wait(60)

    def fails() -> None:
        raise OptionError("it failed")

    handler = Told()
    log.addHandler(handler)
    try:
        failed: Future[None] = pool.submit(publish, operations, fails)
        assert told.wait(60)
        with pytest.raises(OptionError, match="it failed"):
            operations.finish()
    finally:
        over.set()
        log.removeHandler(handler)
    assert isinstance(failed.exception(60), OptionError)


def test_an_operation_in_a_forked_process_is_refused_there_and_fails_the_batch() -> None:
    """Its copy of ``tx`` would keep what it stages, and nobody would miss it."""
    operations = Operations()
    if not (child := os.fork()):
        try:
            publish(operations)
        except OptionError as error:
            os._exit(7 if "in a forked process" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    publish(operations)
    with pytest.raises(OptionError, match="in a process that the function has forked"):
        operations.finish()
