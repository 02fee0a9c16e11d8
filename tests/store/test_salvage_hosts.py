"""Salvage of a directory whose virtual hosts use the same names: what one of them lost is not lost to
another.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from broker_core.core import errors
from broker_core.core.address import VHOST
from broker_core.engine import START, BranchHeader, Limit, Origin
from broker_core.node.local import LocalBroker
from broker_core.node.vhost_engines import VhostEngines
from broker_core.store.durable import DurableStore
from broker_core.store.salvage.salvage import salvage
from broker_core.store.salvage.verify import verify
from tests.reading import fetched, unsettled
from tests.store.test_salvage import claimed_again, flip

SALES = "sales"
HOSTS = (VHOST, SALES)
ROWS = 1200

Contents = dict[tuple[str, str], dict[int, bytes]]  # by virtual host and queue, then by offset


def body(vhost: str, queue: str, number: int) -> bytes:
    return f"{vhost} {queue} {number:06} {'x' * 50}".encode()


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In each host a claimed queue in segments, one in the catalog, and a staged batch, all with the same
    names.
    """
    directory = tmp_path_factory.mktemp("hosts") / "data"
    broker = LocalBroker(DurableStore(directory, roll_bytes=200_000), upkeep=False)
    broker.run(lambda state, change, _now: state.virtual_hosts.add(change, SALES, max_queues=7))
    engines = VhostEngines(broker)
    for vhost in HOSTS:
        with broker.channel(vhost=vhost) as channel:
            for queue, count in (("owned", ROWS), ("small", 30)):
                channel.queue_declare(queue)
                channel.tx_select()
                for number in range(count):
                    channel.publish(body(vhost, queue, number), routing_key=queue)
                channel.tx_commit()
        engine = engines.of(vhost)
        engine.claim("app", ["owned"], {"owned": START}, Limit(max_rows=2 * ROWS), Origin(), "fail")
        rows = pa.RecordBatch.from_pydict(
            {"body": pa.array([body(vhost, "staged", number) for number in range(3000)], pa.binary())}
        )
        engine.stage(BranchHeader("token", "branch", "publish", {"routing_key": "small"}), [rows])
    broker.close()
    return directory


@pytest.fixture
def damaged(filled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled, tmp_path / "data"))


def contents(directory: Path) -> Contents:
    broker = LocalBroker(DurableStore(directory), upkeep=False)
    found = {
        (vhost, queue.name): {offset: fetched(broker, queue, offset).body for offset in unsettled(queue)}
        for vhost, topology in broker.state.virtual_hosts.by_name.items()
        for queue in topology.queues.values()
    }
    broker.close()
    return found


def replayed(directory: Path, vhost: str) -> list[bytes]:
    """What the claim of the host's app reads again."""
    broker = LocalBroker(DurableStore(directory), upkeep=False)
    _, bodies = claimed_again(VhostEngines(broker).of(vhost))
    broker.close()
    return bodies


def test_a_whole_directory_keeps_every_host_with_its_limits_claims_and_staged_rows(
    filled: Path, tmp_path: Path
) -> None:
    expected = contents(filled)
    report = salvage(filled, tmp_path / "new")
    assert report.whole and verify(tmp_path / "new").problems == []
    assert contents(tmp_path / "new") == expected
    assert report.messages == {
        name: len(expected[vhost, queue])
        for vhost, queue, name in (
            (VHOST, "owned", "owned"),
            (VHOST, "small", "small"),
            (SALES, "owned", "owned in vhost sales"),
            (SALES, "small", "small in vhost sales"),
        )
    }
    broker = LocalBroker(DurableStore(tmp_path / "new"), upkeep=False)
    assert broker.state.virtual_hosts.limits(SALES).max_queues == 7
    engines = VhostEngines(broker)
    assert [len(engines.of(vhost).staged_batches()) for vhost in HOSTS] == [1, 1]
    broker.close()


@pytest.mark.parametrize(("hurt", "spared"), [HOSTS, HOSTS[::-1]])
def test_a_claim_skips_what_its_own_host_lost_and_nothing_of_another(
    damaged: Path, tmp_path: Path, hurt: str, spared: str
) -> None:
    broker = LocalBroker(DurableStore(damaged), upkeep=False)
    queue = broker.state.virtual_hosts.get(hurt).queue("owned")
    place = broker.locate(queue.log.runs_between(0, 1)[0].block_id)
    assert place is not None
    broker.close()
    flip(Path(place.path), place.position + place.length // 2)
    report = salvage(damaged, tmp_path / "new")
    assert {lost.queue for lost in report.lost} == {"owned" if hurt == VHOST else "owned in vhost sales"}
    gone = {offset for lost in report.lost for offset in range(lost.start, lost.end)}
    assert 0 < len(gone) <= 256
    assert replayed(tmp_path / "new", spared) == [body(spared, "owned", each) for each in range(ROWS)]
    assert replayed(tmp_path / "new", hurt) == [
        body(hurt, "owned", each) for each in range(ROWS) if each not in gone
    ]


@pytest.mark.parametrize("seed", range(15))
def test_flipped_bytes_in_the_catalog_move_no_message_to_another_host(
    damaged: Path, filled: Path, tmp_path: Path, seed: int
) -> None:
    chosen = random.Random(seed)
    catalog = damaged / "catalog.db"
    for _ in range(chosen.choice((1, 1, 3))):
        flip(catalog, chosen.randrange(2048, catalog.stat().st_size), 1 << chosen.randrange(8))
    try:
        report = salvage(damaged, tmp_path / "new")
    except errors.CorruptCatalog:
        return  # nothing can be read
    assert verify(tmp_path / "new").problems == []
    expected, found = contents(filled), contents(tmp_path / "new")
    for (vhost, queue), messages in found.items():
        if not queue.startswith("salvaged-"):
            assert messages.items() <= expected[vhost, queue].items()
    if report.whole:
        assert found == expected
    if sum(map(len, found.values())) < sum(map(len, expected.values())):
        assert not report.whole
