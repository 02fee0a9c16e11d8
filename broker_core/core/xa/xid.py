"""An xid of the XA standard as the name of a transaction, and back.

    xa:FORMAT:GLOBAL:BRANCH     xa:131077:AAEC:_w

FORMAT is a number in decimal, GLOBAL and BRANCH are base64url without padding (RFC 4648, 5).

Invariant: an xid has one name, and a name that begins with ``xa:`` is that of one xid. It has at most 188
bytes, so that ``amq.transaction.NAME`` is a short string of AMQP too.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass

from broker_core.core.errors import OptionError

MOST_BYTES = 64  # of each part
NO_XID = -1  # the format id that stands for none
_PREFIX = "xa:"
_NAME = re.compile(r"xa:(-?[0-9]{1,10}):([A-Za-z0-9_-]+):([A-Za-z0-9_-]*)")
_ADVICE = "write it as `str(txmq.Xid(format_id, global_id, branch))` does"


@dataclass(frozen=True, slots=True)
class Xid:
    """An xid of the XA standard. ``format_id``: 32 bits, signed, and not -1; ``global_id``: 1 to 64 bytes;
    ``branch``: its qualifier, 0 to 64 bytes. ``str()`` is the name for ``prepare``, ``commit`` and
    ``rollback``. Raises OptionError.
    """

    format_id: int
    global_id: bytes
    branch: bytes = b""

    def __post_init__(self) -> None:
        if not -(2**31) <= self.format_id < 2**31 or self.format_id == NO_XID:
            raise OptionError(f"the format id of an xid is a number of 32 bits but -1, not {self.format_id}")
        if not 1 <= len(self.global_id) <= MOST_BYTES or len(self.branch) > MOST_BYTES:
            raise OptionError(
                f"an xid has 1 to {MOST_BYTES} bytes and 0 to {MOST_BYTES} of its branch, not "
                f"{len(self.global_id)} and {len(self.branch)}"
            )

    def __str__(self) -> str:
        return f"{_PREFIX}{self.format_id}:{_text(self.global_id)}:{_text(self.branch)}"

    @classmethod
    def parse(cls, name: str) -> Xid:
        """Returns the xid of a name that ``str()`` has made. Raises OptionError for any other name."""
        parts = _NAME.fullmatch(name)
        try:
            xid = cls(int(parts[1]), _bytes(parts[2]), _bytes(parts[3])) if parts else None
        except ValueError:  # base64
            xid = None
        if xid is None or str(xid) != name:
            raise OptionError(f"{name[:60]!r} is not the name of an xid of the XA standard", _ADVICE)
        return xid


def check_name(name: str) -> None:
    """Checks that a name which looks like an xid is one, in its one form. Raises OptionError."""
    if name.startswith(_PREFIX):
        Xid.parse(name)


def _text(part: bytes) -> str:
    return urlsafe_b64encode(part).rstrip(b"=").decode("ascii")


def _bytes(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))
