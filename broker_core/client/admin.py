"""The operator's port (``admin.py``) over Flight: each word is one channel of the broker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from broker_core.admin import (
    PAGE,
    BindingInfo,
    BrokerStatus,
    ClientInfo,
    ConsumerInfo,
    ExchangeInfo,
    HistoryPage,
    LedgerInfo,
    MessageLife,
    Preparation,
    QueueInfo,
    SkippedDamage,
    TransactionInfo,
)
from broker_core.client.broker import BrokerClient
from broker_core.client.connection import HELLO_S
from broker_core.core.errors import Unroutable


class RemoteAdmin:
    """Implements :class:`broker_core.admin.Admin`."""

    def __init__(self, client: BrokerClient) -> None:
        self._client = client

    def prepare(
        self, principal: str, apps: Sequence[str], sources: Sequence[str], targets: Sequence[str]
    ) -> list[Preparation]:
        """Nothing: the embedded broker makes what it needs, and `txmq permission` gives rights."""
        return []

    def queues(self) -> list[QueueInfo]:
        return self._client.queues()

    def exchanges(self) -> list[ExchangeInfo]:
        return self._client.exchanges()

    def bindings(self) -> list[BindingInfo]:
        return self._client.bindings()

    def consumers(self) -> list[ConsumerInfo]:
        return self._client.administer(list[ConsumerInfo], "consumers")

    def ledger(self, app_id: str = "", sequence: int = 0, limit: int = PAGE) -> list[LedgerInfo]:
        return self._client.administer(
            list[LedgerInfo], "ledger", app_id=app_id, sequence=sequence, limit=limit
        )

    def history(self, limit: int = PAGE, before: int = 0) -> list[TransactionInfo]:
        """A call reads a part of the history; at most ``PAGE`` are returned."""
        found: list[TransactionInfo] = []
        limit = min(limit, PAGE)
        while len(found) < limit:
            page: HistoryPage = self._client.administer(
                HistoryPage, "history", limit=limit - len(found), before=before
            )
            found += page.transactions
            before = page.before
            if not before:
                break
        return found

    def transaction(self, sequence: int) -> TransactionInfo:
        return self._client.administer(TransactionInfo, "transaction", sequence=sequence)

    def message(self, queue: str, offset: int) -> MessageLife:
        """A call reads a part of the history."""
        ask = partial(self._client.administer, MessageLife, "message", queue=queue, offset=offset)
        found = ask()
        while found.more:
            page = ask(at=found.more)
            found = replace(page, steps=found.steps + page.steps)
        return found

    def declare_queue(
        self, name: str, *, durable: bool = True, arguments: Mapping[str, object] | None = None
    ) -> None:
        with self._client.channel() as channel:
            channel.queue_declare(name, durable=durable, arguments=arguments)

    def delete_queue(self, name: str) -> None:
        with self._client.channel() as channel:
            channel.queue_delete(name)

    def declare_exchange(self, name: str, type: str, arguments: Mapping[str, object] | None = None) -> None:
        with self._client.channel() as channel:
            channel.exchange_declare(name, type, arguments=dict(arguments or {}))

    def delete_exchange(self, name: str) -> None:
        with self._client.channel() as channel:
            channel.exchange_delete(name)

    def bind(
        self, queue: str, exchange: str, routing_key: str = "", arguments: Mapping[str, object] | None = None
    ) -> None:
        with self._client.channel() as channel:
            channel.queue_bind(queue, exchange, routing_key, arguments)

    def unbind(
        self, queue: str, exchange: str, routing_key: str = "", arguments: Mapping[str, object] | None = None
    ) -> None:
        with self._client.channel() as channel:
            channel.queue_unbind(queue, exchange, routing_key, arguments)

    def publish(
        self, bodies: Iterable[bytes], exchange: str = "", routing_key: str = "", properties: bytes = b""
    ) -> int:
        count = 0
        with self._client.channel() as channel:
            channel.tx_select()
            for count, body in enumerate(bodies, 1):  # noqa: B007  # counts them
                channel.publish(body, exchange, routing_key, properties, mandatory=True)
            channel.tx_commit()
            returned = len(channel.returned)
        if returned:
            raise Unroutable(f"{returned} of {count} messages reached no queue", _way(exchange, routing_key))
        return count


def _way(exchange: str, routing_key: str) -> str:
    if exchange:
        return f"bind a queue to exchange {exchange!r} for routing key {routing_key!r}"
    return f"declare queue {routing_key!r}" if routing_key else "give a routing key: the name of a queue"


def status(client: BrokerClient) -> BrokerStatus:
    """The broker as a whole. Raises AccessRefused, and ConnectionFailed for one that does not answer."""
    return client.administer(BrokerStatus, "status", timeout_s=HELLO_S)


def skip_damaged(client: BrokerClient, queue: str, *, check: bool = False) -> SkippedDamage:
    """Take damaged messages out of a queue, and out of each that shares their rows. ``check``: only look.
    Raises QueueNotFound, AccessRefused, PreconditionFailed.
    """
    found: SkippedDamage = client.administer(SkippedDamage, "skip_damaged", queue=queue, check=check)
    return found


def connections(client: BrokerClient) -> list[ClientInfo]:
    """The connections to a virtual host, oldest first."""
    return client.administer(list[ClientInfo], "connections")
