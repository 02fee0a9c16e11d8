"""How rows are cut into parts, how files of parts are handed over, and how a piece of a log becomes rows."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as arrow_flight
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_core.arrow.part_file import PartFile, PartWriter
from broker_core.arrow.parts import PART_BYTES, PART_ROWS, branch_checksum, normalise, part_checksum, parts
from broker_core.arrow.rows import Piece, assemble
from broker_core.broker.batch.branch import StagedLimits
from broker_core.client.broker import BrokerClient
from broker_core.client.channel import RemoteChannel
from broker_core.core import errors
from broker_core.engine import BranchHeader, StagedBranch
from broker_core.flight import contract
from broker_core.launcher import Broker
from broker_core.message.message import MESSAGE_SCHEMA, READ_SCHEMA
from broker_core.server.quotas import QuotaLimits
from broker_core.store.salvage.verify import verify
from tests.gates import examples
from tests.server.conftest import Served, bodies, fill
from tests.server.flight.flight_calls import Raw, messages

Intervals = tuple[tuple[int, int], ...]

PUBLISH = BranchHeader("token", "branch", "publish", {"exchange": "e", "routing_key": "k"})
APPEND = BranchHeader("token", "branch", "append", {"table": "t", "options": {}})


def test_missing_and_null_columns_take_the_targets_values() -> None:
    batch = pa.record_batch({"body": ["a", "b"], "routing_key": ["own", None]})
    (part,) = parts([batch], PUBLISH)
    assert part.schema == MESSAGE_SCHEMA
    assert part.to_pylist() == [
        {"exchange": "e", "routing_key": "own", "body": b"a", "properties": b""},
        {"exchange": "e", "routing_key": "k", "body": b"b", "properties": b""},
    ]


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"text": ["x"]}, "column 'text' is not part of a message"),
        ({"routing_key": ["x"]}, "no column 'body'"),
        ({"body": [1]}, "column 'body' has type int64; it must be binary or string"),
        ({"body": ["x"], "routing_key": [1]}, "column 'routing_key' has type int64"),
        ({"body": [None]}, "row 1 has no body"),
    ],
)
def test_wrong_rows_are_one_error_that_names_column_or_row(
    columns: dict[str, list[object]], text: str
) -> None:
    with pytest.raises(errors.OptionError, match=text):
        list(parts([pa.record_batch({"body": ["fine"]}), pa.record_batch(columns)], PUBLISH))


def test_body_over_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker_core.arrow.parts.MAX_BODY_BYTES", 10)
    with pytest.raises(errors.TransactionTooLarge, match="row 1 has 11 bytes; the limit is 10"):
        list(parts([pa.record_batch({"body": [b"x" * 10, b"x" * 11]})], PUBLISH))


def test_huge_body_is_a_part_of_its_own() -> None:
    sizes = [100, PART_BYTES * 2, 100, 100]
    cut = list(parts([pa.record_batch({"body": [b"x" * size for size in sizes]})], PUBLISH))
    assert [part.num_rows for part in cut] == [1, 1, 2]


def test_no_rows_are_no_parts() -> None:
    empty = pa.RecordBatch.from_pylist([], schema=pa.schema([("body", pa.binary())]))
    assert list(parts([empty, empty], PUBLISH)) == []


@examples(25)
@given(st.lists(st.integers(0, 150_000), max_size=6))
def test_parts_are_the_rows_in_order_and_never_over_the_limits(counts: list[int]) -> None:
    first = 0
    batches = []
    for count in counts:
        batches.append(pa.record_batch({"n": pa.array(range(first, first + count), pa.int64())}))
        first += count
    cut = list(parts(batches, APPEND))
    assert all(0 < part.num_rows <= PART_ROWS and part.nbytes <= PART_BYTES for part in cut)
    assert [n for part in cut for n in part.column("n").to_pylist()] == list(range(first))


def test_checksums_fit_a_signed_bigint_and_depend_on_order() -> None:
    one, two = (part_checksum(pa.record_batch({"n": [n]})) for n in (1, 2))
    assert 0 <= one < 2**63
    assert 0 <= branch_checksum([one, two]) < 2**63
    assert branch_checksum([one, two]) != branch_checksum([two, one])


def _stored(rows: int) -> pa.RecordBatch:
    columns = [
        [f"e{row}" for row in range(rows)],
        [f"k{row}" for row in range(rows)],
        [b"%d" % row for row in range(rows)],
        [b""] * rows,
    ]
    return pa.RecordBatch.from_arrays([pa.array(column) for column in columns], schema=MESSAGE_SCHEMA)


def _intervals(limit: int) -> st.SearchStrategy[Intervals]:
    return st.lists(
        st.tuples(st.integers(0, limit), st.integers(0, limit)).map(lambda pair: (min(pair), max(pair))),
        max_size=3,
    ).map(tuple)


@given(
    chosen=st.lists(st.booleans(), min_size=1, max_size=40),
    row=st.integers(0, 5),
    dense=st.booleans(),
    skipped=_intervals(60),
    redelivered=_intervals(60),
    data=st.data(),
)
def test_piece_gives_the_rows_that_its_bits_intervals_and_offsets_name(
    chosen: list[bool],
    row: int,
    dense: bool,
    skipped: tuple[tuple[int, int], ...],
    redelivered: tuple[tuple[int, int], ...],
    data: st.DataObject,
) -> None:
    selected = [row + index for index, wanted in enumerate(chosen) if wanted or dense]
    before = data.draw(st.integers(0, len(selected)))
    count = data.draw(st.integers(0, len(selected) - before))
    bits = sum(1 << index for index, wanted in enumerate(chosen) if wanted)
    bitmap = b"" if dense else bits.to_bytes((len(chosen) + 7) // 8, "little")
    piece = Piece("q", 10, count, 1, row, bitmap, 7, 123, skipped, redelivered, before=before)

    def within(intervals: Intervals, offset: int) -> bool:
        return any(start <= offset < end for start, end in intervals)

    expected = [
        (10 + index, f"e{number}", f"k{number}", b"%d" % number, within(redelivered, 10 + index))
        for index, number in enumerate(selected[before : before + count])
        if not within(skipped, 10 + index)
    ]
    rows = assemble(piece, _stored(row + len(chosen)))
    rows.validate(full=True)
    assert rows.schema == READ_SCHEMA
    found = [
        tuple(line[name] for name in ("offset", "exchange", "routing_key", "body", "redelivered"))
        for line in rows.to_pylist()
    ]
    assert found == expected


def _handed_over(served: Served, rows: int = 2000, keep: bool = False) -> tuple[PartWriter, PartFile, int]:
    """A writer's file, and a descriptor that can still write to it where ``keep``."""
    writer = PartWriter(str(served.directory))
    for number in range(3):
        writer.append(
            normalise(pa.record_batch({"body": [b"%d.%d" % (number, row) for row in range(rows)]}), "", "q")
        )
    kept = os.dup(writer.descriptor) if keep else -1
    return writer, writer.end(), kept


