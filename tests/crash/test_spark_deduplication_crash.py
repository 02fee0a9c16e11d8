"""Producers that send everything again, into queues that drop duplicates, and drivers that are killed while they
publish from these into others of the kind: each id is there once.

Not here: kills of the broker (``test_deduplication_crash.py``).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from broker_core.client.broker import BrokerClient
from broker_core.message.properties import Properties
from tests.crash.deduplicated_publishes import NEWS, ONCE, PLAIN, PUBLISHED, SUNK
from tests.progress import wait_until
from tests.spark.pipelines import ROOT, Served

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.slow, pytest.mark.soak]

KILLS, EACH = 5, 40
IDS = {"x-message-deduplication": True, "x-cache-size": 10_000}


def bodies(client: BrokerClient, queue: str) -> list[str]:
    held = client.available([queue])[queue]
    batches = client.browse([(queue, held.start, held.end)])
    return sorted(body.decode() for batch in batches for body in batch.column("body").to_pylist())


def send_all(client: BrokerClient, count: int, draw: random.Random) -> None:
    """All ids so far, also those of before, in transactions of any size."""
    for queue in (PUBLISHED, SUNK):
        left = [f"{queue} {number}" for number in range(count)]
        with client.channel() as channel:
            channel.tx_select()
            while left:
                size = draw.randint(1, 20)
                for name in left[:size]:
                    properties = Properties(message_id=name, delivery_mode=2).encode()
                    channel.publish(name.encode(), routing_key=queue, properties=properties)
                channel.tx_commit()
                left = left[size:]


def test_soak_what_killed_drivers_publish_with_ids_is_there_once(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    served = Served(tmp_path / "broker")
    driver: subprocess.Popen[bytes] | None = None
    try:
        with BrokerClient(served.url) as client:
            with client.channel() as channel:
                for queue in (PUBLISHED, SUNK, ONCE):
                    channel.queue_declare(queue, arguments=IDS)
                for queue in (NEWS, PLAIN):
                    channel.queue_declare(queue)
                channel.exchange_declare(NEWS, "x-message-deduplication", arguments={"x-cache-size": 10_000})
                channel.queue_bind(NEWS, NEWS)
            for kill in range(1, KILLS + 1):
                with (tmp_path / f"driver{kill}.log").open("wb") as log:
                    driver = subprocess.Popen(
                        [
                            sys.executable,
                            "-m",
                            "tests.crash.deduplicated_publishes",
                            served.url,
                            str(tmp_path),
                        ],
                        cwd=ROOT,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                before = len(bodies(client, ONCE))
                send_all(client, EACH * kill, draw)
                enough = 2 * EACH * kill if kill == KILLS else before + draw.randint(1, EACH)

                def moved(
                    enough: int = enough, driver: subprocess.Popen[bytes] = driver, kill: int = kill
                ) -> bool:
                    assert driver.poll() is None, (tmp_path / f"driver{kill}.log").read_text()[-2000:]
                    return len(bodies(client, ONCE)) >= enough

                wait_until(moved, f"{enough} messages from driver {kill}")
                send_all(client, EACH * kill, draw)
                os.killpg(driver.pid, signal.SIGKILL)
                driver.wait()
            published, sunk = ([f"{queue} {at}" for at in range(EACH * KILLS)] for queue in (PUBLISHED, SUNK))
            assert bodies(client, ONCE) == sorted(published + sunk)
            assert bodies(client, PLAIN) == bodies(client, NEWS) == sorted(published)
    finally:
        if driver is not None and driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
        served.stop()
