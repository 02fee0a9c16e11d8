"""The publish that came last on a channel, as the bytes around its body: often the next ones differ only in
the body.

Not here: decoding (``decoder.py``). It finds out by comparing bytes whether a publish is like the last one.
Invariant: bytes that begin with ``_head``, then have a body size, ``_middle``, and a frame of that size, are
a publish of ``_method`` on ``_channel`` with ``_properties``. Bytes that begin with ``_start`` are one of
``_step`` bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from broker_core.amqp.v0_9_1.events import Command, Decoded, Publishes
from broker_core.amqp.v0_9_1.methods import BasicPublish, Method

MOST_CHANNELS = 64  # of a connection, that are remembered
MOST_PUBLISHES = 512  # in one event: they take about a share of a turn (``server/turns.py``)

_BODY_SIZE_AT, _PROPERTIES_AT = 11, 19  # in the frame of a content header
_SIZE_AT, _BODY_AT = 3, 7  # in the frame of a body
_MOST_BYTES = 1024  # remembered of a publish
_FRAME_END = 0xCE
_SIZE = struct.Struct(">I").unpack_from
_BODY_SIZE = struct.Struct(">Q").unpack_from
_new_tuple: Callable[[type[Command], tuple[int, Method, bytes, bytes]], Command] = tuple.__new__


class PublishTemplate:
    """``_head``: the method frame, and the frame of the content header up to the body size. ``_middle``: the
    rest of it, and the frame of the body up to its size. ``_start``: both, with the sizes of the last body.
    ``complete`` False: none of them is there.
    """

    __slots__ = (
        "_channel", "_head", "_method", "_middle", "_properties", "_raw", "_start", "_step",
        "complete",
    )  # fmt: skip

    def __init__(self, channel: int) -> None:
        self._channel = channel
        self._method: Method = BasicPublish()
        self._raw = b""  # the properties as they came
        self.complete = False
        self._properties = self._head = self._middle = self._start = b""
        self._step = 0

    def learn(
        self, method: Method, properties: bytes, data: bytes, start: int, header: int, body: int, end: int
    ) -> None:
        """Notes a publish from ``start`` to ``end`` of ``data``, whose other frames begin at ``header`` and
        ``body``. From its second time on the template is complete.
        """
        if method is not self._method or properties != self._raw:
            self.complete = False
            if body - start <= _MOST_BYTES:
                self._method, self._raw = method, properties
        elif not self.complete:
            self.complete = True
            self._properties = b"" if properties == b"\0\0" else properties
            self._head = data[start : header + _BODY_SIZE_AT]
            self._middle = data[header + _PROPERTIES_AT : body + _SIZE_AT]
            self._start = data[start : body + _BODY_AT]
            self._step = end - start

    def take(self, data: bytes, position: int, most: int, events: list[Decoded]) -> int:
        """Takes known publishes with bodies of at most ``most`` bytes off ``data``, as one event, and returns
        the position of what follows.
        """
        size, ahead = len(data), len(self._start)
        bodies: list[bytes] = []
        while len(bodies) < MOST_PUBLISHES:
            start, step = self._start, self._step
            for _ in range(MOST_PUBLISHES - len(bodies)):
                if (
                    not data.startswith(start, position)
                    or position + step > size
                    or data[position + step - 1] != _FRAME_END
                ):
                    break
                bodies.append(data[position + ahead : position + step - 1])
                position += step
            if position == size or not self._resize(data, position, most):
                break
        if len(bodies) == 1:
            events.append(_new_tuple(Command, (self._channel, self._method, self._properties, bodies[0])))
        elif bodies:
            events.append(Publishes(self._channel, self._method, self._properties, bodies))
        return position

    def _resize(self, data: bytes, position: int, most: int) -> bool:
        """Returns whether a known publish begins at ``position`` and has a body of another size."""
        at = position + len(self._head)
        if not data.startswith(self._head, position) or not data.startswith(self._middle, at + 8):
            return False
        body = position + len(self._start)
        if body > len(data):
            return False
        (body_size,) = _BODY_SIZE(data, at)
        step = len(self._start) + body_size + 1
        if step == self._step or not 0 < body_size <= most or _SIZE(data, body - 4)[0] != body_size:
            return False
        self._start, self._step = data[position:body], step
        return True


class PublishTemplates(dict[int, PublishTemplate]):
    """The publishes of one connection by channel, for a few channels."""

    def __missing__(self, channel: int) -> PublishTemplate:
        if len(self) >= MOST_CHANNELS:
            self.clear()
        template = self[channel] = PublishTemplate(channel)
        return template
