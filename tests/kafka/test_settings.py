"""Urls and settings of a Kafka engine."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from broker_core.core.errors import OptionError
from broker_core.engines import connect, connect_admin
from broker_core.kafka.cluster.connection import NODES_SHARE
from broker_core.kafka.protocol.port import NodeAddress
from broker_core.kafka.record.record_batch import Codec
from broker_core.kafka.settings import parse_settings, parse_url, without_secrets

URL = "kafka://one:9092"
SASL = {
    "kafka.security.protocol": "SASL_PLAINTEXT",
    "kafka.sasl.username": "alice",
    "kafka.sasl.password": "secret",
}


def test_a_url_names_nodes() -> None:
    assert parse_url("kafka://one:9093,two,[::1]:1/") == (
        NodeAddress("one", 9093),
        NodeAddress("two", 9092),
        NodeAddress("::1", 1),
    )
    assert parse_url("KAFKA://one") == (NodeAddress("one", 9092),)


@pytest.mark.parametrize(
    "url",
    [
        "kafka://",
        "kafka://one,",
        "kafka://one:0",
        "kafka://one:70000",
        "kafka://one?x=1",
        "one:9092",
        "txmq://one",
    ],
)
def test_a_url_that_names_none_is_refused(url: str) -> None:
    with pytest.raises(OptionError, match="names no nodes of Kafka"):
        parse_url(url)


@pytest.mark.parametrize("path", ["sales", "a/b", "sales%2F", "%"])
def test_a_cluster_has_no_virtual_hosts_but_the_one_that_is_always_there(path: str) -> None:
    assert parse_url("kafka://one/") == parse_url("kafka://one")
    with pytest.raises(OptionError, match="names a virtual host, and a cluster of Kafka has none"):
        parse_url(f"kafka://one/{path}")
    for connected in (connect, connect_admin):
        with pytest.raises(OptionError, match="'sales', and a cluster of Kafka has no virtual hosts"):
            connected("kafka://one:9092", vhost="sales")


def test_a_login_in_the_url_is_refused_and_not_shown() -> None:
    with pytest.raises(OptionError, match="before '@'") as refused:
        parse_url("kafka://alice:secret@one:9092")
    assert "secret" not in str(refused.value)


def test_settings_have_the_names_of_kafka() -> None:
    plain = parse_settings(URL)
    assert (plain.connection.tls, plain.connection.login, plain.codec) == (None, None, Codec.NONE)
    # a node that is silent leaves time for another one, and may wait for one that Kafka gives up after 9 s
    assert 2 * plain.connection.request_s <= plain.reconnect_s
    assert NODES_SHARE * plain.connection.request_s > 9
    found = parse_settings(
        URL,
        {
            **SASL,
            "kafka.sasl.mechanisms": "scram-sha-256",
            "kafka.request.timeout.ms": "5000",
            "kafka.default.api.timeout.ms": "70000",
            "compression.type": "lz4",
        },
    )
    login = found.connection.login
    assert login is not None and (login.mechanism, login.user, login.password) == (
        "SCRAM-SHA-256",
        "alice",
        "secret",
    )
    assert (found.connection.request_s, found.reconnect_s) == (5.0, 70.0)
    assert found.codec is Codec.LZ4
    tls = parse_settings(URL, {"kafka.security.protocol": "ssl"}).connection.tls
    assert tls is not None and tls.check_hostname and tls.verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"kafka.nothing": "1"}, "has no setting kafka.nothing"),
        ({"kafka.sasl.jaas.config": "x"}, "set kafka.sasl.username"),
        ({"kafka.bootstrap.servers": "x"}, "name the nodes in the url"),
        ({"kafka.security.protocol": "TLS"}, "kafka.security.protocol is 'TLS'"),
        ({"kafka.request.timeout.ms": "-1"}, "kafka.request.timeout.ms is '-1'"),
        ({"kafka.compression.type": "best"}, "use one of NONE, GZIP"),
        ({"kafka.sasl.username": "alice"}, "kafka.security.protocol is PLAINTEXT, which does not use it"),
        ({"kafka.ssl.ca.location": "x"}, "kafka.security.protocol is PLAINTEXT, which does not use it"),
        (
            {"kafka.security.protocol": "SSL", "kafka.ssl.ca.location": "/missing"},
            "kafka.ssl.ca.location cannot be used",
        ),
        (
            {"kafka.security.protocol": "SSL", "kafka.ssl.certificate.location": "/missing"},
            "ssl.certificate.location cannot be used",
        ),
        (
            {"kafka.security.protocol": "SSL", "kafka.ssl.key.location": "x"},
            "give kafka.ssl.certificate.location too",
        ),
        ({**SASL, "kafka.sasl.mechanism": "GSSAPI"}, "kafka.sasl.mechanism is 'GSSAPI'"),
        ({**SASL, "kafka.sasl.mechanism": "OAUTHBEARER"}, "needs a function"),
        ({**SASL, "kafka.sasl.password": ""}, "needs a user and a password"),
    ],
)
def test_a_setting_that_is_wrong_is_refused(settings: dict[str, str], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        parse_settings(URL, settings)


def test_no_text_shows_a_secret(tmp_path: Path) -> None:
    assert "secret" not in str(without_secrets(SASL)) and "alice" in str(without_secrets(SASL))
    assert "secret" not in repr(parse_settings(URL, SASL))
    with pytest.raises(OptionError) as refused:
        parse_settings(URL, {**SASL, "kafka.nothing": "1"})
    assert "secret" not in str(refused.value)
