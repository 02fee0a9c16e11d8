"""The catalog's write-ahead log, looked at before SQLite replays it: does damage hide commits behind it?

SQLite takes the first frame that does not match its checksum for the end of the log. That is right for a
write that was cut off, and silently forgets all later commits where a byte was flipped. A commit is synced
before the next one is written, so only the last one can be cut off: frames of two commits behind the end mean
damage. Not here: the frames' contents. What cannot be told apart is taken for a write that was cut off:
damage to the last commit alone.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

_HEADER = struct.Struct(">8I")
_FRAME = struct.Struct(">6I")
_MAGIC = 0x377F0682  # the lowest bit says in which byte order checksums are counted
_MASK = 0xFFFFFFFF


class HiddenCommits(NamedTuple):
    """``position``: of the first frame that is damaged, or of its commit. At least so many ``commits`` are
    behind it.
    """

    path: Path
    position: int
    commits: int

    def __str__(self) -> str:
        where = f"its log {self.path} is damaged at position {self.position}"
        return f"{where}, and at least {self.commits} commits lie behind that"


def hidden_commits(path: Path) -> HiddenCommits | None:
    """Of the log at ``path``, which may be missing; None where SQLite's replay loses nothing that was
    acknowledged.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(content) < _HEADER.size or not any(content[: _HEADER.size]):
        return None
    magic, _version, page_size, _sequence, *salt, check_0, check_1 = _HEADER.unpack_from(content)
    big_endian = bool(magic & 1)
    valid = magic & ~1 == _MAGIC and _checksum(content[:24], (0, 0), big_endian=big_endian) == (
        check_0,
        check_1,
    )
    if not valid:
        page_size, salt = (
            1024,
            list(_FRAME.unpack_from(content, _HEADER.size)[2:4])
            if len(content) >= _HEADER.size + _FRAME.size
            else [],
        )
    size = _FRAME.size + page_size
    end = (
        _valid_end(content, size, (check_0, check_1), salt, big_endian=big_endian) if valid else _HEADER.size
    )
    later = [
        commit
        for position in range(end, len(content) - size + 1, size)
        for _page, commit, salt_0, salt_1, _, _ in (_FRAME.unpack_from(content, position),)
        if [salt_0, salt_1] == salt
    ]
    commits = [index for index, commit in enumerate(later) if commit]
    if not commits or (len(commits) == 1 and commits[0] == len(later) - 1):
        return None
    return HiddenCommits(path, end, len(commits))


def _valid_end(
    content: bytes, size: int, check: tuple[int, int], salt: list[int], *, big_endian: bool
) -> int:
    """Behind the last commit up to which every frame matches its checksum."""
    position = end = _HEADER.size
    while position + size <= len(content):
        _page, commit, salt_0, salt_1, check_0, check_1 = _FRAME.unpack_from(content, position)
        if [salt_0, salt_1] != salt:
            break
        check = _checksum(content[position : position + 8], check, big_endian=big_endian)
        check = _checksum(content[position + _FRAME.size : position + size], check, big_endian=big_endian)
        if check != (check_0, check_1):
            break
        position += size
        if commit:
            end = position
    return end


def _checksum(data: bytes, start: tuple[int, int], *, big_endian: bool) -> tuple[int, int]:
    first, second = start
    words = struct.unpack(f"{'>' if big_endian else '<'}{len(data) // 4}I", data)
    for even, odd in zip(words[::2], words[1::2], strict=True):
        first = (first + even + second) & _MASK
        second = (second + odd + first) & _MASK
    return first, second
