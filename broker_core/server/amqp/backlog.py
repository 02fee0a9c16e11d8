"""The commands of one channel that wait behind a commit.

Invariant: ``size`` is the length of all their bodies.
"""

from __future__ import annotations

from collections import deque

from broker_core.amqp.v0_9_1.events import Command

COMMANDS = 1_000  # waiting; then the connection is not read
BYTES = 16 * 1024 * 1024  # of their bodies


class Backlog:
    """First in, first out. ``full`` is a hint to stop reading; commands that were read still go in."""

    __slots__ = ("_commands", "_size")

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._size = 0

    def __bool__(self) -> bool:
        return bool(self._commands)

    @property
    def full(self) -> bool:
        return len(self._commands) >= COMMANDS or self._size > BYTES

    def append(self, command: Command) -> None:
        self._commands.append(command)
        self._size += len(command.body)

    def put_back(self, command: Command) -> None:
        """Make it the next one."""
        self._commands.appendleft(command)
        self._size += len(command.body)

    def pop(self) -> Command:
        command = self._commands.popleft()
        self._size -= len(command.body)
        return command

    def clear(self) -> None:
        self._commands.clear()
        self._size = 0
