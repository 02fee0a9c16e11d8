"""The tasks of ``test_celery.py``. The worker and the test import the same module; ``TXMQ_CELERY_*`` tell it
what to use.

Not here: the test.
Invariant: an effect is one appended line, so a task that ran twice left two and one that never ran left none.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from celery import Celery, Task
from kombu import Queue

NAME = os.environ.get("TXMQ_CELERY_NAME", "interop")
DEAD = f"{NAME}-dead"
EFFECTS = Path(os.environ.get("TXMQ_CELERY_EFFECTS", os.devnull))

app = Celery(NAME, broker=os.environ.get("TXMQ_CELERY_BROKER", "amqp://"), backend="rpc://")
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    task_default_queue=NAME,
    task_queues=[
        Queue(
            NAME,
            routing_key=NAME,
            queue_arguments={
                "x-dead-letter-exchange": "",
                "x-dead-letter-routing-key": DEAD,
                "x-max-priority": 9,
            },
        )
    ],
    result_expires=300,
    broker_connection_retry_on_startup=True,
    broker_connection_retry=True,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    control_exchange=f"{NAME}-control",
    event_exchange=f"{NAME}-events",
)


def effect(text: str) -> None:
    """One line, in one write, which is there after a SIGKILL of this process."""
    with EFFECTS.open("ab", buffering=0) as effects:
        effects.write(f"{text}\n".encode())


@app.task
def add(left: int, right: int) -> int:
    return left + right


@app.task
def step(previous: list[str], name: str) -> list[str]:
    """One link of a chain."""
    time.sleep(0.02)
    effect(name)
    return [*previous, name]


@app.task
def write(name: str) -> str:
    time.sleep(0.02)
    effect(name)
    return name


@app.task
def fail(text: str) -> None:
    effect(f"tried {text}")
    raise ValueError(text)


@app.task(acks_on_failure=False)
def poison(text: str) -> None:
    """Its message is rejected, and not acknowledged, when it fails."""
    effect(f"tried {text}")
    raise ValueError(text)


@app.task(bind=True, max_retries=3)
def flaky(self: Task[Any, Any], name: str) -> int:
    """Fails twice, then tells how often it was tried again."""
    effect(f"try {name}")
    if self.request.retries < 2:
        raise self.retry(countdown=0.05)
    return int(self.request.retries)


@app.task
def die_once(marker: str) -> str:
    """Ends its own process by SIGKILL the first time."""
    if not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    effect("survived")
    return "survived"
