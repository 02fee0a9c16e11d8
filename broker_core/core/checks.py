"""Checks that arguments match their annotations: one checker for every interface, in process and over Flight.

It checks the contents of containers, unions, Literals, dataclasses and NamedTuples. A whole number has 64
bits (``True`` is none), a text can be encoded and is not longer than allowed there, a mapping has texts as
keys.

Not here: what a value means (``broker/``).
Invariant: a call whose arguments pass has no value of a type that its code does not expect; one that is
refused has changed nothing.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import (
    Annotated,
    Any,
    Literal,
    NoReturn,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from broker_core.core.errors import OptionError

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C")
Check = Callable[[object], None]

MAX_NAME_BYTES = 255  # AMQP's short string: names, routing keys, xids
MAX_TEXT_BYTES = 1024 * 1024
MAX_DEPTH = 72  # as tables of AMQP, within definitions
# arguments and fields that are names wherever they occur: of AMQP, and the ids of what outlives a call
NAMES = frozenset(
    {"queue", "queues", "logs", "exchange", "routing_key", "type", "xid"}
    | {"app_id", "query_id", "token", "channel", "branch", "user", "vhost"}
)

NAME = "name"
Name = Annotated[str, NAME]  # of at most MAX_NAME_BYTES
UNSIGNED = "unsigned"
Unsigned = Annotated[int, UNSIGNED]  # of 64 bits: a checksum, an inode
JSON = "json"
Json = Annotated[object, JSON]  # stored as JSON: no bytes, no objects

_INT = range(-(1 << 63), 1 << 63)
_WHOLE = range(1 << 64)


def assert_never(value: NoReturn) -> NoReturn:
    """Replaces ``typing.assert_never`` of Python 3.11: mypy refuses a branch that a value can reach."""
    raise AssertionError(f"unexpected value: {value!r}")


class Mismatch(Exception):
    """``value``, found at ``path``, is not what is ``allowed`` there."""

    def __init__(self, allowed: str, value: object) -> None:
        super().__init__(allowed)
        self.path = ""
        self.allowed = allowed
        self.value = value

    def within(self, step: str) -> Mismatch:
        self.path = step + self.path
        return self


def refused(call: str, argument: str, wrong: Mismatch) -> OptionError:
    """Returns an error with the call, the argument, its value and what is allowed."""
    return OptionError(
        f"{call}: argument '{argument}{wrong.path}' must be {wrong.allowed}, not {show(wrong.value)}"
    )


def show(value: object) -> str:
    kind = type(value).__name__
    if value is None:
        return "None"
    if isinstance(value, str):
        size = len(value.encode(errors="surrogatepass"))
        return f"{kind} {value!a}" if len(value) <= 40 else f"{kind} {value[:40]!a}... of {size} bytes"
    if isinstance(value, (bool, int, float)) and (not isinstance(value, int) or value.bit_length() < 200):
        return f"{kind} {value!r}"
    return kind if kind[:1].isupper() else f"a {kind}"


# -- the annotations -----------------------------------------------------------------------------------------


def check_text(value: object, limit: int = MAX_TEXT_BYTES) -> None:
    if not isinstance(value, str):
        raise Mismatch("text", value)
    if value.isascii():
        size = len(value)
    else:
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            raise Mismatch("text that can be encoded as UTF-8, without lone surrogates", value) from None
    if size > limit:
        raise Mismatch(f"text of at most {limit} bytes", value)


def _check_name(value: object) -> None:
    check_text(value, MAX_NAME_BYTES)


def _check_int(value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value not in _INT:
        raise Mismatch("a whole number of 64 bits", value)


def _check_unsigned(value: object) -> None:
    if type(value) is not int or value not in _WHOLE:
        raise Mismatch("a whole number of 64 bits, 0 or more", value)


def _check_bool(value: object) -> None:
    if value is not True and value is not False:
        raise Mismatch("True or False", value)


def _check_float(value: object) -> None:
    if type(value) not in (int, float) or value != value or (type(value) is int and value not in _INT):
        raise Mismatch("a number", value)


def _check_bytes(value: object) -> None:
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise Mismatch("bytes", value)


def _check_none(value: object) -> None:
    if value is not None:
        raise Mismatch("None", value)


def _check_any(value: object, depth: int = 0) -> None:
    """Checks a value of a table: its texts, numbers and keys. Objects of other classes are not checked
    here.
    """
    if isinstance(value, str):
        check_text(value)
    elif type(value) is int:
        _check_int(value)
    elif isinstance(value, (Mapping, list, tuple)):
        if depth > MAX_DEPTH:
            raise Mismatch(f"nested at most {MAX_DEPTH} deep", value)
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            try:
                if isinstance(value, Mapping):
                    check_text(key)
                _check_any(item, depth + 1)
            except Mismatch as wrong:
                raise wrong.within(f"[{key!a}]") from None


def _check_json(value: object) -> None:
    _check_any(value)
    if not _is_json(value):
        raise Mismatch("text, a number, True, False, None, or a list or dict of these", value)


def _is_json(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_json, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_json, value))
    return value is None or isinstance(value, (str, int, float))


_SCALARS: dict[object, Check] = {
    str: check_text,
    int: _check_int,
    bool: _check_bool,
    float: _check_float,
    bytes: _check_bytes,
    None: _check_none,
    type(None): _check_none,
    object: _check_any,
    Any: _check_any,
}


_ANNOTATED: dict[object, Check] = {UNSIGNED: _check_unsigned, JSON: _check_json, NAME: _check_name}


@cache
def check_of(kind: object) -> Check:
    """Returns the checker of an annotation; it raises Mismatch."""
    if kind in _SCALARS:
        return _SCALARS[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        inner = (_ANNOTATED[each] for each in arguments[1:] if each in _ANNOTATED)
        return next(inner, None) or check_of(arguments[0])
    if origin is Literal:
        return _literal(arguments)
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
        return _fixed(tuple(map(check_of, arguments)))
    if origin in (tuple, list, collections.abc.Sequence):
        return _sequence(check_of(arguments[0]))
    if origin in (dict, collections.abc.Mapping):
        return _mapping(*map(check_of, arguments))
    if origin in (collections.abc.Iterable, collections.abc.Iterator):
        return _iterable
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")):
        return _fields(kind)
    if isinstance(kind, type):
        return functools.partial(_instance, kind)
    raise TypeError(f"no check for the annotation {kind!r}")


def _literal(options: tuple[object, ...]) -> Check:
    allowed = " or ".join(map(repr, options))

    def check(value: object) -> None:
        if not any(
            value is option or (type(value) is type(option) and value == option) for option in options
        ):
            raise Mismatch(allowed, value)

    return check


def _union(kinds: tuple[object, ...]) -> Check:
    checks = [check_of(kind) for kind in kinds]

    def check(value: object) -> None:
        allowed: list[str] = []
        deeper: Mismatch | None = None
        for each in checks:
            try:
                return each(value)
            except Mismatch as wrong:
                allowed.append(wrong.allowed)
                if wrong.path:
                    deeper = wrong  # of the right kind, with a wrong value inside
        raise deeper or Mismatch(" or ".join(allowed), value)

    return check


def _fixed(checks: tuple[Check, ...]) -> Check:
    def check(value: object) -> None:
        if not isinstance(value, (tuple, list)) or len(value) != len(checks):
            raise Mismatch(f"a list of {len(checks)}", value)
        for place, (each, item) in enumerate(zip(checks, value, strict=True)):
            _within(each, item, f"[{place}]")

    return check


def _sequence(item_check: Check) -> Check:
    def check(value: object) -> None:
        if not isinstance(value, collections.abc.Sequence) or isinstance(
            value, (str, bytes, bytearray, memoryview)
        ):
            raise Mismatch("a list", value)
        for place, item in enumerate(value):
            _within(item_check, item, f"[{place}]")

    return check


def _mapping(key_check: Check, item_check: Check) -> Check:
    def check(value: object) -> None:
        if not isinstance(value, Mapping):
            raise Mismatch("a dict", value)
        for key, item in value.items():
            step = f"[{key!a}]" if not isinstance(key, str) or len(key) <= MAX_NAME_BYTES else "[...]"
            _within(key_check, key, step)
            _within(item_check, item, step)

    return check


def _iterable(value: object) -> None:
    if not isinstance(value, collections.abc.Iterable) or isinstance(value, (str, bytes)):
        raise Mismatch("iterable", value)


def _fields(kind: type) -> Check:
    hints = hints_of(kind)

    @cache
    def checks() -> list[tuple[str, Check]]:  # late, because classes may name each other
        return [(name, place_check(name, hint)) for name, hint in hints.items()]

    def check(value: object) -> None:
        if not isinstance(value, kind):
            raise Mismatch(f"a {kind.__name__}", value)
        for name, each in checks():
            _within(each, getattr(value, name), f".{name}")

    return check


def _instance(kind: type, value: object) -> None:
    if not isinstance(value, kind):
        raise Mismatch(f"a {kind.__name__}", value)


def _within(check: Check, value: object, step: str) -> None:
    try:
        check(value)
    except Mismatch as wrong:
        raise wrong.within(step) from None


@cache
def _hints(kind: object) -> dict[str, object]:
    return get_type_hints(kind, include_extras=True)


def hints_of(kind: object) -> dict[str, object]:
    """Returns the annotations of a class, function or method, by name."""
    return _hints(getattr(kind, "__func__", kind))


def place_check(name: str, kind: object) -> Check:
    """Returns the checker of an argument or field: names are shorter than other texts."""
    if name in NAMES and kind is str:
        return _check_name
    if name in NAMES and get_origin(kind) in (list, collections.abc.Sequence) and get_args(kind) == (str,):
        return _sequence(_check_name)
    return check_of(kind)


# -- calls ---------------------------------------------------------------------------------------------------


@cache
def checks_of(function: Callable[..., object]) -> dict[str, Check]:
    """Returns the checkers by argument, without ``self``, in the order of the signature."""
    hints = hints_of(function)
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    return {name: place_check(name, hints[name]) for name in names}


@cache
def _required(function: Callable[..., object]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    return tuple(
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.name != "self"
    )


def check_call(call: str, function: Callable[..., object], arguments: Mapping[str, object]) -> None:
    """Checks that ``arguments`` fit the signature of ``function``. Raises OptionError."""
    function = getattr(function, "__func__", function)
    checks = checks_of(function)
    for name in arguments:
        if name not in checks:
            raise OptionError(f"{call} has no argument {name!a}; it takes {', '.join(checks) or 'none'}")
    for name in _required(function):
        if name not in arguments:
            raise OptionError(f"{call}: argument '{name}' is missing")
    for name, value in arguments.items():
        try:
            checks[name](value)
        except Mismatch as wrong:
            raise refused(call, name, wrong) from None


def checked(operation: Callable[P, T]) -> Callable[P, T]:
    """Makes a method check its arguments before it begins. Raises OptionError."""
    place: list[tuple[str, Check]] = []
    by_name: dict[str, Check] = {}

    @functools.wraps(operation)
    def call(*args: P.args, **keywords: P.kwargs) -> T:
        if len(args) == 1 and not keywords:
            return operation(*args, **keywords)
        if not by_name:
            by_name.update(checks_of(operation))
            place.extend(by_name.items())
        try:
            name = ""
            for (name, check), value in zip(place, args[1:], strict=False):  # noqa: B007
                check(value)
            for name, value in keywords.items():
                if name in by_name:  # otherwise the call itself raises
                    by_name[name](value)
        except Mismatch as wrong:
            raise refused(operation.__name__, name, wrong) from None
        return operation(*args, **keywords)

    return call


def checked_calls(*, but: tuple[str, ...] = ()) -> Callable[[type[C]], type[C]]:
    """Makes all public methods of a class :func:`checked`, except ``but``: frequent calls that check their
    arguments themselves.
    """

    def decorate(kind: type[C]) -> type[C]:
        for name, member in list(vars(kind).items()):
            if inspect.isfunction(member) and not name.startswith("_") and name not in but:
                setattr(kind, name, checked(member))
        return kind

    return decorate
