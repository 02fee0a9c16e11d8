"""What mallory may do, and what follows from it: patterns, topics, tags, and the virtual hosts it may enter.

The table of ``docs/permissions.md`` once more, by hand: whether a right of mallory permits an effect on things of
others. Not here: what it tries (``interference.py``).
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, TypeAlias

from hypothesis import strategies as st

TAGS = ("administrator", "operator", "monitoring", "management", "impersonator")
# what a pattern may name; not: ``hidden`` and ``other``, which are asked for by who may not know of them
NAMES = ("m", "in$", "out$", "secret$", "private$", "t$", "amq.default$", "amq.transaction")
TOPICS = ("^public", "^secret", "^(public|secret)", "^$")
Permission: TypeAlias = Literal["configure", "write", "read"]


class Grant(NamedTuple):
    """``patterns``: configure, write, read; None: it may not enter. ``topic``: of the exchange ``t``, write and
    read; None: not limited. ``side``: it may enter the other virtual host too.
    """

    patterns: tuple[str, str, str] | None
    tags: tuple[str, ...] = ()
    topic: tuple[str, str] | None = ("^public", "^public")
    side: bool = True

    def may(self, permission: Permission, *names: str) -> bool:
        if self.patterns is None:
            return False
        pattern = self.patterns[("configure", "write", "read").index(permission)]
        return all(re.search(pattern, name) if pattern else not name for name in names)

    def may_topic(self, permission: Literal["write", "read"], *keys: str) -> bool:
        """Routing keys of the exchange ``t``."""
        if self.topic is None:
            return True
        pattern = self.topic[permission == "read"]
        return all(re.search(pattern, key) for key in keys)

    @property
    def enters(self) -> bool:
        """The listener of AMQP."""
        return self.patterns is not None

    @property
    def administers(self) -> bool:
        return "administrator" in self.tags

    @property
    def operates(self) -> bool:
        return self.administers or "operator" in self.tags

    @property
    def looks(self) -> bool:
        return self.operates or "monitoring" in self.tags

    @property
    def manages(self) -> bool:
        """The listener of HTTP."""
        return self.looks or "management" in self.tags


GRANTS: dict[str, Grant] = {
    "enters": Grant(("^$", "^$", "^$")),
    "has names of its own": Grant(("^m", "^m", "^m")),
    "names transactions": Grant(("^m", "^(m|amq.transaction)", "^m")),
    "looks": Grant(("^m", "^(m|amq.transaction)", "^m"), ("monitoring",)),
    "publishes in public": Grant(("^m", "^(m|t$|amq.transaction)", "^m")),
    "impersonates": Grant(("^m", "^(m|t$)", "^m"), ("impersonator",)),
    "manages": Grant(("^m", "^(m|t$)", "^m"), ("management",)),
    # rights that mallory has to the same queues: what stays refused is refused because of whose a thing is
    "shares queues": Grant(("^m", "^(m|amq.default$)", "^(m|in$)")),
    "operates": Grant(("^m", "^(m|amq.transaction)", "^m"), ("operator",)),
    "administers": Grant(("^m", "^m", "^(m|in$)"), ("administrator",)),
}

_PATTERNS = st.lists(st.sampled_from(NAMES), unique=True).map(
    lambda names: f"^({'|'.join(names)})" if names else "^$"
)
_TOPICS = st.none() | st.tuples(st.sampled_from(TOPICS), st.sampled_from(TOPICS))
SUBSETS = st.builds(
    Grant,
    patterns=st.none() | st.tuples(_PATTERNS, _PATTERNS, _PATTERNS),
    tags=st.lists(st.sampled_from(TAGS), unique=True).map(lambda tags: tuple(sorted(tags))),
    topic=_TOPICS,
    side=st.booleans(),
)
