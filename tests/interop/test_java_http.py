"""The Java client of RabbitMQ's management API, unmodified, from Maven Central, against the HTTP API.

Not here: keys and types of the answers (``tests/server/http/test_management.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pika
import pytest

from tests.interop.jdk import class_path
from tests.interop.programs import Ended, checks_of, run
from tests.server.http.http_client import PASSWORD, add_people, serving

pytestmark = pytest.mark.soak  # of another language: minutes to build and run

SOURCES = Path(__file__).parent / "java_http"
CHECKS = checks_of(SOURCES / "Management.java")
CLIENT = ("com.rabbitmq:http-client:5.4.0", "org.slf4j:slf4j-nop:2.0.17")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    jars = class_path(CLIENT)
    with serving(tmp_path_factory.mktemp("java_http")) as broker:
        add_people(broker)
        api = f"http://{urlsplit(broker.http_urls[0]).netloc}/api/"
        amqp = urlsplit(broker.amqp_urls[0])
        parameters = pika.URLParameters(f"amqp://boss:{PASSWORD.replace(' ', '%20')}@{amqp.netloc}/%2F")
        parameters.client_properties = {"connection_name": "watched"}
        with pika.BlockingConnection(parameters) as connection:
            channel = connection.channel()
            channel.queue_declare("consumed", durable=True)
            channel.tx_select()
            channel.basic_consume("consumed", lambda *_: None)
            command = ["java", "-cp", jars, "Management.java", api, "boss", PASSWORD]
            yield run(command, SOURCES)
            with pytest.raises(pika.exceptions.ConnectionClosedByBroker, match="an operator closed"):
                connection.process_data_events(time_limit=60)


@pytest.mark.parametrize("check", CHECKS)
def test_java_client_of_the_management_api(ended: Ended, check: str) -> None:
    ended.verdict(check)


def test_the_java_program_comes_to_all_its_checks_and_no_others(ended: Ended) -> None:
    ended.complete(CHECKS)
