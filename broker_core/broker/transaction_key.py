"""The keys of transactions: a kind, a virtual host and a name, as one text. No two have the same key.

    xid@%2F:order-7     a user's xid or commit token, in its virtual host
    batch:TOKEN         a batch write in ``/``; ``batch@sales:TOKEN`` in another one

Versions before kept a user's name as it is, for all virtual hosts. Such a record is found by its name alone.
"""

from __future__ import annotations

from urllib.parse import quote

from broker_core.address import VHOST

_XID, _WRITES = "xid@", ("batch:", "batch@")


def transaction_key(vhost: str, name: str) -> str:
    return f"{_XID}{quote(vhost, safe='')}:{name}"


def write_key(vhost: str, token: str) -> str:
    return f"batch:{token}" if vhost == VHOST else f"batch@{quote(vhost, safe='')}:{token}"


def is_bare(key: str) -> bool:
    """Whether it may be the name of a user's transaction of an older version."""
    return not key.startswith((_XID, *_WRITES))


def name_of(key: str) -> str:
    """Returns the name as its user gave it."""
    return key.partition(":")[2] if key.startswith(_XID) else key
