"""Connections of Flight that have not logged in: their number, time, bytes and calls are bounded.

gRPC's own limits do not do: it would refuse whoever comes last, keeps a silent connection for a minute and
one that answers its SETTINGS for good. So a thread looks at the connections of the ports
(``kernel_sockets.py``), has the kernel drop what those send that flood, and shuts down those that have no
right to be there: nothing lies between a client and gRPC. While all have logged in and this host has as many
sockets as before, it looks less often.

Not here: calls of those who have logged in (``calls.py``, ``quotas.py``).
Invariant: a connection on which a call was let in is never ended; it is not read any more once
LATER_REFUSALS calls in a row were refused: its user was deleted.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from broker_core.broker.access.shares import Shares
from broker_core.server.access.throttle import parse_ip
from broker_core.server.flight.kernel_sockets import ClientSocket, KernelSockets, Peer
from broker_core.server.quotas import Quota, UserLimit, flight_connection, sockets

logger = logging.getLogger("txmq.flight")

LOOK_S = 0.05
LOOK_SELDOM_S = 0.5  # nothing has changed, or only the owner of the directory may use the broker
WAITING = 256  # that have not logged in, and at most half of all
BYTES = 16 * 1024  # before a login; a client of txmq says hello first
REFUSALS = 16  # of calls of one connection without a login
LATER_REFUSALS = 200  # a client may have two users, and takes turns
HANDSHAKE_S = 10.0
REPORT_S = 5.0


class FlightConnectionLimit:
    """Of all listeners of one server. ``limit``: of connections, logged in or not. ``on_close``: all are
    called with the gRPC name of each that had logged in and has ended.
    """

    def __init__(
        self,
        on_close: Callable[[str], None],
        limit: int | None = None,
        handshake_s: float = HANDSHAKE_S,
        *,
        of_this_host: bool = False,
        shares: Shares | None = None,
    ) -> None:
        limit = max(sockets() // 4, 16) if limit is None else limit
        self._quota = Quota(UserLimit(limit), flight_connection, shares)
        self.on_close, self._handshake_s = [on_close], handshake_s
        self._look_s = LOOK_SELDOM_S if of_this_host else LOOK_S
        self._lock = threading.Lock()
        self._checks: Counter[Peer] = Counter()  # logins that are being checked
        self.proved: dict[str, tuple[Peer, float]] = {}  # by gRPC's name; and since when
        self._seen: dict[Peer, float] = {}  # that have not logged in
        self.refusals: Counter[Peer] = Counter()
        self.stalled: set[int] = set()  # sockets
        # sockets of this host at the last look, and when
        self._looked: tuple[int | None, float] = (None, 0.0)
        self._wake, self._ended = threading.Event(), False
        self._reported_at = 0.0
        self._thread: threading.Thread | None = None

    @property
    def limit(self) -> int:
        return self._quota.most.total or 0

    def watch(self, ports: Callable[[], Sequence[int]]) -> None:
        """From now on. If the kernel does not list its sockets, that is logged, and nothing is limited."""
        try:
            kernel = KernelSockets()
        except OSError as error:
            logger.warning("the connections of Spark's port cannot be looked at, nor limited: %s", error)
            return
        run = threading.Thread(target=self._run, args=(kernel, ports), name="flight-entrance", daemon=True)
        self._thread = run
        self._thread.start()

    def stop(self) -> None:
        self._ended = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    # -- calls -----------------------------------------------------------------------------------------------
    def refused(self, name: str) -> None:
        """A call of the client that gRPC calls ``name`` was not let in, or was none of ours."""
        if self._thread is None or (peer := peer_of(name)) is None:
            return
        with self._lock:
            self.refusals[peer] += 1
            if self.refusals[peer] in (REFUSALS + 1, LATER_REFUSALS + 1):
                self._wake.set()

    @contextlib.contextmanager
    def login(self, name: str) -> Iterator[Callable[[str], None]]:
        """Around the login of a call of the client that gRPC calls ``name``; it calls what this yields with
        the user, which raises Busy.
        """
        peer = peer_of(name)
        if peer is None or (name in self.proved and not self.refusals[peer]):
            yield lambda _user: None
            return

        def prove(user: str) -> None:
            with self._lock:
                self.refusals.pop(peer, None)
                if name not in self.proved:  # another call of this connection may have been faster
                    self._quota.enter(name, user)
                    self.proved[name] = (peer, time.monotonic())

        with self._lock:
            self._checks[peer] += 1
        try:
            yield prove
        finally:
            with self._lock:
                self._checks[peer] -= 1
                if not self._checks[peer]:
                    del self._checks[peer]

    # -- the thread ------------------------------------------------------------------------------------------
    def _run(self, kernel: KernelSockets, ports: Callable[[], Sequence[int]]) -> None:
        with contextlib.closing(kernel):
            while not self._ended:
                woken = self._wake.wait(self._look_s)
                self._wake.clear()
                now = time.monotonic()
                try:
                    if not self.must_look(kernel.count(), now, woken=woken):
                        continue
                    found = [each for port in ports() for each in kernel.connections(port)]
                    stalling, let_go = self.floods(found)
                    kernel.let_go(let_go)
                    if stalling:
                        kernel.stall(stalling)
                        self._report(
                            "%d connections flood Spark's port without a login, and are not read any more",
                            len(stalling),
                        )
                    ending = self.overdue(found, now)
                    if ending:
                        kernel.end({each.inode for each in ending if each.inode})
                        self._report(
                            "%d connections at Spark's port have not logged in, and are closed", len(ending)
                        )
                except OSError as error:
                    self._report(
                        "the connections of Spark's port cannot be looked at, nor limited: %s", error
                    )
            with contextlib.suppress(OSError), self._lock:  # gRPC would wait for them
                proved = {peer for peer, _ in self.proved.values()}
                left = [each for port in ports() for each in kernel.connections(port)]
                kernel.end({each.inode for each in left if each.peer not in proved})

    def must_look(self, counted: int | None, now: float, *, woken: bool) -> bool:
        """Whether connections may have come, gone or become overdue since the last look, which this one then
        is. ``counted``: sockets of this host. One that comes while another one goes is found later.
        """
        before, looked_at = self._looked
        same = counted is not None and counted == before
        if same and not self._seen and not woken and now - looked_at < LOOK_SELDOM_S:
            return False
        self._looked = counted, now
        return True

    def floods(self, found: Sequence[ClientSocket]) -> tuple[set[int], set[int]]:
        """The sockets that are not read any more from now on, because their peers would come again if they
        were ended; and those that are read again, because a login was under way. Bytes count from the second
        look on: a login may be behind the first ones.
        """
        with self._lock:
            there = {each.peer for each in found}
            self.refusals = Counter({peer: n for peer, n in self.refusals.items() if peer in there})
            proved = {peer for peer, _ in self.proved.values()}
            most = {True: LATER_REFUSALS, False: REFUSALS}
            flooding = {peer for peer, number in self.refusals.items() if number > most[peer in proved]}
            safe = (proved | set(self._checks)) - flooding
            large = {each.peer for each in found if each.received > BYTES and each.peer in self._seen} - safe
            over = {each.inode for each in found if each.peer in flooding | large} - {0}
        let_go = {each.inode for each in found if each.peer in safe} & self.stalled
        stalling = over - self.stalled
        self.stalled = {each.inode for each in found} & (self.stalled | over) - let_go
        return stalling, let_go

    def overdue(self, found: Sequence[ClientSocket], now: float) -> list[ClientSocket]:
        """Which of the connections end."""
        with self._lock:
            there = {each.peer for each in found}
            left = [name for name, (peer, at) in self.proved.items() if peer not in there and at < now]
            for name in left:
                del self.proved[name]
                self._quota.leave(name)
            proved, checking = {peer for peer, _ in self.proved.values()}, set(self._checks)
        for name in left:
            for tell in self.on_close:
                tell(name)
        waiting = [each for each in found if each.peer not in proved]
        self._seen = {each.peer: self._seen.get(each.peer, now) for each in waiting}
        waiting.sort(key=lambda each: self._seen[each.peer])
        idle = [each for each in waiting if each.peer not in checking]
        ending = {each for each in idle if now - self._seen[each.peer] > self._handshake_s}
        most_waiting = min(WAITING, max(self.limit // 2, 1))
        over = max(len(waiting) - most_waiting, len(found) - self.limit) - len(ending)
        left_over = [each for each in idle if each not in ending]
        of_address = Counter(each.peer.address for each in left_over)
        while over > 0 and left_over:  # the oldest of the address that has most
            most = max(of_address.values())
            oldest = next(each for each in left_over if of_address[each.peer.address] == most)
            left_over.remove(oldest)
            of_address[oldest.peer.address] -= 1
            ending.add(oldest)
            over -= 1
        return list(ending)

    def _report(self, text: str, what: object) -> None:
        now = time.monotonic()
        if now - self._reported_at >= REPORT_S:
            self._reported_at = now
            logger.warning(text, what)


def peer_of(name: str) -> Peer | None:
    """Of gRPC's name of a client, ``ipv4:127.0.0.1:4711``; None if it has no address."""
    kind, _, rest = name.partition(":")
    host, _, port = rest.rpartition(":")
    host = host.replace("%5B", "").replace("%5D", "").strip("[]").partition("%")[0]
    try:
        return Peer(str(parse_ip(host)), int(port)) if kind in ("ipv4", "ipv6") else None
    except ValueError:
        return None
