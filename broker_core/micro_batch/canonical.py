"""The canonical text of a JSON value, which keys of records and comparisons use."""

from __future__ import annotations

import json


def canonical(value: object) -> str:
    """Returns one text for equal JSON values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
