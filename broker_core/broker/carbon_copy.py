"""Sender-selected distribution: the headers ``CC`` and ``BCC`` add routing keys (a RabbitMQ extension).

Pure.
Invariant: ``BCC`` never reaches a consumer.
"""

from __future__ import annotations

from dataclasses import replace

from broker_core.broker.arguments import type_name
from broker_core.errors import PreconditionFailed
from broker_core.properties import Properties

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
    value that is not a list.
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
    if "BCC" in decoded.headers:
        headers = {name: value for name, value in decoded.headers.items() if name != "BCC"}
        properties = replace(decoded, headers=headers).encode()
    return keys, properties