def _adopt(client: BrokerClient, file: PartFile, branch: str = "branch") -> list[contract.PartReceipt]:
    header = BranchHeader("token", branch, "publish", {"exchange": "", "routing_key": "q"})
    answer = client._connection.call("adopt", contract.encode(contract.FileHeader(header, 0, file)))
    found: list[contract.PartReceipt] = contract.decode(list[contract.PartReceipt], answer)
    return found


def test_a_file_that_is_handed_over_twice_is_staged_once_with_the_same_receipts(served: Served) -> None:
    served.start()
    with BrokerClient(served.url) as client:
        fill(client, "q", 0)
        writer, file, _ = _handed_over(served)
        receipts = _adopt(client, file)
        assert [receipt.rows for receipt in receipts] == [2000] * 3
        assert _adopt(client, file) == receipts
        writer.close()
        staged = StagedBranch("branch", 0, 0, 6000, branch_checksum(receipt.checksum for receipt in receipts))
        assert client.commit_branches("token", [staged]) == 6000
        assert len(bodies(client, "q")) == 6000
    served.terminate()
    assert verify(served.directory).problems == []


def test_a_writer_that_cuts_its_file_off_at_any_moment_does_not_end_the_broker(served: Served) -> None:
    served.start()
    with BrokerClient(served.url) as client:
        fill(client, "q", 0)
        for attempt in range(10):
            writer, file, kept = _handed_over(served, rows=20_000, keep=True)
            cutting = threading.Thread(target=lambda kept=kept: [os.ftruncate(kept, 4096), os.close(kept)])  # type: ignore[misc]
            cutting.start()
            assert _adopt(client, file, f"branch {attempt}") == [], "somebody could write to it"
            cutting.join()
            writer.close()
        staged = client.stage(
            BranchHeader("next", "next", "publish", {"exchange": "", "routing_key": "q"}),
            [pa.record_batch({"body": ["x"]})],
        )
        assert client.commit_branches("next", [staged]) == 1
        assert bodies(client, "q") == [b"x"]


def test_a_descriptor_of_the_broker_itself_is_not_taken_for_a_writers_file(served: Served) -> None:
    served.start()
    with BrokerClient(served.url) as client:
        fill(client, "q", 3000, size=1000)
        own = Path(f"/proc/{served.pid}/fd")
        taken = 0
        for number in map(int, os.listdir(own)):
            with contextlib.suppress(OSError):
                found = os.stat(own / str(number))
                taken += len(
                    _adopt(
                        client,
                        PartFile(served.pid, number, found.st_dev, found.st_ino, found.st_size, ()),
                        f"fd {number}",
                    )
                )
        assert taken == 0
        assert all(path.stat().st_nlink == 1 for path in (served.directory / "segments").iterdir())


# -- what comes before a message that is refused -----------------------------------------------------------------


