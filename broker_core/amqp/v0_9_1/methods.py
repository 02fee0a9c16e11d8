"""The methods of AMQP 0-9-1 with RabbitMQ's extensions: one table, written as one class for each method.

Not here: how a method becomes bytes (``codec.py``), when it may come (``states.py``), what it does.

The annotations of a class are the fields of the method in the order of the wire, with their types
(specification 4.2.5). A field that the specification reserves is a ``ClassVar``: it has its place on the
wire, is written as zero and not read. Every other field has the specification's zero value as its default.

Invariant: an instance never changes, so one instance may stand for any number of equal methods; METHODS holds
every class once.
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

Octet = Annotated[int, "octet"]
Short = Annotated[int, "short"]
Long = Annotated[int, "long"]
LongLong = Annotated[int, "longlong"]
ShortStr = Annotated[str, "shortstr"]
LongStr = Annotated[bytes, "longstr"]
Bit = Annotated[bool, "bit"]
Table = Annotated[Mapping[str, object], "table"]

Sender = Literal["client", "server", "both"]


@dataclass(frozen=True, slots=True)
class Method:
    """A method as a value. ``LAYOUT`` is the order on the wire: (field, type), the field None where it is
    reserved.
    """

    CLASS_ID: ClassVar[int]
    METHOD_ID: ClassVar[int]
    NAME: ClassVar[str]
    HAS_CONTENT: ClassVar[bool]
    SENT_BY: ClassVar[Sender]
    LAYOUT: ClassVar[tuple[tuple[str | None, str], ...]]

    def __init_subclass__(
        cls, ids: tuple[int, int] | None = None, sent_by: Sender = "both", has_content: bool = False
    ) -> None:
        """``ids``: class and method number. None when ``dataclass`` makes the class again with slots: it
        is the one in METHODS, and all is known by then.
        """
        if ids is None:
            METHODS[cls.CLASS_ID, cls.METHOD_ID] = cls
            return
        cls.CLASS_ID, cls.METHOD_ID = ids
        cls.HAS_CONTENT, cls.SENT_BY = has_content, sent_by
        class_name, *words = re.findall("[A-Z][a-z]+", cls.__name__)
        cls.NAME = f"{class_name}.{'-'.join(words)}".lower()
        cls.LAYOUT = tuple(
            _place(name, annotation) for name, annotation in inspect.get_annotations(cls).items()
        )


METHODS: dict[tuple[int, int], type[Method]] = {}
"""Every method by its class and method number."""


def _place(name: str, annotation: Any) -> tuple[str | None, str]:
    if get_origin(annotation) is ClassVar:
        return None, get_args(annotation)[0].__metadata__[0]
    return name, annotation.__metadata__[0]


# -- class 10: connection ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConnectionStart(Method, ids=(10, 10), sent_by="server"):
    version_major: Octet = 0
    version_minor: Octet = 0
    server_properties: Table = field(default_factory=dict)
    mechanisms: LongStr = b""
    locales: LongStr = b""


@dataclass(frozen=True, slots=True)
class ConnectionStartOk(Method, ids=(10, 11), sent_by="client"):
    client_properties: Table = field(default_factory=dict)
    mechanism: ShortStr = ""
    response: LongStr = b""
    locale: ShortStr = ""


@dataclass(frozen=True, slots=True)
class ConnectionSecure(Method, ids=(10, 20), sent_by="server"):
    challenge: LongStr = b""


@dataclass(frozen=True, slots=True)
class ConnectionSecureOk(Method, ids=(10, 21), sent_by="client"):
    response: LongStr = b""


@dataclass(frozen=True, slots=True)
class ConnectionTune(Method, ids=(10, 30), sent_by="server"):
    channel_max: Short = 0
    frame_max: Long = 0
    heartbeat: Short = 0


@dataclass(frozen=True, slots=True)
class ConnectionTuneOk(Method, ids=(10, 31), sent_by="client"):
    channel_max: Short = 0
    frame_max: Long = 0
    heartbeat: Short = 0


@dataclass(frozen=True, slots=True)
class ConnectionOpen(Method, ids=(10, 40), sent_by="client"):
    virtual_host: ShortStr = ""
    reserved_1: ClassVar[ShortStr] = ""
    reserved_2: ClassVar[Bit] = False


@dataclass(frozen=True, slots=True)
class ConnectionOpenOk(Method, ids=(10, 41), sent_by="server"):
    reserved_1: ClassVar[ShortStr] = ""


@dataclass(frozen=True, slots=True)
class ConnectionClose(Method, ids=(10, 50), sent_by="both"):
    reply_code: Short = 0
    reply_text: ShortStr = ""
    class_id: Short = 0
    method_id: Short = 0


@dataclass(frozen=True, slots=True)
class ConnectionCloseOk(Method, ids=(10, 51), sent_by="both"): ...


@dataclass(frozen=True, slots=True)
class ConnectionBlocked(Method, ids=(10, 60), sent_by="server"):
    reason: ShortStr = ""


@dataclass(frozen=True, slots=True)
class ConnectionUnblocked(Method, ids=(10, 61), sent_by="server"): ...


@dataclass(frozen=True, slots=True)
class ConnectionUpdateSecret(Method, ids=(10, 70), sent_by="client"):
    new_secret: LongStr = b""
    reason: ShortStr = ""


@dataclass(frozen=True, slots=True)
class ConnectionUpdateSecretOk(Method, ids=(10, 71), sent_by="server"): ...


# -- class 20: channel ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChannelOpen(Method, ids=(20, 10), sent_by="client"):
    reserved_1: ClassVar[ShortStr] = ""


@dataclass(frozen=True, slots=True)
class ChannelOpenOk(Method, ids=(20, 11), sent_by="server"):
    reserved_1: ClassVar[LongStr] = b""


@dataclass(frozen=True, slots=True)
class ChannelFlow(Method, ids=(20, 20), sent_by="both"):
    active: Bit = False


@dataclass(frozen=True, slots=True)
class ChannelFlowOk(Method, ids=(20, 21), sent_by="both"):
    active: Bit = False


@dataclass(frozen=True, slots=True)
class ChannelClose(Method, ids=(20, 40), sent_by="both"):
    reply_code: Short = 0
    reply_text: ShortStr = ""
    class_id: Short = 0
    method_id: Short = 0


@dataclass(frozen=True, slots=True)
class ChannelCloseOk(Method, ids=(20, 41), sent_by="both"): ...


# -- class 40: exchange --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExchangeDeclare(Method, ids=(40, 10), sent_by="client"):
    reserved_1: ClassVar[Short] = 0
    exchange: ShortStr = ""
    type: ShortStr = ""
    passive: Bit = False
    durable: Bit = False
    auto_delete: Bit = False
    internal: Bit = False
    nowait: Bit = False
    arguments: Table = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExchangeDeclareOk(Method, ids=(40, 11), sent_by="server"): ...


@dataclass(frozen=True, slots=True)
class ExchangeDelete(Method, ids=(40, 20), sent_by="client"):
    reserved_1: ClassVar[Short] = 0
    exchange: ShortStr = ""
    if_unused: Bit = False
    nowait: Bit = False


@dataclass(frozen=True, slots=True)
class ExchangeDeleteOk(Method, ids=(40, 21), sent_by="server"): ...


@dataclass(frozen=True, slots=True)
class ExchangeBind(Method, ids=(40, 30), sent_by="client"):
    reserved_1: ClassVar[Short] = 0
    destination: ShortStr = ""
    source: ShortStr = ""
    routing_key: ShortStr = ""
    nowait: Bit = False
    arguments: Table = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExchangeBindOk(Method, ids=(40, 31), sent_by="server"): ...


@dataclass(frozen=True, slots=True)
class ExchangeUnbind(Method, ids=(40, 40), sent_by="client"):
    reserved_1: ClassVar[Short] = 0
    destination: ShortStr = ""
    source: ShortStr = ""
    routing_key: ShortStr = ""
    nowait: Bit = False
    arguments: Table = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExchangeUnbindOk(Method, ids=(40, 51), sent_by="server"): ...


# -- class 50: queue -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QueueDeclare(Method, ids=(50, 10), sent_by="client"):
    reserved_1: ClassVar[Short] = 0
    queue: ShortStr = ""
    passive: Bit = False
    durable: Bit = False
    exclusive: Bit = False
    auto_delete: Bit = False
    nowait: Bit = False
    arguments: Table = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QueueDeclareOk(Method, ids=(50, 11), sent_by="server"):
    queue: ShortStr = ""
    message_count: Long = 0
    consumer_count: Long = 0


@dataclass(frozen=True, slots=True)
class QueueBind(Method, ids=(50, 20), sent_by="client"):
    reserved_1: ClassVar[Short] = 0
    queue: ShortStr = ""
    exchange: ShortStr = ""
    routing_key: ShortStr = ""
    nowait: Bit = False
    arguments: Table = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QueueBindOk(Method, ids=(50, 21), sent_by="server"): ...


@dataclass(frozen=True, slots=True)
class QueuePurge(Method, ids=(50, 30), sent_by="client"):
    reserved_1: ClassVar[Short] = 0
    queue: ShortStr = ""
    nowait: Bit = False


@dataclass(frozen=True, slots=True)
class QueuePurgeOk(Method, ids=(50, 31), sent_by="server"):
    message_count: Long = 0


@dataclass(frozen=True, slots=True)
class QueueDelete(Method, ids=(50, 40), sent_by="client"):
    reserved_1: ClassVar[Short] = 0
    queue: ShortStr = ""
    if_unused: Bit = False
    if_empty: Bit = False
    nowait: Bit = False


@dataclass(frozen=True, slots=True)
class QueueDeleteOk(Method, ids=(50, 41), sent_by="server"):
    message_count: Long = 0


@dataclass(frozen=True, slots=True)
class QueueUnbind(Method, ids=(50, 50), sent_by="client"):
    reserved_1: ClassVar[Short] = 0
    queue: ShortStr = ""
    exchange: ShortStr = ""
    routing_key: ShortStr = ""
    arguments: Table = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QueueUnbindOk(Method, ids=(50, 51), sent_by="server"): ...


# -- class 60: basic -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BasicQos(Method, ids=(60, 10), sent_by="client"):
    prefetch_size: Long = 0
    prefetch_count: Short = 0
    global_: Bit = False


@dataclass(frozen=True, slots=True)
class BasicQosOk(Method, ids=(60, 11), sent_by="server"): ...


@dataclass(frozen=True, slots=True)
class BasicConsume(Method, ids=(60, 20), sent_by="client"):
    reserved_1: ClassVar[Short] = 0
    queue: ShortStr = ""
    consumer_tag: ShortStr = ""
    no_local: Bit = False
    no_ack: Bit = False
    exclusive: Bit = False
    nowait: Bit = False
    arguments: Table = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BasicConsumeOk(Method, ids=(60, 21), sent_by="server"):
    consumer_tag: ShortStr = ""


@dataclass(frozen=True, slots=True)
class BasicCancel(Method, ids=(60, 30), sent_by="both"):
    consumer_tag: ShortStr = ""
    nowait: Bit = False


@dataclass(frozen=True, slots=True)
class BasicCancelOk(Method, ids=(60, 31), sent_by="server"):
    consumer_tag: ShortStr = ""


@dataclass(frozen=True, slots=True)
class BasicPublish(Method, ids=(60, 40), sent_by="client", has_content=True):
    reserved_1: ClassVar[Short] = 0
    exchange: ShortStr = ""
    routing_key: ShortStr = ""
    mandatory: Bit = False
    immediate: Bit = False


@dataclass(frozen=True, slots=True)
class BasicReturn(Method, ids=(60, 50), sent_by="server", has_content=True):
    reply_code: Short = 0
    reply_text: ShortStr = ""
    exchange: ShortStr = ""
    routing_key: ShortStr = ""


@dataclass(frozen=True, slots=True)
class BasicDeliver(Method, ids=(60, 60), sent_by="server", has_content=True):
    consumer_tag: ShortStr = ""
    delivery_tag: LongLong = 0
    redelivered: Bit = False
    exchange: ShortStr = ""
    routing_key: ShortStr = ""


@dataclass(frozen=True, slots=True)
class BasicGet(Method, ids=(60, 70), sent_by="client"):
    reserved_1: ClassVar[Short] = 0
    queue: ShortStr = ""
    no_ack: Bit = False


@dataclass(frozen=True, slots=True)
class BasicGetOk(Method, ids=(60, 71), sent_by="server", has_content=True):
    delivery_tag: LongLong = 0
    redelivered: Bit = False
    exchange: ShortStr = ""
    routing_key: ShortStr = ""
    message_count: Long = 0


@dataclass(frozen=True, slots=True)
class BasicGetEmpty(Method, ids=(60, 72), sent_by="server"):
    reserved_1: ClassVar[ShortStr] = ""


@dataclass(frozen=True, slots=True)
class BasicAck(Method, ids=(60, 80), sent_by="both"):
    delivery_tag: LongLong = 0
    multiple: Bit = False


@dataclass(frozen=True, slots=True)
class BasicReject(Method, ids=(60, 90), sent_by="client"):
    delivery_tag: LongLong = 0
    requeue: Bit = False


@dataclass(frozen=True, slots=True)
class BasicRecoverAsync(Method, ids=(60, 100), sent_by="client"):
    requeue: Bit = False


@dataclass(frozen=True, slots=True)
class BasicRecover(Method, ids=(60, 110), sent_by="client"):
    requeue: Bit = False


@dataclass(frozen=True, slots=True)
class BasicRecoverOk(Method, ids=(60, 111), sent_by="server"): ...


@dataclass(frozen=True, slots=True)
class BasicNack(Method, ids=(60, 120), sent_by="both"):
    delivery_tag: LongLong = 0
    multiple: Bit = False
    requeue: Bit = False


# -- class 85: confirm ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConfirmSelect(Method, ids=(85, 10), sent_by="client"):
    nowait: Bit = False


@dataclass(frozen=True, slots=True)
class ConfirmSelectOk(Method, ids=(85, 11), sent_by="server"): ...


# -- class 90: tx --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TxSelect(Method, ids=(90, 10), sent_by="client"): ...


@dataclass(frozen=True, slots=True)
class TxSelectOk(Method, ids=(90, 11), sent_by="server"): ...


@dataclass(frozen=True, slots=True)
class TxCommit(Method, ids=(90, 20), sent_by="client"): ...


@dataclass(frozen=True, slots=True)
class TxCommitOk(Method, ids=(90, 21), sent_by="server"): ...


@dataclass(frozen=True, slots=True)
class TxRollback(Method, ids=(90, 30), sent_by="client"): ...


@dataclass(frozen=True, slots=True)
class TxRollbackOk(Method, ids=(90, 31), sent_by="server"): ...
