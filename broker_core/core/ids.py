"""Whole numbers that are given once and then only compared: the ids of blocks and queues, and the sequence
numbers of commits.

mypy refuses one kind where another is expected. A number becomes one of them only where it is given (a
counter) or read (the catalog, JSON). Not here: numbers that code calculates with, such as offsets and rows.
"""

from __future__ import annotations

from typing import NewType

BlockId = NewType("BlockId", int)  # below 0: of a block in memory only
QueueId = NewType("QueueId", int)
CommitSequence = NewType("CommitSequence", int)

NO_BLOCK = BlockId(0)  # of rows that are not in a block
NO_QUEUE = QueueId(0)
NO_SEQUENCE = CommitSequence(0)  # of a change that publishes nothing; of rows that have their own
