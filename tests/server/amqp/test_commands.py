"""The tables of a session: each method on an open channel has one command, and each phase an end."""

from __future__ import annotations

from typing import get_type_hints

import pytest

from broker_core.amqp.v0_9_1.backlog import BACKLOG, BACKLOG_BYTES, Backlog
from broker_core.amqp.v0_9_1.events import Command
from broker_core.amqp.v0_9_1.methods import BasicPublish, ChannelClose, Method
from broker_core.amqp.v0_9_1.states import WORK
from broker_core.server.amqp.commands import COMMANDS
from broker_core.server.amqp.commands.registry import command
from broker_core.server.amqp.session import PHASES, DroppedPublish, Move, Phase, Session


def test_each_method_that_passes_the_connection_has_a_command() -> None:
    assert set(COMMANDS) == WORK | {ChannelClose, DroppedPublish}


@pytest.mark.parametrize("kind", COMMANDS, ids=lambda kind: kind.NAME)
def test_a_command_is_registered_under_its_annotation(kind: type[Method]) -> None:
    assert get_type_hints(COMMANDS[kind])["method"] is kind


def test_two_commands_for_one_method_are_refused() -> None:
    def again(session: Session, method: BasicPublish, command: Command) -> None:
        raise AssertionError

    with pytest.raises(AssertionError, match=r"basic\.publish"):
        command(again)


def test_a_session_is_ready_again_after_each_wait_and_ends_from_every_phase() -> None:
    for phase in (Phase.waiting, Phase.committing):
        assert PHASES[phase, Move.go_on] is Phase.ready
    assert {PHASES[phase, Move.end] for phase in Phase} == {Phase.ended}
    assert {after for (phase, _), after in PHASES.items() if phase is Phase.ended} == {Phase.ended}


def test_a_backlog_keeps_the_order_and_says_when_it_is_full() -> None:
    backlog = Backlog()
    first, second = (
        Command(1, BasicPublish("", "a")),
        Command(1, BasicPublish("", "b"), b"", b"x" * BACKLOG_BYTES),
    )
    backlog.append(second)
    backlog.put_back(first)
    assert not backlog.full
    assert [backlog.pop(), backlog.pop()] == [first, second] and not backlog
    for _ in range(BACKLOG):
        backlog.append(first)
    assert backlog.full
    backlog.clear()
    backlog.append(second)
    backlog.append(second)
    assert backlog.full
