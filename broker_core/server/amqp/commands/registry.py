"""The table of commands: the annotation of a function says which method it carries out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

from broker_core.amqp.v0_9_1.events import Command
from broker_core.amqp.v0_9_1.methods import Method
from broker_core.server.amqp.session import Session

M = TypeVar("M", bound=Method)

COMMANDS: dict[type[Method], Callable[[Session, Any, Command], None]] = {}


def command(function: Callable[[Session, M, Command], None]) -> Callable[[Session, M, Command], None]:
    """Registers ``function(session, method, command)`` for the type of ``method``.

    The command holds the content.
    """
    kind: type[Method] = get_type_hints(function)["method"]
    assert kind not in COMMANDS, f"two functions carry out {kind.NAME}"
    COMMANDS[kind] = function
    return function
