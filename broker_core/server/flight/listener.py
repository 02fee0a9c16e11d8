"""The listeners of the Flight server: gRPC takes the calls of clients, and their login comes first.

1. The headers of a call have come: one that is refused, or is none of Flight, is answered by the thread
that takes all calls, and waits for nothing. 2. Others get a thread of the pool, and log in. 3. What the call
brings is read. So a flood of calls without a login costs one thread.

Not here: what a call does (``server.py``), the bounds of connections (``connection_limit.py``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import grpc

from broker_core.arrow.parts import MAX_PART_BYTES
from broker_core.core.address import bracketed
from broker_core.core.errors import ConnectionFailed, LoginRefused, TxmqError
from broker_core.flight import authorization, contract
from broker_core.server.access.identity import Authenticator, Identity, Standing
from broker_core.server.flight import messages
from broker_core.server.flight.calls import CallFailed
from broker_core.server.flight.connection_limit import FlightConnectionLimit
from broker_core.server.flight.login import Credentials, Headers, credentials, identity
from broker_core.server.tls import Certificates, TlsFiles

# gRPC logs to stderr when a port is taken or a peer is gone; the errors of txmq report the same
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# each header that is not UTF-8, with a traceback: credentials, and gigabytes of whoever wants to
for _name in ("grpc._cython.cygrpc", "grpc._server"):
    logging.getLogger(_name).disabled = True

THREADS = 4096  # more than there are calls that are let in, are checked, or have sent nothing
LOGINS = 256  # that are being checked; each holds a thread
IDLE_S = 10.0
FIRST_THREADS = 8  # for a time at which no other can be started
_FLIGHT = "/arrow.flight.protocol.FlightService/"
_OPTIONS = [
    ("grpc.so_reuseport", 0),  # a port that is taken is an error
    ("grpc.max_receive_message_length", MAX_PART_BYTES + (2 << 20)),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: what comes is as large as it was on its way
    ("grpc.max_concurrent_streams", 1000),  # of a connection; more of them wait at the client
]
T = TypeVar("T")


class FlightCall(NamedTuple):
    """``peer``: gRPC's name of the client. ``requests``: what it sends; empty where it has gone. ``ended``
    calls what it gets when the answer is sent or the client has gone; False: that is now.
    """

    identity: Identity
    peer: str
    headers: Headers
    requests: Iterator[bytes]
    ended: Callable[[Callable[[], None]], bool]


class Service(Protocol):
    """Answers calls, in many threads; it raises CallFailed. ``streaming``: what has more than one answer, by
    its name in Flight.
    """

    connection_limit: FlightConnectionLimit

    @property
    def run(self) -> str: ...

    @property
    def logins(self) -> Authenticator: ...

    @property
    def streaming(self) -> Mapping[str, Callable[[FlightCall], Iterator[bytes]]]: ...

    def action(self, call: FlightCall) -> bytes: ...


class _Threads:
    """A thread for each call that is under way; one that is idle for IDLE_S ends."""

    def __init__(self) -> None:
        self._work = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]()
        self._lock = threading.Lock()
        self._idle = self._count = 0
        for _ in range(FIRST_THREADS):
            self._start()

    def submit(self, function: Callable[..., T], /, *args: Any, **keywords: Any) -> Future[T]:
        """It raises nothing: that would end the thread that takes all calls."""
        done: Future[T] = Future()
        with self._lock:
            self._work.put((done, partial(function, *args, **keywords)))
            self._idle -= 1
            if self._idle < 0 and self._count < THREADS:
                with contextlib.suppress(RuntimeError):  # none can be started now: those there are take it
                    self._start()
        return done

    def end(self) -> None:
        """After the last call."""
        for _ in range(self._count):
            self._work.put(None)

    def _start(self) -> None:
        threading.Thread(target=self._run, name="flight", daemon=True).start()
        self._count += 1
        self._idle += 1

    def _run(self) -> None:
        while True:
            try:
                taken = self._work.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._idle <= 0 or self._count <= FIRST_THREADS:
                        continue
                    self._idle -= 1
                    self._count -= 1
                    return
            if taken is None:
                return
            try:
                taken[0].set_result(taken[1]())
            finally:
                del taken
                with self._lock:
                    self._idle += 1


class _AtOnce(ThreadPoolExecutor):
    """The thread that takes all calls."""

    def submit(self, function: Callable[..., T], /, *args: Any, **keywords: Any) -> Future[T]:
        done: Future[T] = Future()
        done.set_result(function(*args, **keywords))
        return done


_AT_ONCE = _AtOnce(1)


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    def __init__(self, service: Service) -> None:
        self._service = service
        self._logins = threading.BoundedSemaphore(LOGINS)
        self._methods = {
            f"{_FLIGHT}{name}": (grpc.stream_stream_rpc_method_handler, method)
            for name, method in service.streaming.items()
        } | {f"{_FLIGHT}DoAction": (grpc.stream_unary_rpc_method_handler, service.action)}

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """How the call is answered whose headers have come."""
        found = self._methods.get(details.method)
        headers = Headers(details.invocation_metadata or ())
        if found is None:
            none = CallFailed(grpc.StatusCode.UNIMPLEMENTED, "a txmq broker has no such call")
            return self._at_once(partial(self._refuse, none))
        if headers.values(authorization.RUN_HEADER) not in ([], [self._service.run]):
            gone = CallFailed(grpc.StatusCode.UNAVAILABLE, "the broker that this client knew has ended")
            return self._at_once(partial(self._refuse, gone))
        if challenges := headers.values(authorization.CHALLENGE_HEADER):
            return self._at_once(partial(self._prove, challenges[0]))
        try:
            brought = credentials(headers)
        except LoginRefused as error:
            return self._at_once(partial(self._refuse, _unauthenticated(error)))
        match self._service.logins.standing(brought):
            case Standing.refused:
                return self._at_once(partial(self._refuse_login, brought))
            case Standing.unproven if not self._logins.acquire(blocking=False):
                busy = CallFailed(grpc.StatusCode.UNAVAILABLE, "too many logins are being checked; try again")
                return self._at_once(partial(self._refuse, busy))
            case standing:
                counted = standing is Standing.unproven
                handler, method = found
                return handler(partial(self._let_in, method, headers, brought, counted))

    # -- by the thread that takes all calls ------------------------------------------------------------------
    def _at_once(self, answer: Callable[[grpc.ServicerContext], bytes]) -> grpc.RpcMethodHandler:
        def behavior(_requests: object, context: grpc.ServicerContext) -> bytes:
            self._service.connection_limit.refused(context.peer())
            try:
                return answer(context)
            except CallFailed as failed:
                context.abort(failed.code, str(failed))
                raise  # not reached

        behavior.experimental_thread_pool = _AT_ONCE  # type: ignore[attr-defined]
        return grpc.stream_unary_rpc_method_handler(behavior)

    def _refuse(self, failed: CallFailed, _context: grpc.ServicerContext) -> bytes:
        raise failed

    def _refuse_login(self, brought: Credentials, context: grpc.ServicerContext) -> bytes:
        """With the text of its login; one that would be let in by now is to try again."""
        try:
            identity(brought, self._service.logins, context.peer())
        except LoginRefused as error:
            raise _unauthenticated(error) from None
        raise CallFailed(grpc.StatusCode.UNAVAILABLE, "the users have changed meanwhile; try again")

    def _prove(self, challenge: str, _context: grpc.ServicerContext) -> bytes:
        try:
            return messages.answer(self._service.logins.prove(bytes.fromhex(challenge)))
        except ValueError:
            raise CallFailed(grpc.StatusCode.INVALID_ARGUMENT, "a challenge is hexadecimal") from None

    # -- by a thread of its own ------------------------------------------------------------------------------
    def _let_in(
        self,
        method: Callable[[FlightCall], bytes | Iterator[bytes]],
        headers: Headers,
        brought: Credentials,
        counted: bool,
        requests: Iterator[bytes],
        context: grpc.ServicerContext,
    ) -> bytes | Iterator[bytes]:
        """``counted``: as a login that is being checked."""
        try:
            try:
                peer = context.peer()
                who = self._login(brought, peer)
                call = FlightCall(who, peer, headers, requests, context.add_callback)
            finally:
                if counted:
                    self._logins.release()
            answer = method(call)
            return answer if isinstance(answer, bytes) else _answers(answer, context)
        except CallFailed as failed:
            context.abort(failed.code, str(failed))
            raise  # not reached

    def _login(self, brought: Credentials, peer: str) -> Identity:
        """Raises CallFailed."""
        limit = self._service.connection_limit
        try:
            with limit.login(peer) as enter:
                who = identity(brought, self._service.logins, peer)
                enter(who.user)
            return who
        except LoginRefused as error:
            limit.refused(peer)
            raise _unauthenticated(error) from error
        except TxmqError as error:
            raise CallFailed(grpc.StatusCode.UNKNOWN, contract.error_text(error)) from error


def _unauthenticated(error: LoginRefused) -> CallFailed:
    return CallFailed(grpc.StatusCode.UNAUTHENTICATED, contract.error_text(error))


def _answers(found: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    with contextlib.closing(found):  # type: ignore[type-var]  # a generator
        try:
            yield from found
        except CallFailed as failed:
            context.abort(failed.code, str(failed))


class FlightListener:
    """The listener of one address. Raises ConnectionFailed."""

    def __init__(self, service: Service, host: str, port: int, tls: TlsFiles | None) -> None:
        self.threads = _Threads()
        self.server = grpc.server(self.threads, handlers=[_Handler(service)], options=_OPTIONS)
        address = f"{bracketed(host)}:{port}"
        try:
            if tls is None:
                self.port: int = self.server.add_insecure_port(address)
            else:
                self.port = self.server.add_secure_port(address, _credentials(tls))
        except RuntimeError as error:
            self.threads.end()
            raise ConnectionFailed(
                f"cannot listen on {address}; if another process uses the port, choose another one, or 0 "
                "for a free one"
            ) from error
        self.server.start()


def _credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """Those of now for each connection."""
    used = tls.now

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        if tls.now is used:
            return None
        used = tls.now
        return _configuration(used)

    verify_peer = tls.options.verify_peer
    return grpc.dynamic_ssl_server_credentials(_configuration(used), renewed, verify_peer)


def _configuration(found: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(found.key, found.cert)], found.ca or None)


def close_all(listeners: Sequence[FlightListener], grace_s: float) -> None:
    """Take no more calls; those in progress get ``grace_s``."""
    deadline = time.monotonic() + grace_s
    for each, ended in [(each, each.server.stop(grace_s)) for each in listeners]:
        ended.wait(max(deadline - time.monotonic(), 0))
        each.threads.end()
