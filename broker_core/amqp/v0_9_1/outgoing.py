"""What a connection is going to send: encoded frames in their order.

Not here: when they are sent.
Invariant: after ``fall_silent`` only ``last_words`` adds to what is sent.
"""

from __future__ import annotations

from broker_core.amqp.v0_9_1.encoder import encode_content, encode_method
from broker_core.amqp.v0_9_1.methods import Method


class Outgoing:
    """``frames`` wait for ``take``, ``size`` is their length in bytes.

    ``frame_max``: of one frame. ``mute``: has fallen silent.
    """

    __slots__ = ("_last", "frame_max", "frames", "mute", "size")

    def __init__(self, frame_max: int) -> None:
        self.frame_max = frame_max
        self.frames: list[bytes] = []
        self.size = 0
        self.mute = False
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
        frames = self._last if self.mute else self.frames
        data = frames[0] if len(frames) == 1 else b"".join(frames)
        self.frames.clear()
        self._last.clear()
        self.size = 0
        return data

    def fall_silent(self) -> None:
        """Send nothing after the frames that were written."""
        if not self.mute:
            self.mute = True
            self._last = self.frames[:]

    def last_words(self, method: Method) -> None:
        """Add ``method`` on channel 0 after the last frame."""
        self._last.append(encode_method(0, method))

    def drop(self) -> None:
        """Drop all frames: the socket is gone."""
        self.fall_silent()
        self._last.clear()
