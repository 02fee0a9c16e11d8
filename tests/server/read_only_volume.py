"""``python -m tests.server.read_only_volume FOLDER``, in a mount namespace of its own: a data directory on a volume that
comes back read-only, and then as it was. Prints JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import txmq


def mount(options: str, volume: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(volume)], check=True)


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except txmq.TxmqError as error:
        return str(error)
    return "not refused"


def main(folder: str) -> None:
    volume = Path(folder)
    mount("rw", volume)
    data = volume / "data"
    with txmq.Broker.open(data) as broker, broker.channel() as channel:
        channel.queue_declare("orders")
        channel.tx_select()
        channel.publish(b"kept", routing_key="orders")
        channel.tx_commit()
    before = sorted(str(path) for path in volume.rglob("*"))
    mount("remount,ro", volume)
    errors = [
        refused(lambda: txmq.Broker.open(data)),
        refused(lambda: txmq.connect(data=str(data)).queues()),
        refused(lambda: txmq.Broker.open(volume / "new")),
    ]
    untouched = sorted(str(path) for path in volume.rglob("*")) == before
    mount("remount,rw", volume)
    with txmq.Broker.open(data) as broker, broker.channel() as channel:
        delivery = channel.get("orders")
        body = delivery.message.body.decode() if delivery is not None else ""
    print(json.dumps({"errors": errors, "untouched": untouched, "body": body}))


if __name__ == "__main__":
    main(sys.argv[1])
