"""``DIR/endpoint.json``, with the address of a data directory's broker, and ``DIR/id``; and what a process
calls itself.

Not here: writing them (``launcher.py``), and starting a broker (``client/starter.py``). Invariant:
``endpoint.json`` is a hint: a reader asks the broker there for its id.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

ENDPOINT = "endpoint.json"
ID = "id"
LOG = "broker.log"  # output of a broker that a client started
UNFINISHED = "backup.unfinished"  # in a copy that `txmq broker backup` has not finished


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The content of ``DIR/endpoint.json``; ``id`` is that of the data directory.

    ``token``: made at each start of a broker; who has it may do everything. Only the owner of the directory
    can read it.
    """

    host: str
    port: int
    pid: int
    id: str
    token: str = field(default="", repr=False)


def read_endpoint(directory: str) -> Endpoint | None:
    """Returns the endpoint, or None if the file is missing or invalid."""
    try:
        found = json.loads(Path(directory, ENDPOINT).read_text())
        token = str(found.get("token", ""))  # before there were tokens: none
        return Endpoint(str(found["host"]), int(found["port"]), int(found["pid"]), str(found["id"]), token)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def why_foreign(directory: str | os.PathLike[str]) -> str:
    """Returns why the directory must not be used: it belongs to another user, who could read and replace all
    that is in it. "" for one of our own; one of root may be a volume for this process, and root may use each.
    """
    try:
        owner, user = os.stat(directory).st_uid, os.geteuid()
    except OSError:
        return ""  # it is missing, or the first use says why it cannot be used
    if user == 0 or owner in (user, 0):
        return ""
    return (
        f"the data directory {directory} belongs to user {owner} of this machine, not to {user}: name a "
        "directory of your own, or let root give you this one with chown"
    )


def new_endpoint(directory: str) -> TextIO:
    """The file for ``write_endpoint``."""
    aside = Path(directory, f"{ENDPOINT}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    # a file that was there, or that another user could make, might be readable for others
    return open(aside, "x", opener=lambda path, flags: os.open(path, flags, 0o600))


def write_endpoint(file: TextIO, endpoint: Endpoint) -> None:
    """Writes the new file and renames it: a reader sees the old file or the new one."""
    with file:
        file.write(json.dumps(asdict(endpoint)) + "\n")
    aside = Path(file.name)
    aside.replace(aside.with_suffix(""))


def remove_endpoint(directory: str, pid: int) -> None:
    Path(directory, f"{ENDPOINT}.{pid}").unlink(missing_ok=True)
    found = read_endpoint(directory)
    if found is not None and found.pid == pid:
        Path(directory, ENDPOINT).unlink(missing_ok=True)


def read_id(directory: str) -> str:
    """Returns the id of a data directory, "" if it has none."""
    try:
        return Path(directory, ID).read_text().strip()
    except OSError:
        return ""


def client_name() -> str:
    """What this process calls itself: program, host and process."""
    program = os.path.basename(sys.argv[0] if sys.argv else "") or "python"
    return f"{program[:60]} {socket.gethostname()[:60]} {os.getpid()}"
