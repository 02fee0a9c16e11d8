"""The calls that bring rows: permitted first, then there is room for what they state, then they are read.

Not here: what is done with them (``node/engine.py``).
Invariant: a part is acknowledged only after the engine has made it durable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

from broker_core.arrow.outside import UNREADABLE, buffer_bytes, line
from broker_core.core import errors, failpoint
from broker_core.engine import BranchHeader
from broker_core.flight import contract
from broker_core.node.engine import EmbeddedEngine
from broker_core.server.access.caller import Caller
from broker_core.server.flight import messages
from broker_core.server.flight.call_permissions import CallPermissions
from broker_core.server.flight.calls import Calls
from broker_core.server.quotas import Quota


class FlightStaging:
    """``engine`` of a caller."""

    def __init__(
        self,
        engine: Callable[[Caller], EmbeddedEngine],
        call_permissions: CallPermissions,
        calls: Calls,
        part_bytes: Quota,
    ) -> None:
        self._engine = engine
        self._call_permissions = call_permissions
        self._calls = calls
        self._part_bytes = part_bytes

    def sent(self, caller: Caller, body: pa.Buffer) -> contract.PartReceipt:
        """Reads the rows once they are permitted, and there is room for what they state."""
        part, rows = contract.decode_part(body)
        self._call_permissions.stage(caller, part.header)
        return self._part(caller, part, rows)

    def stream(self, caller: Caller, first: messages.Data, rest: Iterator[messages.Data]) -> Iterator[bytes]:
        """Stages the parts of a branch as they come, and yields a receipt for each."""
        header: BranchHeader = contract.decode_checked(BranchHeader, first.command, "put")
        self._call_permissions.stage(caller, header)  # before Arrow reads a row
        for sent in _parts(first, rest):
            self._calls.require_room()
            part, rows = contract.decode_numbered(sent)
            receipt = self._part(caller, contract.PartHeader(header, part), rows)
            failpoint.here("server.reply.part")
            yield contract.encode(receipt)

    def file(self, caller: Caller, header: contract.FileHeader) -> list[contract.PartReceipt]:
        """Stages the parts in a file of the writer."""
        self._call_permissions.stage(caller, header.header, header.file.size_bytes)
        failpoint.here("server.stage.file")
        staged = self._engine(caller).stage_file(header.header, header.part, header.file)
        return [
            contract.PartReceipt(part, rows, checksum)
            for part, (rows, checksum) in enumerate(staged, header.part)
        ]

    def _part(self, caller: Caller, part: contract.PartHeader, rows: pa.Buffer) -> contract.PartReceipt:
        with self._part_bytes.within(caller.identity.user, contract.part_bytes(rows)):
            batch = contract.decode_batch(rows)
        self._call_permissions.stage(caller, part.header, buffer_bytes(batch))
        failpoint.here("server.stage.part")
        with self._part_bytes.within(caller.identity.user, buffer_bytes(batch)):
            rows, checksum = self._engine(caller).stage_part(part.header, part.part, batch)
        return contract.PartReceipt(part.part, rows, checksum)


def _parts(first: messages.Data, rest: Iterator[messages.Data]) -> Iterator[pa.Buffer]:
    """What a client's stream carries beside rows of its own, which it has none of: Arrow would decompress
    them before anybody could ask how many bytes they state. It decompresses nothing of a schema without
    columns. Raises RemoteProtocolError.
    """
    try:
        columns = len(messages.schema(first.header))
    except (*UNREADABLE, TypeError) as error:
        raise errors.RemoteProtocolError(f"put: the stream cannot be read: {line(error)}") from error
    if columns:
        raise errors.RemoteProtocolError(
            f"put: a stream with {columns} columns came; parts are sent beside a schema without columns"
        )
    for message in rest:
        if len(message.header) or len(message.body) or message.metadata is None:
            raise errors.RemoteProtocolError("put: a message without a part came")
        yield pa.py_buffer(message.metadata)
