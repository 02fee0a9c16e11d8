"""BrokerClient: the engine's port over Flight, and the words of channels and of the operator, from any
process.

Not here: connecting (``connection.py``), finding or starting the broker (``starter.py``), the contract
(``contract.py``).

Invariant: a call returns only what the broker has answered. Until ``reconnect_s`` is over, a broken
connection or a restarted broker only delays a call. Each row is read once and staged once, also if the
connection breaks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import pyarrow as pa
import pyarrow.flight as arrow_flight

from broker_core import errors
from broker_core.address import Address, parse_address
from broker_core.admin import BindingInfo, ChannelInfo, ExchangeInfo, QueueInfo
from broker_core.arrow.rows import ReadPlan, assemble
from broker_core.arrow.segment_files import SegmentFiles
from broker_core.checks import checked_calls
from broker_core.client.channel import RemoteChannel
from broker_core.client.connection import CONNECT_S, FAILED, RECONNECT_S, FlightConnection, Live
from broker_core.client.stage import stage
from broker_core.credentials import Credentials
from broker_core.engine import (
    AppInfo,
    AttemptInfo,
    Available,
    BranchHeader,
    Committed,
    DeadLetterRoute,
    Features,
    LedgerEntry,
    Limit,
    Note,
    OnNewCheckpoint,
    Opened,
    Origin,
    PreparedInfo,
    Ranges,
    ReadTicket,
    StagedBranch,
    Vector,
)
from broker_core.flight import contract
from broker_core.ids import NO_BLOCK, BlockId

Slices = tuple[tuple[str, int, int], ...]
TicketOf = Callable[[Slices], contract.Ticket]

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
    """The client of this process for an address: one, made once, connected when first used.

    ``credentials``: user and password, token, and files for TLS. ``vhost``: with ``data``; a url has
    it as its path. ``reached``: another process has reached this broker, so this one waits for it as after a
    lost connection. ``connect_s``: of a client that is made here. Raises OptionError.
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


