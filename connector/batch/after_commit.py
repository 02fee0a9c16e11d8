"""The functions of ``after_commit``: which arguments they take, and their token.

Not here: when they are called (``apply.py``).

Invariant: a repeated call has the token of the first one, and no other call has it. It is made of the token
of the decision, which the ledger stores. A batch that is decided anew, in a data directory that was made
again or restored from an older copy, has another token: one token stands for one set of rows.
"""

from __future__ import annotations

import contextlib
import inspect
import uuid
from collections.abc import Callable, Mapping

from pyspark.sql import DataFrame

from broker_core.core.errors import OptionError
from broker_core.engine import LedgerEntry
from connector.batch.call import require_ended

AfterCommit = Callable[..., object]  # f(rows, sequence) or f(rows, sequence, token)

FORMS = "give a function f(rows, sequence), or f(rows, sequence, token)"
_TOKENS = uuid.UUID("7f0c1c1e-5c0b-5d36-9a3f-2f1c3a0b7d55")  # part of every token, so it never changes


def check_functions(functions: Mapping[str, object]) -> None:
    """Raises OptionError for a function that cannot be called with these arguments."""
    for name, function in functions.items():
        if not callable(function):
            raise OptionError(f"after_commit[{name!r}] is {function!r}", FORMS)
        try:
            signature = inspect.signature(function)
        except ValueError:  # a function of C has none: it gets rows and sequence
            continue
        try:
            signature.bind(None, 0, **_by_name(signature, ""))
        except TypeError:
            raise OptionError(f"after_commit[{name!r}] takes the arguments {signature}", FORMS) from None


def call(name: str, function: AfterCommit, rows: DataFrame, entry: LedgerEntry) -> None:
    """Calls ``function`` for a decided batch; one with a parameter ``token`` gets the token."""
    more: dict[str, str] = {}
    with contextlib.suppress(ValueError):  # a function of C
        more = _by_name(inspect.signature(function), token(name, entry))
    require_ended(function(rows, entry.sequence, **more), f"after_commit[{name!r}]")


def token(name: str, entry: LedgerEntry) -> str:
    """The token of the call of function ``name`` for a batch: the text of a UUID, 36 characters."""
    return str(uuid.uuid5(_TOKENS, f"{entry.token}/{name}"))


def _by_name(signature: inspect.Signature, token: str) -> dict[str, str]:
    """The token, if a function takes it by its name."""
    parameter = signature.parameters.get("token")
    by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return {"token": token} if parameter is not None and parameter.kind in by_name else {}
