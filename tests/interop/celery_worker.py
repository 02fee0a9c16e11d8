"""A Celery worker of two processes, the app of the test, and what its tasks left.

Not here: the tasks (``tasks.py``).
Invariant: every worker is a process group of its own and is ended with all its children.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any

import celery
import kombu
import kombu.pools
import pytest

from tests.progress import GUARD_S, wait_until

ROOT = Path(__file__).resolve().parents[2]


class Worker:
    """``celery worker`` with two processes."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.log = directory / "worker.log"
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Worker:
        command = [
            sys.executable,
            "-m",
            "celery",
            "-A",
            "tests.interop.tasks",
            "worker",
            "--concurrency=2",
            "--loglevel=INFO",
        ]
        command += ["--without-mingle", "--without-gossip", f"--hostname=worker@{uuid.uuid4().hex[:8]}"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=ROOT, env=self._environment, start_new_session=True
            )
        return self

    def kill(self) -> None:
        """SIGKILL for the worker and its children at once, as when the machine goes."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(GUARD_S)
            self._process = None

    def terminate(self) -> int:
        """SIGTERM: Celery's warm shutdown; the exit code."""
        assert self._process is not None
        self._process.terminate()
        code = self._process.wait(GUARD_S)
        self._process = None
        return code


class CeleryRig:
    """The app of the test, its worker, and what its tasks left."""

    def __init__(self, url: str, directory: Path) -> None:
        self.name = f"celery-{uuid.uuid4().hex[:8]}"
        self.url = url
        self._effects = directory / "effects"
        self._effects.touch()
        environment = {
            "TXMQ_CELERY_NAME": self.name, "TXMQ_CELERY_BROKER": url.replace("/%2F", "//"), "TXMQ_CELERY_EFFECTS": str(self._effects)
        }  # fmt: skip
        self.environment = {**os.environ, **environment}
        self.worker = Worker(directory, self.environment)
        with pytest.MonkeyPatch.context() as patch:
            for key, value in environment.items():
                patch.setenv(key, value)
            sys.modules.pop("tests.interop.tasks", None)
            self.tasks: ModuleType = importlib.import_module("tests.interop.tasks")

    @property
    def app(self) -> celery.Celery:
        app: celery.Celery = self.tasks.app
        return app

    def effects(self) -> list[str]:
        return self._effects.read_text().splitlines()

    def wait_for_effects(self, names: set[str]) -> list[str]:
        try:
            return list(
                wait_until(lambda: self.effects() if names <= set(self.effects()) else None, "every task ran")
            )
        except AssertionError:
            raise AssertionError(
                f"never ran: {sorted(names - set(self.effects()))}; {self.worker.log.read_text()[-3000:]}"
            ) from None

    def value(self, result: Any) -> Any:
        return result.get(timeout=GUARD_S)

    def queue(self, name: str) -> tuple[int, int]:
        """Ready messages and consumers."""
        with kombu.Connection(self.url) as connection:
            answer = connection.default_channel.queue_declare(name, passive=True)
            return answer.message_count, answer.consumer_count

    def close(self) -> None:
        self.worker.kill()
        self.app.close()
        kombu.pools.reset()  # the pools of kombu are shared by everybody who names the same broker
