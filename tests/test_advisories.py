"""The audit of the lock file: a vulnerability fails it, and a database that is away does not."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bench.ports import free_ports
from tests import advisories

pytestmark = pytest.mark.slow  # each asks a server of its own

LOCK = "six==1.16.0 --hash=sha256:{0}\nidna==3.4 --hash=sha256:{0}\n".format("0" * 64)


@contextlib.contextmanager
def database(vulnerable: str = "", answers: int = 1000) -> Iterator[str]:
    """OSV's, in which this package is ``vulnerable``; it breaks after so many ``answers``."""
    left = iter(range(answers))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            code = 503 if next(left, None) is None else 200
            name = asked["package"]["name"]
            affected = [{"package": asked["package"], "ranges": [], "versions": [asked["version"]]}]
            found = {"vulns": [{"id": "PYSEC-1", "summary": "bad", "aliases": [], "affected": affected}]}
            body = json.dumps(found if name == vulnerable else {}).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_said: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/query"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def lock(tmp_path: Path) -> str:
    path = tmp_path / "requirements.lock"
    path.write_text(LOCK)
    return str(path)


def test_a_known_vulnerability_fails_the_audit(lock: str, capsys: pytest.CaptureFixture[str]) -> None:
    with database(vulnerable="idna") as url:
        assert advisories.main(lock, url) == 1
    assert "idna 3.4: PYSEC-1" in capsys.readouterr().out
    with database(vulnerable="other") as url:
        assert advisories.main(lock, url) == 0
    assert capsys.readouterr().out == "no known vulnerability in 2 packages\n"


def test_a_database_that_cannot_be_reached_is_one_line_and_no_failure(
    lock: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert advisories.main(lock, f"http://127.0.0.1:{free_ports(1)[0]}/v1/query") == 0
    for answers in (0, 1):
        with database(answers=answers) as url:
            assert advisories.main(lock, url) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(line.startswith("not audited: http://127.0.0.1:") for line in lines)


def test_for_a_release_what_could_not_be_asked_is_a_failure(lock: str) -> None:
    assert advisories.main(lock, f"http://127.0.0.1:{free_ports(1)[0]}/v1/query", strict=True) == 1
    with database(answers=1) as url:
        assert advisories.main(lock, url, strict=True) == 1
    with database() as url:
        assert advisories.main(lock, url, strict=True) == 0


def test_a_lock_file_that_is_none_fails_the_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lock").write_text("six==\n")
    with database() as url:
        assert advisories.main(str(tmp_path / "lock"), url) == 1
    assert "invalid specifier" in capsys.readouterr().err
