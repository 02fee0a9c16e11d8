"""Named places where a test kills the process, or simulates a disk error, at exactly one step.

``TXMQ_FAILPOINTS="store.commit.synced=kill"`` kills with SIGKILL at the first hit; ``name@3=kill`` at the
third; ``name=raise`` raises OSError(EIO); ``name=enospc`` raises OSError(ENOSPC); ``name=drop`` raises
ConnectionResetError, like a lost reply; ``name=stop`` suspends the process, until another one kills it there.
``TXMQ_FAILPOINTS="@path"`` names a file with such a list, which a process reads at its start. In one process
a test calls ``arm``. If none is set, a failpoint costs one check of an empty dict.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

Action = Callable[[str], None]

_armed: dict[str, list[tuple[int, Action]]] = {}
_hits: dict[str, int] = {}


def _kill(_name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(_name: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise(name: str) -> None:
    raise OSError(errno.EIO, f"failpoint {name}")


def _enospc(name: str) -> None:
    raise OSError(errno.ENOSPC, f"failpoint {name}")


def _drop(name: str) -> None:
    raise ConnectionResetError(errno.ECONNRESET, f"failpoint {name}")


ACTIONS: dict[str, Action] = {"kill": _kill, "stop": _stop, "raise": _raise, "enospc": _enospc, "drop": _drop}


def arm(name: str, action: str | Action, *, hit: int = 1) -> None:
    """Acts at the ``hit``-th time (from 1, counted since armed) that ``name`` is reached."""
    _hits[name] = 0
    _armed.setdefault(name, []).append((hit, ACTIONS[action] if isinstance(action, str) else action))


def disarm() -> None:
    _armed.clear()
    _hits.clear()


def here(name: str) -> None:
    """Marks a failpoint called ``name`` (``layer.operation.step``)."""
    if _armed:
        _act(name)


def _act(name: str) -> None:
    if name not in _armed:
        return
    reached = _hits[name] = _hits[name] + 1  # another thread may reach it while an action waits
    for hit, action in _armed[name]:
        if hit == reached:
            action(name)


def arm_from_environment() -> None:
    """Arms what ``TXMQ_FAILPOINTS`` names. A new process does so by itself; a forked one has to call it."""
    listed = os.environ.get("TXMQ_FAILPOINTS", "")
    if listed.startswith("@"):
        listed = Path(listed[1:]).read_text()
    for item in filter(None, listed.split(",")):
        name, _, action = item.partition("=")
        name, _, hit = name.partition("@")
        arm(name, action, hit=int(hit or 1))


arm_from_environment()
