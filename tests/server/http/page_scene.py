"""A broker with something on every page: queues that fill and empty, apps, clients, transactions.

``python -m tests.server.http.page_scene [MINUTES]`` takes the pictures of ``docs/pictures``, after as many minutes of traffic (30).
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pika
from pika.adapters.blocking_connection import BlockingChannel

from broker_core.client.broker import BrokerClient
from broker_core.core.credentials import Credentials
from broker_core.engine import Vector
from broker_core.launcher import Broker
from broker_core.message.properties import Properties
from tests.server.conftest import MicroBatch
from tests.server.http.browser import Tab, chromium
from tests.server.http.http_client import CHEAP, PASSWORD, serving

HOSTILE = "<script>document.title='taken'</script>"
PICTURES = Path(__file__).parents[3] / "docs" / "pictures"
PAGES = {
    "overview": "/ui",
    "queues": "/ui/queues",
    "queue": "/ui/queue?vhost=%2F&name=orders.confirmed&peek=1",
    "apps": "/ui/apps",
    "app": "/ui/app?vhost=%2F&app=confirm-orders",
    "transactions": "/ui/transactions",
    "decision": "/ui/transaction/commit?vhost=%2F&xid=transfer-7f3a&of={user}",
    "connections": "/ui/connections",
    "store": "/ui/store",
}
SHOWN = {*(f"{name}-light" for name in PAGES), "overview-dark"}
QUEUES = ("orders", "orders.confirmed", "payments", "invoices", "emails", "emails.retry", "audit")


@dataclass
class Scene:
    """``step`` makes a little of everything happen."""

    broker: Broker
    client: BrokerClient
    source: random.Random = field(default_factory=lambda: random.Random(27))
    at: int = 0
    ends: dict[str, Vector] = field(default_factory=dict)

    def step(self) -> None:
        self.at += 1
        with self.broker.channel() as channel:
            channel.tx_select()
            for number in range(int(30 + 25 * math.sin(self.at / 9) + self.source.random() * 12)):
                body = f'{{"order": {self.at * 100 + number}, "total": {self.source.randint(100, 90_000)}}}'
                headers = Properties(content_type="application/json", headers={"tenant": "north"})
                channel.publish(body.encode(), "sales", "order.new", headers.encode())
            for name in ("invoices", "emails", "audit"):
                for _ in range(self.source.randint(0, 6)):
                    channel.publish(b"x" * 200, "", name)
            channel.tx_commit()
            for name in ("emails", "audit"):
                for _ in range(self.source.randint(0, 6)):
                    channel.get(name, no_ack=True)
        if self.at % 3 == 0:
            self.batch("confirm-orders", "orders", "orders.confirmed", self.at // 3 - 1)
        if self.at % 11 == 0:
            self.batch("bill", "orders.confirmed", "invoices", self.at // 11 - 1)

    def batch(self, app: str, source: str, sink: str, batch_id: int) -> None:
        batch = MicroBatch(self.client, source, sink, app=app, batch_id=batch_id, query=app)
        self.ends[app] = batch.run(self.ends.get(app))


@contextlib.contextmanager
def scene(broker: Broker, user: str = "boss", *, hostile: bool = True) -> Iterator[Scene]:
    """``user`` is an administrator of ``broker``, with the password of ``http_client``."""
    with broker.channel() as channel:
        for name in QUEUES:
            dying = {"x-dead-letter-exchange": "dead"} if name == "emails" else {}
            channel.queue_declare(name, arguments=dying)
        channel.queue_declare("heartbeats", durable=False)
        channel.exchange_declare("sales", "topic")
        channel.exchange_declare("dead", "fanout")
        channel.queue_bind("orders", "sales", "order.#")
        channel.queue_bind("emails.retry", "dead")
        if hostile:
            channel.queue_declare(HOSTILE)
            channel.publish(b"<img src=x onerror=document.title='taken'>", "", HOSTILE)
            channel.publish(bytes(range(64)), "", HOSTILE)
    host, port = broker.amqp_urls[0].partition("://")[2].split(":")
    login = pika.PlainCredentials(user, PASSWORD)
    parameters = pika.ConnectionParameters(
        host, int(port), credentials=login, heartbeat=0, client_properties={"connection_name": "mailer-1"}
    )
    client = BrokerClient(broker.url, credentials=Credentials(user, PASSWORD))
    connection = pika.BlockingConnection(parameters)
    try:
        with client:
            _in_doubt(client)
            for each in range(20):
                _publish(broker, "payments", f"payment {each}")
            _hold(connection.channel(), connection)
            yield Scene(broker, client)
    finally:
        with contextlib.suppress(pika.exceptions.AMQPError):  # a test has closed it
            connection.close()


def _publish(broker: Broker, queue: str, text: str) -> None:
    with broker.channel() as channel:
        channel.publish(text.encode(), "", queue)


def _in_doubt(client: BrokerClient) -> None:
    with client.channel() as channel:
        channel.tx_select()
        for xid, messages in (("transfer-7f3a", 3), ("nightly-settlement", 120)):
            for _ in range(messages):
                channel.publish(b"x" * 300, routing_key="payments")
            channel.prepare(xid)


def _hold(channel: BlockingChannel, connection: pika.BlockingConnection) -> None:
    channel.basic_qos(prefetch_count=5)
    channel.basic_consume("payments", lambda *_: None, consumer_tag="mailer")
    connection.process_data_events(0.2)
    other = connection.channel()
    other.tx_select()
    other.basic_publish("", "audit", b"not yet")


@contextlib.contextmanager
def going_on(scene: Scene, pause_s: float = 0.02) -> Iterator[None]:
    """Steps, in a thread."""
    ended = threading.Event()
    failed: list[BaseException] = []

    def steps() -> None:
        try:
            while not ended.wait(pause_s):
                scene.step()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=steps)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert not failed, failed


def pictures(minutes: float) -> None:
    """Of the whole page, at most 800 pixels of it."""
    user = "ops"
    with tempfile.TemporaryDirectory(prefix="txmq-") as folder, serving(Path(folder)) as broker:
        broker.accounts.add_user(user, CHEAP, ["administrator"])
        broker.accounts.set_permissions(user, ".*", ".*", ".*")
        with scene(broker, user, hostile=False) as found, going_on(found, pause_s=1), chromium() as browser:
            time.sleep(60 * minutes)
            for scheme in ("light", "dark"):
                tab = Tab(browser, broker.http_urls[0], color_scheme=scheme)
                tab.log_in(user)
                tab.page.wait_for_selector("#tiles")
                for name in [each for each in PAGES if f"{each}-{scheme}" in SHOWN]:
                    tab.page.set_viewport_size({"width": 1280, "height": 300})
                    tab.go(PAGES[name].format(user=user))
                    tab.page.wait_for_load_state("networkidle")
                    height = tab.page.evaluate("document.documentElement.scrollHeight")
                    tab.page.set_viewport_size({"width": 1280, "height": min(800, height)})
                    tab.page.screenshot(path=str(PICTURES / f"page-{name}-{scheme}.png"))
                tab.close()


if __name__ == "__main__":
    pictures(float(sys.argv[1]) if len(sys.argv) > 1 else 30)
