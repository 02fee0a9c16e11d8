"""Makes the handlers that ``txmq serve`` names, with their options. Not here: when they are called."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from types import NoneType, SimpleNamespace
from typing import get_args, get_type_hints

from broker_core.core.errors import OptionError
from broker_core.server.amqp.handlers.handler import Handler

GROUP = "txmq.handlers"  # the entry points of packages: NAME = "module:Class"
_PARSERS: Mapping[object, Callable[[str], object]] = {  # by type; all others are text
    int: int,
    float: float,
    bool: lambda text: {"true": True, "false": False}[text],
}


def load(names: Sequence[str], options: Sequence[str]) -> tuple[Handler, ...]:
    """One handler of each name: MODULE:CLASS, or an entry point. ``options``: KEY=VALUE for all that have the
    parameter KEY, NAME.KEY=VALUE for those of one name. Raises OptionError.
    """
    classes = [_class(name) for name in names]
    parameters = [inspect.signature(kind).parameters for kind in classes]
    arguments: list[dict[str, object]] = [{} for _ in names]
    takes = [f"{name} takes {', '.join(each) or 'none'}" for name, each in zip(names, parameters)]
    for option in options:
        key, equals, value = option.partition("=")
        of, _, key = key.rpartition(".")
        takers = [at for at, name in enumerate(names) if of in ("", name) and key in parameters[at]]
        if not (equals and takers):
            text = f"no handler takes --handler-option '{option}'"
            raise OptionError(text, f"write KEY=VALUE; {'; '.join(takes) or 'name one with --handler'}")
        for at in takers:
            arguments[at][key] = _parsed(option, value, _type(classes[at], parameters[at][key]))
    found: list[Handler] = []
    for name, kind, keywords, usage in zip(names, classes, arguments, takes):
        try:
            found.append(kind(**keywords))
        except (Exception, SystemExit) as error:
            text = f"handler '{name}' cannot be made: {type(error).__name__}: {error}"
            raise OptionError(text, f"change its --handler-option KEY=VALUE; {usage}") from error
    return tuple(found)


def _class(name: str) -> type[Handler]:
    target = name
    if ":" not in name:
        installed = entry_points(group=GROUP)
        target, *more = sorted({each.value for each in installed if each.name == name}) or [""]
        if more or not target:
            text = f"{'several' if more else 'no'} installed packages have a handler '{name}'"
            others = ", ".join(sorted({each.name for each in installed} - {name})) or "none"
            raise OptionError(text, f"give MODULE:CLASS, or another one that is installed: {others}")
    try:
        kind: type[Handler] = pkgutil.resolve_name(target)
        if not issubclass(kind, Handler):
            raise TypeError("it does not derive from Handler")
    except (Exception, SystemExit) as error:  # a module may run anything
        text = f"handler '{name}' cannot be loaded: {type(error).__name__}: {error}"
        module = target.partition(":")[0]
        advice = f"`python -c 'import {module}'` must work, see PYTHONPATH, and the class derive from Handler"
        raise OptionError(text, advice) from error
    return kind


def _type(kind: type[Handler], parameter: inspect.Parameter) -> object:
    """Of its annotation, without None, or of its default. Text where it has no meaning at runtime."""
    if parameter.annotation is parameter.empty:
        return type(parameter.default)
    alone = SimpleNamespace(__annotations__={"": parameter.annotation})
    try:
        hint = get_type_hints(alone, getattr(kind.__init__, "__globals__", {}))[""]
    except Exception:  # an annotation may be any expression
        return str
    others = [each for each in get_args(hint) if each is not NoneType]
    return others[0] if NoneType in get_args(hint) and len(others) == 1 else hint


def _parsed(option: str, value: str, kind: object) -> object:
    try:
        return _PARSERS.get(kind, str)(value)
    except (KeyError, ValueError):
        one = "true or false" if kind is bool else "a whole number" if kind is int else "a number"
        raise OptionError(f"--handler-option '{option}' has a wrong value", f"give {one}") from None
