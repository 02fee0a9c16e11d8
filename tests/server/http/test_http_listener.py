"""The listener of HTTP: logins, limits, refusals. Not here: who may ask what (``test_http_rights.py``), what is
answered (``test_management.py``).
"""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from broker_core.core import pieces
from broker_core.core.errors import OptionError
from broker_core.launcher import Broker
from broker_core.server.http import application
from broker_core.server.http import connection as http_connection
from broker_core.server.http import server as http_server
from broker_core.server.http.connection import PIPELINED, HttpConnection
from broker_core.server.http.options import HttpOptions
from broker_core.server.listener_options import ListenerOptions
from broker_core.server.quotas import UserLimit
from tests.progress import GUARD_S, wait_until
from tests.server.http.http_client import PASSWORD, Api, add_people, serving
from tests.server.http.page_visitor import Visitor

HEAD_S, SLOTS = 1.0, 4


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """With short times and small limits."""
    with pytest.MonkeyPatch.context() as patch:
        options = HttpOptions(
            connections=UserLimit(24, 8),
            requests=UserLimit(16, SLOTS),
            head_bytes=4096,
            body_bytes=64 * 1024,
            head_s=HEAD_S,
            body_s=HEAD_S,
            send_s=HEAD_S,
            max_unauthenticated=8,
        )
        patch.setattr("broker_core.server.http.options.HttpOptions", lambda **_: options)
        with serving(tmp_path_factory.mktemp("http")) as made:
            add_people(made)
            yield made


def connect(broker: Broker) -> socket.socket:
    parts = urlsplit(broker.http_urls[0])
    return socket.create_connection((parts.hostname, parts.port), GUARD_S)


def answered(connection: socket.socket) -> bytes:
    """All that comes until the broker closes."""
    found = b""
    while True:
        try:
            piece = connection.recv(65536)
        except ConnectionResetError:
            return found
        if not piece:
            return found
        found += piece


