"""The client of a schema registry, against a real HTTP server: only an answer of the registry itself counts."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from broker_core.core.errors import LoginRefused, OptionError, RegistryFailed
from connector.typed.registry import client as module
from connector.typed.registry.client import RegisteredSchema, SchemaRegistry
from tests.protobuf_files import LINE, ORDER, serialized
from tests.registry_server import RegistryServer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RegistryServer]:
    monkeypatch.setattr(module, "_WAITS_S", (0.001, 0.001))
    made = RegistryServer()
    yield made
    made.close()


def test_an_id_is_asked_once_and_a_missing_one_each_time(server: RegistryServer) -> None:
    number = server.add("orders-value", "string")
    for _ in range(2):
        assert SchemaRegistry(f"{server.url}/").schema(number) == RegisteredSchema("AVRO", ("string",))
    assert SchemaRegistry(server.url).schema(number + 1) is None
    assert server.add("orders-value", {"type": "object"}, "JSON") == number + 1
    assert SchemaRegistry(server.url).schema(number + 1) == RegisteredSchema("JSON", ('{"type": "object"}',))
    assert len(server.asked) == 3


def test_an_id_that_no_registry_can_have_is_not_asked(server: RegistryServer) -> None:
    assert SchemaRegistry(server.url).schema(1 << 31) is None
    assert SchemaRegistry(server.url).schema((1 << 32) - 1) is None
    assert server.asked == []


def test_references_come_before_what_refers_to_them(server: RegistryServer) -> None:
    server.add("a/b", "1")
    middle = {"name": "m", "subject": "a/b", "version": 1}
    server.add("middle", "2", references=[middle])
    number = server.add("top", "3", references=[{"name": "x", "subject": "middle", "version": 1}, middle])
    assert SchemaRegistry(server.url).schema(number) == RegisteredSchema("AVRO", ("1", "2", "3"))
    assert SchemaRegistry(server.url).latest("top", "AVRO").texts == ("1", "2", "3")


# -- Protobuf ------------------------------------------------------------------------------------------------


def orders(server: RegistryServer) -> int:
    server.add_file(LINE.name, LINE)
    return server.add_file("orders", ORDER, LINE.name)


@pytest.mark.parametrize("serializes", ["always", "version"])
def test_a_schema_of_protobuf_comes_as_files_with_the_names_of_its_references(
    server: RegistryServer, serializes: Any
) -> None:
    number = orders(server)
    server.serializes = serializes
    files = (serialized(LINE), serialized(ORDER))
    for _ in range(2):
        found = SchemaRegistry(server.url).serialized(number)
        assert found == RegisteredSchema("PROTOBUF", files) and found.references == ((LINE.name, files[0]),)
    asked = len(server.asked)
    assert SchemaRegistry(server.url).latest_serialized("orders") == (number, found)
    assert len(server.asked) == asked + 1  # the newest may change, its files may not
    assert SchemaRegistry(server.url).serialized(number + 1) is None
    text = server.add("text", "1")
    assert SchemaRegistry(server.url).serialized(text) == RegisteredSchema("AVRO", ("1",))


def test_the_newest_schema_of_protobuf_needs_no_second_look(server: RegistryServer) -> None:
    number = orders(server)
    assert SchemaRegistry(server.url).latest_serialized("orders")[0] == number
    with pytest.raises(OptionError, match="has no subject 'none'"):
        SchemaRegistry(server.url).latest_serialized("none")
    server.add("json", {}, "JSON")
    with pytest.raises(OptionError, match="subject 'json' is JSON, not PROTOBUF"):
        SchemaRegistry(server.url).latest_serialized("json")


def test_a_registry_that_has_only_text_is_one_clear_error(server: RegistryServer) -> None:
    number = orders(server)
    server.serializes = "never"
    for ask in (
        lambda: SchemaRegistry(server.url).serialized(number),
        lambda: SchemaRegistry(server.url).latest_serialized("orders"),
    ):
        with pytest.raises(OptionError, match="does not know format=serialized") as raised:
            ask()
        assert "protoc --include_imports --descriptor_set_out=FILE" in str(raised.value)
    plain = (200, json.dumps(server.by_id[number]).encode())
    for status in (400, 404, 422, 501):
        server.broken = [plain, *[(status, b'{"error_code": 501, "message": "unsupported"}')] * 3]
        with pytest.raises(OptionError, match="does not know format=serialized"):
            SchemaRegistry(f"{server.url}/{status}").serialized(number)
        server.broken.clear()


@pytest.mark.parametrize("answer", [b"", b"[]", b"[5]", b'{"subject": "s"}', b'[{"subject": "s"}]'])
def test_a_registry_that_fails_for_the_files_is_no_registry_without_them(
    server: RegistryServer, answer: bytes
) -> None:
    number = orders(server)
    plain = (200, json.dumps(server.by_id[number]).encode())
    server.broken = [plain, *[(500, b'{"message": "out of order"}')] * 3, (200, answer)]
    with pytest.raises(RegistryFailed, match="HTTP 500 out of order"):
        SchemaRegistry(server.url).serialized(number)


def test_references_without_an_end_are_an_error_and_no_loop(server: RegistryServer) -> None:
    circle = [{"name": "c", "subject": "circle", "version": 1}]
    number = server.add("circle", "1", references=circle)
    with pytest.raises(RegistryFailed, match="references of 'circle' without an end"):
        SchemaRegistry(server.url).schema(number)
    number = server.add("odd", "2", references=[{"name": "c"}])
    with pytest.raises(RegistryFailed, match="the reference"):
        SchemaRegistry(server.url).schema(number)
    for at in range(150):
        server.add(
            f"s{at}", f"{at}", references=[{"name": "n", "subject": f"s{at - 1}", "version": 1}] if at else ()
        )
    server.asked.clear()
    with pytest.raises(RegistryFailed, match="without an end"):
        SchemaRegistry(server.url).latest("s149", "AVRO")
    assert len(server.asked) < 110
    for strange in (5, [5], [[]], "ab", [{"subject": "s", "version": {}}]):
        server.broken.append((200, json.dumps({"schema": "1", "references": strange}).encode()))
        with pytest.raises(RegistryFailed, match="the reference"):
            SchemaRegistry(server.url).latest("x", "AVRO")


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ([(404, b"<html>no such page</html>")], "answered with HTTP 404"),
        ([(404, b'{"error_code": 404, "message": "HTTP 404 Not Found"}')], "HTTP 404 HTTP 404 Not Found"),
        ([(404, b'{"error_code": 40401}')], "answered with HTTP 404"),
        ([(200, b"<html>please log in</html>")], "answered with no schema"),
        ([(200, b'["schema"]')], "answered with no schema"),
        ([(200, b'{"schema": 5}')], "answered with no schema"),
        ([(302, b"http://localhost:1/login")], "answered with HTTP 302"),
        ([(503, b"")] * 3, "answered with HTTP 503"),
        ([(500, b'{"error_code": 50002, "message": "Operation timed out"}')] * 3, "Operation timed out"),
    ],
)  # fmt: skip
def test_what_the_registry_has_not_said_is_a_failure_and_no_unknown_id(
    server: RegistryServer, answers: Any, text: str
) -> None:
    server.broken += answers
    with pytest.raises(RegistryFailed) as raised:
        SchemaRegistry(server.url).schema(1)
    assert text in str(raised.value) and server.url in str(raised.value)
    assert raised.value.retriable
    assert server.broken == [] and SchemaRegistry(server.url).schema(1) is None


def test_a_registry_that_is_not_able_for_a_moment_is_asked_again(server: RegistryServer) -> None:
    number = server.add("s", "1")
    server.broken += [(503, b""), (429, b"")]
    assert SchemaRegistry(server.url).schema(number) is not None


def test_a_registry_that_does_not_listen_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WAITS_S", (0.001,))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # listens and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RegistryFailed, match="cannot be reached"):
            SchemaRegistry(url, timeout_s=0.05).schema(1)
    with pytest.raises(RegistryFailed, match="cannot be reached"):
        SchemaRegistry(url).schema(1)


def test_a_schema_is_registered_once_and_has_its_id(server: RegistryServer) -> None:
    registry = SchemaRegistry(server.url)
    first = registry.register("orders value/1", "JSON", "{}")
    assert registry.register("orders value/1", "JSON", "{}") == first
    assert SchemaRegistry(server.url).register("other", "JSON", "{}") == first
    assert server.asked == [
        ("POST", "/subjects/orders%20value%2F1/versions"),
        ("POST", "/subjects/other/versions"),
    ]
    assert server.by_id[first] == {"schema": "{}", "schemaType": "JSON"}


def test_a_schema_that_the_registry_refuses_is_one_clear_error(server: RegistryServer) -> None:
    registry = SchemaRegistry(server.url)
    with pytest.raises(OptionError, match="refuses a schema for subject 's': Schema being registered is inc"):
        registry.register("s", "JSON", '"incompatible"')
    with pytest.raises(OptionError, match="Invalid schema"):
        registry.register("s", "AVRO", "{")
    with pytest.raises(OptionError, match="has no subject 's'"):
        registry.latest("s", "AVRO")
    registry.register("s", "JSON", "{}")
    with pytest.raises(OptionError, match="subject 's' is JSON, not AVRO"):
        registry.latest("s", "AVRO")
    server.broken.append((200, b'{"id": -1}'))
    with pytest.raises(RegistryFailed, match="the id -1"):
        registry.register("s", "JSON", "[]")


def test_a_login_is_sent_and_never_shown(server: RegistryServer) -> None:
    server.login = "me:s3cret/@"
    number = server.add("s", "1")
    with pytest.raises(LoginRefused, match="refuses user ''"):
        SchemaRegistry(server.url).schema(number)
    with pytest.raises(LoginRefused) as raised:
        SchemaRegistry(server.url, "me", "s3cret-2").schema(number)
    assert "s3cret" not in str(raised.value)
    for registry in (
        SchemaRegistry(server.url, "me", "s3cret/@"),
        SchemaRegistry(server.url.replace("//", "//me:s3cret%2F%40@")),
    ):
        assert registry.schema(number) is not None
        assert "s3cret" not in repr(registry) + registry.url and registry.url == server.url


def test_tls_needs_the_authority_of_the_registry(tmp_path: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    for name, each in (("ca", authority), ("other", other)):
        each.cert_pem.write_to_path(tmp_path / f"{name}.pem")
    client = authority.issue_cert("client")
    client.private_key_pem.write_to_path(tmp_path / "key.pem")
    client.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    both = {"cert": str(tmp_path / "cert.pem"), "key": str(tmp_path / "key.pem")}
    server = RegistryServer(context=context)
    try:
        number = server.add("s", "1")
        with pytest.raises(RegistryFailed, match="CERTIFICATE_VERIFY_FAILED"):
            SchemaRegistry(server.url, ca=str(tmp_path / "other.pem"), **both).schema(number)
        with pytest.raises(OptionError, match=r"a file for TLS .*/none.pem', .* read in '/"):
            SchemaRegistry(server.url, ca=str(tmp_path / "none.pem")).schema(number)
        assert SchemaRegistry(server.url, ca=str(tmp_path / "ca.pem"), **both).schema(number) is not None
    finally:
        server.close()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"url": "localhost:8081"}, "the url of the schema registry is invalid"),
        ({"url": "ftp://x"}, "the url of the schema registry is invalid"),
        ({"url": "http://"}, "the url of the schema registry is invalid"),
        ({"url": "http://x:port"}, "the url of the schema registry is invalid"),
        ({"url": None}, "the url of the schema registry is invalid"),
        ({"url": "http://x?a=b"}, "the url of the schema registry is invalid"),
        ({"url": "http://x", "ca": "f"}, "are for https"),
        ({"url": "https://x", "cert": "f"}, "go together"),
    ],
)
def test_a_wrong_argument_is_one_clear_error(given: Any, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        SchemaRegistry(**given)
    with pytest.raises(OptionError, match="registry=5"):
        SchemaRegistry.of(5)  # type: ignore[arg-type]
