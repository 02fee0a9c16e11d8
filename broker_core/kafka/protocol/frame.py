"""A request in one version of Kafka's protocol: its bytes, and its answer in other bytes.

Not here: which fields a request has (``request_codecs.py``); sockets.
Invariant: bytes that are no answer to their request raise RemoteProtocolError and nothing else. The highest
version that both sides know is taken.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from broker_core.core import errors
from broker_core.kafka.protocol.library import Answer, ApiVersionsRequest
from broker_core.kafka.protocol.port import NodeAddress

CLIENT_ID = "txmq"
_CORRELATION = struct.Struct(">i")


@dataclass(frozen=True, slots=True)
class RequestCodec:
    """How one request is written and its answer read. ``low`` and ``high``: the versions that are
    supported.
    """

    api: Any
    low: int
    high: int
    fields: Mapping[str, object]
    read: Callable[[Answer], Any]

    @property
    def key(self) -> int:
        return int(self.api.API_KEY)


class VersionedRequest:
    """A form in one version: its bytes, and the answer in other bytes."""

    def __init__(
        self, codec: RequestCodec, versions: Mapping[int, tuple[int, int]] | None, node: NodeAddress
    ) -> None:
        """``versions``: what the node supports, None before its answer. Raises KafkaError where no version is
        common.
        """
        self._codec = codec
        self._node = node
        low, high = versions.get(codec.key, (0, -1)) if versions is not None else (codec.low, codec.high)
        self._version = min(high, codec.high)
        if self._version < max(low, codec.low):
            raise errors.KafkaError(
                f"{node} does not speak {self.name} of version {codec.low} to {codec.high}, but {low} to "
                f"{high}",
                "Kafka 3.1 or later is needed, 4.0 or later for transactions of version 2",
            )

    @property
    def name(self) -> str:
        return str(self._codec.api.name).removesuffix("Request")

    def encode(self, correlation: int) -> bytes | bytearray:
        """The frame, its length in front."""
        request = self._codec.api(**self._codec.fields)
        request.API_VERSION = self._version
        request.with_header(correlation_id=correlation, client_id=CLIENT_ID)
        frame: bytes | bytearray = request.encode(framed=True, header=True)
        return frame

    def decode(self, frame: memoryview, correlation: int) -> Any:
        """The answer in a frame without its length. Raises RemoteProtocolError."""
        try:
            if _CORRELATION.unpack_from(frame)[0] != correlation:
                raise ValueError("it belongs to another request")
            request = self._codec.api
            header = request.header_class(
                request_api_key=self._codec.key,
                request_api_version=self._version,
                correlation_id=0,
                client_id="",
            )
            response = header.get_response_class()
            behind = _CORRELATION.size
            # a flexible header ends with tagged fields, of which Kafka defines none; that of ApiVersions
            # never is flexible (KIP-511)
            if self._codec.api is not ApiVersionsRequest and response.flexible_version_q(self._version):
                if frame[behind]:
                    raise ValueError("its header has tagged fields")
                behind += 1
            return self._codec.read(response.decode(frame[behind:]))
        except (errors.TxmqError, MemoryError):
            raise
        except Exception as error:  # kafka-python raises whatever the damaged bytes lead to
            raise errors.RemoteProtocolError(
                f"the answer of {self._node} to {self.name} cannot be read: {type(error).__name__}: "
                f"{errors.one_line(error)[:200]}",
                "check that the address is that of a Kafka broker",
            ) from None