def error_of(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def test_a_wrong_password_an_unknown_user_and_none_get_401_with_a_challenge(broker: Broker) -> None:
    for user, password in (("boss", "wrong"), ("nobody", "wrong"), ("", "")):
        api = Api(broker.http_urls[0], user, password)
        answer = api.ask("GET", "/api/overview")
        assert answer.status == 401 and answer.body["error"] == "not_authorised"
        assert answer.headers["www-authenticate"].startswith("Basic ")
        api.close()
    for header in ("Basic", "Basic !!", "Bearer x", "Basic " + "x" * 5000, "Basic eA=="):
        api = Api(broker.http_urls[0], "")
        assert api.ask("GET", "/api/whoami", headers={"authorization": header[:3000]}).status == 401
        api.close()


def test_logins_and_changes_are_in_the_audit_log_without_secrets(broker: Broker, boss: Api) -> None:
    assert boss.ask("PUT", "/api/queues/%2F/audited", {}).status == 201
    assert Api(broker.http_urls[0], "manager").ask("GET", "/api/users").status == 401
    text = (Path(broker.directory) / "audit.log").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    http = [line for line in lines if line.get("listener") == "http"]
    assert {"login", "queue.declare", "refused"} <= {line["event"] for line in http}
    declared = next(line for line in http if line["event"] == "queue.declare")
    assert (declared["user"], declared["queue"], declared["vhost"]) == ("boss", "audited", "/")
    refused = next(line for line in http if line["event"] == "refused")
    assert (refused["user"], refused["asked"]) == ("manager", "GET /api/users")
    assert "a password" not in text


def test_a_deleted_user_and_another_password_end_what_a_connection_may_do(broker: Broker, boss: Api) -> None:
    assert boss.ask("PUT", "/api/users/leaving", {"password": "one", "tags": "management"}).status == 201
    leaving = Api(broker.http_urls[0], "leaving", "one")
    assert leaving.get("/api/whoami") == {"name": "leaving", "tags": ["management"]}
    assert boss.ask("PUT", "/api/users/leaving", {"password": "two", "tags": "management"}).status == 204
    assert leaving.ask("GET", "/api/whoami").status == 401
    assert boss.ask("DELETE", "/api/users/leaving").status == 204
    assert Api(broker.http_urls[0], "leaving", "two").ask("GET", "/api/whoami").status == 401


def test_users_of_one_connection_are_each_themselves(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a proxy."""
    monkeypatch.setattr(http_connection, "PROVED", 2)
    api = Api(broker.http_urls[0], "")
    for user, password in [
        ("boss", PASSWORD),
        ("manager", PASSWORD),
        ("boss", "wrong"),
        ("watcher", PASSWORD),
    ] * 2:
        sent = {"authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"}
        answer = api.ask("GET", "/api/whoami", headers=sent)
        if password == PASSWORD:
            assert (answer.status, answer.body["name"]) == (200, user)
        else:
            assert answer.status == 401
    assert api.ask("GET", "/api/whoami").status == 401, "nobody's login is the connection's"
    api.close()


def test_errors_have_one_format(boss: Api) -> None:
    for method, path, body, status in (
        ("GET", "/api/nope", None, 404),
        ("GET", "/nope", None, 404),
        ("GET", "/api/queues/%2F/nope", None, 404),
        ("POST", "/api/queues", {}, 405),
        ("PUT", "/api/queues/%2F/q", b"no json", 400),
        ("PUT", "/api/queues/%2F/q", b"[" * 60_000, 400),
        ("PUT", "/api/queues/%2F/q", b"[]", 400),
        ("PUT", "/api/queues/%2F/q", {"durable": "perhaps"}, 400),
        ("PUT", "/api/queues/%2F/q", {"arguments": {"x-max-length": -1}}, 400),
        ("PUT", f"/api/queues/%2F/{'x' * 300}", {}, 400),
        ("PUT", "/api/queues/%2F/%ff", {}, 400),
        ("PUT", "/api/exchanges/%2F/x", {"type": "nope"}, 400),
    ):
        answer = boss.ask(method, path, body)
        assert answer.status == status, (method, path, answer)
        assert set(answer.body) == {"error", "reason"} and all(answer.body.values()), answer


def test_a_page_of_another_origin_changes_nothing(boss: Api) -> None:
    for origin, status in (("http://evil.example", 403), ("null", 403)):
        answer = boss.ask("PUT", "/api/queues/%2F/forged", {}, {"origin": origin})
        assert answer.status == status and answer.body["error"] == "forbidden"
    assert boss.ask("GET", "/api/queues/%2F/forged").status == 404
    for foreign in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
        assert boss.ask("GET", "/api/aliveness-test/%2F", headers=foreign).status == 403
        assert boss.ask("HEAD", "/api/aliveness-test/%2F", headers=foreign).status == 403
    assert boss.ask("GET", "/api/queues/%2F/aliveness-test").status == 404
    for here in ({}, {"sec-fetch-site": "same-origin"}):
        assert boss.ask("GET", "/api/aliveness-test/%2F", headers=here).status == 200
    headers = boss.ask("GET", "/api/overview").headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/whoami"),
        ("GET", "/api/definitions"),
        ("GET", "/api/nothing"),
        ("PATCH", "/api/whoami"),
        ("OPTIONS", "/api/whoami"),
        ("PUT", "/api/queues/%2F/large"),
        ("GET", "/"),
        ("GET", "/ui"),
        ("GET", "/ui/nothing"),
        ("GET", "/ui/login"),
        ("POST", "/ui/login"),
    ],
)
def test_no_answer_is_stored_or_taken_for_another_type(boss: Api, method: str, path: str) -> None:
    headers = boss.ask(method, path, b"x" * 100_000 if method == "PUT" else None).headers
    assert headers["cache-control"] == "no-store" and headers["x-content-type-options"] == "nosniff"
    assert "frame-ancestors 'none'" in headers["content-security-policy"]


def test_a_key_that_is_given_twice_is_refused(boss: Api) -> None:
    for body, key in (
        (b'{"durable":true,"durable":false}', "durable"),
        (b'{"arguments":{"x-max-length":1,"x-max-length":2}}', "x-max-length"),
        (b'{"arguments":{"a":1' + b',"b":[1,2,3]' * 20_000 + b"}}", "b"),  # large
    ):
        answer = boss.ask("PUT", "/api/queues/%2F/twice", body)
        if len(body) > 64 * 1024:
            assert answer.status == 413
            with pytest.raises(pieces.GivenTwice, match="'b'"):
                pieces.loads(body, None, pieces.once)
        else:
            assert answer.status == 400 and f"{key!r} is given twice" in answer.body["reason"]
    assert boss.ask("GET", "/api/queues/%2F/twice").status == 404


def test_no_header_names_another_address(broker: Broker, boss: Api) -> None:
    """The throttle and the default user go by addresses."""
    named = {"x-forwarded-for": "192.0.2.7", "forwarded": "for=192.0.2.7"}
    api = Api(broker.http_urls[0], "boss", "wrong")
    assert api.ask("GET", "/api/whoami", headers=named).status == 401
    assert "192.0.2.7" not in (Path(broker.directory) / "audit.log").read_text()


# -- limits --------------------------------------------------------------------------------------------------
def test_a_large_body_is_refused_without_being_read(broker: Broker, boss: Api) -> None:
    with connect(broker) as connection:
        connection.sendall(_request("PUT", "/api/queues/%2F/large", f"content-length: {1 << 30}"))
        assert error_of(answered(connection)) == (413, "body_too_large")
    with connect(broker) as connection:  # in chunks, which announce no size
        connection.sendall(_request("PUT", "/api/queues/%2F/large", "transfer-encoding: chunked"))
        piece = b"1000\r\n" + b"x" * 4096 + b"\r\n"

        def send_for_ever() -> None:
            while True:
                connection.sendall(piece * 100)

        with pytest.raises(OSError):  # what is refused is dropped for a while
            send_for_ever()
    assert boss.get("/api/whoami")["name"] == "boss"


@pytest.mark.parametrize("size", [100_000, 4_000_000])
@pytest.mark.parametrize("path", ["/api/queues/%2F/large", "/api/nothing", "/ui/login"])
def test_a_client_that_sends_all_of_a_large_body_reads_why_it_is_refused(
    broker: Broker, path: str, size: int
) -> None:
    for user in ("boss", ""):
        head = _request("PUT", path, f"content-length: {size}", user=user)
        with connect(broker) as connection:
            connection.sendall(head)
            for start in range(0, size, 50_000):
                connection.sendall(b"x" * min(50_000, size - start))
            status = int(answered(connection).split()[1])
            assert status == (404 if "nothing" in path else 405 if "ui" in path else 413 if user else 401)


def test_logins_that_are_sent_slowly_or_are_large_keep_nobody_from_the_page(broker: Broker) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(SLOTS):  # as many as one user may have in progress
            connection = stack.enter_context(connect(broker))
            connection.sendall(_form("content-length: 60000") + b"user=")
        visitor = Visitor(broker.http_urls[0])
        assert visitor.log_in("boss").status == 303 and visitor.get("/ui").status == 200
        visitor.close()
    for length in (1 << 17, 1 << 30):
        with connect(broker) as connection:
            connection.sendall(_form(f"content-length: {length}"))
            assert answered(connection).startswith(b"HTTP/1.1 413 ")


def _form(*headers: str) -> bytes:
    head = ("POST /ui/login HTTP/1.1", "host: here", "origin: http://here", *headers, "", "")
    return "\r\n".join(head).encode()


def test_large_headers_are_refused(broker: Broker) -> None:
    many = "\r\n".join(f"x-{number}: {'y' * 100}" for number in range(60))
    for head in (
        _request("GET", "/api/whoami", many),
        _request("GET", "/" + "x" * 8000),
        b"GET /" + b"x" * 9000,
        _request("GET", "/api/whoami", "\r\n".join(f"h{number}: x" for number in range(100))),
    ):
        with connect(broker) as connection:
            connection.sendall(head)
            assert error_of(answered(connection)) == (431, "headers_too_large")


def test_a_connection_that_ends_leaves_no_requests_to_the_collector(broker: Broker) -> None:
    """It ends while requests wait behind another one: they would be in memory until a collection."""
    server = broker.http
    assert server is not None
    seen: list[weakref.ref[HttpConnection]] = []
    gc.collect()
    gc.disable()
    try:
        before = set(server.clients.connections)
        for _ in range(10):
            with connect(broker) as connection:
                connection.sendall(_request("GET", "/", "a: b") * PIPELINED)
                connection.recv(1)
                seen += [weakref.ref(each) for each in set(server.clients.connections) - before]
        assert seen
        wait_until(lambda: set(server.clients.connections) <= before)
        wait_until(lambda: all(each() is None for each in seen))
    finally:
        gc.enable()


def test_bytes_that_are_no_request_get_400(broker: Broker) -> None:
    for data in (b"\x16\x03\x01\x02\x00\x01\x00", b"AMQP\x00\x00\x09\x01", b"GET\r\n\r\n", b"\x00" * 20):
        with connect(broker) as connection:
            connection.sendall(data)
            assert error_of(answered(connection)) == (400, "bad_request")


def test_a_client_that_sends_slowly_is_disconnected_and_others_are_served(broker: Broker, boss: Api) -> None:
    began = time.monotonic()
    with connect(broker) as silent, connect(broker) as slow, connect(broker) as body:
        body.sendall(_request("PUT", "/api/queues/%2F/slow", "content-length: 100"))
        head = _request("GET", "/api/whoami")
        try:
            for byte in head:
                slow.sendall(bytes([byte]))
                assert boss.get("/api/whoami")["name"] == "boss"
                time.sleep(HEAD_S / 10)
        except OSError:
            pass
        assert answered(slow) == b"" and answered(silent) == b""
        assert error_of(answered(body)) == (408, "timeout")
    assert time.monotonic() - began < GUARD_S


@pytest.mark.parametrize("reads", [0, 1])
def test_a_client_that_reads_a_byte_at_a_time_or_nothing_is_disconnected(
    broker: Broker, boss: Api, reads: int
) -> None:
    with broker.channel() as channel:
        for number in range(500):
            channel.queue_declare(f"unread-{number:03}-{'x' * 200}", durable=False)
    connection = connect(broker)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    server = broker.http
    assert server is not None
    before = len(server.clients.connections)
    connection.sendall(_request("GET", "/api/queues") * PIPELINED)  # 8 MB of answers
    wait_until(
        lambda: len(server.clients.connections) == before + 1 or len(server.clients.connections) < before
    )

    def gone() -> bool:
        with contextlib.suppress(OSError):
            connection.recv(reads)
        return len(server.clients.connections) <= before

    wait_until(gone)
    assert boss.get("/api/whoami")["name"] == "boss"
    connection.close()
    with broker.channel() as channel:
        for number in range(500):
            channel.queue_delete(f"unread-{number:03}-{'x' * 200}")


def test_a_few_things_are_listed_without_a_thread_and_many_beside_the_loop(broker: Broker, boss: Api) -> None:
    server = broker.http
    assert server is not None
    released = threading.Event()
    for _ in range(http_server.THREADS):
        server._beside.submit(released.wait)  # no thread is free
    try:
        for path in (
            "/api/queues",
            "/api/overview",
            "/api/exchanges/%2F",
            "/api/channels",
            "/api/connections",
        ):
            boss.get(path)
        with broker.channel() as channel:
            for number in range(application.FEW):
                channel.queue_declare(f"many-{number}", durable=False)
        api, found = Api(broker.http_urls[0], "boss"), list[int]()
        asking = threading.Thread(target=lambda: found.append(len(api.get("/api/queues?columns=name"))))
        asking.start()
        wait_until(lambda: len(server.requests) == 1)
        assert boss.get("/api/whoami")["name"] == "boss" and not found
    finally:
        released.set()
    asking.join()
    api.close()
    assert found[0] >= application.FEW
    with broker.channel() as channel:
        for number in range(application.FEW):
            channel.queue_delete(f"many-{number}")


def test_connections_of_a_user_and_without_a_login_are_limited(broker: Broker, boss: Api) -> None:
    server = broker.http
    assert server is not None
    open_ = [Api(broker.http_urls[0], "manager") for _ in range(9)]
    statuses = [api.ask("GET", "/api/whoami").status for api in open_]
    assert statuses == [200] * 8 + [503]
    assert boss.get("/api/whoami")["name"] == "boss"
    for api in open_:
        api.close()
    wait_until(lambda: len(server.connections) <= 1)
    held = [connect(broker) for _ in range(12)]  # the oldest are closed
    assert boss.get("/api/whoami")["name"] == "boss"
    assert Api(broker.http_urls[0], "manager").get("/api/whoami")["name"] == "manager"
    for connection in held:
        connection.close()


def test_a_connection_that_is_refused_to_a_second_user_still_counts_for_the_first(broker: Broker) -> None:
    """Otherwise two logins hold as many connections as they like: each is of nobody after the refusal."""
    server = broker.http
    assert server is not None
    boss, manager = Api("http://x:1", "boss")._headers, Api("http://x:1", "manager")._headers
    wait_until(lambda: len(server.connections) <= 1)
    full = [Api(broker.http_urls[0], "manager") for _ in range(8)]
    assert [api.ask("GET", "/api/whoami").status for api in full] == [200] * 8
    before = len(server.connections)
    turning = [Api(broker.http_urls[0], "") for _ in range(8)]
    assert [api.ask("GET", "/api/whoami", headers=boss).status for api in turning[:7]] == [200] * 7
    assert [api.ask("GET", "/api/whoami", headers=manager).status for api in turning[:7]] == [503] * 7
    assert len(server.connections) == before and len(server.unauthenticated) == 7
    assert [api.ask("GET", "/api/whoami", headers=boss).status for api in turning[:7]] == [200] * 7
    assert len(server.connections) == before + 7 and len(server.unauthenticated) == 0
    for api in (*full, *turning):
        api.close()


def _request(method: str, path: str, *headers: str, user: str = "boss") -> bytes:
    login = ["authorization: Basic Ym9zczphIHBhc3N3b3Jk"] if user else []
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: here", *login, *headers, "", ""]).encode()


@pytest.mark.parametrize(
    ("host", "comes_in"),
    [
        *(
            (host, True)
            for host in ("localhost", "localhost:1", "127.0.0.1:15672", "[::1]:1", "txmq.localhost")
        ),
        *((host, False) for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "")),
        *((host, False) for host in ("127.0.0.1@evil.example", "[", "localhost:x@evil.example")),
    ],
)
def test_the_default_user_does_not_come_in_under_a_name_of_others(
    tmp_path: Path, host: str, comes_in: bool
) -> None:
    """A page whose name is given an address of this host sends requests from here (DNS rebinding)."""
    with serving(tmp_path) as broker:
        api = Api(broker.http_urls[0])
        assert api.ask("GET", "/api/whoami", headers={"host": host}).status == (200 if comes_in else 401)
        api.close()
        visitor = Visitor(broker.http_urls[0])
        visitor.post(
            "/ui/login",
            {"user": "guest", "password": "guest"},
            {"host": host, "origin": f"http://{host}"},
            form=None,
        )
        assert bool(visitor.cookie) == comes_in
        visitor.close()


# -- the start -----------------------------------------------------------------------------------------------
def test_other_hosts_need_tls_or_permission(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"--http is 0\.0\.0\.0:0"):
        Broker.open(tmp_path / "data", listeners=ListenerOptions(http=["0.0.0.0:0"]))


def test_without_its_packages_the_remedy_is_one_sentence(tmp_path: Path) -> None:
    blocked = "import sys; sys.modules['starlette'] = None; sys.modules['uvicorn'] = None; "
    code = f"from txmq.cli import main; sys.exit(main(['serve', '--data', {str(tmp_path / 'd')!r}, '--http', '127.0.0.1:0', '--listen', '127.0.0.1:0', '--amqp', 'none']))"
    done = subprocess.run(
        [sys.executable, "-c", blocked + code], capture_output=True, text=True, timeout=GUARD_S
    )
    assert done.returncode and "pip install '.[http]'" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