def _bad(number: int) -> dict[str, pa.Buffer]:
    """Messages that are refused, by why."""
    good = contract.encode_numbered(number, messages(b"good"))
    return {
        "damaged rows": good[: len(good) - 40],
        "no rows": contract.encode_numbered(number, messages(b"x"))[:4],
        "another schema": contract.encode_numbered(number, pa.record_batch({"n": [1]})),
        "over the limit": contract.encode_numbered(number, messages(b"x" * 60_000)),
    }


def _put(raw: Raw, header: BranchHeader, parts_: list[pa.Buffer], *, whole: bool) -> tuple[list[Any], str]:
    """Sends them in one stream, all of them before an answer is read or each after the answer to the one
    before. Returns the receipts and the error.
    """
    writer, reader = raw.client.do_put(
        arrow_flight.FlightDescriptor.for_command(contract.encode(header)), contract.NO_COLUMNS
    )
    receipts: list[Any] = []

    def received() -> bool:
        answer = reader.read()
        if answer is not None:
            receipts.append(contract.decode(contract.PartReceipt, answer))
        return answer is not None

    failed = (arrow_flight.FlightError, pa.ArrowException, OSError)
    with contextlib.suppress(*failed):
        for part in parts_:
            writer.write_metadata(part)
            if not whole and not received():
                break
    with contextlib.suppress(*failed):
        writer.done_writing()
    with contextlib.suppress(*failed):
        while received():
            pass
    try:
        writer.close()
    except failed as error:
        return receipts, str(contract.error_from(error))
    return receipts, ""


@pytest.mark.parametrize("why", _bad(0))
def test_parts_before_one_that_is_refused_are_staged_and_acknowledged_before_the_error(
    why: str, tmp_path: Path
) -> None:
    """Whether they are sent at once or one by one, and wherever it comes; then the branch goes on behind them."""
    quotas = QuotaLimits(staged=StagedLimits(user_bytes=50_000))
    with Broker.open(tmp_path / "data", quotas=quotas) as broker, broker.channel() as channel:
        channel.queue_declare("in")
        with BrokerClient(broker.url) as client:
            for place in (0, 1, 3):
                ends = []
                for whole in (True, False):
                    token = f"{place}-{whole}"
                    client.open_batch(token, token, 0, "fail", token=token)
                    header = BranchHeader(token, f"b-{token}", "publish", {"routing_key": "in"})
                    good = [contract.encode_numbered(n, messages(b"%d" % n)) for n in range(place)]
                    raw = Raw(broker.url)
                    receipts, refused = _put(
                        raw,
                        header,
                        [*good, _bad(place)[why], contract.encode_numbered(place + 1, messages(b"z"))],
                        whole=whole,
                    )
                    assert [each.part for each in receipts] == list(range(place)) and refused
                    rest = [contract.encode_numbered(place, messages(b"last"))]
                    more, none = _put(raw, header, rest, whole=whole)
                    assert [each.part for each in more] == [place] and none == ""
                    raw.client.close()
                    checksum = branch_checksum(each.checksum for each in (*receipts, *more))
                    staged = StagedBranch(header.branch, 0, 0, place + 1, checksum)
                    entry = client.commit_batch(token, token, 0, token, [staged]).entry
                    assert entry.published == place + 1
                    ends.append((bodies(client, "in"), refused.replace(token, "")))
                    channel.queue_purge("in")
                assert ends[0] == ends[1]
                assert ends[0][0] == [*(b"%d" % n for n in range(place)), b"last"]


@pytest.mark.parametrize("gathered", [1, 2, 128])
@pytest.mark.parametrize("wrong", ["exchange", "properties"])
def test_publishes_of_a_transaction_have_the_same_end_however_many_are_sent_together(
    wrong: str, gathered: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is refused ends the transaction: nothing of it is committed, and what was before stays."""
    monkeypatch.setattr("broker_core.client.channel.PUBLISHES", gathered)
    bad: dict[str, dict[str, Any]] = {
        "exchange": {"exchange": "missing"},
        "properties": {"properties": b"\xff\xff\xff"},
    }
    with Broker.open(tmp_path / "data") as broker, BrokerClient(broker.url) as client:
        for place in range(4):
            with client.channel() as channel:
                channel.queue_declare("q")
                channel.tx_select()
                channel.publish(b"before", routing_key="q")
                channel.tx_commit()
                assert channel.get("q") is not None

                def all_of_it(channel: RemoteChannel = channel, place: int = place) -> None:
                    for number in range(4):
                        more = {"routing_key": "q", **(bad[wrong] if number == place else {})}
                        channel.publish(b"lost", **more)
                    channel.tx_commit(f"t{place}")

                with pytest.raises(errors.TxmqError) as refused:
                    all_of_it()
                assert not isinstance(refused.value, errors.ConnectionFailed)
                with pytest.raises(errors.TransactionState, match="the channel is closed"):
                    channel.tx_commit()
            assert not client.committed(f"t{place}")
            with client.channel() as channel:
                found = channel.get("q")
                assert found is not None and (found.message.body, found.redelivered) == (b"before", True)
                assert channel.get("q") is None
                channel.queue_purge("q")
                channel.ack(found.tag)
