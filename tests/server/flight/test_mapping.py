"""Mapped files: verified, mapped again when they have grown, and None whenever something is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import xxhash

from broker_core.arrow.segment_files import SegmentFiles
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


@pytest.mark.parametrize(
    ("field", "value"), [("checksum", 1), ("rows", 4), ("position", 10**6), ("length", 8), ("path", "absent")]
)
def test_location_that_does_not_fit_its_file_is_none(tmp_path: Path, field: str, value: int | str) -> None:
    location = _append(tmp_path / "1.arrow")
    assert SegmentFiles(str(tmp_path)).read(replace(location, **{field: value})) is None
