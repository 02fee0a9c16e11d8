"""Ids: whole numbers that are given once, compared and looked up, and never calculated with.

mypy refuses an id of one kind where another kind is expected. A number becomes an id only where it is given
(a counter) or read (the catalog, JSON).
"""

from __future__ import annotations

from typing import NewType

BlockId = NewType("BlockId", int)  # below 0: of a block in memory only
QueueId = NewType("QueueId", int)

NO_BLOCK = BlockId(0)  # of rows that are not in a block
NO_QUEUE = QueueId(0)
