"""The ids that a caller makes, as they are kept: each is one of its user. No two users share one.

    T             token, branch or channel T of the owner of the data directory
    @ann:T        that of ann

Not here: the keys of named transactions and of batch writes (``broker/transaction/key.py``).
"""

from __future__ import annotations

from urllib.parse import quote, unquote

_OF_USER = "@"


def own_id(user: str, name: str) -> str:
    """``user``: "" for the owner of the data directory."""
    return f"{_OF_USER}{quote(user, safe='')}:{name}" if user or name.startswith(_OF_USER) else name


def name_in(own: str) -> str:
    """Returns the id as its caller gave it."""
    return own.partition(":")[2] if own.startswith(_OF_USER) else own


def user_in(own: str) -> str:
    return unquote(own.partition(":")[0].removeprefix(_OF_USER)) if own.startswith(_OF_USER) else ""
