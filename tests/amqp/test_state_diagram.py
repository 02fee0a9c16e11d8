"""The diagrams in ``docs/connection_states.md`` are the tables of ``states.py``; where they differ, the test says what the
page has to hold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from broker_core.amqp.v0_9_1.states import (
    CHANNEL,
    CHANNEL_IGNORES,
    CONNECTION,
    CONNECTION_IGNORES,
    WORK,
    Cause,
    ChannelState,
    ConnectionState,
    Step,
)

PAGE = Path(__file__).parents[2] / "docs" / "connection_states.md"


def diagram(table: Mapping[tuple[Enum, Cause], Enum], first: Enum, ignores: frozenset[Enum]) -> str:
    """Mermaid.

    All methods that only work on an open channel are one arrow; the end of the socket is one line of text.
    """
    arrows: dict[tuple[str, str], list[str]] = {}
    for (state, cause), after in table.items():
        if cause is Step.end:
            continue
        said = (
            cause.value if isinstance(cause, Step) else "any other command" if cause in WORK else cause.NAME
        )
        labels = arrows.setdefault((state.name, after.name), [])
        if said not in labels:
            labels.append(said)
    lines = ["stateDiagram-v2", f"    [*] --> {first.name}"]
    lines += [f"    {state} --> {after} : {', '.join(labels)}" for (state, after), labels in arrows.items()]
    lines += [
        f"    note right of {state.name} : all else is ignored" for state in type(first) if state in ignores
    ]
    return "\n".join(lines)


def test_the_diagrams_of_the_page_are_the_tables() -> None:
    found = re.findall(r"```mermaid\n(.*?)\n```", PAGE.read_text(), re.DOTALL)
    assert found == [
        diagram(CONNECTION, ConnectionState.awaiting_header, CONNECTION_IGNORES),
        diagram(CHANNEL, ChannelState.closed, CHANNEL_IGNORES),
    ]


def test_every_state_is_reached_and_left() -> None:
    assert {ConnectionState.awaiting_header, *CONNECTION.values()} == set(ConnectionState)
    assert {state for state, _ in CONNECTION} == set(ConnectionState) - {ConnectionState.closed}
    assert set(CHANNEL.values()) == {state for state, _ in CHANNEL} == set(ChannelState)
