"""A broker with HTTP and people of each tag, and its administrator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from broker_core.launcher import Broker
from tests.server.http.http_client import Api, add_people, serving


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with serving(tmp_path_factory.mktemp("http")) as made:
        add_people(made)
        yield made


@pytest.fixture
def boss(broker: Broker) -> Iterator[Api]:
    api = Api(broker.http_urls[0], "boss")
    yield api
    api.close()
