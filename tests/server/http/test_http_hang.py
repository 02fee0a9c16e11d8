"""The disk hangs in a commit: an operator still sees everything, and a change waits without holding others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker_core.core import failpoint
from broker_core.launcher import Broker
from tests.progress import GUARD_S, wait_until
from tests.server.http.http_client import Api, add_people, serving
from tests.server.http.http_rows import rows
from tests.server.http.page_visitor import Visitor
from tests.server.http.test_page_rights import ROWS

COMMITS = ("/api/aliveness-test/%2F",)  # what it looks at is a commit


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker with a commit that has not come back from the disk."""
    reached, released = threading.Event(), threading.Event()

    def hang(_name: str) -> None:
        reached.set()
        released.wait()

    with serving(tmp_path_factory.mktemp("http")) as broker:
        add_people(broker)
        with broker.channel() as channel:
            channel.queue_declare("gone")
        failpoint.arm("store.commit.begin", hang)

        def commit() -> None:
            with broker.channel() as channel:
                channel.publish(b"x", "", "gone")

        thread = threading.Thread(target=commit)
        thread.start()
        try:
            assert reached.wait(GUARD_S)
            yield broker
        finally:
            failpoint.disarm()
            released.set()
            thread.join()
        wait_until(lambda: next(each.messages for each in broker.queues() if each.name == "gone") == 1)


@pytest.mark.parametrize(
    "path", [row.at() for row in rows() if row.method == "GET" and row.at() not in COMMITS]
)
def test_the_api_looks_while_the_disk_hangs(hung: Broker, path: str) -> None:
    api = Api(hung.http_urls[0], "boss")
    assert api.ask("GET", path).status in (200, 400, 404, 503)  # 503: a check
    api.close()


@pytest.mark.parametrize(
    "path",
    [path.replace("=V", "=%2F").replace("{name}", "page.css") for method, path, _ in ROWS if method == "GET"],
)
def test_the_page_looks_while_the_disk_hangs(hung: Broker, path: str) -> None:
    visitor = Visitor(hung.http_urls[0], "boss")
    assert visitor.get(path).status in (200, 303, 404)
    visitor.close()


def test_changes_that_wait_for_the_disk_leave_the_page_to_those_who_look(
    hung: Broker, tmp_path: Path
) -> None:
    """More of them than there are threads beside the loop."""
    waiting = [
        threading.Thread(
            target=lambda: Api(hung.http_urls[0], "manager").ask("PUT", "/api/queues/%2F/late", {})
        )
        for _ in range(8)
    ]
    for each in waiting:
        each.daemon = True
        each.start()
    requests = hung.http.requests  # type: ignore[union-attr]
    wait_until(lambda: len(requests) >= len(waiting))
    visitor = Visitor(hung.http_urls[0], "boss")
    assert visitor.get("/ui").status == 200 and visitor.get("/ui/store").status == 200
    visitor.close()
