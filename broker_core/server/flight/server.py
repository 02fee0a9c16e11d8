"""The Flight server: decode, call the engine, encode. No rule of the broker is decided here.

Not here: its listeners (``listener.py``), and how rows come in (``staging.py``).
Invariant: rows are sent batch by batch, never as a whole result.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import grpc
import pyarrow as pa

from broker_core.core import errors, failpoint
from broker_core.core.address import VHOST
from broker_core.engine import Engine, ReadTicket, StagedBatch
from broker_core.flight import contract
from broker_core.node.engine import EmbeddedEngine
from broker_core.node.local import LocalBroker
from broker_core.node.vhost_engines import VhostEngines
from broker_core.server.access.accounts import Accounts
from broker_core.server.access.audit import Auditor
from broker_core.server.access.caller import Caller
from broker_core.server.access.logins import Logins
from broker_core.server.access.vhosts import Vhosts
from broker_core.server.flight import audit, backup, call_permissions, messages, streams, transactions
from broker_core.server.flight.call_permissions import CallPermissions
from broker_core.server.flight.calls import PUBLISHES, CallFailed, Calls
from broker_core.server.flight.channels import FlightChannels
from broker_core.server.flight.connection_limit import FlightConnectionLimit
from broker_core.server.flight.listener import FlightCall, FlightListener, close_all
from broker_core.server.flight.login import asked_vhost, client_of, peer_address
from broker_core.server.flight.staging import FlightStaging
from broker_core.server.flight.transactions import Transactions
from broker_core.server.history_reader import HistoryReader
from broker_core.server.quotas import Quotas
from broker_core.server.status import StatusReader
from broker_core.server.tls import TlsFiles

GRACE_S = 5.0  # for calls in progress when the server ends


class FlightServer:
    """Answers the calls of its listeners. ``failed`` is set once the store takes no more work."""

    def __init__(
        self,
        id_: str,
        directory: str,
        engines: VhostEngines,
        broker: LocalBroker,
        logins: Logins,
        accounts: Accounts,
        vhosts: Vhosts,
        quotas: Quotas | None = None,
        connection_limit: FlightConnectionLimit | None = None,
        listens: Callable[[], list[str]] = list,
    ) -> None:
        self.failed = threading.Event()
        self.gives_up = False  # started by a client: it ends if it is idle when asked for its directory
        self.given_up = threading.Event()
        self._engines, self._broker, self.logins = engines, broker, logins
        self._hello = contract.Hello(contract.VERSION, uuid.uuid4().hex, id_, directory, os.getpid())
        self._call_permissions = CallPermissions(engines, broker, logins.audit)
        quotas = quotas or Quotas()
        self._calls = Calls(quotas.calls, quotas.alarm)
        self._staging = FlightStaging(self._engine, self._call_permissions, self._calls, quotas.part_bytes)
        self.channels = FlightChannels(broker, self._call_permissions, quotas.channels)
        accounts.changed.append(self.channels.end_deleted)
        if quotas.alarm is not None:
            quotas.alarm.counted += [self.channels.ended, engines.size]
        status = StatusReader(broker, engines, quotas.alarm, directory, listens, vhosts)
        self.admin_words: dict[str, Callable[..., object]] = {  # of ``admin.``
            **{word: getattr(broker, word) for word in call_permissions.LISTS},
            "status": status.now,
            "close": broker.open_channels.close,
            "skip_damaged": broker.skip_damaged,
            "call_took_place": self._call_took_place,
            "give_up": self._give_up,
            **{word: getattr(Transactions, word) for word in transactions.WORDS},
            **{word: getattr(vhosts, word, None) or getattr(accounts, word) for word in audit.ACCOUNTS},
        }
        self._stopping = threading.Event()
        self._listeners: list[FlightListener] = []
        self.connection_limit = connection_limit or FlightConnectionLimit(logins.forget)
        self.connection_limit.on_close.append(self._call_permissions.clients.forget)
        self.connection_limit.watch(lambda: [each.port for each in self._listeners])

    def listen(self, host: str, port: int, tls: TlsFiles | None = None) -> int:
        """Returns the port. Raises ConnectionFailed."""
        self._listeners.append(FlightListener(self, host, port, tls))
        return self._listeners[-1].port

    def idle_s(self) -> float:
        return self._calls.idle_s()

    def calls_in_progress(self) -> int:
        return self._calls.in_progress

    def stop(self) -> None:
        """End all channels, then the server; calls in progress get GRACE_S."""
        self._stopping.set()
        self.channels.close()
        self.connection_limit.stop()
        close_all(self._listeners, GRACE_S)

    @property
    def streaming(self) -> dict[str, Callable[[FlightCall], Iterator[bytes]]]:
        return {"DoGet": self._get, "DoPut": self._put}

    # -- actions ---------------------------------------------------------------------------------------------
    def action(self, call: FlightCall) -> bytes:
        with self._answering():
            action, body = messages.action(_first(self._calls, call))
            with self._caller(call, action) as caller:
                if action not in PUBLISHES:
                    _check_size(action, body.size)
                kind, _, word = action.rpartition(".")
                with self._calls.computing(action, caller.identity.user):
                    answer = self._answer(caller, kind, word, body)
                failpoint.here(f"server.reply.{word}")
                self._calls.answered(answer, caller.identity.user, call.ended)
                return messages.answer(answer)

    def _engine(self, caller: Caller) -> EmbeddedEngine:
        return self._engines.of(caller.state.vhost).acting(caller.actor)

    def _answer(self, caller: Caller, kind: str, word: str, body: pa.Buffer) -> bytes:
        if kind == "engine" and word in contract.METHODS:
            arguments = contract.decode_arguments(word, getattr(Engine, word), body)
            self._call_permissions.check(call_permissions.ENGINE, word, caller, arguments)
            if word == "release" and caller.identity.user:
                arguments["by"] = caller.identity.user  # whatever the caller says
            if word == "open_batch" and arguments.get("token"):  # also of whom nothing is asked
                self._call_permissions.clients.staged(caller, arguments["token"])
            answer = self._engine_word(caller, word)(**arguments)
            self._call_permissions.carried_out(caller, f"engine.{word}", arguments)
            return contract.encode(answer)
        if kind == "channel":
            call = contract.decode_checked(contract.ChannelCall, body, f"channel.{word}")
            with self._calls.reading() if word == "take_returned" else contextlib.nullcontext():
                return contract.encode(self.channels.call(word, call, caller))
        if kind == "admin":
            return contract.encode(self._admin(caller, word, body))
        if word == "read":
            return self._read(caller, contract.decode_checked(ReadTicket, body, "read"))
        if word == "stage":
            return contract.encode(self._staging.sent(caller, body))
        if word == "adopt":
            file: contract.FileHeader = contract.decode_checked(contract.FileHeader, body, "adopt")
            return contract.encode(self._staging.file(caller, file))
        if word == "hello":
            outside = replace(self._hello, id="", directory="", pid=0)
            return contract.encode(self._hello if caller.enters_somewhere else outside)
        what = f"unknown action {kind}.{word}; client and broker are of different versions"
        raise errors.RemoteProtocolError(what)

    @property
    def run(self) -> str:
        return self._hello.run

    def with_clients(self, vhost: str, found: list[StagedBatch]) -> list[StagedBatch]:
        """Returns the staged batches with who opened each, where that is known."""
        return self._call_permissions.clients.with_clients(vhost, found)

    def _engine_word(self, caller: Caller, word: str) -> Callable[..., object]:
        engine = self._engine(caller)
        if word == "wait":
            return partial(_wait, engine, self._stopping, caller)
        if word == "staged_batches":
            return lambda: self.with_clients(caller.state.vhost, engine.staged_batches())
        return cast(Callable[..., object], getattr(engine, word))

    def _read(self, caller: Caller, ticket: ReadTicket) -> bytes:
        self._call_permissions.read(caller, ticket)
        with self._calls.answers.within(caller.identity.user):  # there is room, before rows are read
            return streams.small(self._engine(caller), ticket)

    def _admin(self, caller: Caller, word: str, body: pa.Buffer) -> object:
        if word not in self.admin_words:
            raise errors.RemoteProtocolError(
                f"unknown action admin.{word}; client and broker are of different versions"
            )
        function = self.admin_words[word]
        arguments = contract.decode_arguments(f"admin.{word}", function, body)
        self._call_permissions.check(call_permissions.ADMIN, word, caller, arguments)
        if word in transactions.WORDS:
            service = Transactions(self._broker, caller, HistoryReader(self._broker, self._engines))
            answer = getattr(service, word)(**arguments)
            arguments["of"] = service.decided_for
        elif word in audit.ACCOUNTS:
            owner: Auditor = function.__self__  # type: ignore[attr-defined]  # a method of it
            return getattr(owner.by(audit.recorder(self.logins.audit, caller)), word)(**arguments)
        else:
            if word in call_permissions.LISTS or word == "skip_damaged":
                arguments["vhost"] = caller.state.vhost
            if word == "call_took_place":
                arguments["channel"] = self.channels.own(caller, arguments["channel"])
            answer = function(**arguments)
        self._call_permissions.carried_out(caller, f"admin.{word}", arguments)
        return answer

    def _give_up(self) -> bool:
        """Whether this broker ends now, so that the caller can open its directory."""
        if self.gives_up and not (self._calls.in_progress > 1 or self.channels.count):
            self.given_up.set()
        return self.given_up.is_set()

    def _call_took_place(self, channel: str, number: int, since_us: int) -> bool:
        return self._broker.run(
            lambda state, _change, _now: state.names.outcomes.call_took_place(channel, number, since_us)
        )

    # -- streams ---------------------------------------------------------------------------------------------
    def _get(self, call: FlightCall) -> Iterator[bytes]:
        with self._answering(), self._caller(call, "get") as caller:
            ticket = messages.ticket(_first(self._calls, call))
            _check_size("get", ticket.size)
            request: contract.Ticket = contract.decode_checked(contract.Ticket, ticket, "get")
            epoch, permissions = self._broker.state.users.epoch, self._call_permissions
            with contextlib.ExitStack() as stream:
                if request.backup:
                    found = backup.opened(self._broker, permissions, caller, self._stopping)
                else:
                    stream.callback(self._calls.streams.leave, stream)
                    most = partial(self._calls.most, stream, caller.identity.user)
                    with self._calls.reading():
                        found = streams.opened(self._engine(caller), permissions, caller, request, most)
                    found = found._replace(reading=self._calls.reading)
                yield from self._stream(found, caller, epoch)

    def _stream(self, found: streams.Stream, caller: Caller, epoch: object) -> Iterator[bytes]:
        """The permission is asked for again when the users are no more those of ``epoch``."""
        users = self._broker.state.users
        yield from messages.head(found.schema)
        while True:
            with found.reading():
                sent = messages.rows(found.schema, found.rows)
            if not sent:
                return
            if self._stopping.is_set():
                raise CallFailed(grpc.StatusCode.UNAVAILABLE, "the broker is stopping")
            caller.enter()
            if users.epoch is not epoch:
                epoch = users.epoch
                found.permitted()
            failpoint.here("server.read.batch")
            yield from sent

    def _put(self, call: FlightCall) -> Iterator[bytes]:
        with self._answering(), self._caller(call, "put") as caller:
            first = messages.data(_first(self._calls, call))
            _check_size("put", len(first.command))
            parts = map(messages.data, call.requests)
            yield from map(messages.answer, self._staging.stream(caller, first, parts))

    # -- around every call -----------------------------------------------------------------------------------
    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Count the call, and send an error as its text."""
        try:
            with self._calls.counted():
                yield
        except CallFailed:
            raise
        except grpc.RpcError as error:
            raise CallFailed(grpc.StatusCode.CANCELLED, "the client has gone") from error
        except ConnectionResetError as error:  # a failpoint that loses the reply
            raise CallFailed(grpc.StatusCode.UNAVAILABLE, "the reply was lost") from error
        except Exception as error:
            if isinstance(error, (errors.StoreFailed, errors.DiskFull)):
                self.failed.set()
            if not isinstance(error, errors.TxmqError):
                traceback.print_exc(file=sys.stderr)
            raise CallFailed(grpc.StatusCode.UNKNOWN, contract.error_text(error)) from error

    @contextlib.contextmanager
    def _caller(self, call: FlightCall, name: str) -> Iterator[Caller]:
        """While the call is one of those in progress. Raises Busy, NotAllowed (no such virtual host; a client
        says hello before that).
        """
        vhost = VHOST if name == "hello" else asked_vhost(call.headers)
        rights, state = self.logins.rights(call.identity, vhost), self._broker.state.of(vhost)
        address = peer_address(call.peer)
        caller = Caller(call.identity, rights, address, state, client_of(call.headers))
        self._call_permissions.clients.called(call.peer, caller)
        try:
            with self._calls.limited(name, caller.identity.user):
                yield caller
        except (errors.AccessRefused, errors.NotAllowed) as error:
            audit.refused(self.logins.audit, caller, name, error)
            raise


def _first(calls: Calls, call: FlightCall) -> bytes:
    """What the call brings first. Raises CallFailed (the client has gone), Busy."""
    with calls.silent(call.identity.user):
        for request in call.requests:
            return request
    raise CallFailed(grpc.StatusCode.INVALID_ARGUMENT, "the call has brought nothing")


def _check_size(call: str, size: int) -> None:
    """Raises RemoteProtocolError."""
    if size > contract.MAX_CALL_BYTES:
        raise errors.RemoteProtocolError(
            f"{call} came with {size} bytes; the limit is {contract.MAX_CALL_BYTES}: send it in several calls"
        )


def _wait(
    engine: EmbeddedEngine,
    stopping: threading.Event,
    caller: Caller,
    queues: Sequence[str],
    ends: dict[str, int],
    timeout_s: float,
) -> bool:
    deadline = time.monotonic() + min(timeout_s, contract.WAIT_S)
    while not stopping.is_set():
        caller.read(queues)  # the user may be deleted meanwhile
        left = deadline - time.monotonic()
        if engine.wait(queues, ends, max(min(left, 0.5), 0.0)):
            return True
        if left <= 0.5:
            return False
    return False
