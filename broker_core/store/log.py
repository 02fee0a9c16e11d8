"""The catalog's write-ahead log, checked before SQLite replays it: does damage hide later commits?

SQLite treats the first frame that does not match its checksum as the end of the log. That is correct for an
incomplete write, but silently drops all later commits after a flipped bit. A commit is synced before the next
one is written, so only the last one can be incomplete: frames of two commits after the end mean damage. Not
here: the frames' contents. Damage to the last commit alone cannot be distinguished from an incomplete write
and is treated as one.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

_HEADER = struct.Struct(">8I")
_FRAME = struct.Struct(">6I")
_MAGIC = 0x377F0682  # the lowest bit is the byte order of checksums
_MASK = 0xFFFFFFFF


class HiddenCommits(NamedTuple):
    """``position`` is that of the first damaged frame, or of its commit. At least ``commits`` commits follow
    it.
    """

    path: Path
    position: int
    commits: int

    def __str__(self) -> str:
        where = f"its log {self.path} is damaged at position {self.position}"
        return f"{where}, and at least {self.commits} commits lie behind that"


def hidden_commits(path: Path) -> HiddenCommits | None:
    """Checks the log at ``path``, which may be missing. Returns None if SQLite's replay loses nothing that
    was acknowledged.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(content) < _HEADER.size or not any(content[: _HEADER.size]):
        return None
    magic, _version, page_size, _sequence, *salt, check_0, check_1 = _HEADER.unpack_from(content)
    big_endian = bool(magic & 1)
    check = check_0, check_1
    valid = magic & ~1 == _MAGIC and _checksum(content[:24], (0, 0), big_endian=big_endian) == check
    if not valid:
        is_whole = len(content) >= _HEADER.size + _FRAME.size
        page_size, salt = 1024, list(_FRAME.unpack_from(content, _HEADER.size)[2:4]) if is_whole else []
    size = _FRAME.size + page_size
    end = _valid_end(content, size, check, salt, big_endian=big_endian) if valid else _HEADER.size
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
    """Returns the end of the last commit up to which every frame matches its checksum."""
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
