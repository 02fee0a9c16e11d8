"""Both stores, the same random commits and crashes: they hold the same, and read the same, after each."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker_core.core import errors
from broker_core.core.change import Change, Drop, InboxRow
from broker_core.core.records import (
    BindingRecord,
    HoleRecord,
    OutcomeRecord,
    ProgressRecord,
    Record,
    RunRecord,
)
from broker_core.message.message import MESSAGE_SCHEMA
from broker_core.store.durable import DurableStore
from broker_core.store.memory import MemoryStore
from broker_core.store.salvage.verify import verify
from tests.contract.test_store_contract import messages
from tests.gates import examples

keys = st.integers(0, 3)
records = st.one_of(
    st.builds(HoleRecord, keys, keys, st.integers(0, 99)),
    st.builds(
        lambda queue, floor: ProgressRecord(queue, "", floor, floor, floor, 0), keys, st.integers(0, 99)
    ),
    st.builds(
        lambda queue, first, sequence: RunRecord(queue, first, 1, 1, 0, b"", sequence, 0),
        keys,
        keys,
        st.integers(0, 99),
    ),
    st.builds(lambda key, value: BindingRecord("e", "q", "k", {"a": [value], "b": key}), keys, keys),
    st.builds(lambda key, at: OutcomeRecord(f"x{key}", "committed", at), keys, st.integers(0, 99)),
)
entries = st.one_of(records, st.builds(lambda record: Drop(type(record), record.key), records))
bad = st.sampled_from(
    [
        HoleRecord(1, 1, 1 << 63),
        OutcomeRecord("\ud800", "committed", 1),
        OutcomeRecord(None, "committed", 1),  # type: ignore[arg-type]
        Drop(HoleRecord, (1, "x")),
        BindingRecord("e", "q", "k", {1: 2}),  # type: ignore[dict-item]
    ]
)


class TwoStores(RuleBasedStateMachine):
    """Block ids differ from store to store: a block is known by its place in ``blocks``."""

    @initialize()
    def open(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.memory = MemoryStore()
        self.durable = DurableStore(self.directory / "data", roll_bytes=3_000)
        self.memory.load()
        self.durable.load()
        self.sequence = 0
        self.open_batch: tuple[int, int] | None = None
        self.open_rows = 0
        self.blocks: list[tuple[int, int]] = []  # named
        self.staged: list[tuple[int, int]] = []
        self.model: dict[Any, Record] = {}

    def teardown(self) -> None:
        self.durable.close()
        shutil.rmtree(self.directory)

    def _commit(self, changes: list[tuple[Change, Change]]) -> None:
        self.memory.commit([mine for mine, _ in changes])
        self.durable.commit([other for _, other in changes])

    @rule(groups=st.lists(st.lists(entries, max_size=6), min_size=1, max_size=4), first=st.booleans())
    def put_and_drop(self, groups: list[list[Any]], first: bool) -> None:
        changes = [(Change(journal=list(group)), Change(journal=list(group))) for group in groups]
        if first:
            for mine, other in changes:
                self.memory.encode(mine)
                self.durable.encode(other)
        self._commit(changes)
        for group in groups:
            for entry in group:
                key = (
                    (entry.kind, repr(entry.key))
                    if isinstance(entry, Drop)
                    else (type(entry), repr(entry.key))
                )
                if isinstance(entry, Drop):
                    self.model.pop(key, None)
                else:
                    self.model[key] = entry

    @rule(group=st.lists(entries, max_size=3), entry=bad, behind=st.lists(entries, max_size=2))
    def refuse(self, group: list[Any], entry: Any, behind: list[Any]) -> None:
        for store in (self.memory, self.durable):
            for committing in (False, True):
                change = Change(journal=[*group, entry, *behind])
                try:
                    store.commit([Change(journal=list(group)), change]) if committing else store.encode(
                        change
                    )
                except errors.OptionError:
                    continue
                raise AssertionError("it was not refused")

    @rule(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=4))
    def small(self, sizes: list[int]) -> None:
        if self.open_batch is None:
            self.open_batch, self.open_rows = (self.memory.new_block_id(), self.durable.new_block_id()), 0
        changes = (Change(), Change())
        for size in sizes:
            self.sequence += 1
            for block_id, change in zip(self.open_batch, changes, strict=True):
                change.rows.append(
                    InboxRow(
                        block_id, self.open_rows, self.sequence, 1, "e", "k", b"", b"x" * size, bytes(16)
                    )
                )
            self.open_rows += 1
        self._commit([changes])

    @rule(size=st.integers(0, 500))
    def append(self, size: int) -> None:
        block = messages(b"a" * size, b"b", b"")
        self.staged.append((self.memory.append(block).block_id, self.durable.append(block).block_id))

    @precondition(lambda self: self.staged)
    @rule(data=st.data(), forgotten=st.booleans())
    def name(self, data: st.DataObject, forgotten: bool) -> None:
        ids = self.staged.pop(data.draw(st.integers(0, len(self.staged) - 1)))
        changes = [(Change(names=[ids[0]]), Change(names=[ids[1]]))]
        if forgotten:
            changes.append((Change(forgets=[ids[0]]), Change(forgets=[ids[1]])))
        else:
            self.blocks.append(ids)
        self._commit(changes)

    @precondition(lambda self: self.open_batch is not None)
    @rule()
    def seal(self) -> None:
        assert self.open_batch is not None
        for store, block_id in zip((self.memory, self.durable), self.open_batch, strict=True):
            store.seal(block_id)
        self._commit([(Change(seals=[self.open_batch[0]]), Change(seals=[self.open_batch[1]]))])
        self.blocks.append(self.open_batch)
        self.open_batch = None

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), live=st.sampled_from([None, b"\x05", b"\x00", b"\xff"]), commits=st.booleans())
    def rewrite(self, data: st.DataObject, live: bytes | None, commits: bool) -> None:
        ids = data.draw(st.sampled_from(self.blocks))
        rows = self.memory.read(ids[0]).num_rows
        mask = None if live is None else live * (rows // 8 + 1)
        for store, block_id in zip((self.memory, self.durable), ids, strict=True):
            store.rewrite(block_id, mask)
        if commits:
            self._commit([(Change(moves=[ids[0]]), Change(moves=[ids[1]]))])

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        ids = self.blocks.pop(data.draw(st.integers(0, len(self.blocks) - 1)))
        self._commit([(Change(forgets=[ids[0]]), Change(forgets=[ids[1]]))])

    @rule(idle=st.booleans())
    def roll(self, idle: bool) -> None:
        for segment in self.durable.segment_usage():
            if segment.open:
                self.durable.roll(segment.number)
        if idle:
            self._commit([(Change(tidy=True), Change(tidy=True))])

    @rule(clean=st.booleans())
    def reopen(self, clean: bool) -> None:
        self.memory.close(clean=clean)
        self.durable.close(clean=clean)
        if clean:
            assert verify(self.directory / "data").problems == []
        self.memory = self.memory.reopened()
        self.durable = DurableStore(self.directory / "data", roll_bytes=3_000)
        images = [self.memory.load(), self.durable.load()]
        assert (
            sorted(map(repr, images[0].records))
            == sorted(map(repr, images[1].records))
            == sorted(map(repr, self.model.values()))
        )
        rows = [[row[1:] for row in image.inbox] for image in images]
        assert rows[0] == rows[1]
        assert images[0].clean == images[1].clean == clean
        assert images[0].sequence == images[1].sequence
        assert [len(image.blocks) for image in images] == [len(self.blocks)] * 2
        self.staged.clear()
        if self.open_batch is not None and not self.open_rows:
            self.open_batch = None

    @invariant()
    def reads_are_the_same(self) -> None:
        for ids in self.blocks:
            mine, other = self.memory.read(ids[0]), self.durable.read(ids[1])
            assert mine.equals(other)
            assert not mine.schema.equals(MESSAGE_SCHEMA) or mine.num_rows == 3


TwoStores.TestCase.settings = settings(examples(40), stateful_step_count=25)
TestTwoStores = pytest.mark.slow(TwoStores.TestCase)
