"""The address and the settings of a Kafka engine, as a user gives them: ``kafka://host:port,...`` and Kafka's
own names, such as ``kafka.security.protocol``.

The names are those of librdkafka and, where they differ, of the Java client. Files of certificates are PEM.
Not here: connecting.
Invariant: no setting is ignored. No error and no repr shows a secret.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from broker_core.core.errors import OptionError
from broker_core.kafka.cluster import connection
from broker_core.kafka.cluster.cluster import RECONNECT_S
from broker_core.kafka.protocol.port import NodeAddress
from broker_core.kafka.protocol.sasl import MECHANISMS, SaslLogin
from broker_core.kafka.record.record_batch import Codec

T = TypeVar("T")

SCHEME, DEFAULT_PORT = "kafka://", 9092
PREFIX = "kafka."
PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
SECRETS = frozenset({"sasl.password", "ssl.key.password"})

_ENDPOINT = re.compile(r"(?:\[([^\]/@]+)\]|([^:/@,\[\]?#]+))(?::([0-9]{1,5}))?")
_TLS = ("ssl.ca.location", "ssl.certificate.location", "ssl.key.location", "ssl.key.password",
        "ssl.endpoint.identification.algorithm")  # fmt: skip
_SASL = ("sasl.mechanism", "sasl.username", "sasl.password")
_SAME = {"sasl.mechanisms": "sasl.mechanism"}  # other names of the same
_ADVICE = {
    "bootstrap.servers": "name the nodes in the url: kafka://host:port,host:port",
    "sasl.jaas.config": "set kafka.sasl.username and kafka.sasl.password",
    "group.id": "txmq names the group after the appId",
    "transactional.id": "txmq names it after the appId",
    "transaction.timeout.ms": "txmq sets it by the size of a batch",
    "isolation.level": "txmq reads what is committed",
    "acks": "txmq waits for all in-sync replicas",
    "ssl.truststore.location": "give the certificates as PEM, in kafka.ssl.ca.location",
    "ssl.keystore.location": "give them as PEM, in kafka.ssl.certificate.location and kafka.ssl.key.location",
}


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """What the settings mean. Times in the unit of their names."""

    bootstrap: tuple[NodeAddress, ...]
    connection: connection.Settings = field(repr=False)
    reconnect_s: float = RECONNECT_S
    codec: Codec = Codec.NONE


def parse_settings(url: str, settings: Mapping[str, object] | None = None) -> KafkaSettings:
    """Raises OptionError for an address or a setting that is wrong or unknown."""
    values = {_name(name): str(value) for name, value in (settings or {}).items()}
    take = _Settings(values)
    bootstrap = parse_url(url)
    protocol = take.choice("security.protocol", PROTOCOLS, "PLAINTEXT")
    take.refuse(
        [*(() if protocol.endswith("SSL") else _TLS), *(() if "SASL" in protocol else _SASL)], protocol
    )
    tls = _tls(take) if protocol.endswith("SSL") else None
    login = _login(take) if "SASL" in protocol else None
    found = KafkaSettings(
        bootstrap,
        connection.Settings(
            tls,
            login,
            connect_s=take.milliseconds("socket.connection.setup.timeout.ms", 10_000) / 1000,
            request_s=take.milliseconds("request.timeout.ms", int(connection.REQUEST_S * 1000)) / 1000,
        ),
        reconnect_s=take.milliseconds("default.api.timeout.ms", int(RECONNECT_S * 1000)) / 1000,
        codec=Codec[take.choice("compression.type", [codec.name for codec in Codec], Codec.NONE.name)],
    )
    take.end()
    return found


def parse_url(url: str) -> tuple[NodeAddress, ...]:
    """Returns the nodes of ``kafka://host:port,host:port``. Raises OptionError."""
    text = url[len(SCHEME) :].removesuffix("/") if url.lower().startswith(SCHEME) else ""
    found = [_ENDPOINT.fullmatch(part) for part in text.split(",")]
    if "@" in url:
        raise OptionError(
            "option 'url' has a user or a password before '@'",
            "give them as kafka.sasl.username and kafka.sasl.password",
        )
    _, slash, path = text.partition("/")
    if slash and path:
        raise OptionError(
            f"option 'url' is {url[:300]!r}, which names a virtual host, and a cluster of Kafka has none",
            f"write kafka://host:{DEFAULT_PORT}, without a path",
        )
    if not all(found) or not all(0 < int(each[3] or DEFAULT_PORT) < 1 << 16 for each in found if each):
        raise OptionError(
            f"option 'url' is {url!r}, which names no nodes of Kafka",
            f"write kafka://host:{DEFAULT_PORT}, or several nodes with commas between",
        )
    return tuple(NodeAddress(each[1] or each[2], int(each[3] or DEFAULT_PORT)) for each in found if each)


