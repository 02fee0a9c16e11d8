"""Sender-selected distribution: the headers ``CC`` and ``BCC`` name more routing keys (a RabbitMQ extension).

Pure. Invariant: ``BCC`` never reaches a consumer.
"""

from __future__ import annotations

from dataclasses import replace

from broker_core.broker.arguments import type_name
from broker_core.errors import PreconditionFailed
from broker_core.properties import Properties

_HEADERS = 0x20  # in the first byte of the property flags


def has_copies(properties: bytes) -> bool:
    """Whether it is worth decoding them."""
    return (
        bool(properties)
        and bool(properties[0] & _HEADERS)
        and (b"\x02CC" in properties or b"\x03BCC" in properties)
    )


def carbon_copies(properties: bytes) -> tuple[list[str], bytes]:
    """The additional routing keys, and the properties as they are delivered. Raises PreconditionFailed for
    what is no list of keys.
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
        # as RabbitMQ: what is no text is no key
        keys += [value for value in values if isinstance(value, str)]
    if "BCC" in decoded.headers:
        headers = {name: value for name, value in decoded.headers.items() if name != "BCC"}
        properties = replace(decoded, headers=headers).encode()
    return keys, properties
