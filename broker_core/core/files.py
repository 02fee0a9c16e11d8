"""What the broker, its clients and the operations on tables do with a file: make it durable, and name it
after what a user has named.
"""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Makes a file durable, or the names in a directory. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def readable(name: str) -> str:
    """Returns ``name`` as a part of the name of a file; two may become the same."""
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in name)
