"""One byte is wrong: nothing is skipped silently, and ``salvage`` keeps what is whole and names what is
not.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from broker_core.core import errors
from broker_core.engine import START, BranchHeader, Limit, Origin, ReadTicket
from broker_core.node.engine import EmbeddedEngine
from broker_core.node.local import LocalBroker
from broker_core.store.durable import DurableStore
from broker_core.store.salvage.salvage import SalvageReport, salvage
from broker_core.store.salvage.verify import verify
from tests.reading import fetched, unsettled

pytestmark = pytest.mark.slow

Contents = dict[str, dict[int, bytes]]


def publish(broker: LocalBroker, queue: str, first: int, count: int) -> None:
    with broker.channel() as channel:
        channel.tx_select()
        for number in range(first, first + count):
            channel.publish(b"%s %06d " % (queue.encode(), number) + b"x" * 50, routing_key=queue)
        channel.tx_commit()


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Queues in segments, in the catalog, and in both; some acked out of order; an owned queue; a prepared
    and an open transaction.
    """
    directory = tmp_path_factory.mktemp("filled") / "data"
    broker = LocalBroker(DurableStore(directory, roll_bytes=200_000), upkeep=False)
    engine = EmbeddedEngine(broker)
    with broker.channel() as channel:
        for queue in ("big", "both", "small", "owned"):
            channel.queue_declare(queue)
        channel.queue_bind("big", "amq.fanout")
    for part in range(3):
        publish(broker, "big", part * 1500, 1500)
        publish(broker, "owned", part * 1200, 1200)
    publish(broker, "both", 0, 1200)
    for number in range(0, 300, 10):
        publish(broker, "both", 1200 + number, 10)
    broker.upkeep.close_open()
    broker.upkeep.seal()
    for number in range(40):
        publish(broker, "small", number, 1)
    with broker.channel() as channel:
        tags = [channel.get("big") for _ in range(200)]
        for delivery in tags[50:150:2]:
            assert delivery is not None
            channel.ack(delivery.tag)
    with broker.channel() as channel:
        channel.tx_select()
        channel.publish(b"prepared", routing_key="small")
        channel.prepare("x1")
    engine.claim("app", ["owned"], {"owned": START}, Limit(max_rows=2500), Origin(), "fail")
    rows = pa.RecordBatch.from_pydict(
        {"body": pa.array([b"staged %d" % number for number in range(3000)], pa.binary())}
    )
    engine.stage(BranchHeader("token", "branch", "publish", {"routing_key": "small"}), [rows])
    broker.close()
    return directory


@pytest.fixture(scope="module")
def expected(filled: Path) -> Contents:
    """What ``filled`` delivers."""
    return contents(filled)


@pytest.fixture
def damaged(filled: Path, tmp_path: Path) -> Path:
    return _copy(filled, tmp_path / "data")


def contents(directory: Path) -> Contents:
    """What a broker of the directory delivers, by queue and offset."""
    broker = LocalBroker(DurableStore(directory), upkeep=False)
    found: Contents = {}
    for queue in broker.state.topology.queues.values():
        found[queue.name] = {offset: fetched(broker, queue, offset).body for offset in unsettled(queue)}
    broker.close()
    return found


def claimed_again(engine: EmbeddedEngine) -> tuple[Mapping[str, Any], list[bytes]]:
    """The end of the claim of "app", and what it reads again."""
    end = engine.claim("app", ["owned"], {"owned": START}, Limit(max_rows=2500), Origin(), "fail")
    ranges = engine.resolve("app", {"owned": START}, end)
    logs = tuple((log, first, last) for log, (first, last) in ranges.items())
    ticket = ReadTicket("app", "q", 0, ranges, logs, True)
    return end, [body for block in engine.read(ticket) for body in block.column("body").to_pylist()]


