"""A broker whose catalog is refused by the operating system within SQLite (``native_calls.c``), in a process of
its own: ``python -m tests.native_calls DIRECTORY CONTROL``.

What was answered must be there, and what was refused with an error that lets the broker go on must not be. It
prints a line of JSON: which calls were refused with which error, and what came of it.
"""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from broker_core.core import errors
from broker_core.launcher import Broker
from broker_core.store.durable import DurableStore
from broker_core.store.port import StoreImage

KINDS = ("open", "read", "write", "sync", "truncate", "map")
ERRORS = (
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN,
    errno.ENOSPC, errno.EIO, errno.EINTR, errno.EACCES, errno.EROFS,
)  # fmt: skip
DATABASE, LOG = 1, 2
_HEAD = struct.Struct("iiii")
_COUNTS = struct.Struct(f"{len(KINDS)}i")
SIZE = _HEAD.size + _COUNTS.size
LARGE = 300_000  # bytes of a message: a few fill the log, which is then copied into the database
FOR_S = 2.0


def name_of(number: int) -> str:
    return errno.errorcode[number]


class Control:
    """What is refused from now on."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), SIZE)

    def refuse(self, number: int, kinds: str = "", files: int = DATABASE | LOG, count: int = 1) -> None:
        chosen = sum(1 << place for place, kind in enumerate(KINDS) if kinds in ("", kind))
        self._shared[: _HEAD.size] = _HEAD.pack(number, chosen, files, count)

    def stop(self) -> None:
        self._shared[: _HEAD.size] = bytes(_HEAD.size)

    def refused(self) -> int:
        return sum(_COUNTS.unpack(self._shared[_HEAD.size : SIZE]))


class Rig:
    def __init__(self, directory: Path, control: Control) -> None:
        self.directory, self.control = directory, control
        self.answered: set[bytes] = set()
        self.refused: set[bytes] = set()
        self.reasons: set[str] = set()
        self.ended = 0
        self._number = 0
        self.broker = Broker.open(directory)
        with self.broker.channel() as channel:
            channel.queue_declare("q")

    def publish(self, size: int = 0) -> None:
        """Raises what the commit raises."""
        self._number += 1
        body = b"%08d" % self._number
        try:
            with self.broker.channel() as channel:
                channel.tx_select()
                channel.publish(body + os.urandom(size), routing_key="q")
                channel.tx_commit()
        except errors.StoreFailed:
            raise  # it may be there
        except errors.TxmqError:
            self.refused.add(body)
            raise
        self.answered.add(body)

    def attempt(self, step: str) -> None:
        """Ends with a broker that is open, or says why it is not."""
        try:
            if step == "open":
                self.broker.close()
                self.broker = Broker.open(self.directory)
            self.publish(LARGE if step == "large" else 0)
        except errors.TxmqError as error:
            self.reasons.add(str(error))

    def go_on(self) -> None:
        """Everything is as before, or the broker has ended with its reason."""
        self.control.stop()
        try:
            self.publish()
        except errors.StoreFailed as reason:
            self.reasons.add(str(reason))
            self.broker.close()
            self.broker = Broker.open(self.directory)
            self.ended += 1
            self.publish()

    def compare(self) -> None:
        """Reads all that is there, after another start."""
        self.broker.close()
        self.broker = Broker.open(self.directory)
        found = []
        with self.broker.channel() as channel:
            while (delivery := channel.get("q", no_ack=True)) is not None:
                found.append(delivery.body[:8])
        assert len(found) == len(set(found)), "published twice"
        assert self.answered <= set(found), f"answered and lost: {self.answered - set(found)}"
        assert not self.refused & set(found), f"refused and published: {self.refused & set(found)}"
        self.answered.clear()
        self.refused.clear()


def once(rig: Rig) -> Iterator[tuple[str, str]]:
    """Each call, once with each error, while a broker commits, copies the log and opens."""
    for kind in KINDS:
        for step, files, repeats in (("small", LOG, 1), ("large", DATABASE, 30), ("open", DATABASE | LOG, 1)):
            for number in ERRORS:
                before = rig.control.refused()
                rig.control.refuse(number, kind, files)
                for _ in range(repeats):
                    rig.attempt(step)
                    if rig.control.refused() > before:
                        break
                if rig.control.refused() > before:
                    yield f"{kind} {step}", name_of(number)
                elif number == ERRORS[0]:
                    rig.go_on()
                    break  # this step makes no such call
                rig.go_on()
        rig.compare()


def for_a_while(rig: Rig) -> Iterator[tuple[str, str]]:
    for number in ERRORS:
        before = rig.control.refused()
        rig.control.refuse(number, count=-1)
        over = threading.Timer(FOR_S, rig.control.stop)  # SQLite repeats what was interrupted, without an end
        over.start()
        while over.is_alive():
            for step in ("small", "large", "open"):
                rig.attempt(step)
        assert rig.control.refused() > before
        yield "all", name_of(number)
        rig.go_on()
        rig.compare()


def while_loading(rig: Rig) -> Iterator[tuple[str, str]]:
    """All reads of the catalog, once it is open."""
    for _ in range(12):
        rig.publish(LARGE)
    load = DurableStore.load
    for number in (errno.EIO, errno.ENOMEM, errno.EACCES):
        before = rig.control.refused()

        def refused(store: DurableStore, number: int = number) -> StoreImage:
            store._catalog._execute("PRAGMA shrink_memory")  # what it has read is read again
            rig.control.refuse(number, "read", DATABASE, count=-1)
            try:
                return load(store)
            finally:
                rig.control.stop()

        DurableStore.load = refused  # type: ignore[method-assign]
        rig.attempt("open")
        DurableStore.load = load  # type: ignore[method-assign]
        if rig.control.refused() > before:
            yield "read loading", name_of(number)
        rig.broker.close()
        rig.broker = Broker.open(rig.directory)
        rig.compare()


def main(directory: Path, control: Path) -> None:
    logging.disable()
    rig = Rig(directory, Control(control))
    found: dict[str, list[str]] = {}
    for way in (while_loading, once, for_a_while):
        for call, name in way(rig):
            found.setdefault(call, []).append(name)
    rig.broker.close()
    print(json.dumps({"refused": found, "ended": rig.ended, "reasons": sorted(rig.reasons)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
