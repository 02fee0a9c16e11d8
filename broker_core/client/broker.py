"""BrokerClient: the engine's port over Flight, and the words of channels and of the operator, from any
process.

Not here: connecting (``connection.py``), finding or starting the broker (``starter.py``), reading and staging
rows (``read.py``, ``stage.py``), the contract (``contract.py``).

Invariant: a call returns only what the broker has answered. Until ``reconnect_s`` is over, a broken
connection or a restarted broker only delays a call. Each row is read once and staged once, even if the
connection breaks.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import pyarrow as pa

from broker_core.admin import BindingInfo, ChannelInfo, ExchangeInfo, PreparedInfo, QueueInfo
from broker_core.client.channel import RemoteChannel
from broker_core.client.connection import CONNECT_S, RECONNECT_S, FlightConnection
from broker_core.client.read import read, read_branches, read_slices
from broker_core.client.stage import stage
from broker_core.core.address import Address, parse_address
from broker_core.core.checks import checked_calls
from broker_core.core.credentials import Credentials
from broker_core.core.xa.recover_info import RecoverInfo
from broker_core.engine import (
    AppOperator,
    BranchHeader,
    Engine,
    OnNewCheckpoint,
    Opened,
    ReadTicket,
    Sink,
    Slice,
    Source,
    StagedBranch,
)
from broker_core.flight import contract

P = ParamSpec("P")
T = TypeVar("T")

_clients: dict[tuple[int, Address], BrokerClient] = {}
_clients_lock = threading.Lock()


def connect(
    *,
    url: str | None = None,
    data: str | os.PathLike[str] | None = None,
    credentials: Credentials | None = None,
    vhost: str | None = None,
    reached: bool = False,
    connect_s: float = CONNECT_S,
) -> BrokerClient:
    """Returns the client of this process for an address. There is one per address; its first call connects.

    ``credentials``: user and password, token, and files for TLS. ``vhost``: with ``data``; a url has it as
    its path. ``reached``: another process has reached this broker, so this client waits for it as after a
    lost connection. ``connect_s``: as in :class:`BrokerClient`, for a new client. Raises OptionError.
    """
    address = parse_address(url, data, credentials, vhost)
    key = (os.getpid(), address)
    with _clients_lock:
        client = _clients.get(key)
        if client is None or client.closed:
            first_s = RECONNECT_S if reached else connect_s
            client = _clients[key] = _client_of(address, RECONNECT_S, first_s, map_files=True)
        return client


def _after_fork() -> None:
    global _clients_lock
    _clients_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _word(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A word of the port as a call of the broker, with the signature and the text that the port gives it."""
    name, signature = method.__name__, inspect.signature(method)

    @functools.wraps(method)
    def call(client: BrokerClient, /, *positional: P.args, **keywords: P.kwargs) -> T:
        bound = signature.bind(client, *positional, **keywords).arguments
        answer: T = client._call(name, **{word: bound[word] for word in bound if word != "self"})
        return answer

    return call


