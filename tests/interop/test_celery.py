"""A real Celery worker with ``acks_late``: results over rpc://, chains, failures, and SIGKILL of the worker
and of the broker.

Not here: Celery's own rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import celery
import kombu
import kombu.pools
import pytest

from tests.amqp_server import AmqpServed
from tests.interop.celery_worker import CeleryRig
from tests.progress import GUARD_S, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def rig(url: str, tmp_path: Path) -> Iterator[CeleryRig]:
    rig = CeleryRig(url, tmp_path)
    yield rig
    rig.close()
    with kombu.Connection(url) as connection:
        for queue in (rig.name, f"{rig.name}-dead"):
            connection.default_channel.queue_delete(queue)
        for exchange in (rig.name, f"{rig.name}-control", f"{rig.name}-events"):
            connection.default_channel.exchange_delete(exchange)


def test_results_chains_groups_failures_and_retries_come_back_over_rpc(rig: CeleryRig) -> None:
    tasks = rig.tasks
    with kombu.Connection(rig.url) as connection:  # where rejected tasks go
        connection.default_channel.queue_declare(tasks.DEAD, durable=True, auto_delete=False)
    rig.worker.start()
    assert rig.value(tasks.add.delay(2, 3)) == 5
    results = [tasks.add.delay(number, 1) for number in range(100)]
    assert [rig.value(result) for result in results] == list(range(1, 101))
    assert rig.value(celery.chain(tasks.add.s(1, 1), tasks.add.s(2), tasks.add.s(3)).delay()) == 7
    assert sorted(
        rig.value(celery.group(tasks.add.s(number, number) for number in range(10)).delay())
    ) == list(range(0, 20, 2))
    failed = tasks.fail.delay("wrong")
    with pytest.raises(ValueError, match="wrong"):
        rig.value(failed)
    assert rig.value(tasks.flaky.delay("f")) == 2
    assert rig.app.control.ping(timeout=5, limit=1)[0].popitem()[1] == {"ok": "pong"}
    with pytest.raises(ValueError, match="poison"):
        rig.value(tasks.poison.delay("poison"))
    wait_until(lambda: rig.queue(tasks.DEAD) == (1, 0), "the rejected task is a dead letter")
    assert Counter(rig.effects()) == {"tried wrong": 1, "try f": 3, "tried poison": 1}
    assert rig.worker.terminate() == 0
    assert rig.queue(rig.name) == (0, 0)
    assert rig.queue(tasks.DEAD) == (1, 0)


def test_a_killed_and_restarted_worker_runs_every_task_and_completes_every_chain(rig: CeleryRig) -> None:
    tasks = rig.tasks
    rig.worker.start()
    chains = [[f"chain {number} link {link}" for link in range(4)] for number in range(15)]
    singles = [f"single {number}" for number in range(60)]
    waiting = [
        celery.chain(tasks.step.s([], links[0]), *(tasks.step.s(link) for link in links[1:])).delay()
        for links in chains
    ]
    for name in singles:
        tasks.write.delay(name)
    for done in (10, 40, 80):  # killed in the middle, three times
        wait_until(lambda least=done: len(rig.effects()) >= least, f"{done} tasks have run")
        rig.worker.kill()
        rig.worker.start()
    assert [rig.value(result) for result in waiting] == chains
    effects = rig.wait_for_effects({*singles, *(link for links in chains for link in links)})
    assert len(effects) <= 120 + 3 * 6, "at most what the killed workers held runs twice"
    wait_until(lambda: rig.queue(rig.name) == (0, 1))


def test_a_task_whose_process_is_killed_runs_again_in_another(rig: CeleryRig, tmp_path: Path) -> None:
    rig.worker.start()
    result = rig.tasks.die_once.delay(str(tmp_path / "died"))
    rig.wait_for_effects({"survived"})
    assert rig.effects() == ["survived"]
    assert (tmp_path / "died").exists()
    del result


@pytest.mark.soak
def test_tasks_with_a_countdown_do_not_hold_up_the_others(rig: CeleryRig) -> None:
    tasks = rig.tasks
    rig.worker.start()
    assert rig.value(tasks.add.delay(1, 1)) == 2
    # More than the prefetch of the worker (two processes, a multiplier of 1): it asks for more credit for
    # each that it holds.
    for number in range(6):
        tasks.write.apply_async([f"later {number}"], countdown=60)
    assert [tasks.add.delay(number, number).get(timeout=GUARD_S) for number in range(10)] == list(
        range(0, 20, 2)
    )
    assert rig.effects() == []


@pytest.mark.soak  # five seconds; tests/crash/test_delays_crash.py has delays
@pytest.mark.txmq_only  # RabbitMQ needs a plugin
def test_a_task_that_the_broker_holds_runs_when_its_delay_is_over(rig: CeleryRig) -> None:
    tasks, later = rig.tasks, f"{rig.name}-later"
    rig.worker.start()
    assert rig.value(tasks.add.delay(1, 1)) == 2  # its queue is there
    with kombu.Connection(rig.url) as connection:
        channel = connection.default_channel
        arguments = {"x-delayed-type": "direct"}
        channel.exchange_declare(
            later, "x-delayed-message", durable=True, auto_delete=False, arguments=arguments
        )
        channel.queue_bind(rig.name, later, rig.name)
        tasks.write.apply_async(["held"], exchange=later, routing_key=rig.name, headers={"x-delay": 5_000})
        assert rig.value(tasks.write.delay("now")) == "now"
        assert rig.wait_for_effects({"now", "held"}) == ["now", "held"]
        channel.exchange_delete(later)


def test_higher_priorities_run_first(rig: CeleryRig) -> None:
    tasks = rig.tasks
    with rig.app.pool.acquire(block=True) as connection:
        tasks.app.amqp.queues[rig.name](connection.default_channel).declare()
    for number in range(20):
        tasks.write.apply_async([f"low {number}"], priority=0)
        tasks.write.apply_async([f"high {number}"], priority=9)
    rig.worker.start()
    order = rig.wait_for_effects({f"low {number}" for number in range(20)})
    assert len(order) == 40
    assert {name.split()[0] for name in order[:18]} == {"high"}


@pytest.mark.soak
def test_a_worker_goes_on_after_the_broker_was_killed_and_no_task_is_lost(
    served: AmqpServed, tmp_path: Path
) -> None:
    rig = CeleryRig(served.amqp_url, tmp_path)
    try:
        rig.worker.start()
        names = [f"task {number}" for number in range(80)]
        with rig.app.connection_for_write() as connection:
            connection.transport_options = {"confirm_publish": True}
            with rig.app.amqp.Producer(connection) as producer:
                for name in names:
                    rig.tasks.write.apply_async([name], producer=producer, ignore_result=True)
        for done in (10, 40):
            wait_until(lambda least=done: len(rig.effects()) >= least, f"{done} tasks have run")
            served.restart()
        rig.wait_for_effects(set(names))
        wait_until(lambda: rig.queue(rig.name) == (0, 1), "all is acknowledged and the worker is back")
    finally:
        rig.close()
