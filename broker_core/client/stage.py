"""Staging the rows of one branch: by files on the broker's host, over Flight elsewhere.

Not here: cutting rows into parts (``arrow/parts.py``), and what a branch is (``broker/batch/branch.py``).

Invariant: a part is kept here until the broker has made it durable, and each part is staged once, even if the
connection breaks.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa
import pyarrow.flight as arrow_flight

from broker_core.arrow.part_file import PartWriter
from broker_core.arrow.parts import branch_checksum, parts
from broker_core.client.connection import FAILED, FlightConnection, Live
from broker_core.core import errors
from broker_core.engine import BranchHeader, StagedBranch
from broker_core.flight import contract

FILE_BYTES = 64 * 1024 * 1024  # a file of parts is handed over at this size
WINDOW = 3  # parts that are sent and not acknowledged; the client keeps them


def stage(
    connection: FlightConnection, header: BranchHeader, rows: Iterable[pa.RecordBatch], *, by_files: bool
) -> StagedBranch:
    """``by_files``: use files if the broker is on this host and takes them. Raises what the broker raises."""
    source = parts(rows, header)
    first = list(itertools.islice(source, 2))
    stream: _PartStream | _FileStream = _PartStream(connection, header)
    if header.kind == "publish" and len(first) > 1 and by_files and connection.live().takes_files:
        stream = _FileStream(connection, header)
    if len(first) == 1 and first[0].nbytes <= contract.SMALL_PART_BYTES:
        message = contract.encode_part(contract.PartHeader(header, 0), first[0])
        stream.receipts.append(contract.decode(contract.PartReceipt, connection.call("stage", message)))
    else:
        with contextlib.closing(stream):
            for batch in itertools.chain(first, source):
                stream.send(batch)
            stream.finish()
    receipts = stream.receipts
    checksum = branch_checksum(receipt.checksum for receipt in receipts)
    return StagedBranch(
        header.branch, header.partition, header.attempt, sum(receipt.rows for receipt in receipts), checksum
    )


class _PartStream:
    """Sends the parts of one branch in order, at most WINDOW unacknowledged; these again after a break."""

    def __init__(self, connection: FlightConnection, header: BranchHeader, first: int = 0) -> None:
        self.receipts: list[contract.PartReceipt] = []
        self._connection = connection
        self._command = contract.encode(header)
        self._patience = connection.patience()
        self._waiting: deque[tuple[int, pa.RecordBatch]] = deque()
        self._sent = first
        self._open: tuple[Live, Any, Any] | None = None

    def send(self, batch: pa.RecordBatch) -> None:
        self._waiting.append((self._sent, batch))
        self._sent += 1
        self._attempt(self._write_last)
        while len(self._waiting) >= WINDOW:
            self._attempt(self._receive)

    def finish(self) -> None:
        while self._waiting:
            self._attempt(self._receive)

    def close(self) -> None:
        if self._open is not None:
            _, writer, _ = self._open
            self._open = None
            with contextlib.suppress(*FAILED):
                writer.close()

    def _attempt(self, step: Callable[[], None]) -> None:
        while True:
            live = self._open[0] if self._open is not None else self._connection.live(self._patience)
            try:
                if self._open is None:
                    self._reopen(live)
                    if step == self._write_last:  # reopening has sent it
                        return
                step()
                return
            except FAILED as error:
                self.close()
                self._connection.broken(live, error, self._patience)

    def _reopen(self, live: Live) -> None:
        """Send all unacknowledged parts on a new stream; those that the broker has are acknowledged."""
        descriptor = arrow_flight.FlightDescriptor.for_command(self._command)
        writer, reader = live.client.do_put(descriptor, contract.NO_COLUMNS)
        self._open = (live, writer, reader)
        for part, batch in self._waiting:
            writer.write_metadata(contract.encode_numbered(part, batch))

    def _write_last(self) -> None:
        assert self._open is not None
        part, batch = self._waiting[-1]
        self._open[1].write_metadata(contract.encode_numbered(part, batch))

    def _receive(self) -> None:
        assert self._open is not None
        answer = self._open[2].read()
        if answer is None:
            raise arrow_flight.FlightUnavailableError(
                "the broker ended the stream before it acknowledged a part"
            )
        receipt: contract.PartReceipt = contract.decode(contract.PartReceipt, answer)
        part, _ = self._waiting[0]
        if receipt.part != part:
            raise errors.RemoteProtocolError(
                f"the broker acknowledged part {receipt.part} where part {part} is due"
            )
        self._waiting.popleft()
        self.receipts.append(receipt)
        self._patience.renew()


class _FileStream:
    """The parts of one branch in files on the broker's host; over Flight after the first file that fails."""

    def __init__(self, connection: FlightConnection, header: BranchHeader) -> None:
        self.receipts: list[contract.PartReceipt] = []
        self._connection = connection
        self._header = header
        self._file: PartWriter | None = None
        self._rows: _PartStream | None = None  # parts after a file that could not be made or handed over

    def send(self, batch: pa.RecordBatch) -> None:
        if self._file is None and self._rows is None:
            try:
                self._file = PartWriter(self._connection.live().local)
            except OSError:
                self._refused([])
        if self._rows is not None:
            self._rows.send(batch)
        elif self._file is not None:
            self._file.append(batch)
            if self._file.size_bytes >= FILE_BYTES:
                self._hand_over(self._file)

    def finish(self) -> None:
        if self._file is not None:
            self._hand_over(self._file)
        if self._rows is not None:
            self._rows.finish()
            self.receipts += self._rows.receipts

    def _hand_over(self, writer: PartWriter) -> None:
        """The call may reach the broker twice, also after a restart: parts are staged once."""
        file = writer.end()
        answer = self._connection.call(
            "adopt", contract.encode(contract.FileHeader(self._header, len(self.receipts), file))
        )
        receipts: list[contract.PartReceipt] = contract.decode(list[contract.PartReceipt], answer)
        if receipts:
            self.receipts += receipts
        else:
            self._refused(file.batches(file.descriptor))
        writer.close()
        self._file = None

    def _refused(self, unsent: Iterable[pa.RecordBatch]) -> None:
        self._connection.live().takes_files = False
        self._rows = _PartStream(self._connection, self._header, len(self.receipts))
        for batch in unsent:
            self._rows.send(batch)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._rows is not None:
            self._rows.close()
