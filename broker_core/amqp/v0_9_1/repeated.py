"""The publish that came last, as the bytes around its body: often the next one differs only in the body.

Not here: decoding (``decoder.py``). It finds out by comparing bytes whether a publish is like the last one.
Invariant: bytes that begin with ``head``, then have a body size, ``middle``, and a frame of that size, are a
publish of ``method`` on ``channel`` with ``properties``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from broker_core.amqp.v0_9_1.events import Command, Event
from broker_core.amqp.v0_9_1.methods import BasicPublish, Method

_BODY_SIZE_AT, _PROPERTIES_AT = 11, 19  # in the frame of a content header
_SIZE_AT = 3  # in the frame of a body
_MOST_BYTES = 1024  # remembered of a publish; a connection has one
_FRAME_END = 0xCE
_SIZE = struct.Struct(">I").unpack_from
_BODY_SIZE = struct.Struct(">Q").unpack_from
_new_tuple: Callable[[type[Command], tuple[int, Method, bytes, bytes]], Command] = tuple.__new__


class Repeated:
    """``head``: the method frame, and the frame of the content header up to the body size. ``middle``: the
    rest of it, and the frame of the body up to its size. ``known`` False: neither is there.
    """

    __slots__ = ("_properties", "channel", "head", "known", "method", "middle", "properties")

    def __init__(self) -> None:
        self.channel = 0
        self.method: Method = BasicPublish()
        self._properties = b""  # as they came
        self.forget()

    def forget(self) -> None:
        self.known = False
        self.head = self.middle = self.properties = b""

    def learn(
        self, channel: int, method: Method, properties: bytes, data: bytes, start: int, header: int, body: int
    ) -> None:
        """Notes a publish whose frames begin at ``start``, ``header`` and ``body`` of ``data``. From its
        second time on it is known.
        """
        if method is not self.method or properties != self._properties or channel != self.channel:
            self.forget()
            if body - start <= _MOST_BYTES:
                self.channel, self.method, self._properties = channel, method, properties
        elif not self.known:
            self.known = True
            self.properties = b"" if properties == b"\0\0" else properties
            self.head = data[start : header + _BODY_SIZE_AT]
            self.middle = data[header + _PROPERTIES_AT : body + _SIZE_AT]

    def take(self, data: bytes, position: int, most: int, events: list[Event]) -> int:
        """Takes known publishes with bodies of at most ``most`` bytes off ``data``, and returns the position
        of what follows.
        """
        head, middle, size = self.head, self.middle, len(data)
        before, behind = len(head), len(head) + len(middle) + 12
        channel, method, properties = self.channel, self.method, self.properties
        while data.startswith(head, position) and data.startswith(middle, position + before + 8):
            (body_size,) = _BODY_SIZE(data, position + before)
            body = position + behind
            end = body + body_size
            if (
                not 0 < body_size <= most
                or end >= size
                or data[end] != _FRAME_END
                or _SIZE(data, body - 4)[0] != body_size
            ):
                break
            events.append(_new_tuple(Command, (channel, method, properties, data[body:end])))
            position = end + 1
        return position
