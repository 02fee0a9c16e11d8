"""An answer that is given again, a moment later: to whom, for how long, and what ends it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.responses import Response

from broker_core.core import password as passwords
from broker_core.launcher import Broker
from broker_core.server.http.state import answer_cache
from broker_core.server.http.state.answer_cache import KEPT_S, OFTEN, AnswerCache
from tests.server.http.http_client import Api, add_people, serving


def asked(kept: AnswerCache, key: object, answer: Response) -> Response:
    """As the application asks."""
    changes, found = kept.changes, kept.find(key)
    if found is None:
        kept.keep(key, answer, changes)
    return found or answer


def made(kept: AnswerCache, now: list[float], rate: int, seconds: int) -> int:
    """How many answers are made for somebody who asks at a steady rate."""
    given = set()
    for _ in range(rate * seconds):
        given.add(asked(kept, "path", Response()))
        now[0] += 1 / rate
    return len(given)


@pytest.mark.parametrize(
    ("rate", "least", "most"), [(2, 20, 20), (OFTEN - 1, 90, 90), (25, 40, 70), (1000, 40, 70)]
)
def test_an_answer_is_made_five_times_a_second_for_who_asks_often(rate: int, least: int, most: int) -> None:
    now = [100.0]
    kept = AnswerCache(lambda: now[0])
    assert least <= made(kept, now, rate, 10) <= most
    now[0] += 2
    assert made(kept, now, OFTEN - 1, 1) == OFTEN - 1, "who asks seldom again sees what is now"


def test_an_answer_ends_with_its_time_with_a_change_and_was_not_made_before_it() -> None:
    now = [100.0]
    kept = AnswerCache(lambda: now[0])
    first, second = Response(), Response()
    for _ in range(OFTEN + 1):
        asked(kept, "path", first)
    assert asked(kept, "path", Response()) is first
    assert asked(kept, "another", second) is second
    now[0] += KEPT_S
    assert asked(kept, "path", second) is second
    kept.changed()
    assert asked(kept, "path", first) is first
    changes = kept.changes
    kept.changed()  # while the next one is made
    kept.keep("path", second, changes)
    kept.keep("path", Response(status_code=404), kept.changes)
    assert kept.find("path") is None
    kept.keep("metrics", first, kept.changes, 0.5)
    assert kept.find("metrics") is None, "nobody has asked for it"
    kept.keep("metrics", first, kept.changes, 0.5)
    assert kept.find("metrics") is first


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    """Everybody asks often, and nothing is forgotten because it is old."""
    monkeypatch.setattr(answer_cache, "OFTEN", 0)
    monkeypatch.setattr(answer_cache, "KEPT_S", 3600.0)
    with serving(tmp_path) as opened:
        add_people(opened)
        yield opened


def names(api: Api, path: str = "/api/queues") -> list[str]:
    return [queue["name"] for queue in api.get(path)]


def test_what_this_listener_has_changed_is_seen_at_once(broker: Broker) -> None:
    boss, watcher = (Api(broker.http_urls[0], user) for user in ("boss", "watcher"))
    assert names(watcher) == []
    with broker.channel() as channel:
        channel.queue_declare("elsewhere")
    assert names(watcher) == [], "the answer is given again"
    assert names(watcher, "/api/queues?columns=name") == ["elsewhere"], "another query is another answer"
    assert boss.ask("PUT", "/api/queues/%2F/made", {}).status == 201
    assert names(watcher) == names(boss) == ["elsewhere", "made"]
    assert boss.ask("DELETE", "/api/queues/%2F/made").status == 204
    assert names(watcher) == names(boss) == ["elsewhere"]
    assert boss.ask("GET", "/api/aliveness-test/%2F").status == 200, "it declares a queue"
    assert "aliveness-test" in names(watcher)


def test_an_answer_is_for_the_user_who_had_it_and_its_rights_now(broker: Broker) -> None:
    url = broker.http_urls[0]
    boss, watcher, manager, stranger = (Api(url, user) for user in ("boss", "watcher", "manager", "stranger"))
    with broker.channel() as channel:
        channel.queue_declare("orders")
    for api, name in ((boss, "boss"), (watcher, "watcher"), (manager, "manager"), (stranger, "stranger")):
        for _ in range(2):
            assert api.get("/api/whoami")["name"] == name
            seen = [] if api is stranger else ["orders"]
            assert names(api) == seen
    assert stranger.ask("GET", "/api/queues/%2F").status == 401
    assert watcher.get("/api/nodes") and watcher.get("/api/nodes")
    broker.accounts.set_tags("watcher", ["management"])
    assert watcher.ask("GET", "/api/nodes").status == 401
    assert names(watcher) == [], "it sees the virtual hosts of its permissions, and has none"
    broker.accounts.clear_permissions("manager")
    assert names(manager) == [], "a right that was taken holds from the next request on"
    broker.accounts.set_permissions("manager", ".*", ".*", ".*")
    assert names(manager) == ["orders"]
    broker.accounts.set_password("manager", passwords.hashed("another", passwords.Cost(4, 8, 1)))
    assert manager.ask("GET", "/api/queues").status == 401
    broker.accounts.delete_user("stranger")
    assert stranger.ask("GET", "/api/whoami").status == 401
    assert Api(url, "").ask("GET", "/api/queues").status == 401


def test_each_export_of_definitions_is_in_the_audit_log(broker: Broker) -> None:
    boss = Api(broker.http_urls[0], "boss")
    for _ in range(3):
        assert boss.ask("GET", "/api/definitions").status == 200
    assert (Path(broker.directory) / "audit.log").read_text().count("export_definitions") == 3
