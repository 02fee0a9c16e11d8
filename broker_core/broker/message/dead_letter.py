"""Dead letters: the new headers of a message, and where it goes, without the queues where it would start a
cycle.

Not here: when messages are dead-lettered (``messages.py``). ``x-death`` and ``x-first-death-*`` are
RabbitMQ's. ``x-original-transaction`` is the id of the transaction that first published the message, as in
ActiveMQ; a message published outside a transaction has none.
Invariant: any message can be copied, whatever its properties contain. The copy has properties that decode,
records this death, and has no expiration. Properties that do not decode are in the copy's header
``x-damaged-properties``, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from broker_core.broker.queue import Queue, Queues
from broker_core.broker.transaction.publish import Publish
from broker_core.core.change import InboxRow
from broker_core.core.errors import RemoteProtocolError
from broker_core.message.field_table import Timestamp
from broker_core.message.message import Message
from broker_core.message.properties import append_headers, encode_headers, expiration, rewrite_of
from broker_core.message.x_death import DAMAGED, READ, Death, Deaths, headers_after
from broker_core.routing.exchange import Exchange, reach
from broker_core.routing.search import STEPS, Search

Reason = Literal["rejected", "expired", "maxlen", "delivery_limit"]

_HEADERS, _EXPIRATION = 0x20, 0x01  # in the first byte of the property flags
# Bytes of a body that are copied while one of headers is decoded and encoded, or checked; few are not counted
_DECODED, _CHECKED, _FEW = 256, 64, 256
_COUNTED = 1024  # encoded headers that are kept
_NO_KEYS: list[str] = []
_new = tuple.__new__  # takes a third of the time of a NamedTuple's own
_READ = (*READ, "x-original-transaction")


class Copy(NamedTuple):
    """``keys`` are additional routing keys (of the header CC, if the copy keeps its own key); ``deaths`` are
    its x-death, newest first.
    """

    message: Message
    keys: list[str]
    deaths: Deaths


class DeadLetters:
    """Copies for ``exchange`` of messages that leave ``queue`` for ``reason`` at one time. ``routing_key``
    None: they keep their own.
    """

    __slots__ = (
        "_encoded", "_entries", "_exchange", "_first", "_queue", "_reason", "_routing_key", "_time",
        "_transaction_of", "search",
    )  # fmt: skip

    def __init__(
        self,
        queue: str,
        reason: Reason,
        exchange: Exchange[Queue],
        routing_key: str | None,
        now_us: int,
        transaction_of: Callable[[InboxRow], str],
    ) -> None:
        self._transaction_of = transaction_of
        self._queue = queue
        self._reason = reason
        self._exchange = exchange
        self._routing_key = routing_key
        self._time = Timestamp(max(0, now_us // 1_000_000))
        self._first: Deaths = [{"queue": queue, "reason": reason}]
        self.search = Search(refuses=False)  # of all searches so far
        # Messages of one commit with the same values share the encoded result.
        self._entries: dict[tuple[str, str, int, str | None], bytes] = {}
        self._encoded: dict[tuple[bytes, str, str, int], bytes] = {}

    def copy(self, row: InboxRow) -> Copy:
        key = row.routing_key if self._routing_key is None else self._routing_key
        keys: list[str] = _NO_KEYS
        deaths = self._first
        if _is_first_death(row.properties):
            properties = self._first_death(row)
        else:
            found: list[Any] = []
            try:
                properties = rewrite_of(
                    row.properties, lambda headers: self._headers(row, headers, found), _READ, ("expiration",)
                )
                keys, deaths = found
            except Exception:  # whatever they contain
                properties = self._wrapped(row)
        return _new(Copy, (_new(Message, (row.body, key, self._exchange.name, properties)), keys, deaths))

    def _first_death(self, row: InboxRow) -> bytes:
        """Returns the properties in the usual case: no header that a death writes exists yet."""
        same = (row.properties, row.exchange, row.routing_key, row.sequence)
        encoded = self._encoded.get(same)
        if encoded is None:
            try:
                encoded = append_headers(row.properties, self._first_entries(row))
            except Exception:
                encoded = self._wrapped(row)
            if len(self._encoded) >= _COUNTED:
                self._encoded.clear()
            self._encoded[same] = encoded
        return encoded

    def _first_entries(self, row: InboxRow) -> bytes:
        same = (row.exchange, row.routing_key, row.sequence, _expiration(row.properties))
        encoded = self._entries.get(same)
        if encoded is None:
            encoded = encode_headers(
                {name: value for name, value in self._headers(row, {}, []).items() if value is not None}
            )
            if len(self._entries) >= _COUNTED:
                self._entries.clear()
            self._entries[same] = encoded
        return encoded

    def _wrapped(self, row: InboxRow) -> bytes:
        """Puts properties that do not decode into a header of properties that do, so that a cycle of such
        messages ends and every reader can decode them.
        """
        return append_headers(b"", encode_headers({DAMAGED: row.properties}) + self._first_entries(row))

    def _headers(
        self, row: InboxRow, headers: Mapping[str, object], found: list[object]
    ) -> dict[str, object]:
        """Returns the changed headers. The additional routing keys and the deaths are added to ``found``."""
        death = Death(
            self._queue, self._reason, self._time, row.exchange, row.routing_key, _expiration(row.properties)
        )
        changed, copies, deaths = headers_after(headers, death, keeps_key=self._routing_key is None)
        # a copy belongs to the commit in which it was dead-lettered
        if "x-original-transaction" not in headers and not headers.get("x-death"):
            changed["x-original-transaction"] = self._transaction_of(row) or None
        found += (copies, deaths)
        return changed

    @property
    def widest(self) -> int:
        """Returns how many queues a copy may reach at most, or what takes as long."""
        if self._routing_key is None or self._exchange.by_headers:
            return reach(self._exchange)
        queues = self._exchange.route(self._routing_key, search=self.search)
        return max(len(queues), self.search.steps // STEPS)

    @staticmethod
    def cost_bytes(row: InboxRow) -> int:
        """Returns how many bytes of a body take as long as the headers."""
        size = len(row.properties)
        if not _is_first_death(row.properties):
            return _DECODED * size
        return 0 if size < _FEW else _CHECKED * size

    def publish(self, row: InboxRow) -> Publish | None:
        """Returns the copy and its queues; None: no queue gets it."""
        message, keys, deaths = self.copy(row)
        if keys:
            queues = self._exchange.route_all((message.routing_key, *keys), message.properties, self.search)
        else:
            queues = self._exchange.route(message.routing_key, message.properties, self.search)
        queues = self._allowed(queues, deaths)
        return _new(Publish, (message, queues, False)) if queues else None

    def _allowed(self, queues: Queues, deaths: Deaths) -> Queues:
        """Returns the ``queues`` that the copy may go to: not one where it died before, unless it was
        rejected since then (or just now).
        """
        if self._reason == "rejected":
            return queues
        if deaths is self._first:
            for queue in queues:
                if queue.name == self._queue:
                    break
            else:
                return queues
        return tuple(queue for queue in queues if not _is_cycle(queue.name, deaths))


def _is_first_death(properties: bytes) -> bool:
    """May return False because of a similar header value; then the slow path is used."""
    return not (properties and properties[0] & _HEADERS) or not (
        b"\x07x-death" in properties
        or b"\x02CC" in properties
        or b"x-first-death-" in properties
        or b"\x10x-delivery-count" in properties
        or b"\x16x-original-transaction" in properties
    )


def _expiration(properties: bytes) -> str | None:
    if not properties or not properties[0] & _EXPIRATION:
        return None
    try:
        return expiration(properties)
    except RemoteProtocolError:
        return None


def _is_cycle(queue: str, deaths: Deaths) -> bool:
    """Returns whether the message came from ``queue`` without a rejection. Newest death first."""
    for death in deaths:
        if death.get("reason") == "rejected":
            return False
        if death.get("queue") == queue:
            return True
    return False
