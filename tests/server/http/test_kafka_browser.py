"""The page of a cluster of Kafka in a real browser: each page that is linked, without an error or a request to
another host.
"""

from __future__ import annotations

import pytest

from broker_core.kafka.engine import KafkaEngine
from tests.kafka.bench.fake_kafka import FakeKafka
from tests.server.http.browser import Tab, chromium
from tests.server.http.kafka_door import APP, FROM, TABLE, kafka_door, play

pytestmark = pytest.mark.slow


def test_each_page_of_a_cluster_leads_to_the_next_without_an_error() -> None:
    fake = FakeKafka()
    engine = KafkaEngine("kafka://fake:1", None, lambda _: fake.wire())
    play(engine)
    with chromium() as browser, kafka_door(engine) as door:
        tab = Tab(browser, door.urls[0])
        tab.log_in("guest", "guest")
        links = tab.page.eval_on_selector_all("nav a", "all => all.map((each) => each.textContent)")
        assert links == ["Overview", "Queues", "Pipelines", "Transactions"]
        for name, says in zip(links, (APP, FROM, APP, APP), strict=True):
            tab.page.click(f"nav a:has-text('{name}')")
            assert says in tab.text(), name
        tab.page.click(f"#last a:has-text('{APP}')")
        assert TABLE in tab.text() and "not applied" in tab.text()
        tab.page.click(f"a:has-text('{FROM}')")
        tab.page.click("button[name=peek][value='10']")
        assert "row 1" in tab.text()
        tab.page.click("article a")
        assert "published" in tab.text("#steps")
        assert not tab.wrong and all(url.startswith(door.urls[0]) for url in tab.asked)
        tab.close()
