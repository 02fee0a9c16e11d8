"""The names of topics: those of queues, and those of txmq itself.

Not here: what the topics hold (``topics/topics.py``).
Invariant: two apps never share a topic, even where Kafka takes ``.`` and ``_`` for equal; the topics of txmq
begin with RESERVED, and no queue does.
"""

from __future__ import annotations

import re

from broker_core.core.errors import OptionError

RESERVED = "_txmq"
OURS = f"{RESERVED}."
TOPOLOGY = f"{OURS}topology"
STAGE = f"{OURS}stage"  # of batch writes, which belong to no app
IDS = "txmq."  # how transactional ids and groups begin
WRITES = f"{IDS}write."  # and transactional ids of batch writes
LONGEST = 249  # bytes of a topic's name

_APP, _STAGE_OF = f"{OURS}app.", f"{STAGE}."
_VALID = re.compile(rf"[a-zA-Z0-9._-]{{1,{LONGEST}}}")
_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-")

DECISIONS, JOURNAL = 0, 1  # the partitions of an app's topic


def is_queue_name(name: str) -> bool:
    return bool(_VALID.fullmatch(name)) and name not in (".", "..") and not name.startswith(RESERVED)


def require_queue_name(name: str) -> str:
    """Returns ``name``. Raises OptionError for a name that no queue on Kafka can have."""
    if is_queue_name(name):
        return name
    if name.startswith(RESERVED):
        raise OptionError(
            f"queue {name!r} begins with {RESERVED!r}, as the topics of txmq do", "choose another name"
        )
    raise OptionError(
        f"queue {name!r} is not a valid name of a Kafka topic",
        f"use 1 to {LONGEST} of the characters a-z, A-Z, 0-9, '.', '_' and '-'",
    )


def app_topic(app_id: str) -> str:
    """Returns the topic of an app's decisions and journal. Raises OptionError for an app id that is too
    long.
    """
    return _of_app(_APP, app_id)


def stage_topic(app_id: str) -> str:
    """Returns the topic of an app's staged branches. Raises OptionError."""
    return _of_app(_STAGE_OF, app_id)


def app_of(topic: str) -> str | None:
    """Returns the app whose topic this is; None for every other topic."""
    escaped = topic.removeprefix(_APP)
    if escaped == topic:
        return None
    try:
        raw = re.sub(rb"_([0-9a-f]{2})", lambda found: bytes.fromhex(found[1].decode()), escaped.encode())
        app_id = raw.decode()
    except UnicodeDecodeError:
        return None
    return app_id if _escaped(app_id) == escaped else None


def producer_of(app_id: str) -> str:
    """Returns the app's transactional id, and the group whose offsets show its lag."""
    return IDS + app_id


def write_id(token: str) -> str:
    """Returns the transactional id of a batch write."""
    return WRITES + token


def _of_app(prefix: str, app_id: str) -> str:
    if not app_id:
        raise OptionError("appId is empty", "name the app")
    escaped = _escaped(app_id)
    # by the longest of its topics: an app that has one of them gets the other
    if len(escaped) > LONGEST - len(_STAGE_OF):
        raise OptionError(
            f"appId {app_id!r} is too long for a topic of Kafka: {escaped} has {len(escaped)} bytes",
            f"at most {LONGEST - len(_STAGE_OF)} fit; a character other than a-z, A-Z, 0-9 and '-' counts 3 "
            "for each of its bytes",
        )
    return prefix + escaped


def _escaped(app_id: str) -> str:
    """Letters, digits and ``-`` as they are, other bytes as ``_xx``: also the dot, because Kafka refuses two
    topics that differ only in ``.`` and ``_``.
    """
    return "".join(chr(byte) if byte in _PLAIN else f"_{byte:02x}" for byte in app_id.encode())
