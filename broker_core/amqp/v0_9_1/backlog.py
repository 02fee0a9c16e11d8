"""The commands of a channel that wait until those before them are carried out."""

from __future__ import annotations

import itertools
from collections import deque

from broker_core.amqp.v0_9_1.events import ChannelFailed, Command
from broker_core.amqp.v0_9_1.methods import ChannelClose

# The order of the commands of all channels, of those that do not end at once: an error has to know what came
# before it.
_ORDER = itertools.count(1)
BACKLOG = 1_000  # commands that wait; then the connection is not read
BACKLOG_BYTES = 16 * 1024 * 1024  # of their bodies


class Backlog:
    """The commands that wait behind a commit, with their order. ``full`` is a hint to stop reading; commands
    that were read still go in. ``_size`` is the length of all their bodies.

    ``order``: of the command that waits, or is carried out after it waited; 0: it did not.
    """

    __slots__ = ("_commands", "_size", "order")

    def __init__(self) -> None:
        self.order = 0
        self._commands: deque[tuple[int, Command | ChannelFailed]] = deque()
        self._size = 0

    def __bool__(self) -> bool:
        return bool(self._commands)

    @property
    def full(self) -> bool:
        return len(self._commands) >= BACKLOG or self._size > BACKLOG_BYTES

    def append(self, command: Command | ChannelFailed) -> None:
        self._commands.append((next(_ORDER), command))
        self._size += _size(command)

    def put_back(self, command: Command | ChannelFailed) -> None:
        """Make it the next one, with the current order."""
        self.stamp()
        self._commands.appendleft((self.order, command))
        self._size += _size(command)

    def stamp(self) -> None:
        """The current command does not end at once: others may go on before it has failed."""
        if not self.order:
            self.order = next(_ORDER)

    def pop(self) -> Command | ChannelFailed:
        self.order, command = self._commands.popleft()
        self._size -= _size(command)
        return command

    def drop_behind(self, order: float) -> bool:
        """Drop what came after the command of this order; whether a channel.close may have been among it."""
        closes = False
        while self._commands and self._commands[-1][0] > order:
            command = self._commands.pop()[1]
            self._size -= _size(command)
            # behind a failed command the close has reached the table of channels alone
            closes |= type(command) is ChannelFailed or type(command.method) is ChannelClose
        return closes

    def clear(self) -> None:
        self._commands.clear()
        self._size = 0


def _size(command: Command | ChannelFailed) -> int:
    return len(command.body) if type(command) is Command else 0
