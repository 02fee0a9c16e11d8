"""What a spelling of a table says by itself, without a session."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from broker_core.core.errors import OptionError
from connector.tables.table import Table, is_path, name_parts, path_of, plain_location, quoted


@pytest.mark.parametrize(
    ("table", "path"),
    [("lake/t", True), ("/lake/t", True), ("s3a://b/t", True), ("t", False), ("a.b.t", False)],
)
def test_paths_and_names_are_told_apart(table: str, path: bool) -> None:
    assert is_path(table) is path


@pytest.mark.parametrize(
    ("spelling", "path"),
    [
        ("/a/b", "/a/b"),
        ("delta.`/a/b`", "/a/b"),
        (" DELTA . `/a``b/c` ", "/a`b/c"),
        ("delta.t", None),
        ("t", None),
        ("`a/b`", None),
    ],
)
def test_a_path_is_read_out_of_its_name_in_sql(spelling: str, path: str | None) -> None:
    assert path_of(spelling) == path


@pytest.mark.parametrize(
    ("spelling", "parts"),
    [
        ("t", ["t"]),
        ("a.b.t", ["a", "b", "t"]),
        ("a.`b.c`", ["a", "b.c"]),
        (" `x``y` . t ", ["x`y", "t"]),
        ("`a/b`", ["a/b"]),
    ],
)
def test_a_name_is_read_as_spark_reads_it(spelling: str, parts: list[str]) -> None:
    assert name_parts(spelling) == parts
    assert name_parts(quoted(parts)) == parts


@pytest.mark.parametrize("spelling", ["a-b", "a b", "a..b", ".a", "a.", "`a", "``", "a.`b`c", "", "x;y"])
def test_what_is_no_name_is_one_clear_error(spelling: str) -> None:
    with pytest.raises(OptionError, match="neither a path"):
        name_parts(spelling)


def test_an_identity_column_that_counts_on_leaves_the_shape_of_a_table() -> None:
    def table(mark: int, start: int = 1) -> Table:
        schema = {
            "fields": [{"metadata": {"delta.identity.start": start, "delta.identity.highWaterMark": mark}}]
        }
        return Table(
            "t",
            "file:/t",
            "id",
            json.dumps({"metaData": {"schemaString": json.dumps(schema, separators=(",", ":"))}}),
            "",
        )

    assert table(5).shape == table(700).shape != table(5, start=2).shape


def test_urls_of_one_place_are_one_location(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    real = f"{tmp_path.resolve()}/real/t"
    spellings = [
        f"file:{real}",
        f"file://{real}",
        f"FILE:///{real[1:]}/",
        f"file:{tmp_path}//link/./t",
        f"file:{tmp_path}/x/../link/t",
    ]
    assert {plain_location(spelling) for spelling in spellings} == {f"file:{real}"}
    assert plain_location("S3A://bucket//a/b/") == "s3a://bucket/a/b"
    assert plain_location("s3a://bucket/a") != plain_location("s3a://Bucket/a")
    assert plain_location("/a/b//") == "/a/b"
