"""The connections of a port of this process, as the kernel knows them, and how one is ended whose socket
belongs to a library.

Linux alone: sock_diag(7), and /proc/net/sockstat. Not here: which connection is ended, and why
(``connection_limit.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import socket
import stat
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from broker_core.server.access.throttle import parse_ip

_SOCK_DIAG, _BY_FAMILY, _DUMP, _DONE, _ERROR = 4, 20, 0x301, 3, 2
_ESTABLISHED = 1 << 1
_INFO = 2  # the attribute that is a tcp_info
_HEADER = struct.Struct("=IHHII")
_ID_BYTES = 48  # ports, addresses, interface and cookie of an inet_diag_sockid
_INODE_AT, _MESSAGE_BYTES = 4 + _ID_BYTES + 16, 4 + _ID_BYTES + 20
_ATTACH_FILTER, _DETACH_FILTER = 26, 27
_RECEIVED_AT = 128  # tcpi_bytes_received
_COUNTS = ("/proc/net/sockstat", "/proc/net/sockstat6")  # the second is missing where there is no IPv6
_IN_USE = re.compile(rb"^TCP6?: inuse (\d+)", re.MULTILINE)


class Peer(NamedTuple):
    address: str
    port: int


class ClientSocket(NamedTuple):
    """``inode``: 0 until it is accepted. ``received``: bytes."""

    peer: Peer
    inode: int
    received: int


class KernelSockets:
    """What it needs is open from the beginning, because it is needed most when no more files can be opened.
    One thread at a time. Raises OSError: the kernel does not list its sockets.
    """

    def __init__(self) -> None:
        with contextlib.ExitStack() as undo:
            kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG)
            self._kernel = undo.enter_context(kernel)
            self._nothing, self._copy = (os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(2))
            self._counts = _opened(_COUNTS)
            self._number = 0
            undo.pop_all()

    def count(self) -> int | None:
        """How many TCP sockets this host has, of all programs and ports; None if the kernel does not say. It
        takes a hundredth of the time of ``connections``. Raises OSError.
        """
        total = 0
        for descriptor in self._counts:
            found = _IN_USE.search(os.pread(descriptor, 1024, 0))
            if found is None:
                return None
            total += int(found[1])
        return total if self._counts else None

    def connections(self, port: int) -> list[ClientSocket]:
        """Those that this host has accepted at ``port``. Raises OSError."""
        families = (socket.AF_INET, socket.AF_INET6)
        return [each for family in families for each in self._of_family(family, port)]

    def stall(self, inodes: Collection[int]) -> None:
        """What still comes to these sockets is dropped, until they end."""
        nothing = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0))  # a program: return 0 octets
        program = struct.pack("@HP", 1, ctypes.addressof(nothing))
        self._each(inodes, lambda copy: copy.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program))

    def let_go(self, inodes: Collection[int]) -> None:
        """What comes to these sockets is taken again."""
        self._each(inodes, lambda copy: copy.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0))

    def end(self, inodes: Collection[int]) -> None:
        """Shuts these sockets down; who has them closes them."""
        self.let_go(inodes)
        self._each(inodes, lambda copy: copy.shutdown(socket.SHUT_RDWR))

    def _each(self, inodes: Collection[int], act: Callable[[socket.socket], None]) -> None:
        """With a copy of each socket, because the number of one that is closed meanwhile may be another's."""
        if not inodes:
            return
        for descriptor in _descriptors():
            with contextlib.suppress(OSError):
                if not _is_one(descriptor, inodes):
                    continue
                os.dup2(descriptor, self._copy, inheritable=False)
                try:
                    if _is_one(self._copy, inodes):
                        copy = socket.socket(fileno=self._copy)
                        try:
                            act(copy)
                        finally:
                            copy.detach()
                finally:
                    os.dup2(self._nothing, self._copy, inheritable=False)

    def close(self) -> None:
        self._kernel.close()
        for descriptor in (self._nothing, self._copy, *self._counts):
            os.close(descriptor)

    def _of_family(self, family: socket.AddressFamily, port: int) -> Iterator[ClientSocket]:
        self._number += 1
        request = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _ESTABLISHED)
        request += struct.pack("!HH", port, 0).ljust(_ID_BYTES, b"\0")
        header = _HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _DUMP, self._number, 0)
        self._kernel.send(header + request)
        while True:
            data = self._kernel.recv(1 << 18)
            while data:
                size, kind, _, number, _ = _HEADER.unpack_from(data)
                message, data = data[_HEADER.size : size], data[size + 3 & ~3 :]
                if number != self._number:  # of a question before, which failed
                    continue
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    code = -struct.unpack_from("=i", message)[0]
                    raise OSError(code, os.strerror(code))
                yield _connected(family, message)


def _opened(paths: Iterable[str]) -> list[int]:
    """Of those that there are."""
    opened = []
    for path in paths:
        with contextlib.suppress(OSError):
            opened.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    return opened


def _descriptors() -> Iterable[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:  # no file can be opened: then there are not many more
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _is_one(descriptor: int, inodes: Collection[int]) -> bool:
    found = os.fstat(descriptor)
    return stat.S_ISSOCK(found.st_mode) and found.st_ino in inodes


def _connected(family: socket.AddressFamily, message: bytes) -> ClientSocket:
    (port,) = struct.unpack_from("!H", message, 6)
    (inode,) = struct.unpack_from("=I", message, _INODE_AT)
    raw = message[24:28] if family == socket.AF_INET else message[24:40]
    received, rest = 0, message[_MESSAGE_BYTES:]
    while len(rest) >= 4:
        size, kind = struct.unpack_from("=HH", rest)
        if kind == _INFO and size >= 4 + _RECEIVED_AT + 8:
            (received,) = struct.unpack_from("=Q", rest, 4 + _RECEIVED_AT)
        rest = rest[max(size + 3 & ~3, 4) :]
    return ClientSocket(Peer(str(parse_ip(raw)), port), inode, received)
