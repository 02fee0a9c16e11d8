"""Every call of the engine sent twice: the second one changes nothing, and is answered as the first or as
what is over.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from broker_core.arrow.parts import branch_checksum, stream_of
from broker_core.core import errors
from broker_core.launcher import Broker
from tests.server.flight.flight_calls import ENGINE, HEADER, Raw, messages, part_body
from tests.server.picture import picture

QUEUES = {"in": 2, "other": 0}


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker.memory() as found:
        found.local.upkeep.stop()
        with found.channel() as channel:
            for name, count in QUEUES.items():
                channel.queue_declare(name)
                for number in range(count):
                    channel.publish(str(number).encode(), routing_key=name)
        yield found


def steps(raw: Raw) -> Iterator[tuple[str, bytes, bool]]:
    """A micro-batch, a batch write and a release, call by call; whether the second sending may be refused."""
    claim = {**ENGINE["claim"], "limit": {"max_rows": 1}}
    yield "engine.claim", _json(claim), False
    yield "engine.open_batch", _json(ENGINE["open_batch"]), False
    yield "read", _json({**READ, "ranges": {"in": [0, 1]}}), False
    rows = stream_of([messages(b"out", routing_key="other")], messages().schema)
    for token, branch in (("t", "b1"), ("w", "b2")):
        header = {
            **HEADER,
            "token": token,
            "branch": branch,
            **({"app_id": "app", "query_id": "q", "batch_id": 0} if token == "t" else {}),
        }
        answer = raw.action("stage", part_body({"header": header, "part": 0}, rows))
        assert isinstance(answer, list)
        receipt = json.loads(answer[0])
        yield "stage", part_body({"header": header, "part": 0}, rows), False
        named = [
            {
                "branch": branch,
                "partition": 0,
                "attempt": 0,
                "rows": 1,
                "checksum": branch_checksum([receipt["checksum"]]),
            }
        ]
        if token == "t":
            yield "engine.commit_batch", _json({**ENGINE["commit_batch"], "branches": named}), False
        else:
            yield "engine.commit_branches", _json({"token": "w", "branches": named}), False
    yield from refused(raw)
    yield "engine.ack", _json({"app_id": "app", "end": {"in": 1}}), False
    yield "engine.mark_applied", _json(ENGINE["mark_applied"]), False
    yield "engine.mark_mirrored", _json(ENGINE["mark_mirrored"]), False
    yield "engine.open_batch", _json({**ENGINE["open_batch"], "batch_id": 2, "token": "t2"}), False
    yield "engine.rollback_batch", _json({"token": "t2"}), False
    yield "engine.resume", _json(ENGINE["resume"]), False
    yield "engine.release", _json({"app_id": "app", "queue": "in"}), True  # nobody owns it any more


READ = {"app_id": "app", "query_id": "q", "batch_id": 0, "slices": [["in", 0, 1]], "fail_on_data_loss": True}


def staged(raw: Raw, header: dict[str, Any]) -> dict[str, Any]:
    """A branch of one row."""
    rows = stream_of([messages(b"row", routing_key="other")], messages().schema)
    answer = raw.action("stage", part_body({"header": header, "part": 0}, rows))
    assert isinstance(answer, list)
    checksum = branch_checksum([json.loads(answer[0])["checksum"]])
    return {"branch": header["branch"], "partition": 0, "attempt": 0, "rows": 1, "checksum": checksum}


def refused(raw: Raw) -> Iterator[tuple[str, bytes, bool]]:
    """A row of the next batch that its table refuses."""
    yield "engine.open_batch", _json({**ENGINE["open_batch"], "batch_id": 1, "token": "t1"}), False
    batch = {"app_id": "app", "query_id": "q", "batch_id": 1}
    appended = {**HEADER, **batch, "token": "t1", "branch": "b3", "kind": "append", "target": {"table": "t"}}
    rows = {"branches": [staged(raw, appended)]}
    yield "engine.commit_batch", _json({**ENGINE["commit_batch"], **batch, **rows, "token": "t1"}), False
    found = raw.action("engine.unapplied", _json({"app_id": "app"}))
    assert isinstance(found, list)
    (entry,) = json.loads(found[0])
    told = {"app_id": "app", "sequence": entry["sequence"], "branches": ["b3"], "rows": "0", "token": "w3"}
    told |= {"staged": [staged(raw, {**HEADER, "token": "w3", "branch": "b4"})]}
    yield "engine.publish_refused", _json(told), False
    yield "engine.mark_applied", _json({"app_id": "app", "sequence": entry["sequence"]}), False


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def test_a_call_that_is_sent_again_changes_nothing_the_second_time(broker: Broker) -> None:
    raw = Raw(broker.url)
    sent: list[tuple[str, bytes]] = []
    for name, body, over in steps(raw):
        first = raw.action(name, body)
        assert isinstance(first, list), (name, first)
        before = picture(broker)
        second = raw.action(name, body)
        assert isinstance(second, list) or (over and isinstance(second, errors.PreconditionFailed)), (
            name,
            second,
        )
        assert picture(broker) == before, name
        sent.append((name, body))
    # and late, in any order: what was published and consumed stays as it is
    counts = {info.name: (info.messages, info.next_offset) for info in broker.queues()}
    for name, body in reversed(sent):
        if name != "engine.claim":
            raw.action(name, body)
        assert {info.name: (info.messages, info.next_offset) for info in broker.queues()} == counts, name
    assert broker.failure is None
