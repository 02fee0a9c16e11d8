"""Celery's Flower, unmodified: its page and its API show the depth of a worker's queue, which it asks for at
the HTTP API.

Not here: the worker's tasks (``test_celery.py``).
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bench.ports import free_ports
from broker_core.core import password as passwords
from tests.interop.celery_worker import ROOT, CeleryRig
from tests.progress import GUARD_S, wait_until
from tests.server.http.http_client import serving

pytestmark = pytest.mark.slow
VHOST, USER, PASSWORD = "tasks", "celery", "of-the-test"


@contextmanager
def flower(rig: CeleryRig, api: str, log: Path) -> Iterator[Callable[[str], str]]:
    """What its paths answer."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "celery", "-A", "tests.interop.tasks", "flower"]
    command += [f"--port={port}", "--address=127.0.0.1", f"--broker-api={api}", "--inspect-timeout=30000"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env={**rig.environment, "FLOWER_UNAUTHENTICATED_API": "true"},
        )

    def ask(path: str) -> str:
        assert process.poll() is None, log.read_text()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=GUARD_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            told = answer.read().decode()
            return told if answer.status == 200 else ""
        except ConnectionError:  # it does not listen yet
            return ""
        finally:
            connection.close()

    try:
        yield ask
    finally:
        process.kill()
        process.wait(GUARD_S)


def test_flower_shows_how_many_tasks_wait(tmp_path: Path) -> None:
    """In a virtual host with a name: for ``/`` Flower asks for a path that RabbitMQ does not have either."""
    with serving(tmp_path) as served:
        served.vhosts.add_vhost(VHOST)
        served.accounts.add_user(USER, passwords.hashed(PASSWORD, passwords.Cost(4, 8, 1)), ("management",))
        served.accounts.set_permissions(USER, ".*", ".*", ".*", vhost=VHOST)
        broker = f"amqp://{USER}:{PASSWORD}@{urlsplit(served.amqp_urls[0]).netloc}/{VHOST}"
        api = f"http://{USER}:{PASSWORD}@{urlsplit(served.http_urls[0]).netloc}/api/"
        rig = CeleryRig(broker, tmp_path)
        try:
            rig.worker.start()
            assert rig.value(rig.tasks.add.delay(2, 3)) == 5
            with flower(rig, api, tmp_path / "flower.log") as ask:

                def waiting() -> int | None:
                    told = ask("/api/queues/length")
                    rows = json.loads(told)["active_queues"] if told else []
                    return next((row["messages"] for row in rows if row["name"] == rig.name), None)

                wait_until(lambda: waiting() == 0, "Flower knows the queue of the worker")
                for number in range(7):  # the worker holds them until it is time
                    rig.tasks.add.apply_async((number, 1), countdown=600)
                wait_until(lambda: waiting() == 7, "Flower shows seven tasks")
                assert rig.name in ask("/broker")
        finally:
            rig.close()
