"""The exchange type x-consistent-hash: each message goes to one destination, by a hash of its routing key,
of a header or of a property. The binding key is the weight of its destination.

Source: the plugin rabbitmq_consistent_hash_exchange, whose names, weights and refusals these are. Which key
goes where is our own: weighted rendezvous hashing. Each destination draws a number for the key, exponentially
distributed with its weight as the rate, and the lowest one wins. A ring of points would take memory by the
weights; this takes one entry and one hash for each destination, of which there are few (``DESTINATIONS``).
Invariant: where a key goes depends on the key and on the kinds, names and weights of what is bound; not on
the order of binding, on ids, or on the process. A destination that comes or goes moves only the keys that it
gets or had. XXH64 and the forms that are hashed never change: they have placed what waits in queues.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import log
from typing import Any

import xxhash

from broker_core.core.errors import LocalProtocolError, PreconditionFailed, RemoteProtocolError
from broker_core.message.arguments import type_name
from broker_core.message.field_table import encode_value
from broker_core.message.properties import property_of
from broker_core.routing.exchange import Binding, BindingKey, Destination, Exchange, Q
from broker_core.routing.search import Search

CONSISTENT_HASH = "x-consistent-hash"
HASH_ARGUMENTS = _HEADER, _PROPERTY = ("hash-header", "hash-property")
PROPERTIES = ("correlation_id", "message_id", "timestamp")
_AS_HASHED = f"give a header as hash-header, or {' or '.join(PROPERTIES)} as hash-property, or neither"
_AS_WEIGHT = "bind with a weight, 1 or more: how many keys go there, beside the weights of others"
DESTINATIONS = 4_096  # a key takes a step for each
_DRAW, _DRAWN = 8, 1024  # steps, and bytes that one more takes
_WEIGHT = re.compile(r"[+-]?[0-9]+")  # what Erlang takes for an integer; Python takes more
_FRACTIONS = 1 << 52  # a float has one half of each exactly


class _Share:
    """What one destination has. One with several bindings has the weight of the key that sorts first as text:
    the plugin counts the first binding, and after a restart finds them in this order.
    """

    __slots__ = ("label", "seed", "sorted", "weight")

    def __init__(self, destination: Destination) -> None:
        self.label = f"{'exchange' if isinstance(destination, Exchange) else 'queue'} {destination.name}"
        self.seed = xxhash.xxh64_intdigest(self.label.encode())
        self.sorted: list[tuple[str, str]] = []  # routing keys and arguments
        self.weight = 0

    def draw(self, hashed: bytes) -> float:
        fraction = ((xxhash.xxh64_intdigest(hashed, self.seed) >> 12) + 0.5) / _FRACTIONS  # never 0 nor 1
        return -log(fraction) / self.weight


class ConsistentHashExchange(Exchange[Q]):
    type = CONSISTENT_HASH
    matches_keys = False  # the keys under CC and BCC choose nothing here
    chooses_one = True

    def __init__(self, name: str, **properties: Any) -> None:
        super().__init__(name, **properties)
        self._shares: dict[Q | Exchange[Q], _Share] = {}
        self.matches_headers = any(each in self.arguments for each in HASH_ARGUMENTS)

    def check(self, routing_key: str, arguments: Mapping[str, object]) -> None:
        if not _WEIGHT.fullmatch(routing_key):
            raise PreconditionFailed(f'The binding key must be an integer: <<"{routing_key}">>', _AS_WEIGHT)
        if int(routing_key) < 1:
            raise PreconditionFailed("The binding key must be greater than 0", _AS_WEIGHT)

    def _added(self, key: BindingKey, binding: Binding) -> None:
        """Also completes one that was interrupted."""
        share = self._shares.get(binding.destination)
        if share is None:
            share = self._shares[binding.destination] = _Share(binding.destination)
        at = bisect_left(share.sorted, key[1:])
        if share.sorted[at : at + 1] != [key[1:]]:
            share.sorted.insert(at, key[1:])
        share.weight = int(share.sorted[0][0])

    def _removed(self, key: BindingKey, binding: Binding) -> None:
        share = self._shares.get(binding.destination)
        if share is None:
            return
        at = bisect_left(share.sorted, key[1:])
        if share.sorted[at : at + 1] == [key[1:]]:
            del share.sorted[at]
        if share.sorted:
            share.weight = int(share.sorted[0][0])
        else:
            del self._shares[binding.destination]

    def _match(self, routing_key: str, search: Search) -> Sequence[Q | Exchange[Q]]:
        # not by ``_shares``: a deleted destination, which may be there still, would get messages
        bound = [(self._shares[each], each) for each in self._by_destination]
        if not bound:
            return ()
        hashed = self._hashed(routing_key, search)
        search.pay(len(bound) * (_DRAW + len(hashed) // _DRAWN) + len(hashed))
        return (min(bound, key=lambda each: (each[0].draw(hashed), each[0].label))[1],)

    def _hashed(self, routing_key: str, search: Search) -> bytes:
        """Returns what is hashed; of a text its UTF-8, whatever it is from. All messages without the header
        or the property, or with damaged properties, are alike.
        """
        value: object = routing_key
        try:
            if _HEADER in self.arguments:
                value = search.headers.get(str(self.arguments[_HEADER]))
            elif _PROPERTY in self.arguments:
                value = property_of(search.properties, str(self.arguments[_PROPERTY]))
                value = str(value) if isinstance(value, int) else value
            return value.encode() if isinstance(value, str) else encode_value(value, "", 1)
        except (RemoteProtocolError, LocalProtocolError):
            return b""


def check_hash_arguments(arguments: Mapping[str, object]) -> None:
    """Raises PreconditionFailed, with the text of the plugin."""
    chosen = [name for name in HASH_ARGUMENTS if name in arguments]
    if len(chosen) > 1:
        raise PreconditionFailed("hash-header and hash-property are mutually exclusive", _AS_HASHED)
    for name in chosen:
        value = arguments[name]
        if not isinstance(value, str):
            raise PreconditionFailed(f"invalid type '{type_name(value)}' for arg '{name}'", _AS_HASHED)
        if name == _PROPERTY and value not in PROPERTIES:
            raise PreconditionFailed(f"Unsupported property: {value}", _AS_HASHED)
