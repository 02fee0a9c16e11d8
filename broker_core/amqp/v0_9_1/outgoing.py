"""What a connection is going to send: encoded frames in their order.

Not here: when they are sent.
Invariant: after ``stop_after_current`` only ``final_frame`` adds to what is sent.
"""

from __future__ import annotations

from broker_core.amqp.v0_9_1.encoder import encode_content, encode_method
from broker_core.amqp.v0_9_1.methods import Method


class Outgoing:
    """``frames`` wait for ``take``, ``size`` is their length in bytes.

    ``frame_max``: of one frame. ``closed_for_sending``: has fallen silent.
    """

    __slots__ = ("_last", "closed_for_sending", "frame_max", "frames", "size")

    def __init__(self, frame_max: int) -> None:
        self.frame_max = frame_max
        self.frames: list[bytes] = []
        self.size = 0
        self.closed_for_sending = False
        self._last: list[bytes] = []

    def send(self, number: int, method: Method, properties: bytes = b"", body: bytes = b"") -> None:
        """Add a method with its content. Raises LocalProtocolError for a value that its field cannot hold."""
        if method.HAS_CONTENT:
            self.write(encode_content(number, method, properties, body, self.frame_max))
        else:
            self.write(encode_method(number, method))

    def write(self, data: bytes) -> None:
        self.frames.append(data)
        self.size += len(data)

    def take(self) -> bytes:
        """All of it, once."""
        frames = self._last if self.closed_for_sending else self.frames
        data = frames[0] if len(frames) == 1 else b"".join(frames)
        self.frames.clear()
        self._last.clear()
        self.size = 0
        return data

    def stop_after_current(self) -> None:
        """Send nothing after the frames that were written."""
        if not self.closed_for_sending:
            self.closed_for_sending = True
            self._last = self.frames[:]

    def final_frame(self, method: Method) -> None:
        """Add ``method`` on channel 0 after the last frame."""
        self._last.append(encode_method(0, method))

    def drop(self) -> None:
        """Drop all frames: the socket is gone."""
        self.stop_after_current()
        self._last.clear()
