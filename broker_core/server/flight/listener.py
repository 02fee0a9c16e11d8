"""The listeners of the Flight server: gRPC takes the calls of clients, and their login comes first.

1. The headers of a call have come: one that is refused, or is none of Flight, is answered by the thread
that takes all calls, and waits for nothing. 2. Others get a thread of the pool, and log in. 3. What the call
brings is read. So a flood of calls without a login costs one thread.

Not here: what a call does (``server.py``), the bounds of connections (``connection_limit.py``).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import grpc

from broker_core.core.address import bracketed
from broker_core.core.errors import ConnectionFailed, LoginRefused, TxmqError
from broker_core.flight import authorization, contract
from broker_core.server.access.identity import Authenticator, Identity, Standing
from broker_core.server.flight import messages
from broker_core.server.flight.calls import CallFailed
from broker_core.server.flight.connection_limit import FlightConnectionLimit
from broker_core.server.flight.login import Headers, credentials, identity
from broker_core.server.tls import Certificates, TlsFiles

# gRPC logs to stderr when a port is taken or a peer is gone; the errors of txmq report the same
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

THREADS = 4096  # more than there are calls that are let in, are checked, or have sent nothing
LOGINS = 256  # that are being checked; each holds a thread
FIRST_THREADS = 8  # for a time at which no other can be started
_FLIGHT = "/arrow.flight.protocol.FlightService/"
_OPTIONS = [
    ("grpc.so_reuseport", 0),  # a port that is taken is an error
    ("grpc.max_receive_message_length", -1),  # of who has logged in
    ("grpc.max_concurrent_streams", 100),  # of a connection; more of them wait at the client
]
T = TypeVar("T")


class FlightCall(NamedTuple):
    """``peer``: gRPC's name of the client. ``requests``: what it sends; empty where it has gone."""

    identity: Identity
    peer: str
    headers: Headers
    requests: Iterator[bytes]


class Service(Protocol):
    """Answers calls, in many threads; it raises CallFailed. ``streaming``: what has more than one answer, by
    its name in Flight.
    """

    connection_limit: FlightConnectionLimit

    @property
    def logins(self) -> Authenticator: ...

    @property
    def streaming(self) -> Mapping[str, Callable[[FlightCall], Iterator[bytes]]]: ...

    def action(self, call: FlightCall) -> bytes: ...


class _Pool(ThreadPoolExecutor):
    """A thread for each call that is under way."""

    def __init__(self) -> None:
        super().__init__(THREADS, thread_name_prefix="flight")
        started = threading.Barrier(FIRST_THREADS + 1)
        for _ in range(FIRST_THREADS):
            super().submit(started.wait)
        started.wait()

    def submit(self, function: Callable[..., T], /, *args: Any, **named: Any) -> Future[T]:
        """An error here would end the thread that takes all calls."""
        try:
            return super().submit(function, *args, **named)
        except RuntimeError:  # no thread can be started: the call is queued for those that there are
            return Future()


class _AtOnce(ThreadPoolExecutor):
    """The thread that takes all calls."""

    def submit(self, function: Callable[..., T], /, *args: Any, **named: Any) -> Future[T]:
        done: Future[T] = Future()
        done.set_result(function(*args, **named))
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
        if challenges := headers.values(authorization.CHALLENGE_HEADER):
            return self._at_once(partial(self._prove, challenges[0]))
        match self._standing(headers):
            case Standing.refused:
                return self._at_once(partial(self._refuse_login, headers))
            case Standing.unproven if not self._logins.acquire(blocking=False):
                busy = CallFailed(grpc.StatusCode.UNAVAILABLE, "too many logins are being checked; try again")
                return self._at_once(partial(self._refuse, busy))
            case standing:
                counted = standing is Standing.unproven
                handler, method = found
                return handler(partial(self._let_in, method, headers, counted))

    def _standing(self, headers: Headers) -> Standing:
        try:
            return self._service.logins.standing(credentials(headers))
        except LoginRefused:
            return Standing.refused

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

    def _refuse_login(self, headers: Headers, context: grpc.ServicerContext) -> bytes:
        """With the text of its login; one that would be let in by now is to try again."""
        try:
            identity(headers, self._service.logins, context.peer())
        except LoginRefused as error:
            raise CallFailed(grpc.StatusCode.UNAUTHENTICATED, contract.error_text(error)) from None
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
        counted: bool,
        requests: Iterator[bytes],
        context: grpc.ServicerContext,
    ) -> bytes | Iterator[bytes]:
        """``counted``: as a login that is being checked."""
        try:
            try:
                call = FlightCall(self._login(headers, context.peer()), context.peer(), headers, requests)
            finally:
                if counted:
                    self._logins.release()
            answer = method(call)
            return answer if isinstance(answer, bytes) else _answers(answer, context)
        except CallFailed as failed:
            context.abort(failed.code, str(failed))
            raise  # not reached

    def _login(self, headers: Headers, peer: str) -> Identity:
        """Raises CallFailed."""
        limit = self._service.connection_limit
        try:
            with limit.login(peer) as enter:
                who = identity(headers, self._service.logins, peer)
                enter(who.user)
            return who
        except LoginRefused as error:
            limit.refused(peer)
            raise CallFailed(grpc.StatusCode.UNAUTHENTICATED, contract.error_text(error)) from error
        except TxmqError as error:
            raise CallFailed(grpc.StatusCode.UNKNOWN, contract.error_text(error)) from error


def _answers(found: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    with contextlib.closing(found):  # type: ignore[type-var]  # a generator
        try:
            yield from found
        except CallFailed as failed:
            context.abort(failed.code, str(failed))


class FlightListener:
    """The listener of one address. Raises ConnectionFailed."""

    def __init__(self, service: Service, host: str, port: int, tls: TlsFiles | None) -> None:
        self._pool = _Pool()
        self._server = grpc.server(self._pool, handlers=[_Handler(service)], options=_OPTIONS)
        address = f"{bracketed(host)}:{port}"
        try:
            if tls is None:
                self.port: int = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, _credentials(tls))
        except RuntimeError as error:
            raise ConnectionFailed(
                f"cannot listen on {address}; if another process uses the port, choose another one, or 0 "
                "for a free one"
            ) from error
        self._server.start()

    def close(self, grace_s: float) -> threading.Event:
        """Take no more calls; those in progress get ``grace_s``. Returns what is set when they are over."""
        ended: threading.Event = self._server.stop(grace_s)
        return ended

    def forget(self) -> None:
        """After the last call."""
        self._pool.shutdown(wait=False)


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
    """Calls in progress get ``grace_s``."""
    deadline = time.monotonic() + grace_s
    for each, ended in [(each, each.close(grace_s)) for each in listeners]:
        if ended.wait(max(deadline - time.monotonic(), 0)):
            each.forget()
