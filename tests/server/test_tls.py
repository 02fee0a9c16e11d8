"""TLS at both listeners: who is trusted, which versions, and certificates that are renewed while clients are
connected.

Sockets, gRPC and pika are real, and every certificate is signed here (``certificates.py``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pika
import psutil
import pytest
from cryptography import x509
from pika.credentials import ExternalCredentials
from pika.exceptions import AMQPConnectionError, ProbableAuthenticationError

from bench.certificates import Authority, Pair
from broker_core.client.broker import BrokerClient
from broker_core.core import errors
from broker_core.core.credentials import Credentials
from broker_core.launcher import Broker
from broker_core.server import tls as server_tls
from broker_core.server.amqp.options import AmqpOptions
from broker_core.server.listener_options import ListenerOptions
from broker_core.server.tls import TlsOptions
from tests.progress import wait_until
from tests.server.conftest import Served, bodies, fill
from tests.server.http.http_client import Api

FREE = "127.0.0.1:0"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


class Encrypted:
    """A broker of this process whose listeners have TLS."""

    def __init__(self, directory: Path, authority: Authority, pair: Pair, **options: object) -> None:
        self.authority = authority
        users = {"guest": "guest", "CN=orders,OU=spark,O=example": "x", "orders": "x"}
        self.broker = Broker.open(
            directory,
            amqp_options=AmqpOptions(handshake_timeout_s=1.0),
            users=users,
            listeners=ListenerOptions(TlsOptions(pair.cert, pair.key, **options), [FREE], http=[FREE]),
        )
        self.flight_port = self.broker.port
        self.amqp_port = int(self.broker.amqp_urls[0].rpartition(":")[2])
        self.http_port = int(self.broker.http_urls[0].rpartition(":")[2])

    def client(self, ca: str | None = None, pair: Pair | None = None, scheme: str = "txmqs") -> BrokerClient:
        known = Credentials(
            user="guest",
            password="guest",
            tls_ca=self.authority.ca if ca is None else ca,
            tls_cert=pair.cert if pair else "",
            tls_key=pair.key if pair else "",
        )
        url = f"{scheme}://localhost:{self.flight_port}"
        login = known if scheme == "txmqs" else None
        return BrokerClient(url, credentials=login, map_files=False, connect_s=1.0)

    def amqp(self, pair: Pair | None = None, **more: object) -> pika.BlockingConnection:
        context = ssl.create_default_context(cafile=self.authority.ca)
        if pair is not None:
            context.load_cert_chain(pair.cert, pair.key)
        return pika.BlockingConnection(
            pika.ConnectionParameters(
                "localhost", self.amqp_port, ssl_options=pika.SSLOptions(context, "localhost"), **more
            )
        )

    def certificates(self) -> list[str]:
        """Those that new connections get."""
        return [_served(port) for port in (self.flight_port, self.amqp_port, self.http_port)]


def _served(port: int) -> str:
    """The certificate at ``port``; "" while it changes hands."""
    try:
        return ssl.get_server_certificate(("127.0.0.1", port), timeout=5)
    except OSError:
        return ""


@contextlib.contextmanager
def encrypted(
    tmp_path: Path, authority: Authority, pair: Pair | None = None, **options
) -> Iterator[Encrypted]:
    made = Encrypted(tmp_path / "data", authority, pair or authority.sign(), **options)
    with made.broker:
        yield made


# -- who is trusted ------------------------------------------------------------------------------------------


def test_messages_pass_both_listeners_with_tls(tmp_path: Path, authority: Authority) -> None:
    with encrypted(tmp_path, authority) as served:
        assert served.broker.url.startswith("txmqs://")
        with served.client() as client, contextlib.closing(served.amqp()) as connection:
            fill(client, "q", 3000, size=2000)
            channel = connection.channel()
            got = [channel.basic_get("q", auto_ack=True)[2] for _ in range(2)]
            channel.basic_publish("", "q", b"of pika")
            wait_until(lambda: bodies(client, "q")[-1] == b"of pika")
            assert [body.strip() for body in got] == [b"0", b"1"] and len(bodies(client, "q")) == 2999


def test_a_large_stream_to_a_slow_amqps_client_is_held_back_and_arrives_whole(
    tmp_path: Path, authority: Authority
) -> None:
    with encrypted(tmp_path, authority) as served, contextlib.closing(served.amqp()) as connection:
        channel = connection.channel()
        channel.queue_declare("large")
        body = random.Random(1).randbytes(2 * 1024 * 1024)
        for _ in range(24):
            channel.basic_publish("", "large", body)
        found = channel.consume("large", auto_ack=True, inactivity_timeout=60)
        assert all(next(found)[2] == body for _ in range(24))


WRONG = {
    "expired": "certificate has expired",
    "wrong name": "Hostname mismatch",
    "unknown authority": "unable to get local issuer certificate",
    "authorities of the machine": "unable to get local issuer certificate",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_certificate_that_does_not_match_is_one_clear_error_at_once(
    tmp_path: Path, authority: Authority, wrong: str
) -> None:
    pair = authority.sign(
        "broker", *(["example.org"] if wrong == "wrong name" else []), expired=wrong == "expired"
    )
    ca = {"unknown authority": Authority(tmp_path, "other").ca, "authorities of the machine": ""}.get(wrong)
    with encrypted(tmp_path, authority, pair) as served, served.client(ca) as client:
        began = time.monotonic()
        with pytest.raises(errors.RemoteProtocolError, match="does not match") as caught:
            client.queues()
        assert WRONG[wrong] in str(caught.value) and "tlsCa" in str(caught.value)
        assert time.monotonic() - began < 0.9  # it is not tried again


def test_a_client_and_a_broker_of_which_one_has_no_tls_say_so(tmp_path: Path, authority: Authority) -> None:
    with encrypted(tmp_path, authority) as served, served.client(scheme="txmq") as client:
        with pytest.raises(errors.RemoteProtocolError, match="it speaks TLS: use txmqs://"):
            client.queues()
    with Broker.memory() as broker:
        url = broker.url.replace("txmq:", "txmqs:")
        with (
            BrokerClient(url) as client,
            pytest.raises(errors.RemoteProtocolError, match="does not speak TLS"),
        ):
            client.queues()


def test_nothing_below_tls_1_2_is_agreed_on(tmp_path: Path, authority: Authority) -> None:
    with encrypted(tmp_path, authority) as served:
        for port in (served.flight_port, served.amqp_port):
            old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
            old.set_ciphers("ALL:@SECLEVEL=0")
            with pytest.warns(DeprecationWarning, match="TLS"):
                old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
            with socket.create_connection(("127.0.0.1", port), 5) as plain, pytest.raises(OSError):
                old.wrap_socket(plain)
            new = ssl.create_default_context(cafile=authority.ca)
            new.set_alpn_protocols(["h2"])
            new.maximum_version = ssl.TLSVersion.TLSv1_2
            with socket.create_connection(("127.0.0.1", port), 5) as plain:
                with new.wrap_socket(plain, server_hostname="localhost") as found:
                    assert found.version() == "TLSv1.2"


# -- certificates of clients ---------------------------------------------------------------------------------


def test_a_broker_that_verifies_its_peers_serves_only_them(tmp_path: Path, authority: Authority) -> None:
    mine, other = authority.sign("client"), Authority(tmp_path, "other").sign("stranger")
    with encrypted(tmp_path, authority, ca=authority.ca, verify_peer=True) as served:
        with served.client(pair=mine) as client:
            assert client.queues() == []
        served.amqp(mine).close()
        for pair in (None, other):
            with served.client(pair=pair) as client, pytest.raises(errors.ConnectionFailed, match="tlsCert"):
                client.queues()
            with pytest.raises(AMQPConnectionError):
                served.amqp(pair)


@pytest.mark.parametrize(("names", "taken"), [(270, True), (340, False), (2_000, False)])
def test_a_certificate_of_more_than_7_kilobytes_is_refused_by_grpc_with_the_reason(
    names: int, taken: bool, tmp_path: Path, authority: Authority
) -> None:
    mine = authority.sign("client", *(f"name-{number:05}.example.com" for number in range(names)))
    size = len(ssl.PEM_cert_to_DER_cert(Path(mine.cert).read_text()))
    assert (size <= 7 * 1024) is taken
    with encrypted(tmp_path, authority, ca=authority.ca, verify_peer=True) as served:
        served.amqp(mine).close()
        with served.client(pair=mine) as client:
            if taken:
                assert client.queues() == []
            else:
                with pytest.raises(errors.ConnectionFailed, match="at most 7 kB with its chain"):
                    client.queues()


@pytest.mark.parametrize("login_from", ["distinguished_name", "common_name"])
def test_external_logs_in_the_user_of_the_certificate(
    tmp_path: Path, authority: Authority, login_from: str
) -> None:
    mine = authority.sign("orders", common_name="orders", organization="example")
    nobody = authority.sign("nobody", common_name="nobody", organization="example")
    with encrypted(tmp_path, authority, ca=authority.ca, login_from=login_from) as served:
        with contextlib.closing(served.amqp(mine, credentials=ExternalCredentials())) as connection:
            connection.channel().queue_declare("q")
            assert connection._impl.server_properties["product"] == "txmq"
            (found,) = served.broker.amqp.connections
            assert (
                found.user
                == {"distinguished_name": "CN=orders,OU=spark,O=example", "common_name": "orders"}[login_from]
            )
        served.amqp(None).close()  # one without a certificate has a password
        for pair in (nobody, None):
            with pytest.raises(ProbableAuthenticationError, match="Login was refused"):
                served.amqp(pair, credentials=ExternalCredentials())


def test_external_is_offered_only_where_certificates_are_asked_for(
    tmp_path: Path, authority: Authority
) -> None:
    with encrypted(tmp_path, authority) as served, pytest.raises(AMQPConnectionError):
        served.amqp(authority.sign("client", common_name="orders"), credentials=ExternalCredentials())


def test_a_distinguished_name_is_escaped_so_that_no_name_is_another(authority: Authority) -> None:
    class Transport:
        def __init__(self, *subject: tuple[str, str]) -> None:
            self.subject = subject

        def get_extra_info(self, _name: str) -> Transport:
            return self

        def getpeercert(self) -> dict:
            return {"subject": tuple((each,) for each in self.subject)}

    files = server_tls.TlsFiles(TlsOptions(*vars(authority.sign()).values(), ca=authority.ca))
    evil = server_tls.certified(Transport(("commonName", "orders,O=example")), files)
    good = server_tls.certified(Transport(("organizationName", "example"), ("commonName", "orders")), files)
    assert (evil, good) == ("CN=orders\\,O=example", "CN=orders,O=example")


# -- renewal -------------------------------------------------------------------------------------------------


def test_certificates_are_renewed_while_clients_are_connected(tmp_path: Path, authority: Authority) -> None:
    with encrypted(tmp_path, authority) as served, contextlib.ExitStack() as stack:
        client = stack.enter_context(served.client())
        connection = stack.enter_context(contextlib.closing(served.amqp()))
        channel = connection.channel()
        fill(client, "q", 4000, size=4000)
        found = client.available(["q"])["q"]
        rows = client.browse([("q", found.start, found.end)])
        seen = next(rows).num_rows  # the rest is still to come
        ended, failed, calls = threading.Event(), [], [0]

        def call() -> None:
            while not ended.is_set():
                try:
                    client.queues()
                    calls[0] += 1
                except errors.TxmqError as error:
                    failed.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        old = served.certificates()
        authority.sign()
        wait_until(lambda: "" not in (new := served.certificates()) and not set(new) & set(old))
        at = calls[0]
        wait_until(lambda: calls[0] > at + 10)
        ended.set()
        thread.join()
        assert failed == [] and len(set(served.certificates())) == 1
        assert seen + sum(batch.num_rows for batch in rows) == 4000
        channel.basic_publish("", "q", b"of the old connection")
        with served.client() as other, contextlib.closing(served.amqp()):
            wait_until(lambda: other.queues()[0].messages == 4001)


def test_http_is_https_with_the_same_certificates_and_says_when_they_expire(
    tmp_path: Path, authority: Authority
) -> None:
    mine = authority.sign("client")
    with encrypted(tmp_path, authority, ca=authority.ca, verify_peer=True) as served:
        assert served.broker.http_urls == [f"https://127.0.0.1:{served.http_port}"]
        context = ssl.create_default_context(cafile=authority.ca)
        url = f"https://localhost:{served.http_port}"
        with pytest.raises(OSError):
            Api(url, "guest", tls=context).ask("GET", "/api/whoami")  # without a certificate of its own
        context.load_cert_chain(mine.cert, mine.key)
        api = Api(url, "guest", tls=context)
        assert api.get("/api/whoami")["name"] == "guest"
        ports = {each["protocol"]: each["port"] for each in api.get("/api/overview")["listeners"]}
        assert ports == {
            "flight/ssl": served.flight_port,
            "amqp/ssl": served.amqp_port,
            "https": served.http_port,
        }
        der = ssl.PEM_cert_to_DER_cert(_served(served.amqp_port))
        days = (x509.load_der_x509_certificate(der).not_valid_after_utc - datetime.now(timezone.utc)).days
        check = "/api/health/checks/certificate-expiration"
        assert api.ask("GET", f"{check}/1/weeks").status == 200
        assert api.ask("GET", f"{check}/{days // 365 - 1}/years").status == 200
        for years in (days // 365 + 1, 9999):
            assert api.ask("GET", f"{check}/{years}/years").status == 503
        assert api.ask("GET", f"{check}/1/eons").status == 400
        api.close()


def test_files_that_are_no_pair_never_replace_those_in_use(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_tls, "LOOK_S", 0.05)
    pair = authority.sign()
    with encrypted(tmp_path, authority, pair) as served, caplog.at_level(logging.WARNING, "txmq.tls"):
        old = served.certificates()
        whole = Path(pair.key).read_bytes()
        for half in (b"", b"no key", Path(authority.sign("other").key).read_bytes()):
            caplog.clear()
            Path(pair.key).write_bytes(half)
            wait_until(lambda: "cannot be renewed" in caplog.text)
            assert served.certificates() == old
        Path(pair.key).unlink()
        Path(pair.key).write_bytes(whole)
        authority.sign()
        wait_until(lambda: "" not in (new := served.certificates()) and not set(new) & set(old))
        assert "PRIVATE KEY" not in caplog.text


def test_sighup_reads_the_certificates_again(authority: Authority, served: Served) -> None:
    pair = authority.sign()
    served.start("", "--tls-cert", pair.cert, "--tls-key", pair.key, "--amqps", "none")
    old = _served(served.port)
    authority.sign()
    os.kill(served.pid, signal.SIGHUP)
    wait_until(lambda: _served(served.port) not in (old, ""))
    assert served.terminate() == 0


# -- listening -----------------------------------------------------------------------------------------------


def test_a_listener_that_other_hosts_reach_needs_tls_or_permission(
    tmp_path: Path, authority: Authority
) -> None:
    pair = authority.sign()
    tls = TlsOptions(pair.cert, pair.key)
    with pytest.raises(errors.OptionError, match="--allow-plaintext"):
        Broker.open(tmp_path / "a", host="0.0.0.0")
    with pytest.raises(errors.OptionError, match="--allow-plaintext"):
        Broker.open(tmp_path / "a", host="0.0.0.0", amqp=["[::]:0"], listeners=ListenerOptions(tls))
    with pytest.raises(errors.OptionError, match="--amqps"):
        Broker.open(tmp_path / "a", amqp=["0.0.0.0:0"])
    assert not (tmp_path / "a").exists()
    with Broker.open(
        tmp_path / "a", host="0.0.0.0", amqp=["localhost:0"], listeners=ListenerOptions(tls, ["0.0.0.0:0"])
    ):
        pass
    with Broker.open(
        tmp_path / "a", host="0.0.0.0", amqp=["0.0.0.0:0"], listeners=ListenerOptions(allow_plaintext=True)
    ):
        pass


@pytest.mark.parametrize(
    ("cert", "key", "options", "text"),
    [
        ("missing", "key", {}, "--tls-cert is '.*missing.pem', which cannot be read"),
        ("broker", "other", {}, "cannot be used"),
        ("broker", "locked", {}, "without a password"),
        ("broker", "broker", {"verify_peer": True}, "--tls-verify-peer is given without --tls-ca"),
        ("broker", "broker", {"ca": "key"}, "--tls-ca .* cannot be used"),
    ],
)
def test_wrong_files_are_refused_before_the_broker_listens(
    tmp_path: Path, authority: Authority, cert: str, key: str, options: dict, text: str
) -> None:
    from cryptography.hazmat.primitives import serialization as form

    pair, _other = authority.sign(), authority.sign("other")
    private = form.load_pem_private_key(Path(pair.key).read_bytes(), None)
    locked = private.private_bytes(
        form.Encoding.PEM, form.PrivateFormat.PKCS8, form.BestAvailableEncryption(b"password")
    )
    (tmp_path / "locked.key").write_bytes(locked)
    given = {name: pair.key if value == "key" else value for name, value in options.items()}
    wrong = TlsOptions(str(tmp_path / f"{cert}.pem"), str(tmp_path / f"{key}.key"), **given)
    with pytest.raises(errors.OptionError, match=text):
        Broker.open(tmp_path / "data", listeners=ListenerOptions(wrong))


# -- bytes before the login ----------------------------------------------------------------------------------


def test_any_bytes_at_the_listeners_leave_others_served_and_nothing_behind(
    authority: Authority, served: Served, seed: int
) -> None:
    source, pair = random.Random(seed), authority.sign()
    served.start("", "--tls-cert", pair.cert, "--tls-key", pair.key, "--amqps", FREE)
    ports = [served.port, int(served.amqp_urls[0].rpartition(":")[2])]
    process, hello = psutil.Process(served.pid), _hello(authority)
    before = process.num_fds()
    for _ in range(300):
        with socket.create_connection(("127.0.0.1", source.choice(ports)), 5) as plain:
            plain.sendall(_damaged(source, hello))
            if source.random() < 0.5:
                plain.settimeout(0.02)
                with contextlib.suppress(OSError):
                    plain.recv(100)
    for _ in range(60):  # behind the handshake
        with contextlib.suppress(OSError), _handshaken(authority, source.choice(ports)) as inside:
            inside.sendall(source.randbytes(source.randint(1, 300)))
    wait_until(lambda: process.num_fds() <= before + 4)
    known = Credentials(tls_ca=authority.ca)
    with BrokerClient(f"txmqs://localhost:{ports[0]}", credentials=known) as client:
        assert client.queues() == []
    context = ssl.create_default_context(cafile=authority.ca)
    pika.BlockingConnection(
        pika.ConnectionParameters("localhost", ports[1], ssl_options=pika.SSLOptions(context, "localhost"))
    ).close()


def _handshaken(authority: Authority, port: int) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=authority.ca)
    context.set_alpn_protocols(["h2"])
    return context.wrap_socket(socket.create_connection(("127.0.0.1", port), 5), server_hostname="localhost")


def _hello(authority: Authority) -> bytes:
    """What a client of TLS says first."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context(cafile=authority.ca)
    client = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def _damaged(source: random.Random, data: bytes) -> bytes:
    found = bytearray(data)
    for _ in range(source.randint(0, 3)):
        at = source.randint(0, len(found) - 1)
        match source.choice(["change", "cut", "insert", "random"]):
            case "change":
                found[at] = source.randint(0, 255)
            case "cut":
                del found[max(at, 1) :]
            case "insert":
                found[at:at] = source.randbytes(20)
            case "random":
                found = bytearray(source.randbytes(source.randint(1, 500)))
    return bytes(found)
