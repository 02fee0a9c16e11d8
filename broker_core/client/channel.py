"""A channel of a broker in another process: the words of the local channel, each one round trip.

Not here: what the words do (``node/local.py``), and the lease (``server/flight/channels.py``).

Invariant: the calls of a channel are numbered and sent one at a time, so a call that is sent again after a
lost reply is done once. A channel does not survive its broker: what it had not committed is rolled back
there, and ConnectionFailed is raised. A commit has a token, so its outcome is known even then.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from broker_core.client.connection import FlightConnection
from broker_core.core import errors
from broker_core.core.checks import check_call, checked_calls
from broker_core.flight import contract
from broker_core.message import spans
from broker_core.message.message import Delivery, Message
from broker_core.message.properties import Properties

T = TypeVar("T")

KEEPALIVE_S = 20.0
PUBLISHES = 1_000  # of a transaction, sent together
PUBLISH_BYTES = 1024 * 1024

_open: weakref.WeakSet[RemoteChannel] = weakref.WeakSet()
_keeper: threading.Thread | None = None
_keeper_lock = threading.Lock()


@checked_calls(but=("publish",))
class RemoteChannel:
    """For one thread at a time: calls of two are put in some order. Close it, or use it in a ``with``."""

    def __init__(self, connection: FlightConnection) -> None:
        self._connection = connection
        self.returned: list[Message] = []  # mandatory messages that reached no queue
        self.id = os.urandom(16).hex()
        self._number = 0
        self._lock = threading.Lock()
        self._closed: type[errors.TxmqError] | None = None  # what calls after the end raise
        self._transactional = False
        self._waiting: list[dict[str, object]] = []  # publishes of the transaction that are not sent yet
        self._waiting_bytes = 0
        self._pid = os.getpid()
        self._opened_us: int = contract.decode(int, self._send("open"))
        _keep(self)

    def __enter__(self) -> RemoteChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- topology --------------------------------------------------------------------------------------------
    def exchange_declare(
        self,
        exchange: str,
        type: str = "direct",
        *,
        durable: bool = True,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: Mapping[str, object] | None = None,
    ) -> None:
        options = {"durable": durable, "auto_delete": auto_delete, "internal": internal}
        self._do("exchange_declare", exchange=exchange, type=type, arguments=arguments, **options)

    def exchange_delete(self, exchange: str, *, if_unused: bool = False) -> None:
        self._do("exchange_delete", exchange=exchange, if_unused=if_unused)

    def queue_declare(
        self,
        queue: str = "",
        *,
        durable: bool = True,
        exclusive: bool = False,
        auto_delete: bool = False,
        arguments: Mapping[str, object] | None = None,
        passive: bool = False,
    ) -> str:
        """The queue's name; "" lets the broker choose one. ``passive`` only looks."""
        options = {"durable": durable, "exclusive": exclusive, "auto_delete": auto_delete, "passive": passive}
        return self._call("queue_declare", str, queue=queue, arguments=arguments, **options)

    def queue_bind(
        self, queue: str, exchange: str, routing_key: str = "", arguments: Mapping[str, object] | None = None
    ) -> None:
        self._do("queue_bind", queue=queue, exchange=exchange, routing_key=routing_key, arguments=arguments)

    def queue_unbind(
        self, queue: str, exchange: str, routing_key: str = "", arguments: Mapping[str, object] | None = None
    ) -> None:
        self._do("queue_unbind", queue=queue, exchange=exchange, routing_key=routing_key, arguments=arguments)

    def queue_delete(self, queue: str, *, if_unused: bool = False, if_empty: bool = False) -> int:
        """How many messages were deleted with it."""
        return self._call("queue_delete", int, queue=queue, if_unused=if_unused, if_empty=if_empty)

    def queue_purge(self, queue: str) -> int:
        """How many messages were dropped; messages that a channel holds stay."""
        return self._call("queue_purge", int, queue=queue)

    # -- messages --------------------------------------------------------------------------------------------
    def publish(
        self,
        body: bytes,
        exchange: str = "",
        routing_key: str = "",
        properties: bytes | Properties = b"",
        *,
        mandatory: bool = False,
    ) -> None:
        """Outside a transaction the message is durable when this returns.

        Mandatory messages that reach no queue are in ``returned``. In a transaction publishes are sent
        together, so an error may come with a later call. Then the transaction is rolled back and the channel
        closed: messages after one that failed are not committed without it.
        """
        encoded = properties.encode() if isinstance(properties, Properties) else properties
        message: dict[str, object] = {"body": body, "exchange": exchange, "routing_key": routing_key}
        message |= {"properties": encoded, "mandatory": mandatory}
        plain = type(body) is type(encoded) is bytes and type(exchange) is type(routing_key) is str
        if not plain or len(routing_key) >= 64:
            if not isinstance(body, (bytes, bytearray, memoryview)):
                raise errors.OptionError(f"a body must be bytes, not {type(body).__name__}; encode it first")
            check_call("publish", RemoteChannel.publish, message)
            message["body"] = bytes(body)
        if not self._transactional:
            self.returned += self._call("publish", list[Message], **message)
            return
        with self._lock:
            self._check_open()
            self._waiting.append(message)
            self._waiting_bytes += len(body)
            if len(self._waiting) >= PUBLISHES or self._waiting_bytes >= PUBLISH_BYTES:
                self._flush()

    def get(self, queue: str, *, no_ack: bool = False) -> Delivery | None:
        """The next message of ``queue``, None if it has none."""
        return self._call("get", Delivery, queue=queue, no_ack=no_ack)

    def get_at(self, queue: str, offsets: Sequence[int]) -> list[Delivery]:
        """The messages at these offsets (at most 1,000) that are ready; it may end early."""
        return self._call("get_at", list[Delivery], queue=queue, offsets=list(offsets))

    def ack(self, tag: int = 0, *, multiple: bool = False) -> None:
        self._do("ack", tag=tag, multiple=multiple)

    def nack(self, tag: int = 0, *, multiple: bool = False, requeue: bool = True) -> None:
        self._do("nack", tag=tag, multiple=multiple, requeue=requeue)

    def reject(self, tag: int, *, requeue: bool = True) -> None:
        self._do("reject", tag=tag, requeue=requeue)

    def recover(self) -> int:
        """Requeue what is delivered and not acked, also not in the open transaction; how many."""
        return self._call("recover", int)

    # -- transactions ----------------------------------------------------------------------------------------
    def tx_select(self) -> None:
        self._do("tx_select")
        self._transactional = True

    def tx_commit(self, token: str = "", *, routed: bool = False) -> None:
        """Commit all of it, or nothing; ``token`` names the commit for :meth:`BrokerClient.committed`.
        ``routed``: only if every mandatory message reaches a queue. Otherwise it raises Unroutable.
        If its answer is lost, the call's number finds it, and the next call raises ConnectionFailed. This one
        does if nothing was committed or nobody can be asked, or UnknownOutcome if the broker forgot it.
        """
        with spans.span("txmq.commit", {}, "PRODUCER"):
            more, taken = self._last("tx_commit", int, 0, token=token, routed=routed), 0
        with contextlib.suppress(errors.ConnectionFailed):  # it is committed: the next call raises it
            while more:  # a block at a time
                more = contract.decode(list[Message], self._send("take_returned", taken=taken))
                self.returned += more
                taken += len(more)

    def _last(self, word: str, kind: type[T], lost: T, **arguments: object) -> Any:
        """Commit or prepare. ``lost``: its answer, if that was lost and it took place."""
        try:
            return self._call(word, kind, **arguments)
        except errors.ConnectionFailed:
            if not self._took_place():
                raise
            return lost
        except (KeyboardInterrupt, SystemExit):
            self.close()  # the token tells the outcome; nothing else may enter the same transaction
            raise

    def tx_timeout(self, seconds: float) -> None:
        """Limit the time of this transaction and of the next ones of the channel, from their first command,
        but not beyond the broker's ``--transaction-time``; 0: that alone. One that is open for longer is
        rolled back and the channel closed, within 5 seconds: the next call raises TransactionState, or a
        commit or prepare that comes first TransactionTooLarge. Raises OptionError for an invalid time.
        """
        self._do("tx_timeout", seconds=seconds)

    def tx_current(self) -> str:
        """The id of the open transaction, as ``txmq connection channels --open`` lists it and the log names
        it. The next transaction has another one, also after a rollback.
        """
        return self._call("tx_current", str)

    def tx_rollback(self) -> None:
        with self._lock:
            self._waiting, self._waiting_bytes = [], 0
        self._do("tx_rollback")

    def prepare(self, xid: str) -> str:
        """Make the transaction durable and transferable: ``prepared``, or ``read_only`` if it was empty."""
        return str(self._last("prepare", str, "prepared", xid=xid))

    def _took_place(self) -> bool:
        """Whether the last call, whose answer was lost, has committed or prepared. Raises UnknownOutcome."""
        arguments = {"channel": self.id, "number": self._number, "since_us": self._opened_us}
        answer = self._connection.call("admin.call_took_place", contract.encode(arguments))
        return bool(contract.decode(bool, answer))

    # -- lease and close -------------------------------------------------------------------------------------
    def keepalive(self) -> None:
        """Renew the lease; a thread of this module does it for every open channel."""
        if not self._closed and self._pid == os.getpid():
            self._send("keepalive")

    def close(self) -> None:
        """Roll back, and requeue what was delivered and not settled. Twice is fine."""
        with self._lock:
            if not self._closed and self._pid == os.getpid():
                self._end()

    def _end(self) -> None:
        self._closed = errors.TransactionState
        _open.discard(self)
        # gone with its broker, or it will end with its lease
        with contextlib.suppress(errors.ConnectionFailed):
            self._send("close")

    # -- calls -----------------------------------------------------------------------------------------------
    def _do(self, word: str, **arguments: object) -> None:
        self._call(word, type(None), **arguments)

    def _call(self, word: str, kind: type[T], **arguments: object) -> T:
        with self._lock:
            self._check_open()
            if self._waiting:
                self._flush()
            answer: T = contract.decode(kind, self._numbered(word, arguments))
            return answer

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed("the channel is closed; open another")

    def _flush(self) -> None:
        """Send the publishes that wait. If one fails, the channel ends: later ones depend on it."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        try:
            self._numbered("publish_all", {"messages": waiting})
        except BaseException:  # even if Ctrl-C interrupts it
            self._end()
            raise

    def _numbered(self, word: str, arguments: dict[str, object]) -> object:
        """Make the next call. If its answer is lost for good, the channel ends: its effect is unknown."""
        call = contract.encode(contract.ChannelCall(self.id, self._number + 1, arguments))
        self._number += 1
        try:
            return self._connection.call(f"channel.{word}", call)
        except errors.ConnectionFailed:
            self._closed = errors.ConnectionFailed  # what the broker may still hold of it ends with its lease
            _open.discard(self)
            raise
        except (KeyboardInterrupt, SystemExit):  # the broker may not have got this number
            self._end()
            raise

    def _send(self, word: str, **arguments: object) -> object:
        call = contract.ChannelCall(self.id, 0, arguments)
        return self._connection.call(f"channel.{word}", contract.encode(call))


def _keep(channel: RemoteChannel) -> None:
    """Renew the leases of the open channels for as long as there are any in this process."""
    global _keeper
    with _keeper_lock:
        _open.add(channel)
        if _keeper is None or not _keeper.is_alive():
            _keeper = threading.Thread(target=_keep_all, name="txmq-channel-keeper", daemon=True)
            _keeper.start()


def _keep_all() -> None:
    wait = threading.Event()
    while not wait.wait(KEEPALIVE_S):
        for channel in list(_open):
            with contextlib.suppress(errors.TxmqError):  # the next call of the channel raises it
                channel.keepalive()
