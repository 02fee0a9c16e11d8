"""The listeners of the Flight server. gRPC takes a certificate when it begins to listen, so a renewed one
needs a new listener: it takes the place of the old one, which still ends the calls that it has.

Not here: what a call does (``server.py``).
Invariant: between two listeners of an address there is a moment in which a new connection is refused. Clients
try again, so a renewal only delays them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Protocol

import pyarrow.flight

from broker_core.core.address import bracketed
from broker_core.core.errors import ConnectionFailed
from broker_core.server.flight.connection_limit import FlightConnectionLimit
from broker_core.server.flight.login import MIDDLEWARE, ReadHeader
from broker_core.server.tls import TlsFiles

# gRPC logs to stderr when a port is taken or a peer is gone; the errors of txmq report the same
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

logger = logging.getLogger("txmq.flight")

AGAIN_S = 0.002  # until the old listener has left the port
REPORT_S = 5.0


class Service(Protocol):
    """Answers calls, in many threads. ``context``: of pyarrow."""

    connection_limit: FlightConnectionLimit

    def do_action(
        self, context: pyarrow.flight.ServerCallContext, action: pyarrow.flight.Action
    ) -> list[object]: ...

    def do_get(
        self, context: pyarrow.flight.ServerCallContext, ticket: pyarrow.flight.Ticket
    ) -> pyarrow.flight.FlightDataStream: ...

    def do_put(
        self,
        context: pyarrow.flight.ServerCallContext,
        descriptor: pyarrow.flight.FlightDescriptor,
        reader: pyarrow.flight.FlightStreamReader,
        writer: pyarrow.flight.FlightMetadataWriter,
    ) -> None: ...


class _GrpcServer(pyarrow.flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    """Listens from the moment it is made."""

    def __init__(self, service: Service, host: str, port: int, tls: TlsFiles | None) -> None:
        self._service = service
        arguments: dict[str, object] = {}
        if tls is not None:
            arguments["tls_certificates"] = [(tls.now.cert, tls.now.key)]
            if tls.options.verify_peer:
                arguments |= {"verify_client": True, "root_certificates": tls.now.ca}
        scheme = "grpc" if tls is None else "grpc+tls"
        super().__init__(
            f"{scheme}://{bracketed(host)}:{port}",
            middleware={MIDDLEWARE: ReadHeader(service.connection_limit)},
            **arguments,
        )

    def do_action(
        self, context: pyarrow.flight.ServerCallContext, action: pyarrow.flight.Action
    ) -> list[object]:
        return self._service.do_action(context, action)

    def do_get(
        self, context: pyarrow.flight.ServerCallContext, ticket: pyarrow.flight.Ticket
    ) -> pyarrow.flight.FlightDataStream:
        return self._service.do_get(context, ticket)

    def do_put(
        self,
        context: pyarrow.flight.ServerCallContext,
        descriptor: pyarrow.flight.FlightDescriptor,
        reader: pyarrow.flight.FlightStreamReader,
        writer: pyarrow.flight.FlightMetadataWriter,
    ) -> None:
        self._service.do_put(context, descriptor, reader, writer)


class FlightListener:
    """The listener of one address, and those before it that still end their calls.

    Raises ConnectionFailed.
    """

    def __init__(self, service: Service, host: str, port: int, tls: TlsFiles | None) -> None:
        self._service, self._host, self._tls = service, host, tls
        self._lock = threading.Lock()
        self._closed = False
        self._ending: list[threading.Thread] = []
        try:
            self._listener: _GrpcServer | None = _GrpcServer(service, host, port, tls)
        except Exception as error:
            raise ConnectionFailed(
                f"cannot listen on {bracketed(host)}:{port}; if another process uses the port, choose "
                "another one, or 0 for a free one"
            ) from error
        self.port: int = self._listener.port

    def renew(self) -> None:
        """Listen with the certificates of now. Nothing changes if gRPC does not take them."""
        if self._tls is None:
            return
        try:
            _GrpcServer(self._service, "127.0.0.1", 0, self._tls).shutdown()
        except Exception as error:
            logger.warning("gRPC does not take the new certificate, the old one stays: %s", error)
            return
        with self._lock:
            self._end()
        reported = began = time.monotonic()
        while True:
            with self._lock:
                if self._closed:
                    return
                try:
                    self._listener = _GrpcServer(self._service, self._host, self.port, self._tls)
                    return
                except Exception as error:
                    if time.monotonic() - reported > REPORT_S:
                        reported = time.monotonic()
                        passed = reported - began
                        logger.error(
                            "port %d cannot be listened on again for %.0f s: %s", self.port, passed, error
                        )
            time.sleep(AGAIN_S)

    def close(self) -> None:
        """Take no more calls."""
        with self._lock:
            self._closed = True
            self._end()

    def wait(self, deadline: float) -> None:
        """For the calls in progress, until ``deadline`` (of the monotonic clock)."""
        for ending in self._ending:
            ending.join(max(deadline - time.monotonic(), 0))

    def _end(self) -> None:
        listener, self._listener = self._listener, None
        self._ending = [each for each in self._ending if each.is_alive()]
        if listener is not None:
            # shutdown waits for every stream, also one whose reader has stopped reading
            ending = threading.Thread(target=listener.shutdown, name="flight-shutdown", daemon=True)
            ending.start()
            self._ending.append(ending)


def close_all(listeners: Sequence[FlightListener], grace_s: float) -> None:
    """Calls in progress get ``grace_s``."""
    deadline = time.monotonic() + grace_s
    for each in listeners:
        each.close()
    for each in listeners:
        each.wait(deadline)
