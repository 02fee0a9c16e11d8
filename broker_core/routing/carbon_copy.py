"""Sender-selected distribution: the headers ``CC`` and ``BCC`` add routing keys (a RabbitMQ extension).

Pure. Of one message, or of all rows of a block.
Invariant: ``BCC`` never reaches a consumer. A message has no more keys than are routed in one piece.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from broker_core.core.errors import PreconditionFailed
from broker_core.message.arguments import MAX_TEXT_BYTES, type_name
from broker_core.message.properties import Properties

MAX_COPIES = 64  # RabbitMQ has no limit; each key is a search in the bindings
_HEADERS = 0x20  # in the first byte of the property flags


def has_copies(properties: bytes) -> bool:
    """Returns whether the properties may have copies and must be decoded."""
    return (
        bool(properties)
        and bool(properties[0] & _HEADERS)
        and (b"\x02CC" in properties or b"\x03BCC" in properties)
    )


def carbon_copies(properties: bytes) -> tuple[list[str], bytes]:
    """Returns the additional routing keys, and the properties to deliver. Raises PreconditionFailed for a
    value that is not a list, too many keys, or one that is too long.
    """
    if not has_copies(properties):
        return [], properties
    decoded = Properties.decode(properties)
    keys: list[str] = []
    for name in ("CC", "BCC"):
        values = decoded.headers.get(name, [])
        if not isinstance(values, list):
            found = f'{{unacceptable_type_in_header,"{name}",{type_name(values)}}}'
            raise PreconditionFailed(f"invalid message: {found}", "give a list of routing keys")
        # as in RabbitMQ: only text is a key
        keys += [value for value in values if isinstance(value, str)]
    _check(keys)
    if "BCC" in decoded.headers:
        headers = {name: value for name, value in decoded.headers.items() if name != "BCC"}
        properties = replace(decoded, headers=headers).encode()
    return keys, properties


class Copies(NamedTuple):
    """The rows of a block that have copies, in order, and for each the place of its additional keys."""

    rows: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    keys: list[tuple[str, ...]]

    def others(self, rows: int) -> npt.NDArray[np.bool_]:
        """Returns which of ``rows`` rows have none."""
        mask = np.ones(rows, dtype=np.bool_)
        mask[self.rows] = False
        return mask

    def chosen(self, mask: npt.NDArray[np.bool_]) -> Copies:
        return Copies(self.rows[mask], self.places[mask], self.keys)


def copies_of_rows(rows: pa.RecordBatch) -> tuple[Copies | None, pa.RecordBatch]:
    """Like ``carbon_copies``, for a block of MESSAGE_SCHEMA: the additional keys, and the rows to deliver."""
    properties = rows.column("properties")
    mask = pc.match_substring(properties, "CC")
    found = np.flatnonzero(mask.to_numpy(zero_copy_only=False))
    if not len(found):
        return None, rows
    encoded = properties.take(pa.array(found)).dictionary_encode()
    before = encoded.dictionary.to_pylist()
    copied = [carbon_copies(each) for each in before]
    after = [delivered for _, delivered in copied]
    if after != before:
        taken = pa.DictionaryArray.from_arrays(encoded.indices, pa.array(after, properties.type))
        changed = pc.replace_with_mask(properties, mask, taken.dictionary_decode())
        rows = rows.set_column(
            rows.schema.get_field_index("properties"), rows.schema.field("properties"), changed
        )
    numbers: dict[tuple[str, ...], int] = {}
    place_of = [numbers.setdefault(tuple(keys), len(numbers)) if keys else -1 for keys, _ in copied]
    places = np.array(place_of, np.int64)[encoded.indices.to_numpy(zero_copy_only=False)]
    if not numbers:
        return None, rows
    return Copies(found[places >= 0], places[places >= 0], list(numbers)), rows


def _check(keys: list[str]) -> None:
    if len(keys) > MAX_COPIES:
        raise PreconditionFailed(
            f"invalid message: CC and BCC have {len(keys)} routing keys, and at most {MAX_COPIES} are taken: "
            "publish it several times, or bind the queues to one key"
        )
    for key in keys:
        size = len(key.encode(errors="surrogateescape"))
        if size > MAX_TEXT_BYTES:
            raise PreconditionFailed(
                f"invalid message: a routing key in CC or BCC has {size} bytes, and at most {MAX_TEXT_BYTES} "
                "are taken: "
                "give shorter keys"
            )
