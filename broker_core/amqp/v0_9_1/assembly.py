"""A content of which frames are missing. Not here: the frames (``decoder.py``)."""

from __future__ import annotations

from broker_core.amqp.v0_9_1.methods import Method
from broker_core.core.errors import UnexpectedFrame

ASSEMBLY_BYTES = 512  # what it costs beside its bytes


class Assembly:
    """``remaining`` None: its header is awaited. ``skipped``: its bytes are dropped."""

    __slots__ = ("body", "cost", "method", "properties", "remaining", "skipped")

    def __init__(self, method: Method, cost: int) -> None:
        self.method = method
        self.cost = cost
        self.remaining: int | None = None
        self.properties = b""
        self.body = bytearray()
        self.skipped = False

    def interrupted(self) -> UnexpectedFrame:
        """By a frame that is not its next one."""
        if self.remaining is None:
            header = f"content header for class {self.method.CLASS_ID}"
            return UnexpectedFrame(f"expected {header}, got non content header frame instead")
        return UnexpectedFrame("expected content body, got non content body frame instead")
