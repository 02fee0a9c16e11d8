"""Channel 0: the handshake, the limits that both sides agree on, and the client's part of closing
(specification 2.2.4).

Not here: the order of the steps (``states.py``), and the login: the caller answers connection.start-ok.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.decoder import (
    DEFAULT_FRAME_MAX,
    DEFAULT_MAX_BODY_BYTES,
    DEFAULT_MAX_PENDING_BYTES,
    FRAME_MIN,
    PROTOCOL_HEADER,
    Decoder,
)
from broker_core.amqp.v0_9_1.encoder import Outgoing
from broker_core.amqp.v0_9_1.events import CloseRequested, Command, ProtocolHeader
from broker_core.amqp.v0_9_1.lifecycle import Lifecycle
from broker_core.amqp.v0_9_1.states import ConnectionState, Step
from broker_core.core.errors import NotAllowed


@dataclass(frozen=True, slots=True)
class Offer:
    """What the broker offers to each client, and how long it waits for it.

    ``max_*_bytes`` as for the decoder.
    """

    start: m.ConnectionStart = field(default_factory=m.ConnectionStart)
    channel_max: int = 2047
    frame_max: int = DEFAULT_FRAME_MAX
    heartbeat_s: int = 60
    handshake_timeout_s: float = 10.0
    close_timeout_s: float = 10.0  # for the answer to connection.close, and for the last bytes to leave
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_pending_bytes: int = DEFAULT_MAX_PENDING_BYTES


class Negotiation:
    """``tuned``: the negotiated limits, and before that the offered ones."""

    __slots__ = ("_admit", "_decoder", "_life", "_offer", "_out", "client_properties", "tuned")

    def __init__(self, offer: Offer, life: Lifecycle, out: Outgoing, decoder: Decoder) -> None:
        self._offer = offer
        self._life = life
        self._out = out
        self._decoder = decoder
        self._admit: Callable[[str], None] | None = None
        self.client_properties: dict[str, object] = {}
        self.tuned = m.ConnectionTuneOk(offer.channel_max, offer.frame_max, 0)

    def header(self, event: ProtocolHeader) -> None:
        if event.ok:
            self._life.go(Step.header)
            self._out.send(0, self._offer.start)
        else:
            self._out.write(PROTOCOL_HEADER)  # specification 4.2.2: send the supported version
            self._life.end(Step.end)

    def authenticated(self, admit: Callable[[str], None] | None) -> None:
        offer = self._offer
        self._admit = admit
        self._out.send(0, m.ConnectionTune(offer.channel_max, offer.frame_max, offer.heartbeat_s))

    def lost(self) -> None:
        self._admit = None  # it has the connection, which has this: a cycle would wait for the collector

    def take(self, command: Command) -> Command | CloseRequested | None:
        """The command or event that the caller has to carry out. Raises a ConnectionException."""
        method = command.method
        before = self._life.go(type(method))
        match method:
            case m.ConnectionClose() if before is ConnectionState.closing:
                self._out.final_frame(m.ConnectionCloseOk())
            case m.ConnectionClose():
                return CloseRequested()
            case m.ConnectionCloseOk():
                self._life.end(Step.end)
            case m.ConnectionStartOk():
                self.client_properties = dict(method.client_properties)
                return command
            case m.ConnectionTuneOk():
                self._tune(method)
            case m.ConnectionOpen():
                if self._admit is not None:
                    self._admit(method.virtual_host)
                self._life.open(self.tuned.heartbeat)
                self._out.send(0, m.ConnectionOpenOk())
            case m.ConnectionUpdateSecret():  # a password does not expire: nothing changes, as in RabbitMQ
                self._out.send(0, m.ConnectionUpdateSecretOk())
        return None

    def announces(self, capability: str) -> bool:
        """Whether the client announced this capability."""
        capabilities = self.client_properties.get("capabilities")
        return isinstance(capabilities, dict) and capabilities.get(capability) is True

    def _tune(self, method: m.ConnectionTuneOk) -> None:
        """Raises NotAllowed, with RabbitMQ's text, for a limit that is not within the offered one."""
        _check_limit("frame_max", method.frame_max, self._offer.frame_max, FRAME_MIN)
        _check_limit("channel_max", method.channel_max, self._offer.channel_max, 1)
        self.tuned = method
        self._out.frame_max = method.frame_max
        self._decoder.tune(method.frame_max)


def _check_limit(name: str, value: int, most: int, least: int) -> None:
    text = f"{value} (no limit)" if name == "channel_max" and value == 0 else str(value)
    if value and value < least:
        raise NotAllowed(f"negotiated {name} = {text} is lower than the minimum allowed value ({least})")
    if most and (not value or value > most):
        raise NotAllowed(f"negotiated {name} = {text} is higher than the maximum allowed value ({most})")