@checked_calls()
class BrokerClient:
    """A broker in another process: implements :class:`broker_core.engine.Engine`; thread-safe and picklable.

    ``url`` is ``txmq://host:port[/vhost]``, or ``txmqs://`` for TLS, with the login and the files of
    ``credentials``; ``data`` a directory, whose broker is started if none runs, with ``vhost``. Nothing
    connects before the first call; until then a process may be forked. ``connect_s``: how long to look for a
    broker that never answered; ``reconnect_s``: for one that did. ``map_files`` False: only Flight.
    """

    features = Features()

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
        self.closed = True
        self._connection.close()

    def _call(self, method: str, *positional: Any, **named: Any) -> Any:
        (answer,) = self._connection.call(
            f"engine.{method}", contract.encode_arguments(method, positional, named)
        )
        return contract.decode(contract.answer_type(method), answer)

    def identity(self, app_id: str = "") -> str:
        live = self._connection.live()
        live.identity = live.identity or self._call("identity")
        return live.identity

    # -- logs ------------------------------------------------------------------------------------------------

    def logs(self, queues: Sequence[str]) -> list[str]:
        found: list[str] = self._call("logs", list(queues))
        return found

    def log_ids(self, logs: Sequence[str]) -> dict[str, str]:
        found: dict[str, str] = self._call("log_ids", list(logs))
        return found

    def available(self, logs: Sequence[str], starts: Mapping[str, int] | None = None) -> dict[str, Available]:
        found: dict[str, Available] = self._call("available", list(logs), starts)
        return found

    def offsets(self, queues: Sequence[str], origin: Origin) -> dict[str, int]:
        found: dict[str, int] = self._call("offsets", list(queues), origin)
        return found

    def wait(self, queues: Sequence[str], ends: Mapping[str, int], timeout_s: float) -> bool:
        """As in the port; the server keeps one call for at most WAIT_S, so a long wait is several."""
        while True:
            grown: bool = self._call("wait", list(queues), dict(ends), min(timeout_s, contract.WAIT_S))
            timeout_s -= contract.WAIT_S
            if grown or timeout_s <= 0:
                return grown

    # -- source ----------------------------------------------------------------------------------------------

    def claim(
        self,
        app_id: str,
        queues: Sequence[str],
        start: Vector,
        limit: Limit,
        origin: Origin,
        on_new_checkpoint: OnNewCheckpoint,
        acks: bool = True,
    ) -> Vector:
        end: Vector = self._call("claim", app_id, list(queues), start, limit, origin, on_new_checkpoint, acks)
        return end

    def resolve(self, app_id: str, start: Vector, end: Vector) -> Ranges:
        ranges: Ranges = self._call("resolve", app_id, start, end)
        return ranges

    def count(self, app_id: str, ranges: Ranges) -> dict[str, Available]:
        found: dict[str, Available] = self._call("count", app_id, ranges)
        return found

    def dead_letter_route(self, queue: str) -> DeadLetterRoute | None:
        found: DeadLetterRoute | None = self._call("dead_letter_route", queue)
        return found

    def ack(self, app_id: str, end: Vector) -> None:
        self._call("ack", app_id, end)

    def read(self, ticket: ReadTicket) -> Iterator[pa.RecordBatch]:
        """As in the port: from mapped files on the broker's host, elsewhere over Flight."""
        plan_json, *rows = self._connection.call("read", contract.encode(ticket))
        if rows:
            return iter(contract.decode_rows(rows[0]))
        plan: ReadPlan = contract.decode(ReadPlan, plan_json)
        directory = self._connection.live().local if self._map_files else ""
        return self._read_mapped(ticket, plan, directory) if directory else self._read_served(ticket)

    def _read_mapped(self, ticket: ReadTicket, plan: ReadPlan, directory: str) -> Iterator[pa.RecordBatch]:
        files = SegmentFiles(directory)
        # the batch of the last piece: small runs share one
        held: tuple[BlockId, pa.RecordBatch | None] = (NO_BLOCK, None)
        served: list[tuple[str, int, int]] = []
        for piece in plan.pieces:
            if piece.location is not None and (held[0] != piece.block_id or held[1] is None):
                held = (piece.block_id, files.read(piece.location))
            if piece.location is None or held[1] is None:
                served.append((piece.log, piece.first, piece.first + piece.count))
                continue
            if served:
                yield from self._read_served(replace(ticket, slices=_joined(served)))
                served = []
            rows = assemble(piece, held[1])
            if rows.num_rows:
                yield rows
        if served:
            yield from self._read_served(replace(ticket, slices=_joined(served)))

    def _read_served(self, ticket: ReadTicket) -> Iterator[pa.RecordBatch]:
        """DoGet; after a broken connection it goes on at the first row that was not delivered."""
        return self._resumed(
            ticket.slices, lambda slices: contract.Ticket(read=replace(ticket, slices=slices))
        )

    def browse(self, slices: Sequence[tuple[str, int, int]]) -> Iterator[pa.RecordBatch]:
        return self._resumed(tuple(slices), lambda left: contract.Ticket(browse=left))

    def _resumed(self, slices: Slices, ticket_of: TicketOf) -> Iterator[pa.RecordBatch]:
        left = slices
        patience = self._connection.patience()
        while left:
            live = self._connection.live(patience)
            try:
                for batch in _batches(live, ticket_of(left)):
                    patience.renew()
                    left = _after(left, batch)
                    yield batch
                return
            except FAILED as error:
                self._connection.broken(live, error, patience)

    # -- sink ------------------------------------------------------------------------------------------------

    def open_batch(
        self,
        app_id: str,
        query_id: str,
        batch_id: int,
        on_new_checkpoint: OnNewCheckpoint,
        *,
        token: str = "",
        consumes: bool = True,
    ) -> Opened:
        # the token is made here: an open that is sent twice opens one attempt
        token = token or os.urandom(16).hex()
        opened: Opened = self._call(
            "open_batch", app_id, query_id, batch_id, on_new_checkpoint, token=token, consumes=consumes
        )
        return opened

    def stage(self, header: BranchHeader, rows: Iterable[pa.RecordBatch]) -> StagedBranch:
        """As in the port. On the broker's host many rows are staged by files, elsewhere over Flight.

        At most WINDOW parts are in memory; a part is freed when it is in a file or durable in the broker.
        """
        return stage(self._connection, header, rows, by_files=self._map_files)

    def commit_batch(
        self,
        app_id: str,
        query_id: str,
        batch_id: int,
        token: str,
        branches: Sequence[StagedBranch],
        *,
        on_unroutable: Literal["fail", "drop"] = "fail",
        consumes: bool = True,
    ) -> Committed:
        committed: Committed = self._call(
            "commit_batch",
            app_id,
            query_id,
            batch_id,
            token,
            list(branches),
            on_unroutable=on_unroutable,
            consumes=consumes,
        )
        return committed

    def commit_branches(
        self, token: str, branches: Sequence[StagedBranch], *, on_unroutable: Literal["fail", "drop"] = "fail"
    ) -> int:
        messages: int = self._call("commit_branches", token, list(branches), on_unroutable=on_unroutable)
        return messages

    def rollback_batch(self, token: str, *, of: str | None = None) -> None:
        self._call("rollback_batch", token, of=of)

    # -- apply, mirror ---------------------------------------------------------------------------------------

    def unapplied(self, app_id: str) -> list[LedgerEntry]:
        found: list[LedgerEntry] = self._call("unapplied", app_id)
        return found

    def read_branches(self, branches: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """As in the port; after a broken connection delivered batches, which never change, are skipped."""
        delivered = 0
        patience = self._connection.patience()
        while True:
            live = self._connection.live(patience)
            try:
                for number, batch in enumerate(_batches(live, contract.Ticket(branches=tuple(branches)))):
                    if number < delivered:
                        continue
                    patience.renew()
                    delivered += 1
                    yield batch
                return
            except FAILED as error:
                self._connection.broken(live, error, patience)

    def mark_applied(self, app_id: str, sequence: int) -> None:
        self._call("mark_applied", app_id, sequence)

    def skip(self, app_id: str, sequence: int, branches: Sequence[str], to: str) -> None:
        self._call("skip", app_id, sequence, list(branches), to)

    def note(self, app_id: str, sequence: int, branches: Sequence[str], name: Note, text: str) -> None:
        self._call("note", app_id, sequence, list(branches), name, text)

    def publish_refused(
        self,
        app_id: str,
        sequence: int,
        branches: Sequence[str],
        rows: str,
        token: str,
        staged: Sequence[StagedBranch],
    ) -> str:
        recorded: str = self._call(
            "publish_refused", app_id, sequence, list(branches), rows, token, list(staged)
        )
        return recorded

    def entries(self, app_id: str) -> list[LedgerEntry]:
        found: list[LedgerEntry] = self._call("entries", app_id)
        return found

    def unmirrored(self, app_id: str, limit: int = 1000) -> list[LedgerEntry]:
        found: list[LedgerEntry] = self._call("unmirrored", app_id, limit)
        return found

    def mark_mirrored(self, app_id: str, sequence: int) -> None:
        self._call("mark_mirrored", app_id, sequence)

    def last_entry(self, app_id: str) -> LedgerEntry | None:
        entry: LedgerEntry | None = self._call("last_entry", app_id)
        return entry

    def resume(self, app_id: str, entries: Sequence[LedgerEntry]) -> bool:
        resumed: bool = self._call("resume", app_id, list(entries))
        return resumed

    def app(self, app_id: str) -> AppInfo | None:
        found: AppInfo | None = self._call("app", app_id)
        return found

    def apps(self) -> list[AppInfo]:
        found: list[AppInfo] = self._call("apps")
        return found

    def attempts(self) -> list[AttemptInfo]:
        found: list[AttemptInfo] = self._call("attempts")
        return found

    def release(self, app_id: str, queue: str, *, force: bool = False, by: str = "") -> None:
        self._call("release", app_id, queue, force=force, by=by)

    # -- channels and the operator ---------------------------------------------------------------------------

    def channel(self) -> RemoteChannel:
        """A channel of the broker. It ends, rolled back and requeued, when closed or with this process."""
        return RemoteChannel(self._connection)

    def queues(self) -> list[QueueInfo]:
        found: list[QueueInfo] = self.administer(list[QueueInfo], "queues")
        return found

    def exchanges(self) -> list[ExchangeInfo]:
        found: list[ExchangeInfo] = self.administer(list[ExchangeInfo], "exchanges")
        return found

    def bindings(self) -> list[BindingInfo]:
        found: list[BindingInfo] = self.administer(list[BindingInfo], "bindings")
        return found

    def channels(self) -> list[ChannelInfo]:
        """The open channels of the virtual host: who holds what."""
        found: list[ChannelInfo] = self.administer(list[ChannelInfo], "channels")
        return found

    def close_channel(self, id: str) -> bool:
        """End a channel, or a connection of AMQP, by the id of ``channels``: it is rolled back and requeued.
        Whether there was one. Raises AccessRefused.
        """
        found: bool = self.administer(bool, "close", id=id)
        return found

    def prepared(self) -> list[PreparedInfo]:
        found: list[PreparedInfo] = self.administer(list[PreparedInfo], "prepared")
        return found

    def commit(self, xid: str, *, of: str | None = None) -> int:
        """Commit a prepared transaction; how much of it was dropped because its queue is gone. ``of``: the
        user who named it, if it is another. Raises UnknownTransaction, TransactionState, AccessRefused."""
        dropped: int = self.administer(int, "commit", xid=xid, of=of)
        return dropped

    def rollback(self, xid: str, *, of: str | None = None) -> None:
        """Roll back a prepared transaction. Raises UnknownTransaction, TransactionState, AccessRefused."""
        self.administer(type(None), "rollback", xid=xid, of=of)

    def committed(self, token: str, since: float | None = None, *, of: str | None = None) -> bool:
        """Whether a commit that was given this token took place (decision 21).

        False: it did not. Raises UnknownOutcome if it may have taken place and is forgotten. With ``since``,
        the earliest time when it began (in s, by the broker's clock), only if something later is forgotten.
        """
        found: bool = self.administer(bool, "committed", token=token, since=since, of=of)
        return found

    def outcome(self, xid: str, since: float | None = None, *, of: str | None = None) -> str:
        """prepared, committed or rolled_back, for an xid or a token. Raises UnknownTransaction (there is
        none), UnknownOutcome.
        """
        found: str = self.administer(str, "outcome", xid=xid, since=since, of=of)
        return found

    def administer(self, kind: object, word: str, *, timeout_s: float | None = None, **given: object) -> Any:
        """A word of ``admin.`` and its answer, of type ``kind``; called by what has a method for each."""
        (answer,) = self._connection.call(f"admin.{word}", contract.encode(given), timeout_s=timeout_s)
        return contract.decode(kind, answer)


def _client_of(address: Address, reconnect_s: float, connect_s: float, map_files: bool) -> BrokerClient:
    """The address holds the login: another process may have neither its environment nor its files."""
    client = BrokerClient.__new__(BrokerClient)
    client._set_up(address, reconnect_s, connect_s, map_files)
    return client


def _batches(live: Live, ticket: contract.Ticket) -> Iterator[pa.RecordBatch]:
    reader = live.client.do_get(arrow_flight.Ticket(contract.encode(ticket)))
    try:
        for chunk in reader:
            if chunk.data is not None and chunk.data.num_rows:
                yield chunk.data
    finally:
        reader.cancel()  # a reader that stops early must not leave the server waiting


def _after(slices: Slices, batch: pa.RecordBatch) -> Slices:
    """What of ``slices`` is left when ``batch`` was delivered."""
    log = batch.column("queue")[0].as_py()
    last = batch.column("offset")[batch.num_rows - 1].as_py()
    for index, (name, start, end) in enumerate(slices):
        if name == log and start <= last < end:
            rest = slices[index + 1 :]
            return ((name, last + 1, end), *rest) if last + 1 < end else rest
    raise errors.RemoteProtocolError(f"the broker sent offset {last} of {log!r}, which was not asked for")


def _joined(slices: Sequence[tuple[str, int, int]]) -> Slices:
    joined: list[tuple[str, int, int]] = []
    for log, start, end in slices:
        if joined and joined[-1][0] == log and joined[-1][2] == start:
            joined[-1] = (log, joined[-1][1], end)
        else:
            joined.append((log, start, end))
    return tuple(joined)
