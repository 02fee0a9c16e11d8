"""Exchanges and bindings of a virtual host as rows for an operator.

Not here: who may see them (``server/flight/call_permissions.py``).
"""

from __future__ import annotations

from collections.abc import Iterable

from broker_core.admin import BindingInfo, ExchangeInfo
from broker_core.core.pieces import in_order
from broker_core.routing.exchange import Binding, Exchange, Q
from broker_core.routing.exchanges import Exchanges


def exchange_row(exchange: Exchange[Q]) -> ExchangeInfo:
    return ExchangeInfo(
        exchange.name,
        exchange.type,
        exchange.durable,
        exchange.auto_delete,
        exchange.internal,
        exchange.size,
        dict(exchange.arguments),
    )


def bindings(topology: Exchanges[Q]) -> list[tuple[str, list[Binding]]]:
    """Returns the bindings of each exchange, copied, so that they can be read without the lock."""
    return [(name, each.bindings) for name, each in topology.exchanges.items() if name]


def binding_rows(found: Iterable[tuple[str, list[Binding]]]) -> list[BindingInfo]:
    """Returns bindings as rows, by exchange and destination. Needs no lock."""
    rows = [
        BindingInfo(
            name,
            each.destination.name,
            "exchange" if isinstance(each.destination, Exchange) else "queue",
            each.routing_key,
            dict(each.arguments),
        )
        for name, listed in found
        for each in listed
    ]
    return in_order(rows, lambda row: (row.exchange, row.kind, row.destination, row.routing_key))