@checked_calls(but=("administer",))
class BrokerClient:
    """A broker in another process: implements :class:`broker_core.engine.Engine`; thread-safe and picklable.

    ``url``: ``txmq://host:port[/vhost]``, or ``txmqs://`` for TLS. ``data``: a data directory instead, whose
    broker is started if none runs, with ``vhost``. ``credentials``: the login and the files for TLS. The
    first call connects; until then the process may fork. ``connect_s``: seconds to wait for a broker that
    has never answered; ``reconnect_s``: for one that has. ``map_files`` False: read over Flight only."""

    def __init__(
        self,
        url: str | None = None,
        *,
        data: str | os.PathLike[str] | None = None,
        credentials: Credentials | None = None,
        vhost: str | None = None,
        reconnect_s: float = RECONNECT_S,
        connect_s: float = CONNECT_S,
        map_files: bool = True,
    ) -> None:
        self._set_up(parse_address(url, data, credentials, vhost), reconnect_s, connect_s, map_files)

    def _set_up(self, address: Address, reconnect_s: float, connect_s: float, map_files: bool) -> None:
        self._arguments = (address, reconnect_s, connect_s, map_files)
        self._map_files = map_files
        self.address = address
        self.closed = False
        self._connection = FlightConnection(address, reconnect_s, connect_s)

    def __reduce__(self) -> tuple[object, ...]:
        return (_client_of, self._arguments)

    def __enter__(self) -> BrokerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"BrokerClient({str(self.address)!r})"

    def close(self) -> None:
        """Closes the connection; channels are rolled back by the broker. It may be repeated."""
        self.closed = True
        self._connection.close()

    def _call(self, method: str, **arguments: object) -> Any:
        answer = self._connection.call(f"engine.{method}", contract.encode(arguments))
        return contract.decode(contract.answer_type(method), answer)

    identity = _word(Engine.identity)

    # -- logs ------------------------------------------------------------------------------------------------
    logs = _word(Source.logs)
    log_ids = _word(Source.log_ids)
    available = _word(Source.available)
    offsets = _word(Source.offsets)

    _grown = _word(Source.wait)

    def wait(self, queues: Sequence[str], ends: Mapping[str, int], timeout_s: float) -> bool:
        """As in the port; the server keeps one call for at most WAIT_S, so a long wait is several."""
        while True:
            grown = self._grown(queues, ends, min(timeout_s, contract.WAIT_S))
            timeout_s -= contract.WAIT_S
            if grown or timeout_s <= 0:
                return grown

    # -- source ----------------------------------------------------------------------------------------------
    claim = _word(Source.claim)
    resolve = _word(Source.resolve)
    count = _word(Source.count)
    dead_letter_route = _word(Source.dead_letter_route)
    ack = _word(Source.ack)

    def read(self, ticket: ReadTicket) -> Iterator[pa.RecordBatch]:
        """As in the port: from mapped files on the broker's host, elsewhere over Flight."""
        return read(self._connection, ticket, by_files=self._map_files)

    def browse(
        self, slices: Sequence[Slice], *, transaction: bool = False, record: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """Yields unsettled rows of the slices; claims and changes nothing."""
        of = functools.partial(contract.Ticket, transaction=transaction)
        return read_slices(self._connection, tuple(slices), lambda left: of(browse=left))

    # -- sink ------------------------------------------------------------------------------------------------
    _opened = _word(Sink.open_batch)

    def open_batch(
        self,
        app_id: str,
        query_id: str,
        batch_id: int,
        on_new_checkpoint: OnNewCheckpoint,
        *,
        token: str = "",
        offset_log: str = "",
    ) -> Opened:
        """Opens a micro-batch under a token that is made here: a call that is sent twice opens one batch."""
        token = token or os.urandom(16).hex()
        return self._opened(app_id, query_id, batch_id, on_new_checkpoint, token=token, offset_log=offset_log)

    def stage(self, header: BranchHeader, rows: Iterable[pa.RecordBatch]) -> StagedBranch:
        """As in the port. On the broker's host many rows are staged by files, elsewhere over Flight.

        At most WINDOW parts are in memory; a part is freed when it is in a file or durable in the broker."""
        return stage(self._connection, header, rows, by_files=self._map_files)

    commit_batch = _word(Sink.commit_batch)
    commit_branches = _word(Sink.commit_branches)
    rollback_batch = _word(Sink.rollback_batch)

    # -- apply, mirror ---------------------------------------------------------------------------------------
    unapplied = _word(Sink.unapplied)

    def read_branches(self, branches: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """As in the port; after a broken connection delivered rows are skipped."""
        return read_branches(self._connection, contract.Ticket(branches=tuple(branches)))

    mark_applied = _word(Sink.mark_applied)
    publish_refused = _word(Sink.publish_refused)
    entries = _word(Sink.entries)
    unmirrored = _word(Sink.unmirrored)
    mark_mirrored = _word(Sink.mark_mirrored)
    last_entry = _word(Sink.last_entry)
    resume = _word(Sink.resume)

    # -- apps ------------------------------------------------------------------------------------------------
    apps = _word(AppOperator.apps)
    app = _word(AppOperator.app)
    staged_batches = _word(AppOperator.staged_batches)
    release = _word(AppOperator.release)
    skip = _word(AppOperator.skip)
    note = _word(AppOperator.note)

    # -- channels and the operator ---------------------------------------------------------------------------
    def channel(self) -> RemoteChannel:
        """Opens a channel. When it or this process ends, it rolls back and requeues what it holds."""
        return RemoteChannel(self._connection)

    def queues(self) -> list[QueueInfo]:
        """Returns every queue of the virtual host, by name."""
        return self.administer(list[QueueInfo], "queues")

    def exchanges(self) -> list[ExchangeInfo]:
        """Returns every exchange of the virtual host, by name."""
        return self.administer(list[ExchangeInfo], "exchanges")

    def bindings(self) -> list[BindingInfo]:
        """Returns every binding, by exchange and destination; not those of the default exchange."""
        return self.administer(list[BindingInfo], "bindings")

    def channels(self) -> list[ChannelInfo]:
        """Returns the open channels of the virtual host, with what each holds."""
        return self.administer(list[ChannelInfo], "channels")

    def close_channel(self, id: str) -> bool:
        """Ends a channel or an AMQP connection by its id in ``channels``: it is rolled back and requeued.
        Returns whether there was one. Raises AccessRefused."""
        return self.administer(bool, "close", id=id)

    def prepared(self) -> list[PreparedInfo]:
        """Returns the prepared transactions of the virtual host that are not decided."""
        return self.administer(list[PreparedInfo], "prepared")

    def recover(self, *, of: str | None = None) -> list[RecoverInfo]:
        """Returns what the caller, or user ``of``, has prepared in the virtual host, oldest first. Raises
        AccessRefused."""
        return self.administer(list[RecoverInfo], "recover", of=of)

    def commit(self, xid: str, *, of: str | None = None, by_hand: bool = False) -> int:
        """Commits a prepared transaction; returns how many messages and acks had a deleted queue. ``of``: the
        user who prepared it, if another one. ``by_hand``: the caller is not the program that prepared it,
        which then gets HeuristicOutcome. Raises UnknownTransaction, TransactionState, AccessRefused."""
        return self.administer(int, "commit", xid=xid, of=of, by_hand=by_hand)

    def rollback(self, xid: str, *, of: str | None = None, by_hand: bool = False) -> None:
        """Rolls back a prepared transaction. Raises as ``commit`` does."""
        self.administer(type(None), "rollback", xid=xid, of=of, by_hand=by_hand)

    def forget(self, xid: str, *, of: str | None = None) -> None:
        """Forgets that an outcome was heuristic: it is like any other from now on. Raises UnknownTransaction,
        TransactionState (prepared), AccessRefused."""
        self.administer(type(None), "forget", xid=xid, of=of)

    def rollback_all(self, *, of: str | None = None, by_hand: bool = False) -> int:
        """Rolls back what the caller, or user ``of``, has prepared in the virtual host; returns how many.
        After a failure the same call continues. Raises AccessRefused."""
        return self.administer(int, "rollback_all", of=of, by_hand=by_hand)

    def committed(self, token: str, since: float | None = None, *, of: str | None = None) -> bool:
        """Returns whether a commit with this token took place (decision 21).

        False: it did not. Raises UnknownOutcome if it may have taken place and is forgotten. With ``since``,
        the earliest time of its begin (in s, of the broker's clock), only if something later is forgotten."""
        return self.administer(bool, "committed", token=token, since=since, of=of)

    def outcome(self, xid: str, since: float | None = None, *, of: str | None = None) -> str:
        """Returns prepared, committed or rolled_back, for an xid or a token; heuristically_ before it if
        somebody else has decided. Raises UnknownTransaction (there is none), UnknownOutcome."""
        return self.administer(str, "outcome", xid=xid, since=since, of=of)

    def administer(self, kind: type[T], word: str, *, timeout_s: float | None = None, **values: object) -> T:
        """A word of ``admin.`` and its answer, of type ``kind``; called by what has a method for each."""
        answer = self._connection.call(f"admin.{word}", contract.encode(values), timeout_s=timeout_s)
        found: T = contract.decode(kind, answer)
        return found


def _client_of(address: Address, reconnect_s: float, connect_s: float, map_files: bool) -> BrokerClient:
    """The address holds the login: another process may have neither its environment nor its files."""
    client = BrokerClient.__new__(BrokerClient)
    client._set_up(address, reconnect_s, connect_s, map_files)
    return client
