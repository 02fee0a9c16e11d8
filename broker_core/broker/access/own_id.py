"""How the names that users give are kept. Each is one of its user, and no two users share one.

Ids that a caller makes:

    T             token, branch or channel T of the owner of the data directory
    @ann:T        that of ann

Keys of transactions, which are a kind, a virtual host, a user and a name, as one text:

    xid@%2F@ann:order-7         a user's xid or commit token, in its virtual host
    xid@%2F@ann@17000000:order-7    the same, prepared at that time by an ann who was deleted
    write@%2F@ann:TOKEN         a batch write of a user, in its virtual host

Versions before kept no user (``xid@%2F:order-7``, ``batch:TOKEN``), and earlier ones no virtual host
(``order-7``). Such a record is nobody's; every user finds it by its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote, unquote

from broker_core.address import VHOST

_OF_USER = "@"
_XID, _WRITE, _OLDER_WRITES = "xid@", "write@", ("batch:", "batch@")


def own_id(user: str, name: str) -> str:
    """``user``: "" for the owner of the data directory."""
    return f"{_OF_USER}{quote(user, safe='')}:{name}" if user or name.startswith(_OF_USER) else name


def name_in(own: str) -> str:
    """Returns the id as its caller gave it."""
    return own.partition(":")[2] if own.startswith(_OF_USER) else own


def user_in(own: str) -> str:
    return unquote(own.partition(":")[0].removeprefix(_OF_USER)) if own.startswith(_OF_USER) else ""


# -- keys of transactions ------------------------------------------------------------------------------------
def transaction_key(vhost: str, user: str, name: str) -> str:
    """``user``: "" for the owner of the data directory."""
    return f"{_XID}{_quoted(vhost)}@{_quoted(user)}:{name}"


def older_keys(vhost: str, name: str) -> Iterator[str]:
    """Yields those of older versions."""
    yield f"{_XID}{_quoted(vhost)}:{name}"
    if not name.startswith((_XID, _WRITE, *_OLDER_WRITES)):
        yield name


def disowned_key(key: str, time_us: int) -> str:
    """Returns the key of a transaction whose user is deleted."""
    owner, _, name = key.partition(":")
    return f"{owner}@{time_us}:{name}"


def write_key(vhost: str, token: str) -> str:
    """``token``: with its user (``own_id``)."""
    return f"{_WRITE}{_quoted(vhost)}@{_quoted(user_in(token))}:{name_in(token)}"


def older_write_key(vhost: str, token: str) -> str:
    name = name_in(token)
    return f"batch:{name}" if vhost == VHOST else f"batch@{_quoted(vhost)}:{name}"


def name_of(key: str) -> str:
    """Returns the name as its user gave it."""
    if key.startswith(_WRITE):
        return f"batch:{key.partition(':')[2]}"
    return key.partition(":")[2] if key.startswith(_XID) else key


def user_of(key: str) -> str | None:
    """Returns whose a user's transaction is; None: nobody's. Of a deleted user: its name."""
    parts = key.partition(":")[0].split("@")
    return unquote(parts[2]) if key.startswith(_XID) and len(parts) > 2 else None


def is_owned(key: str) -> bool:
    """Whether its user may decide it: it was not deleted since."""
    return key.startswith(_XID) and len(key.partition(":")[0].split("@")) == 3


def _quoted(text: str) -> str:
    return quote(text, safe="")
