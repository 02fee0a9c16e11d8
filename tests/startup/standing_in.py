"""A Python process of Spark that stands in for a fork (``tests/fork_server.py``): it passes on its streams and the
signals that it gets, and ends as the fork has ended.

Not here: what the fork does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def stand_in(place: str) -> None:
    """Does not return, unless no fork server of this Python listens there."""
    name, _, prefix = place.partition("@")
    if prefix != sys.prefix:
        return
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        server.connect(f"\0{name}")
        order = {
            "module": sys.orig_argv[2],
            "arguments": sys.orig_argv[3:],
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "path": [os.getcwd(), *sys.path],
        }
        socket.send_fds(server, [json.dumps(order).encode()], [0, 1, 2])
        started = server.recv(64)
    except OSError:
        return
    if not started:  # the server has ended
        return

    def pass_on(number: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(started), number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    code = int(server.recv(64) or b"1")
    if code < 0:  # by a signal
        if -code in PASSED_ON:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
