"""What the recipes of docs/after_commit.md write to: a PostgreSQL of its own and an HTTP API with idempotency keys.

Not here: the recipes (``recipes.py``).
Invariant: whatever is started here is ended here, by its id.
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench.ports import free_ports
from tests.progress import GUARD_S, wait_until
from tests.spark.recipes import statements

# -- PostgreSQL ----------------------------------------------------------------------------------------------


def _program(name: str) -> str | None:
    """Debian keeps the server's programs beside the PATH."""
    versions = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[-3]))
    return shutil.which(name) or (str(versions[-1]) if versions else None)


@contextmanager
def postgres() -> Iterator[str]:
    """The connection string of a new server with the tables of the page; skips the test if there is no PostgreSQL.

    PostgreSQL refuses to run as root: then it runs as the user of its package, or as nobody.
    """
    psycopg = pytest.importorskip("psycopg", reason="psycopg or libpq is missing", exc_type=ImportError)
    initdb, server = _program("initdb"), _program("postgres")
    if initdb is None or server is None:
        pytest.skip("PostgreSQL is not installed")
    folder = Path(tempfile.mkdtemp(prefix="txmq-postgres."))  # nobody else may enter pytest's folders
    user = {"user": _other_user(folder)} if os.geteuid() == 0 else {}
    port = free_ports(1)[0]
    try:
        _run(
            [
                initdb,
                "-D",
                str(folder / "data"),
                "-U",
                "txmq",
                "-A",
                "trust",
                "-E",
                "UTF8",
                "--locale=C",
                "-N",
            ],
            **user,
        )
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(port),
            "unix_socket_directories": "",
            "fsync": "off",  # only drivers are killed here
            "max_prepared_transactions": "10",
        }
        command = [server, "-D", str(folder / "data")]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                command, cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL, **user
            )
        try:
            address = f"host=127.0.0.1 port={port} user=txmq dbname=postgres"
            wait_until(lambda: _connects(psycopg, address, process, folder / "log"), "PostgreSQL answers")
            with psycopg.connect(address) as connection:
                for statement in statements():
                    connection.execute(statement)
            yield address
        finally:
            process.send_signal(signal.SIGINT)  # SIGTERM waits for its clients
            process.wait(GUARD_S)
    finally:
        shutil.rmtree(folder)


def _other_user(folder: Path) -> str:
    import pwd

    names = {entry.pw_name for entry in pwd.getpwall()}
    user = "postgres" if "postgres" in names else "nobody"
    shutil.chown(folder, user)
    assert getpass.getuser() != user
    return user


def _run(command: list[str], **more: Any) -> None:
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, **more)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


def _connects(psycopg: Any, address: str, process: subprocess.Popen[Any], log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    try:
        psycopg.connect(address).close()
    except psycopg.OperationalError:
        return False
    return True


# -- HTTP ----------------------------------------------------------------------------------------------------


class Api:
    """``POST /charges`` with the header Idempotency-Key: a repeated key gets the first answer, and 422 with another
    body.
    """

    def __init__(self) -> None:
        self.charges: list[dict[str, Any]] = []  # the effects
        self.requests: list[tuple[str, bytes]] = []  # key, body
        self.fail_at: int | None = (
            None  # so many requests from now, the effect is there and the answer is lost
        )
        self._known: dict[str, tuple[bytes, bytes]] = {}
        self._lock = threading.Lock()
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, answer = api.charge(self.headers["Idempotency-Key"], body)
                if status:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(answer)))
                    self.end_headers()
                    self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def charge(self, key: str, body: bytes) -> tuple[int, bytes]:
        """(status, answer); status 0: the connection is closed without an answer."""
        with self._lock:
            self.requests.append((key, body))
            if key not in self._known:
                self.charges.append(json.loads(body))
                self._known[key] = (body, json.dumps({"id": len(self.charges)}).encode())
            if self.fail_at is not None:
                self.fail_at -= 1
                if self.fail_at < 0:
                    self.fail_at = None
                    return 0, b""
            first, answer = self._known[key]
            return (201, answer) if first == body else (422, b"")

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
