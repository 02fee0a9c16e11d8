"""The channels of one connection: which are open, and what may come on each (the table is in ``states.py``).

Not here: what a command does.
Invariant: a channel that is not in ``states`` is closed.
"""

from __future__ import annotations

import re
from functools import partial

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.decoder import Decoder
from broker_core.amqp.v0_9_1.encoder import Outgoing
from broker_core.amqp.v0_9_1.events import Command
from broker_core.amqp.v0_9_1.states import ChannelState, Step, channel_step
from broker_core.core.checks import MAX_NAME_BYTES
from broker_core.core.errors import ChannelError

_NAMES = re.compile(r"(?<![^\s(])'[^']{13,}'|(?<!\S)(?!\[TXMQ_)\S{13,}")  # of queues, users, files and so on


class ChannelTable:
    """``states``: by number. Answers that concern a channel which is not open go to ``out``."""

    __slots__ = ("_decoder", "_out", "states")

    def __init__(self, out: Outgoing, decoder: Decoder) -> None:
        self._out = out
        self._decoder = decoder
        self.states: dict[int, ChannelState] = {}

    @property
    def opened(self) -> int:
        return sum(state is ChannelState.open for state in self.states.values())

    def take(self, command: Command) -> bool:
        """Whether a command is to be carried out; else it is done, or ignored.

        Raises ChannelNumberError, CommandInvalid.
        """
        number, method = command.channel, command.method
        before = self.states.get(number, ChannelState.closed)
        after = channel_step(before, type(method))
        if after is ChannelState.closed:
            del self.states[number]
        else:
            self.states[number] = after
        if before is ChannelState.closing and isinstance(method, m.ChannelClose):
            self._out.send(number, m.ChannelCloseOk())  # both closed at once; the answer to ours still comes
        return before is ChannelState.open or before is ChannelState.closed

    @property
    def unanswered(self) -> bool:
        """The client has closed one, and has no answer."""
        return ChannelState.ending in self.states.values()

    def reopen(self, number: int) -> None:
        """The client's channel.close is not carried out."""
        if self.states[number] is ChannelState.ending:
            self.states[number] = ChannelState.open

    def fail(self, number: int) -> None:
        """Ignore what comes on it from now on: ``close`` is called when what came before is answered."""
        self._decoder.discard(number)
        self.states[number] = channel_step(self.states[number], Step.fail)

    def close(self, number: int, error: ChannelError, ids: tuple[int, int] = (0, 0)) -> str:
        """Send channel.close, and ignore what comes on the channel until close-ok. Returns the reply text.

        ``ids``: class and method that caused it.
        """
        self._decoder.discard(number)
        before = self.states[number]
        self.states[number] = channel_step(before, Step.close)
        text = reply_text(error.reply_name, error.summary)
        self._out.send(number, m.ChannelClose(error.reply_code, text, *ids))
        if before is ChannelState.ending:
            self._out.send(number, m.ChannelCloseOk())
        return text

    def ended(self, number: int) -> None:
        """All that came on it is done: a channel.close of the client is answered."""
        if self.states.pop(number, None) is ChannelState.ending:
            self._out.send(number, m.ChannelCloseOk())


def reply_text(name: str, summary: str) -> str:
    """At most 255 bytes, as a short string has. Long names give way, so that the text behind them stays.

    It has no advice beside RabbitMQ's own texts; what RabbitMQ does not say has it in the summary.
    """
    for length in (MAX_NAME_BYTES, 48, 24, 12):
        summary = _NAMES.sub(partial(_shorten, length), summary)
        text = f"{name} - {summary}"
        if len(text.encode(errors="surrogateescape")) <= 255:
            return text
    return text.encode(errors="surrogateescape")[:255].decode(errors="ignore")


def _shorten(length: int, found: re.Match[str]) -> str:
    text = found.group()
    return text if len(text) <= length else f"{text[: length // 2]}...{text[-(length // 2) :]}"