def flip(path: Path, at: int, bit: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= bit
    path.write_bytes(content)


def lost_offsets(report: SalvageReport) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for lost in report.lost:
        found.setdefault(lost.queue, set()).update(range(lost.start, lost.end))
    return found


def test_a_whole_directory_is_salvaged_whole_and_the_copy_is_the_same_broker(
    filled: Path, tmp_path: Path, expected: Contents
) -> None:
    (filled / "id").write_text("some-id\n")
    report = salvage(filled, tmp_path / "new")
    assert report.whole
    assert (tmp_path / "new" / "id").read_text() == "some-id\n"
    (filled / "id").unlink()
    assert verify(tmp_path / "new").problems == []
    assert contents(tmp_path / "new") == expected
    assert report.messages == {queue: len(messages) for queue, messages in expected.items()}
    broker = LocalBroker(DurableStore(tmp_path / "new"), upkeep=False)
    engine = EmbeddedEngine(broker)
    assert [attempt.token for attempt in engine.staged_batches()] == ["token"]
    broker.commit("x1")
    assert broker.state.topology.queue("small").messages == 41
    broker.close()


@pytest.mark.parametrize("seed", range(12))
def test_a_flipped_byte_in_a_segment_loses_its_block_alone_and_each_offset_is_named(
    damaged: Path, tmp_path: Path, seed: int, expected: Contents
) -> None:
    chosen = random.Random(seed)
    segment = chosen.choice(sorted((damaged / "segments").iterdir()))
    flip(segment, chosen.randrange(segment.stat().st_size), 1 << chosen.randrange(8))
    report = salvage(damaged, tmp_path / "new")
    assert verify(tmp_path / "new").problems == []
    found = contents(tmp_path / "new")
    lost = lost_offsets(report)
    for queue, messages in expected.items():
        assert found[queue] == {
            offset: body for offset, body in messages.items() if offset not in lost.get(queue, ())
        }
        assert lost.get(queue, set()) <= set(messages)
    for each in report.lost:
        assert segment.name in each.where and "position" in each.where
    if verify(damaged).problems:
        assert not report.whole


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(25))
def test_flipped_bytes_in_the_catalog_never_make_a_message_another_one(
    damaged: Path, filled: Path, tmp_path: Path, seed: int, expected: Contents
) -> None:
    chosen = random.Random(seed)
    catalog = damaged / "catalog.db"
    for _ in range(chosen.choice((1, 1, 3))):
        flip(catalog, chosen.randrange(2048, catalog.stat().st_size), 1 << chosen.randrange(8))
    with contextlib.suppress(errors.CorruptCatalog):
        assert contents(_copy(damaged, tmp_path / "opened")) == expected, (
            "a broker that opens the directory has it all"
        )
    try:
        report = salvage(damaged, tmp_path / "new")
    except errors.CorruptCatalog:
        return  # nothing can be read
    assert verify(tmp_path / "new").problems == []
    found = contents(tmp_path / "new")
    names = {queue for queue in found if not queue.startswith("salvaged-")}
    assert names <= set(expected)
    everything = {body for messages in expected.values() for body in messages.values()}
    for queue, messages in found.items():
        if queue in expected:
            for offset, body in messages.items():
                assert expected[queue].get(offset, body) == body
        assert set(messages.values()) <= everything | _settled(filled)
    if report.whole:
        assert found == expected
    missing = sum(len(messages) for messages in expected.values()) - sum(
        len(messages) for messages in found.values()
    )
    if missing > 0:
        assert not report.whole


def _copy(directory: Path, to: Path) -> Path:
    shutil.copytree(directory, to)
    return to


def _settled(filled: Path) -> set[bytes]:
    return {b"big %06d " % number + b"x" * 50 for number in range(200)}


@pytest.mark.parametrize("page", range(12))
def test_a_catalog_whose_list_of_tables_is_damaged_is_refused_and_says_where_the_messages_are(
    damaged: Path, tmp_path: Path, page: int
) -> None:
    """The pages of a table alone are losses of the report."""
    catalog = damaged / "catalog.db"
    content = bytearray(catalog.read_bytes())
    content[page * 1024 : page * 1024 + 1024] = random.Random(page).randbytes(1024)
    catalog.write_bytes(content)
    try:
        report = salvage(damaged, tmp_path / "new")
    except errors.CorruptCatalog as error:
        said = error.message
    else:
        assert page and report.losses and verify(tmp_path / "new").problems == []
        return
    assert f"any Arrow stream reader reads the messages in {damaged / 'segments'}" in said
    assert not (tmp_path / "new").exists()
    read = set[bytes]()
    for segment in (damaged / "segments").iterdir():
        with pa.ipc.open_stream(segment.read_bytes()) as reader:
            read.update(reader.read_all().column("body").to_pylist())
    assert {b"owned %06d " % number + b"x" * 50 for number in range(3600)} <= read


def test_a_list_of_tables_whose_error_is_no_text_is_refused_as_any_other(
    damaged: Path, tmp_path: Path
) -> None:
    """SQLite puts the name of the table into its error, byte for byte."""
    with contextlib.closing(sqlite3.connect(damaged / "catalog.db")) as connection, connection:
        connection.execute("PRAGMA writable_schema = ON")
        changed = "UPDATE sqlite_schema SET name = CAST(x'71ff' AS TEXT), sql = 'CREATE TABEL q (a)' WHERE name = 'run'"
        assert connection.execute(changed).rowcount == 1
    for act in (lambda: salvage(damaged, tmp_path / "new"), lambda: DurableStore(damaged)):
        with pytest.raises(errors.CorruptCatalog):
            act()
    assert verify(damaged).problems != []


