"""A data directory that another broker may hold: an idle broker that a client started gives it up.

Not here: finding or starting a broker for a client (``starter.py``), and the lock (``store/directory.py``).
Invariant: a broker that is in use, or that a user started, is never made to end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from broker_core.client.connection import FlightConnection
from broker_core.core import endpoint, errors
from broker_core.core.address import Address, bracketed
from broker_core.core.credentials import Credentials
from broker_core.flight import contract

Store = TypeVar("Store")

ENDING_S = 60.0  # for a broker that is ending: it closes its store
LOOK_S = 0.05


def take_over(directory: str, open_store: Callable[[str], Store]) -> Store:
    """Opens the store of a directory, after an idle broker that a client started has released it.

    Raises DataDirectoryLocked, which names the holder and its address; otherwise what ``open_store`` raises.
    """
    deadline = 0.0
    while True:
        try:
            return open_store(directory)
        except errors.DataDirectoryLocked as locked:
            if not deadline and _gives_up(directory):
                deadline = time.monotonic() + ENDING_S
            if time.monotonic() > deadline:
                raise _with_holder(directory, locked) from None
        time.sleep(LOOK_S)


def _gives_up(directory: str) -> bool:
    found = endpoint.read_endpoint(directory)
    if found is None:
        return False
    address = Address(found.host, found.port, credentials=Credentials(token=found.token))
    connection = FlightConnection(address, reconnect_s=0, connect_s=0)
    try:
        same = connection.live().hello.id == found.id
        return same and bool(contract.decode(bool, connection.call("admin.give_up")))
    except errors.TxmqError:  # it is ending, or has another version
        return False
    finally:
        connection.close()


def _with_holder(directory: str, locked: errors.DataDirectoryLocked) -> errors.DataDirectoryLocked:
    found = endpoint.read_endpoint(directory)
    if found is None:
        return locked
    url = f"txmq://{bracketed(found.host)}:{found.port}"
    return errors.DataDirectoryLocked(
        f"{locked.summary} (its broker listens at {url})",
        "use txmq.connect(data=...), which connects to any holder. A broker that a client started ends when "
        "it has no clients",
    )
