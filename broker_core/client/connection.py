"""One client's connection to a broker: made when needed, made again when it broke, shared by all threads.

Not here: what the calls mean (``broker.py``).

Invariant: a call that failed because the connection broke is sent again until an answer comes or
``reconnect_s`` has passed. A call that the broker answered, with a value or an error, is not sent again.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import threading
from collections.abc import Iterator
from urllib.parse import quote

import pyarrow as pa
import pyarrow.flight
import pyarrow.flight as arrow_flight

from broker_core.client import starter, tls
from broker_core.core import endpoint, errors
from broker_core.core.address import VHOST, Address, bracketed
from broker_core.core.backoff import Backoff, Time
from broker_core.core.credentials import Credentials
from broker_core.core.endpoint import Endpoint, client_name
from broker_core.flight import authorization, contract
from broker_core.flight.authorization import CHALLENGE_BYTES, Basic, Bearer, proof


class SendHeader(pyarrow.flight.ClientMiddlewareFactory):  # type: ignore[misc]  # pyarrow has no types
    """What every call says of its caller. ``header``: the value of ``authorization``, of ``Basic`` or
    ``Bearer``; "": none. ``vhost``: where the calls are made.
    """

    def __init__(self, header: str = "", vhost: str = VHOST) -> None:
        super().__init__()
        self._vhost = vhost
        self.send(header)

    def send(self, header: str, run: str = "") -> None:
        """From the next call on. ``run``: of the broker, which alone is to answer."""
        self._middleware = _Header(header, self._vhost, run)

    def start_call(self, _info: object) -> _Header:
        return self._middleware


class _Header(pyarrow.flight.ClientMiddleware):  # type: ignore[misc]
    def __init__(self, header: str, vhost: str, run: str) -> None:
        super().__init__()
        caller = {authorization.HEADER: header, authorization.RUN_HEADER: run}
        self._headers = {name: value for name, value in caller.items() if value}
        self._headers[authorization.CLIENT_HEADER] = quote(client_name(), safe="")
        if vhost != VHOST:
            self._headers[authorization.VHOST_HEADER] = quote(vhost, safe="")

    def sending_headers(self) -> dict[str, str]:
        return self._headers


CONNECT_S = 5.0  # for a broker that was never reached
RECONNECT_S = 30.0
HELLO_S = 5.0  # a broker that takes connections but does not answer
PAUSES_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

BROKEN = (
    arrow_flight.FlightUnavailableError,
    arrow_flight.FlightTimedOutError,
    arrow_flight.FlightCancelledError,
)
# what pyarrow raises for a failed call: FlightError, or an ArrowException that is a ValueError or OSError as
# well
FAILED = (arrow_flight.FlightError, pa.ArrowException, OSError)

# gRPC logs to stderr when a port is taken or a peer is gone; the errors of txmq report the same
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# a local pool: gRPC would share a failed channel's back-off with the next client of the same address
_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.initial_reconnect_backoff_ms", 100),
]

_inherited: list[object] = []  # clients from before a fork: neither usable nor safe to close in this process
_used = False  # gRPC has threads in this process
_forked_in_use = False  # ... and had them in the parent before a fork: a call would hang


def _after_fork() -> None:
    global _forked_in_use
    _forked_in_use = _used


os.register_at_fork(after_in_child=_after_fork)


class Live:
    """A connection that has answered. ``local`` is the data directory if it is on this host, else ""."""

    def __init__(self, client: arrow_flight.FlightClient, hello: contract.Hello) -> None:
        self.client = client  # answered by this broker alone
        self.hello = hello
        self.local = hello.directory if hello.id and endpoint.read_id(hello.directory) == hello.id else ""
        self.takes_files = bool(self.local)  # until it has refused one


class FlightConnection:
    def __init__(
        self, address: Address, reconnect_s: float = RECONNECT_S, connect_s: float = CONNECT_S
    ) -> None:
        self.address = address
        self._reconnect_s = reconnect_s
        self._connect_s = connect_s
        self._live: Live | None = None
        self._why: errors.ConnectionFailed | errors.Busy | None = None  # the last attempt failed
        self._reached = False  # ever
        self._closed = False
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def patience(self) -> Backoff:
        limit_s = self._reconnect_s
        if not self._reached and not self.address.directory:
            limit_s = min(limit_s, self._connect_s)
        return Backoff(limit_s, Time(), PAUSES_S)

    # -- calls -----------------------------------------------------------------------------------------------
    def call(
        self,
        action: str,
        body: bytes = b"",
        *,
        patience: Backoff | None = None,
        timeout_s: float | None = None,
    ) -> pa.Buffer:
        """The result of an action. Raises what the broker raised, or ConnectionFailed. ``timeout_s``: of one
        try; None: as long as the broker lives.
        """
        options = arrow_flight.FlightCallOptions(timeout=timeout_s)
        patience = patience or self.patience()
        while True:
            live = self.live(patience)
            try:
                (result,) = live.client.do_action((action, body), options)
                return result.body
            except FAILED as error:
                # a channel keeps the answer to each call
                self.broken(live, error, patience, again=not action.startswith("channel."))

    def broken(self, live: Live, error: Exception, patience: Backoff, *, again: bool = True) -> None:
        """Raise the broker's error; or drop the connection, and return if there is time to try again.
        ``again``: the call may be made again after a ResourceShortage.
        """
        crossed = contract.error_from(error)
        # the broker of a directory makes a new token at each start, and may listen on the port of before
        restarted = isinstance(crossed, errors.LoginRefused) and bool(self.address.directory)
        passes = isinstance(crossed, errors.Busy) or (again and isinstance(crossed, errors.ResourceShortage))
        if passes and patience.failed():
            return  # it was not begun, and the connection is whole
        if crossed is not None and not restarted:
            raise crossed from None
        if not isinstance(error, BROKEN) and not restarted:
            raise errors.RemoteProtocolError(
                f"{self.address}: {type(error).__name__}: {errors.one_line(error)[:500]}"
            ) from error
        if not isinstance(error, arrow_flight.FlightCancelledError):  # too many calls, or the broker is gone
            self._drop(live)
        if not patience.failed():
            raise crossed or self._failure() from error

    # -- making it -------------------------------------------------------------------------------------------
    def live(self, patience: Backoff | None = None) -> Live:
        """The connection. Raises ConnectionFailed when ``patience`` ends."""
        live = self._live
        if live is not None and self._pid == os.getpid():
            return live
        patience = patience or self.patience()
        while True:
            with self._locked():
                if self._closed:
                    raise errors.ConnectionFailed(f"this client of {self.address} is closed")
                if self._live is None:
                    self._live = self._connect()
                if self._live is not None:
                    self._reached = True
                    return self._live
            if not patience.failed():
                raise self._failure()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if self._pid != os.getpid():  # forked: the lock may be held by a thread that does not exist here
            self._lock = threading.Lock()
            if self._live is not None:
                _inherited.append(self._live)
            self._live = None
            self._pid = os.getpid()
        with self._lock:
            yield

    def _connect(self) -> Live | None:
        if not self.address.directory:
            try:
                self._why = None
                return _try(self.address, "")
            except (errors.ConnectionFailed, errors.Busy) as error:
                self._why = error
                return None
        lives: list[Live] = []

        def answers(found: Endpoint) -> bool:
            near = Address(
                found.host, found.port, credentials=Credentials(token=found.token), vhost=self.address.vhost
            )
            live = _try(near, found.id)
            if live is not None:
                lives.append(live)
            return live is not None

        starter.find_or_start(self.address.directory, answers)
        return lives[-1]

    def _failure(self) -> errors.ConnectionFailed | errors.Busy:
        directory = self.address.directory
        if self._why is not None:
            return self._why
        if directory:
            return errors.ConnectionFailed(
                f"the broker of {directory} does not answer; look into "
                f"{os.path.join(directory, endpoint.LOG)}"
            )
        if not self._reached:
            listen = f"{bracketed(self.address.host)}:{self.address.port}"
            return errors.ConnectionFailed(
                f"nothing listens at {self.address}: start a broker there (txmq serve --data DIR --listen "
                f"{listen}) or correct the url"
            )
        return errors.ConnectionFailed(
            f"the broker at {self.address} has not answered for {self._reconnect_s:.0f} s; start it again: "
            "what was committed is not lost"
        )

    def _drop(self, live: Live) -> None:
        """Other threads may still use it, so it is closed with its last reference."""
        with self._locked():
            if self._live is live:
                self._live = None

    def close(self) -> None:
        with self._locked():
            live, self._live, self._closed = self._live, None, True
        if live is not None:
            with contextlib.suppress(*FAILED):
                live.client.close()


def _try(address: Address, directory_id: str) -> Live | None:
    """A connection to the broker at a host and port; None if none answers, one of another data directory, or
    one that has not the token of ``address``.

    Raises LoginRefused, OptionError; Busy: the user has too many connections; RemoteProtocolError if TLS
    cannot be agreed on, or what listens is no broker of this version; ConnectionFailed if it may be only now
    that TLS cannot be agreed on.
    """
    global _used
    if _forked_in_use:
        raise errors.LocalProtocolError(
            "this process was forked from one that had used a txmq client, and its network library does not "
            "survive a fork; start the process with spawn, or fork before the first use"
        )
    _used = True
    login = SendHeader(vhost=address.vhost)
    client = arrow_flight.connect(
        f"{'grpc+tls' if address.tls else 'grpc'}://{bracketed(address.host)}:{address.port}",
        generic_options=_OPTIONS,
        middleware=[login],
        **tls.arguments(address),
    )
    try:
        if (token := address.credentials.token) and not _proven(client, token):
            client.close()
            return None
        login.send(header := _header(address))
        (result,) = client.do_action(("hello", b""), arrow_flight.FlightCallOptions(timeout=HELLO_S))
        hello: contract.Hello = contract.decode(contract.Hello, result.body)
    except BROKEN as error:
        client.close()
        busy = isinstance(error, arrow_flight.FlightCancelledError)
        refusal = tls.Refusal("") if directory_id or busy else tls.refusal(address)
        if refusal.why:
            kind = errors.RemoteProtocolError if refusal.certain else errors.ConnectionFailed
            raise kind(f"{address} cannot be used: {refusal.why}") from error
        return None
    except FAILED as error:
        client.close()
        crossed = contract.error_from(error)
        if isinstance(crossed, errors.RemoteProtocolError):  # it does not know the action ``prove``
            raise crossed from None
        if directory_id:
            return None
        if isinstance(crossed, (errors.LoginRefused, errors.Busy)):
            raise crossed from None
        raise errors.RemoteProtocolError(
            f"what listens at {address} is not a txmq broker: {type(error).__name__}"
        ) from error
    if hello.version != contract.VERSION:
        client.close()
        raise errors.RemoteProtocolError(
            f"the broker at {address} speaks version {hello.version} of the protocol and this client "
            f"{contract.VERSION}; use the same txmq on both sides"
        )
    if directory_id and hello.id != directory_id:
        client.close()
        return None
    login.send(header, hello.run)
    return Live(client, hello)


def _proven(client: arrow_flight.FlightClient, token: str) -> bool:
    """Whether the broker has the token, which is not sent before. Raises as an action does."""
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    header = (authorization.CHALLENGE_HEADER.encode(), challenge.hex().encode())
    options = arrow_flight.FlightCallOptions(timeout=HELLO_S, headers=[header])
    answers = [result.body.to_pybytes() for result in client.do_action(("prove", b""), options)]
    return len(answers) == 1 and hmac.compare_digest(answers[0], proof(token, challenge))


def _header(address: Address) -> str:
    own = address.credentials
    if own.token:
        return Bearer(own.token).header
    return Basic(own.user, own.password).header if own.user else ""
