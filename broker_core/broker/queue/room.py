"""How many bytes a queue holds (for x-max-length-bytes), and how much room prepared transactions have
reserved in it.

Not here: the limits (``broker/message/messages.py``).
Invariant: ``sizes`` has each unsettled entry, ``total`` is their sum, and ``unacked`` and ``claimed`` are the
sums of the held and the claimed ones. ``sizes`` is None for a queue without the limit, or not measured yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from broker_core.core.undo import Undo


class Room:
    __slots__ = ("_saved", "_undo", "claimed", "prepared", "prepared_bytes", "sizes", "total", "unacked")

    def __init__(self, undo: Undo) -> None:
        self._undo = undo
        self._saved = 0  # ``Undo.work`` when the sums were last saved
        self.sizes: dict[int, int] | None = None  # body sizes
        self.total = 0
        self.unacked = 0
        self.claimed = 0
        self.prepared = 0  # messages that prepared transactions will enqueue
        self.prepared_bytes = 0

    def _save(self) -> None:
        self._saved = self._undo.work
        self._undo.append((self._put_back, self.total, self.unacked, self.claimed))

    def _put_back(self, total: int, unacked: int, claimed: int) -> None:
        self.total, self.unacked, self.claimed = total, unacked, claimed

    @property
    def ready_bytes(self) -> int:
        """Returns the bytes of entries that no channel holds and no app claims."""
        return self.total - self.unacked - self.claimed

    def reserve(self, messages: int, size_bytes: int) -> None:
        """Reserves room for a prepared transaction; negative numbers release it."""
        self._undo.attribute(self, "prepared")
        self._undo.attribute(self, "prepared_bytes")
        self.prepared += messages
        self.prepared_bytes += size_bytes

    # -- sizes -----------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Starts to track sizes."""
        if self._saved != self._undo.work:
            self._save()
        self._undo.attribute(self, "sizes")
        self.sizes, self.total = {}, 0

    def forget(self) -> None:
        """Drops the sizes, because some are unknown. They are measured again when next needed."""
        self._undo.attribute(self, "sizes")
        self.sizes = None

    def add(self, offset: int, size_bytes: int) -> None:
        """Adds the size of one entry."""
        assert self.sizes is not None
        if self._saved != self._undo.work:
            self._save()
        self._undo.append((self.sizes.pop, offset, None))
        self.sizes[offset] = size_bytes
        self.total += size_bytes

    def of(self, offsets: Iterable[int]) -> int:
        sizes = self.sizes
        # a list: for one offset it is twice as fast
        return sum([sizes.get(offset, 0) for offset in offsets]) if sizes else 0

    def settle(self, start: int, end: int, claimed: Iterable[Sequence[int]]) -> None:
        """Removes the settled entries [start, end). ``claimed`` is the part of them that was claimed."""
        sizes = self.sizes
        assert sizes is not None
        if self._saved != self._undo.work:
            self._save()
        within = range(start, end)
        fewer, others = (within, sizes) if len(within) <= len(sizes) else (sizes, within)
        settled = {offset: sizes[offset] for offset in fewer if offset in others}
        self._undo.append((sizes.update, settled))
        for first, last in claimed:
            self.claimed -= self.of(range(first, last))
        for offset in settled:
            del sizes[offset]
        self.total -= sum(settled.values())

    def hold(self, offsets: Iterable[int]) -> None:
        if self._saved != self._undo.work:
            self._save()
        self.unacked += self.of(offsets)

    def let_go(self, offsets: Iterable[int]) -> None:
        if self._saved != self._undo.work:
            self._save()
        self.unacked -= self.of(offsets)

    def measure(self, unacked: Iterable[int], claimed: Iterable[Sequence[int]]) -> None:
        """Sums up the sizes of held and claimed entries, after all sizes are known."""
        if self._saved != self._undo.work:
            self._save()
        self.unacked = self.of(unacked)
        self.claimed = sum(self.of(range(start, end)) for start, end in claimed)

    def claim(self, ranges: Iterable[Sequence[int]]) -> None:
        """Adds newly claimed entries."""
        if self._saved != self._undo.work:
            self._save()
        self.claimed += sum(self.of(range(start, end)) for start, end in ranges)

    def unclaim(self) -> None:
        if self._saved != self._undo.work:
            self._save()
        self.claimed = 0
