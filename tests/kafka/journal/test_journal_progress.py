"""What the sink keeps in the journal of an app: every driver sees it, whoever wrote it and in which order."""

from __future__ import annotations

import pytest

from broker_core.kafka.journal.journal import AppProgress, Journal
from broker_core.kafka.sink.sink import KafkaSink
from broker_core.kafka.source.source import KafkaSource
from broker_core.micro_batch import ledger
from broker_core.micro_batch.ledger_info import tables
from tests.kafka.bench.sink_bench import APP, QUERY, Cluster, Driver


def driver(cluster: Cluster) -> Driver:
    """One whose facts are those of the journal."""
    found = cluster.driver()
    source = KafkaSource(found.client, lambda app_id: found.sink.decided(app_id))
    found.sink = KafkaSink(
        found.client,
        lambda app_id: AppProgress(found.client, app_id, source.journal(app_id), source),
        clean_every_bytes=0,
    )
    return found


def facts(cluster: Cluster) -> set[str]:
    journal = Journal(cluster.reader, APP)
    journal.catch_up()
    return set(journal.facts)


def append(each: Driver, number: int) -> None:
    token = each.open(number).token
    branches = [
        each.stage(token, [b"x"], batch=number, kind="append", target={"table": table})
        for table in ("t", "u")
    ]
    each.commit(number, token, branches)


def test_c5_what_one_driver_has_applied_or_skipped_no_other_one_applies() -> None:
    cluster = Cluster()
    first, second = driver(cluster), driver(cluster)
    for number in range(4):
        append(first, number)
    second.sink.mark_applied(APP, 2)
    first.sink.mark_applied(APP, 2)
    first.sink.mark_applied(APP, 1)
    (third,) = (entry for entry in second.sink.unapplied(APP) if entry.sequence == 3)
    second.sink.skip(APP, 3, third.to_apply[0].branches, "/files")
    for each in (first, second, driver(cluster)):
        waiting = {entry.sequence: len(entry.to_apply) for entry in each.sink.unapplied(APP)}
        assert waiting == {3: 1, 4: 2}
    first.sink.skip(APP, 3, third.to_apply[1].branches, "/files")
    for each in (second, first, driver(cluster)):
        assert [entry.sequence for entry in each.sink.unapplied(APP)] == [4]
        again = each.open(2)
        assert again.entry is not None and again.entry.applied


def test_c6_the_highest_number_that_anyone_has_mirrored_holds() -> None:
    cluster = Cluster()
    first, second = driver(cluster), driver(cluster)
    for number in range(5):
        first.run(number, [b"a", b"b"])
    assert len(second.sink.unmirrored(APP)) == 5
    first.sink.mark_mirrored(APP, 4)
    second.sink.mark_mirrored(APP, 2)  # it comes late
    for each in (first, second, driver(cluster)):
        assert [entry.sequence for entry in each.sink.unmirrored(APP)] == [5]
    first.sink.mark_mirrored(APP, 5)
    assert facts(cluster) == {'["mirrored",5]'}, "of several numbers the highest is kept"


def test_c5_every_driver_knows_the_versions_of_the_tables_that_one_has_written() -> None:
    cluster = Cluster()
    first, second = driver(cluster), driver(cluster)
    for number in range(2):
        append(first, number)
    for number, versions in ((1, (7, 0)), (2, (8,))):
        (entry, *_) = second.sink.unapplied(APP)
        named = {part.branches[0]: at for part, at in zip(entry.to_apply, versions, strict=False)}
        second.sink.mark_applied(APP, number, named)
        first.sink.mark_applied(APP, number)
    first.sink.unapplied(APP)
    for each in (first, second, driver(cluster)):
        found = [
            [(table.table, table.version) for table in tables(entry)]
            for entry in each.sink.entry_records(APP)
        ]
        assert found == [[("t", 7), ("u", 0)], [("t", 8), ("u", None)]]


def test_facts_of_entries_that_the_ledger_drops_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "KEPT_ENTRIES", 2)
    cluster = Cluster()
    first = driver(cluster)
    for number in range(5):
        append(first, number)
        first.sink.mark_applied(APP, number + 1)
    assert facts(cluster) == {'["applied",4]', '["applied",5]'}
    assert driver(cluster).sink.unapplied(APP) == []


def test_an_app_without_a_source_is_shown_by_what_it_decided() -> None:
    cluster = Cluster()
    first = driver(cluster)
    first.run(0, [b"a", b"b"], QUERY)
    (info,) = driver(cluster).sink.apps()
    assert (info.app_id, info.queues, info.sequence, info.lag) == (APP, (), 1, 0)
