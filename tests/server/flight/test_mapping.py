"""Mapped files: verified, few at a time, mapped again when they have grown, and None whenever something is wrong."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import xxhash

from broker_core.arrow.segment_files import MAPPED_FILES, SegmentFiles
from broker_core.message.message import Location

BATCH = pa.record_batch({"n": [1, 2, 3]})


def _append(path: Path) -> Location:
    message = bytes(BATCH.serialize())
    if not path.exists():
        path.write_bytes(bytes(BATCH.schema.serialize()))
    position = path.stat().st_size
    with path.open("ab") as file:
        file.write(message)
    return Location(str(path), position, len(message), xxhash.xxh3_64_intdigest(message), 3)


def test_batch_is_read_and_a_grown_file_is_mapped_again(tmp_path: Path) -> None:
    files = SegmentFiles(str(tmp_path))
    assert files.read(_append(tmp_path / "1.arrow")) == BATCH
    assert files.read(_append(tmp_path / "1.arrow")) == BATCH


def test_file_that_was_removed_is_readable_while_it_is_mapped(tmp_path: Path) -> None:
    files = SegmentFiles(str(tmp_path))
    location = _append(tmp_path / "1.arrow")
    assert files.read(location) == BATCH
    (tmp_path / "1.arrow").unlink()
    assert files.read(location) == BATCH
    assert SegmentFiles(str(tmp_path)).read(location) is None


@pytest.mark.skipif(sys.platform != "linux", reason="maps of a process are read from /proc")
def test_a_reader_of_many_files_has_two_of_them_mapped_whatever_it_has_yielded(tmp_path: Path) -> None:
    """A large micro-batch is read from many; mapped pages count as memory of the worker."""
    files = SegmentFiles(str(tmp_path))
    locations = [_append(tmp_path / f"{number}.arrow") for number in range(20)]
    for location in [*locations, *locations]:
        assert files.read(location) == BATCH
        assert Path("/proc/self/maps").read_text().count(str(tmp_path)) <= MAPPED_FILES == 2


@pytest.mark.parametrize(
    ("field", "value"), [("checksum", 1), ("rows", 4), ("position", 10**6), ("length", 8), ("path", "absent")]
)
def test_location_that_does_not_fit_its_file_is_none(tmp_path: Path, field: str, value: int | str) -> None:
    location = _append(tmp_path / "1.arrow")
    assert SegmentFiles(str(tmp_path)).read(replace(location, **{field: value})) is None
