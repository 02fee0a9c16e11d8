"""Lag in seconds: the age of the oldest message that is not consumed, wherever its commit time is stored."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker_core.admin import QueueInfo
from broker_core.engine import AppInfo, Limit, Origin, ReadTicket
from broker_core.launcher import Broker
from txmq.admin.top import LiveRates
from txmq.cli import main


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker.open(tmp_path / "data") as found:
        with found.channel() as channel:
            channel.queue_declare("in")
        yield found


def publish(broker: Broker, *bodies: bytes) -> None:
    """Each in a commit of its own."""
    with broker.channel() as channel:
        for body in bodies:
            channel.publish(body, routing_key="in")


def claim(broker: Broker) -> dict[str, tuple[int, int]]:
    engine = broker.engine
    end = engine.claim("app", ["in"], {"in": "start"}, Limit(max_rows=2), Origin(), "fail")
    return engine.resolve("app", {"in": "start"}, end)


def decide(broker: Broker, ranges: dict[str, tuple[int, int]], batch: int = 0) -> None:
    engine = broker.engine
    token = engine.open_batch("app", "query", batch, "fail").token
    list(engine.read(ReadTicket("app", "query", batch, ranges, (("in", *ranges["in"]),))))
    engine.commit_batch("app", "query", batch, token, [])


def committed_s(broker: Broker, offset: int) -> float:
    (rows,) = broker.engine.browse([("in", offset, offset + 1)])
    return float(rows.column("timestamp")[0].as_py().timestamp())


def seal(broker: Broker) -> None:
    broker.local.upkeep.close_open()
    broker.local.upkeep.seal()


def require_age(look: Callable[[], float | None], since_s: float) -> None:
    """Whatever the machine does meanwhile: the age is between those at two times around the look."""
    least = time.time() - since_s
    age = look()
    assert age is not None and least - 1e-3 <= age <= time.time() - since_s + 1e-3


def app_lag(broker: Broker) -> float | None:
    (app,) = broker.engine.apps()
    return app.lag_s


def oldest(broker: Broker) -> float | None:
    (queue,) = broker.queues()
    return queue.oldest_s


@pytest.mark.parametrize("sealed", [False, True], ids=["in memory", "in a segment"])
def test_the_lag_in_seconds_is_that_of_the_oldest_message_also_in_a_segment(
    broker: Broker, sealed: bool
) -> None:
    assert oldest(broker) is None
    publish(broker, b"a", b"b", b"c", b"d")
    times = [committed_s(broker, offset) for offset in range(4)]
    ranges = claim(broker)
    if sealed:
        seal(broker)
    require_age(lambda: app_lag(broker), times[0])  # claimed, and not decided
    decide(broker, ranges)
    require_age(lambda: app_lag(broker), times[2])
    require_age(lambda: oldest(broker), times[3] if sealed else times[2])  # reads no segment
    broker.engine.ack("app", {"in": 2})
    end = broker.engine.claim("app", ["in"], {"in": 2}, Limit(), Origin(), "fail")
    decide(broker, broker.engine.resolve("app", {"in": 2}, end), 1)
    broker.engine.ack("app", end)
    assert (app_lag(broker), oldest(broker)) == (None, None)


def test_a_message_that_the_app_skips_is_no_lag(broker: Broker) -> None:
    publish(broker, b"a", b"b")
    broker.engine.claim("app", ["in"], {"in": "start"}, Limit(), Origin(offsets={"in": 1}), "fail")
    require_age(lambda: app_lag(broker), committed_s(broker, 1))
    require_age(lambda: oldest(broker), committed_s(broker, 0))


def test_the_lag_of_a_bulk_commit_survives_a_restart(tmp_path: Path) -> None:
    with Broker.open(tmp_path / "data") as broker:
        with broker.channel() as channel:
            channel.queue_declare("in")
            channel.tx_select()
            for number in range(40_000):
                channel.publish(b"%d" % number, routing_key="in")
            channel.tx_commit()
        claim(broker)
        since = committed_s(broker, 0)
        publish(broker, b"later")
    with Broker.open(tmp_path / "data") as broker:
        require_age(lambda: app_lag(broker), since)
        require_age(lambda: oldest(broker), since)


def test_the_commands_say_it(broker: Broker, capsys: pytest.CaptureFixture[str]) -> None:
    publish(broker, b"a", b"b", b"c")
    decide(broker, claim(broker))
    at = ("--data", broker.directory)
    assert main(["app", "list", *at, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["lag_s"] >= 0
    assert main(["queue", "list", *at, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["oldest_s"] >= 0


def test_status_says_the_lag_of_the_app_that_is_furthest_behind(
    broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ("--url", broker.url)
    publish(broker, b"a", b"b", b"c")
    assert main(["status", *at, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lag_s"] is None  # no app waits for them
    decide(broker, claim(broker))
    since = committed_s(broker, 2)

    def said() -> float:
        assert main(["status", *at, "--json"]) == 0
        return float(json.loads(capsys.readouterr().out)["lag_s"])

    require_age(said, since)
    assert main(["status", *at]) == 0
    assert " s, of the app that is furthest behind" in capsys.readouterr().out


def test_nothing_that_waits_is_an_empty_cell(broker: Broker, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["queue", "list", "--data", broker.directory]) == 0
    assert "None" not in capsys.readouterr().out


def test_top_shows_the_lag_of_each_pipeline_in_seconds() -> None:
    app = AppInfo("app", ("in",), 1, "q", 0, lag=3, unapplied=0, unmirrored=0, lag_s=12.34)
    queue = QueueInfo("in", 3, 0, 3, 0, "app", True, oldest_s=12.34)
    screen = "\n".join(LiveRates().screen([queue], [app], 20, 1.0))
    assert "lag_s" in screen and "oldest_s" in screen and screen.count("12.3") == 2
