"""JSON Schema by jsonschema: whether bodies of JSON conform to the schema of their id.

Not here: the registry and the ids (``typed/registry/client.py``, ``typed/registry/wire_format.py``), columns
(``formats.py``).
Invariant: a schema refers to itself, to the references of the registry, and to the drafts of JSON Schema.
Nothing else is opened, whatever a $ref names.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, SimpleNamespace
from typing import Any

import pyarrow as pa

from broker_core.core.errors import OptionError
from connector.typed.decode_udf import OverArrays, UnsupportedSchema, encodable, fault_text, once_in_task
from connector.typed.registry.client import RegisteredSchema

Validator = Any  # of jsonschema

LONGEST_S = 30.0  # of one message; a pattern may take until the end of days
_LONGEST_PLACE, _LONGEST_MESSAGE = 100, 150  # characters


class _ValidationTimeout(BaseException):
    """A message is validated for too long. No handler of the library may catch it."""


def library() -> Any:
    """jsonschema and referencing. Raises OptionError if they are not installed."""
    try:
        import jsonschema_specifications
        import referencing
        import referencing.exceptions
        from jsonschema import exceptions, validators
        from referencing import jsonschema
    except ImportError:
        raise OptionError(
            "validate=True needs the package jsonschema", "pip install '.[json-schema]' in a checkout"
        ) from None
    return SimpleNamespace(
        validators=validators,
        refused=exceptions.SchemaError,
        unresolvable=referencing.exceptions.Unresolvable,
        resource=referencing.Resource,
        drafts=jsonschema_specifications.REGISTRY,
        specification=jsonschema.specification_with,
    )


def validator(schema: RegisteredSchema) -> Validator:
    """Draft 7 if the schema names no draft, as with Confluent. Raises UnsupportedSchema."""
    used = library()
    try:
        text = _parsed(schema.texts[-1])
        kind = _draft(text)
        kind.check_schema(text)
        default = used.specification(kind.META_SCHEMA["$schema"])
        root = used.resource.from_contents(text, default_specification=default)
        found = []
        for name, each in schema.references:
            parsed = _parsed(each)
            _draft(parsed).check_schema(parsed)
            resource = used.resource.from_contents(parsed, default_specification=default)
            found += [(name, resource), (urllib.parse.urljoin(root.id() or "", name), resource)]
        return kind(text, registry=used.drafts.with_resources(found))
    except (UnsupportedSchema, OptionError):
        raise
    except used.refused as error:
        raise UnsupportedSchema(
            f"is not a JSON Schema (at {_short(error.json_path)}: {error.message[:_LONGEST_MESSAGE]})"
        ) from None
    except Exception as error:  # of any class, for any damage
        raise UnsupportedSchema(f"is not a JSON Schema ({fault_text(error)})") from None


def _draft(schema: object) -> Any:
    """The class of validators for the draft that a schema names. Raises UnsupportedSchema."""
    name = schema.get("$schema") if isinstance(schema, dict) else None
    if name is None:
        return library().validators.Draft7Validator
    found = library().validators.validator_for({"$schema": str(name)}, default=None)
    if found is None:
        raise UnsupportedSchema(
            f"has the $schema {str(name)[:_LONGEST_PLACE]!r}, which is not a draft of JSON Schema"
        )
    return found


# -- bodies, in tasks ----------------------------------------------------------------------------------------


def checker(schemas: Mapping[int, RegisteredSchema]) -> Callable[[pa.Array, pa.Array], pa.Array]:
    """A function over ids and bodies without them: why a body is not valid (string), or null. It raises
    OptionError for one that takes too long.
    """
    checks: dict[int, Validator] = {}

    def checked(ids: pa.Array, bodies: pa.Array) -> pa.Array:
        faults: list[str | None] = []
        for number, body in zip(ids.to_pylist(), bodies.to_pylist(), strict=True):
            if body is None or number not in schemas:
                faults.append(None)
                continue
            if number not in checks:  # once in a task
                checks[number] = validator(schemas[number])
            faults.append(fault_of(checks[number], body, f"schema id {number}"))
        return pa.array(faults, pa.string())

    return checked


def _encoder(header: bytes, schema: RegisteredSchema) -> OverArrays:
    """A function over bodies (string): each behind ``header``. It raises OptionError for one that is not
    valid.
    """
    check = validator(schema)

    def encoded(bodies: pa.Array) -> pa.Array:
        found = []
        for text in bodies.to_pylist():
            body = text.encode()
            fault = fault_of(check, body, "the schema")
            if fault is not None:
                raise OptionError(
                    f"a row does not fit the JSON Schema: {fault}", "change the row, or the schema"
                )
            found.append(header + body)
        return pa.array(found, pa.binary())

    return encoded


encoder = once_in_task(_encoder)


def fault_of(check: Validator, body: bytes, schema: str) -> str | None:
    """The first keyword that ``body`` does not satisfy, and where. Raises OptionError if that lasts."""
    try:
        with _limited():
            value = _parsed(body.decode())
            error = next(check.iter_errors(value), None)
    except _ValidationTimeout:
        raise OptionError(
            f"a message is validated against {schema} for more than {LONGEST_S:.0f} s: nothing is decided",
            "look for a pattern or references in the schema that take exponential time",
        ) from None
    except library().unresolvable as missing:
        reference = encodable(missing.ref[:_LONGEST_PLACE])
        return f"{schema} refers to {reference!r}, which the registry does not have"
    except RecursionError:
        return f"the body is nested too deeply, or {schema} refers to itself without an end"
    except ValueError as malformed:
        return f"the body is not JSON ({fault_text(malformed)})"
    except Exception as strange:  # of any class, for any damage of a schema
        return f"the body cannot be validated against {schema} ({fault_text(strange)})"
    if error is None:
        return None
    message = " ".join(error.message[:_LONGEST_MESSAGE].split())
    keyword = "false" if error.validator is None else error.validator
    return encodable(f"the body is not valid at {_short(error.json_path)}: {_short(keyword)} ({message})")


def _parsed(text: str) -> Any:
    return json.loads(text, parse_constant=_no_number)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_PLACE else f"{text[: _LONGEST_PLACE - 3]}..."


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Ends what takes too long. Only in the main thread, where Spark's workers call their functions."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise _ValidationTimeout

    former = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