def without_secrets(settings: Mapping[str, object]) -> dict[str, object]:
    """Returns the settings for a text: without secrets."""
    return {name: "***" if _name(name) in SECRETS else value for name, value in settings.items()}


def _name(option: str) -> str:
    name = option.lower().removeprefix(PREFIX)
    return _SAME.get(name, name)


class _Settings:
    """Settings that are taken one by one; what is left at the end is unknown."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._left = dict(values)

    def text(self, name: str, default: str = "") -> str:
        return self._left.pop(name, default)

    def choice(self, name: str, allowed: Collection[str], default: str) -> str:
        value = self.text(name, default).upper()
        if value not in allowed:
            raise OptionError(f"{PREFIX}{name} is {value!r}", f"use one of {', '.join(allowed)}")
        return value

    def milliseconds(self, name: str, default: int) -> int:
        value = self.text(name, str(default))
        if not value.isdecimal() or not 0 < int(value) < 1 << 31:
            raise OptionError(f"{PREFIX}{name} is {value!r}", "give a number of milliseconds")
        return int(value)

    def refuse(self, names: Iterable[str], protocol: str) -> None:
        for name in names:
            if name in self._left:
                raise OptionError(
                    f"{PREFIX}{name} is given, and {PREFIX}security.protocol is {protocol}, which does not "
                    "use it",
                    f"set {PREFIX}security.protocol to the protocol of the listener",
                )

    def end(self) -> None:
        for name in sorted(self._left):
            raise OptionError(
                f"txmq has no setting {PREFIX}{name}",
                _ADVICE.get(name, "leave it out; the page about Kafka lists those that are used"),
            )


def _tls(take: _Settings) -> ssl.SSLContext:
    authority = take.text("ssl.ca.location") or None
    certificate, key = take.text("ssl.certificate.location"), take.text("ssl.key.location")
    password = take.text("ssl.key.password")
    verified = take.choice("ssl.endpoint.identification.algorithm", ("HTTPS", "NONE", ""), "HTTPS")
    context = _loaded("ssl.ca.location", lambda: ssl.create_default_context(cafile=authority))
    context.check_hostname = verified == "HTTPS"
    if certificate:
        _loaded(
            "ssl.certificate.location",
            lambda: context.load_cert_chain(certificate, key or None, lambda: password),
        )
    elif key or password:
        raise OptionError(f"{PREFIX}ssl.key.location is given", f"give {PREFIX}ssl.certificate.location too")
    return context


def _loaded(name: str, load: Callable[[], T]) -> T:
    try:
        return load()
    except OSError as error:  # also every error of TLS
        raise OptionError(f"{PREFIX}{name} cannot be used: {error}", "give a readable PEM file") from None


def _login(take: _Settings) -> SaslLogin:
    mechanism = take.choice("sasl.mechanism", MECHANISMS, "PLAIN")
    if mechanism == "OAUTHBEARER":
        raise OptionError(
            f"{PREFIX}sasl.mechanism OAUTHBEARER needs a function that gives tokens, and a setting is text",
            "use SCRAM-SHA-512, SCRAM-SHA-256 or PLAIN",
        )
    return SaslLogin(mechanism, take.text("sasl.username"), take.text("sasl.password"))
