"""The pages of a SQLite file with its list of tables, copied from a new catalog to a damaged one.

One script makes all catalogs, so these pages, and the first page of each table, are the same in all of them.
They differ in a catalog upgraded from an older format: then rows are read from wrong places, match no
checksum, and nothing is gained.
Invariant: only the pages of the list of tables are written; the file's own size and counters stay in its
header.
"""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

from broker_core.store.catalog import PAGE_BYTES, create

_INTERIOR = 5  # a page of a table that points to others
_HEADER_BYTES = 100  # of the file, at the start of the first page


def put_schema(path: Path) -> None:
    """Writes the pages to the catalog at ``path``, which must not be open."""
    with tempfile.TemporaryDirectory(prefix="txmq-schema-") as directory:
        new = Path(directory) / "catalog.db"
        create(new)
        pages = new.read_bytes()
    content = bytearray(path.read_bytes())
    content.extend(bytes(max(0, len(pages) - len(content))))
    for number in _schema_pages(pages):
        content[(number - 1) * PAGE_BYTES : number * PAGE_BYTES] = pages[
            (number - 1) * PAGE_BYTES : number * PAGE_BYTES
        ]
    struct.pack_into(">I", content, 28, len(content) // PAGE_BYTES)
    struct.pack_into(">II", content, 32, 0, 0)  # a reader does not use free pages
    content[92:96] = content[24:28]  # the size above is valid
    path.write_bytes(content)


def _schema_pages(pages: bytes) -> list[int]:
    """Returns the numbers of the pages of the tree whose root is page 1."""
    found: list[int] = []
    pending = [1]
    while pending:
        number = pending.pop()
        found.append(number)
        start = (number - 1) * PAGE_BYTES
        header = start + (_HEADER_BYTES if number == 1 else 0)
        if pages[header] != _INTERIOR:
            continue
        (cells,) = struct.unpack_from(">H", pages, header + 3)
        (last,) = struct.unpack_from(">I", pages, header + 8)
        pointers = struct.unpack_from(f">{cells}H", pages, header + 12)
        pending += [last, *(struct.unpack_from(">I", pages, start + pointer)[0] for pointer in pointers)]
    return found
