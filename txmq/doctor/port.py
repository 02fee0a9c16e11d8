"""Addresses to listen on: whether they are free, and who holds them if not."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import psutil

from broker_core.client.connection import FlightConnection
from broker_core.core.address import Address, parse_listen
from broker_core.core.credentials import Credentials
from broker_core.core.endpoint import read_endpoint
from broker_core.core.errors import TxmqError
from broker_core.flight.contract import Hello
from txmq.doctor.finding import Finding, hint, ok, problem


def port(check: str, listen: str, option: str, *, chosen: bool, data: str | None = None) -> Iterator[Finding]:
    """``listen``: HOST:PORT. ``chosen``: by the user; then a port in use is a problem, unless the broker
    of ``data`` holds it. Raises OptionError.
    """
    host, number = parse_listen(listen)
    failure = _failure(host, number)
    if failure is None:
        yield ok(check, f"{listen} is free")
        return
    if failure.errno != errno.EADDRINUSE:
        yield problem(check, f"{listen} cannot be used: {failure.strerror}", f"name another {option}")
        return
    pid = _listener(number)
    owner = read_endpoint(data) if data is not None else None
    if pid is not None and owner is not None and owner.pid == pid:
        yield ok(check, f"the broker of {data} listens on {listen}")
        return
    who = process(pid) if pid is not None else _unseen(host, number)
    advice = f"end it, or name another port with {option}"
    found = f"{who} listens on {listen}"
    yield problem(check, found, advice) if chosen else hint(check, found, f"for `txmq serve`: {advice}")


def _failure(host: str, number: int) -> OSError | None:
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)  # two sockets may be bound, and one may listen
    except OSError as error:
        return error
    return None


def hello(host: str, number: int, token: str = "") -> Hello | None:
    """What a broker at this address says of itself; None if no broker answers there."""
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    address = Address(everywhere.get(host, host), number, credentials=Credentials(token=token))
    connection = FlightConnection(address, reconnect_s=0, connect_s=0)
    try:
        return connection.live().hello
    except TxmqError:
        return None
    finally:
        connection.close()


def _listener(number: int) -> int | None:
    """The process that listens on a port, if this user may know it."""
    try:
        found = psutil.net_connections("tcp")
    except psutil.Error:
        return None
    listening = [each for each in found if each.status == psutil.CONN_LISTEN and each.laddr.port == number]
    return next((each.pid for each in listening if each.pid is not None), None)


def _unseen(host: str, number: int) -> str:
    broker = hello(host, number)
    if broker is None:
        return "a process of another user"
    return f"the broker of {broker.directory or 'no directory'}, process {broker.pid} of another user,"


def process(pid: int) -> str:
    """A process by its command, as far as this user may know."""
    try:
        command = " ".join(psutil.Process(pid).cmdline())[:100]
    except psutil.Error:
        command = ""
    return f"process {pid}" + (f" ({command})" if command else "")