def test_a_damaged_index_loses_no_row_of_its_table(damaged: Path, tmp_path: Path, expected: Contents) -> None:
    with contextlib.closing(sqlite3.connect(damaged / "catalog.db")) as connection:
        pages = connection.execute("SELECT rootpage FROM sqlite_schema WHERE type = 'index'").fetchall()
    content = bytearray((damaged / "catalog.db").read_bytes())
    for (page,) in pages:
        content[(page - 1) * 1024 : page * 1024] = random.Random(page).randbytes(1024)
    (damaged / "catalog.db").write_bytes(content)
    assert pages and salvage(damaged, tmp_path / "new").whole
    assert contents(tmp_path / "new") == expected


@pytest.mark.parametrize("where", ["segment", "catalog"])
def test_the_error_of_a_flipped_byte_names_the_command_that_goes_past_it(damaged: Path, where: str) -> None:
    if where == "catalog":
        content = (damaged / "catalog.db").read_bytes()
        (damaged / "catalog.db").write_bytes(content.replace(b"small 00", b"small 01"))
        with pytest.raises(errors.CorruptCatalog, match=f"`txmq broker salvage {damaged} --to NEWDIR`"):
            LocalBroker(DurableStore(damaged), upkeep=False)
        return
    segment = sorted((damaged / "segments").iterdir())[0]
    flip(segment, segment.stat().st_size // 2)
    with pytest.raises(errors.CorruptSegment, match=f"`txmq broker salvage {damaged} --to NEWDIR`"):
        contents(damaged)


def test_a_claim_over_lost_messages_can_be_replayed_without_them(damaged: Path, tmp_path: Path) -> None:
    broker = LocalBroker(DurableStore(damaged), upkeep=False)
    queue = broker.state.topology.queue("owned")
    place = broker.locate(queue.log.runs_between(0, 1)[0].block_id)
    assert place is not None
    broker.close()
    flip(Path(place.path), place.position + place.length // 2)
    report = salvage(damaged, tmp_path / "new")
    lost = lost_offsets(report)["owned"]
    assert 0 < len(lost) <= 256
    assert lost < set(range(1200))
    broker = LocalBroker(DurableStore(tmp_path / "new"), upkeep=False)
    end, bodies = claimed_again(EmbeddedEngine(broker))
    assert end == {"owned": 2400}
    assert bodies == [b"owned %06d " % number + b"x" * 50 for number in range(2400) if number not in lost]
    publish(broker, "owned", 9000, 1)
    assert broker.state.topology.queue("owned").log.next_offset == 3601
    broker.close()


def test_one_flipped_byte_among_thousands_of_messages_loses_a_few_hundred_at_most(tmp_path: Path) -> None:
    broker = LocalBroker(DurableStore(tmp_path / "data"), upkeep=False)
    with broker.channel() as channel:
        channel.queue_declare("q")
        channel.queue_declare("half")
        channel.tx_select()
        for number in range(3000):
            channel.publish(b"%05d " % number + b"x" * 1000, routing_key="q")
            if number % 2:
                channel.publish(b"%05d " % number + b"y" * 100, routing_key="half")
        channel.tx_commit()
    broker.close()
    (segment,) = (tmp_path / "data" / "segments").iterdir()
    flip(segment, segment.stat().st_size // 2)
    report = salvage(tmp_path / "data", tmp_path / "new")
    assert verify(tmp_path / "new").problems == []
    lost, found = lost_offsets(report), contents(tmp_path / "new")
    assert 0 < sum(map(len, lost.values())) <= 256
    assert found["q"] == {n: b"%05d " % n + b"x" * 1000 for n in range(3000) if n not in lost.get("q", ())}
    assert found["half"] == {
        n: b"%05d " % (2 * n + 1) + b"y" * 100 for n in range(1500) if n not in lost.get("half", ())
    }


def test_segments_that_go_take_their_sums_with_them(tmp_path: Path) -> None:
    broker = LocalBroker(DurableStore(tmp_path, roll_bytes=1), upkeep=False)
    with broker.channel() as channel:
        channel.queue_declare("q")
        for _ in range(3):
            publish(broker, "q", 0, 1100)
        assert len(list((tmp_path / "sums").iterdir())) == 3
        channel.queue_purge("q")
        publish(broker, "q", 0, 1)
    broker.upkeep.compact()
    assert {path.name for path in (tmp_path / "sums").iterdir()} == {
        path.stem for path in (tmp_path / "segments").iterdir()
    }
    broker.close()
    (tmp_path / "sums" / "00000099").write_bytes(b"of a segment that a crash has left behind")
    DurableStore(tmp_path).close()
    assert not (tmp_path / "sums" / "00000099").exists()


@pytest.mark.parametrize("left", [0, 1, 700, 0.3, 0.9])
def test_a_segment_that_was_cut_off_is_salvaged_up_to_there(
    damaged: Path, tmp_path: Path, left: float, expected: Contents
) -> None:
    segment = sorted((damaged / "segments").iterdir())[0]
    content = segment.read_bytes()
    segment.write_bytes(content[: int(left * len(content)) if isinstance(left, float) else left])
    report = salvage(damaged, tmp_path / "new")
    assert verify(tmp_path / "new").problems == []
    found, lost = contents(tmp_path / "new"), lost_offsets(report)
    assert found == {
        queue: {o: b for o, b in messages.items() if o not in lost.get(queue, ())}
        for queue, messages in expected.items()
    }


def test_a_directory_without_sums_is_salvaged_block_by_block(damaged: Path, tmp_path: Path) -> None:
    shutil.rmtree(damaged / "sums")
    segment = sorted((damaged / "segments").iterdir())[0]
    flip(segment, segment.stat().st_size // 2)
    report = salvage(damaged, tmp_path / "new")
    assert not report.whole
    assert verify(tmp_path / "new").problems == []


def test_lost_messages_at_the_end_of_a_queue_do_not_give_their_offsets_to_others(
    damaged: Path, tmp_path: Path
) -> None:
    broker = LocalBroker(DurableStore(damaged), upkeep=False)
    place = broker.locate(broker.state.topology.queue("big").log.runs_between(4499, 4500)[0].block_id)
    assert place is not None
    broker.close()
    flip(Path(place.path), place.position + place.length // 2)
    salvage(damaged, tmp_path / "new")
    broker = LocalBroker(DurableStore(tmp_path / "new"), upkeep=False)
    assert broker.state.topology.queue("big").log.next_offset == 4500
    broker.close()


def test_messages_that_a_damaged_catalog_loses_at_the_end_of_a_claim_do_not_give_it_others(
    damaged: Path, tmp_path: Path
) -> None:
    broker = LocalBroker(DurableStore(damaged), upkeep=False)
    broker.rollback("x1")  # its message is the last one
    EmbeddedEngine(broker).claim("other", ["small"], {"small": START}, Limit(), Origin(), "fail")
    end = broker.state.topology.queue("small").log.next_offset
    broker.close()
    content = (damaged / "catalog.db").read_bytes()
    (damaged / "catalog.db").write_bytes(content.replace(b"small 000039", b"small 000093"))
    report = salvage(damaged, tmp_path / "new")
    assert lost_offsets(report)["small"] == {end - 1}
    broker = LocalBroker(DurableStore(tmp_path / "new"), upkeep=False)
    publish(broker, "small", 9000, 1)
    assert broker.state.topology.queue("small").log.next_offset == end + 1
    broker.close()


def test_salvage_refuses_what_is_in_use_what_is_no_directory_and_what_is_not_empty(
    filled: Path, tmp_path: Path
) -> None:
    store = DurableStore(filled)
    with pytest.raises(errors.DataDirectoryLocked, match="in use by process"):
        salvage(filled, tmp_path / "new")
    store.close()
    assert not (tmp_path / "new").exists()
    with pytest.raises(errors.DataDirectoryInvalid, match="no catalog"):
        salvage(tmp_path, tmp_path / "new")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for target in (tmp_path / "full", filled, filled / "new"):
        with pytest.raises(errors.DataDirectoryInvalid):
            salvage(filled, target)
    before = {path: path.read_bytes() for path in filled.rglob("*") if path.is_file()}
    salvage(filled, tmp_path / "new")
    assert {path: path.read_bytes() for path in filled.rglob("*") if path.is_file()} == before


def test_a_missing_segment_file_is_named_with_the_offsets_that_it_held(
    damaged: Path, tmp_path: Path, expected: Contents
) -> None:
    segment = sorted((damaged / "segments").iterdir())[0]
    segment.unlink()
    report = salvage(damaged, tmp_path / "new")
    assert report.lost and all(segment.name in lost.where for lost in report.lost)
    found, lost = contents(tmp_path / "new"), lost_offsets(report)
    assert found == {
        queue: {o: b for o, b in messages.items() if o not in lost.get(queue, ())}
        for queue, messages in expected.items()
    }
