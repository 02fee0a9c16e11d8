"""Addresses: what is taken, what is refused, and that a password is never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker_core.core import endpoint, errors
from broker_core.core.address import DEFAULT_PORT, parse_address, parse_listen


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("txmq://localhost:1234", "localhost", 1234),
        ("txmq://localhost", "localhost", DEFAULT_PORT),
        ("txmq://[::1]:7", "::1", 7),
        ("TXMQ://h:7/", "h", 7),
    ],
)
def test_url_names_host_and_port(url: str, host: str, port: int) -> None:
    address = parse_address(url)
    assert (address.host, address.port) == (host, port)


@pytest.mark.parametrize("protocol", ["", "AMQP"])
def test_an_address_to_listen_on_is_read_alike_for_every_listener(protocol: str) -> None:
    assert parse_listen("127.0.0.1:5673", protocol) == ("127.0.0.1", 5673)
    assert parse_listen("[::1]:0", protocol) == ("::1", 0)
    for wrong in (
        "::1:5673",
        "localhost:\u0663",
        "localhost:\u00b2",
        "[[::1]:1",
        "[]:1",
        "a]:5",
        ":1",
        "h:70000",
    ):
        with pytest.raises(errors.OptionError, match="must be HOST:PORT"):
            parse_listen(wrong, protocol)


def test_user_and_password_are_taken_and_never_shown() -> None:
    address = parse_address("txmq://guest:s%40cret@h:7")
    assert (address.credentials.user, address.credentials.password) == ("guest", "s@cret")
    assert "cret" not in f"{address} {address!r}"
    for url in (
        "txmqs://guest:secret@h:0",
        "kafka://guest:secret@h",
        "guest:secret@h",
        "txmq://a:://secret@h:x",
    ):
        with pytest.raises(errors.OptionError) as caught:
            parse_address(url)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["", "h:1", "txmq://", "txmq://h:0", "txmq://h:70000", "txmq://h:x", "txmq://h:1/a/b", "txmq://h:1?x=1"],
)
def test_wrong_url_is_an_option_error(url: str) -> None:
    with pytest.raises(errors.OptionError, match="option 'url' is"):
        parse_address(url)


def test_url_and_data_exclude_each_other_and_one_is_required() -> None:
    with pytest.raises(errors.OptionError, match="both"):
        parse_address("txmq://h:1", "data")
    with pytest.raises(errors.OptionError, match="neither"):
        parse_address()


def test_data_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_address(data="lake/broker").directory == str(tmp_path / "lake" / "broker")


def test_endpoint_file_is_read_as_written_and_removed_by_its_owner_only(tmp_path: Path) -> None:
    written = endpoint.Endpoint("127.0.0.1", 5, 77, "id")
    endpoint.write_endpoint(endpoint.new_endpoint(str(tmp_path)), written)
    assert endpoint.read_endpoint(str(tmp_path)) == written
    endpoint.remove_endpoint(str(tmp_path), 78)
    assert endpoint.read_endpoint(str(tmp_path)) == written
    endpoint.remove_endpoint(str(tmp_path), 77)
    assert endpoint.read_endpoint(str(tmp_path)) is None


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"host": "h"}', '{"host": "h", "port": "x", "pid": 1, "id": ""}']
)
def test_damaged_endpoint_file_is_as_if_there_were_none(tmp_path: Path, content: str) -> None:
    (tmp_path / endpoint.ENDPOINT).write_text(content)
    assert endpoint.read_endpoint(str(tmp_path)) is None
