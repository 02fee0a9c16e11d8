"""Violations of framing, of the states of connection and channel, and of who may send which method."""

from __future__ import annotations

import struct

from pamqp import commands, heartbeat

from tests.amqp_peer import encoded, method, raw
from tests.server.amqp.violations.row import Answered, ChannelClosed, ConnectionClosed, Dropped, Like, row

C, H, Q, B, E = commands.Connection, commands.Channel, commands.Queue, commands.Basic, commands.Exchange
FRAME_MAX = 131_072
PUBLISH = B.Publish(routing_key="violation.nowhere")
WRONG_STATE = "CHANNEL_ERROR - unexpected method in connection state running"
UNIMPLEMENTED = "COMMAND_INVALID - unimplemented method"
NOT_OPEN = "CHANNEL_ERROR - expected 'channel.open'"
NO_METHOD = "UNEXPECTED_FRAME - expected method frame, got non method frame instead"
NO_HEADER = "UNEXPECTED_FRAME - expected content header for class 60, got non content header frame instead"
NO_BODY = "UNEXPECTED_FRAME - expected content body, got non content body frame instead"
TOO_MANY = "NOT_ALLOWED - number of channels opened (2) has reached the negotiated channel_max (2)"
NO_UTF_8 = "FRAME_ERROR - Malformed UTF-8 in shortstr"
CANNOT_DECODE = Like("FRAME_ERROR - cannot decode <<.*>>")

# where this broker differs from RabbitMQ 3.10.8
CRASHES = "RabbitMQ's reader crashes on it and closes the socket without a word; the specification has a reply code for it"
REMOVED = "the class is not part of 0-9-1, and no client of 0-9-1 sends it"
WAITS = "RabbitMQ waits for more; the specification wants 505 for a content that is not well formed (4.2.6.1)"
HEADER = "RabbitMQ finds the damage while it answers; the specification's code for illegal values is 502"
EARLY = "RabbitMQ looks once it has the whole body; this broker does not take it first"
UTF_8 = "RabbitMQ looks at some short strings only; all of them have to be UTF-8 (4.2.5.3)"
BLAME = "the ids are of the method that is to blame"


def unknown(class_id: int, method_id: int) -> ConnectionClosed:
    return ConnectionClosed(503, Like(f"COMMAND_INVALID - .*{class_id}.*{method_id}.*"), (0, 0))


DAMAGED = ConnectionClosed(502, Like("SYNTAX_ERROR - .*"), (60, 40))
TABLE = ConnectionClosed(502, Like("SYNTAX_ERROR - .*"), (50, 10))
TOO_LONG = ConnectionClosed(505, Like("UNEXPECTED_FRAME - .*"), (60, 40))


def too_large(size: int) -> ChannelClosed:
    return ChannelClosed(
        406,
        f"PRECONDITION_FAILED - message size {size} is larger than configured max size 134217728",
        (60, 40),
    )


DECLARE = encoded(1, Q.Declare(queue="violation.q", exclusive=True))


def content_header(
    size: int, class_id: int = 60, weight: int = 0, flags: bytes = b"\0\0", channel: int = 1
) -> bytes:
    return raw(2, channel, struct.pack(">HHQ", class_id, weight, size) + flags)


def body(data: bytes, channel: int = 1) -> bytes:
    return raw(3, channel, data)


def table_argument(table: bytes, length: int | None = None) -> bytes:
    """queue.declare with these bytes as its table."""
    name = b"violation.q"
    arguments = (
        struct.pack(">HB", 0, len(name))
        + name
        + b"\0"
        + struct.pack(">I", len(table) if length is None else length)
        + table
    )
    return method(1, 50, 10, arguments)


FRAMES = [
    row(
        "wrong frame end", DECLARE[:-1] + b"\0", Like("FRAME_ERROR - type 1, .*\\{invalid_frame_end_marker.*")
    ),
    row(
        "wrong frame end of a body",
        PUBLISH,
        content_header(3),
        raw(3, 1, b"abc", end=b"\0"),
        Like("FRAME_ERROR - type 3, .*\\{invalid_frame_end_marker.*"),
    ),
    row("frame of type 0", raw(0, 1, b"abc"), Like("FRAME_ERROR - type 0, .*unknown_frame.*")),
    row("frame of type 4", raw(4, 1, b"abc"), Like("FRAME_ERROR - type 4, .*unknown_frame.*")),
    row("frame of type 255", raw(255, 0, b"abc"), Like("FRAME_ERROR - type 255, .*unknown_frame.*")),
    row(
        "frame of one byte more than frame-max",
        PUBLISH,
        content_header(FRAME_MAX - 7),
        body(bytes(FRAME_MAX - 7)),
    ),
    row(
        "frame of nine bytes more than frame-max",
        PUBLISH,
        content_header(FRAME_MAX + 1),
        body(bytes(FRAME_MAX + 1)),
        Like("FRAME_ERROR - type 3, .*\\{frame_too_large.*"),
    ),
    row(
        "frame that announces 4 GB",
        raw(3, 1, bytes(100), size=0xFFFFFFFF),
        Like("FRAME_ERROR - type 3, .*\\{frame_too_large.*"),
    ),
    row(
        "frame of exactly frame-max",
        PUBLISH,
        content_header(FRAME_MAX - 8),
        body(bytes(FRAME_MAX - 8)),
        Q.Declare(queue="", exclusive=True),
    ),
    row("heartbeat on channel 1", raw(8, 1, b""), Like("UNEXPECTED_FRAME - type 8, .*")),
    row("heartbeat with a payload", raw(8, 0, b"abc"), Like("FRAME_ERROR - type 8, .*unknown_frame.*")),
    row(
        "protocol header in an open connection",
        b"AMQP\0\0\x09\x01",
        Like("FRAME_ERROR - type 65, .*\\{frame_too_large.*"),
    ),
    row("method frame without a payload", raw(1, 1, b""), Like("FRAME_ERROR - type 1, .*unknown_frame.*")),
    row("method frame of two bytes", raw(1, 1, b"\0\x32"), Like("FRAME_ERROR - type 1, .*unknown_frame.*")),
    row(
        "method frame without a payload on channel 0",
        raw(1, 0, b""),
        Like("FRAME_ERROR - type 1, .*unknown_frame.*"),
    ),
    row("unknown class", method(1, 999, 10), Dropped(), why=CRASHES, here=unknown(999, 10)),
    row("unknown class on channel 0", method(0, 999, 10), Dropped(), why=CRASHES, here=unknown(999, 10)),
    row("unknown method of queue", method(1, 50, 99), Dropped(), why=CRASHES, here=unknown(50, 99)),
    row("unknown method of connection", method(0, 10, 99), Dropped(), why=CRASHES, here=unknown(10, 99)),
    row("class file of 0-8", method(1, 70, 10, bytes(8)), Dropped(), why=CRASHES, here=unknown(70, 10)),
    row("class dtx of 0-8", method(1, 100, 10), Dropped(), why=CRASHES, here=unknown(100, 10)),
    row(
        "class access of 0-8",
        method(1, 30, 10, b"\x05/data\0"),
        Answered(("class 30, method 11",)),
        why=REMOVED,
        here=unknown(30, 10),
    ),
    row("arguments cut off", method(1, 50, 10, b"\0\0\x0bviol"), CANNOT_DECODE, ids=(50, 10)),
    row("arguments that are missing", method(1, 50, 10), CANNOT_DECODE, ids=(50, 10)),
    row("arguments with bytes behind them", raw(1, 1, DECLARE[7:-1] + b"more"), CANNOT_DECODE, ids=(50, 10)),
    row("table with an unknown type", table_argument(b"\x01k?\0"), Dropped(), why=CRASHES, here=TABLE),
    row("table longer than the method", table_argument(b"\x01kt\x01", 400), CANNOT_DECODE, ids=(50, 10)),
    row("table cut off in a value", table_argument(b"\x01kI\0"), Dropped(), why=CRASHES, here=TABLE),
    row(
        "table with a string longer than it",
        table_argument(b"\x01kS\0\0\x10\0ab"),
        Dropped(),
        why=CRASHES,
        here=TABLE,
    ),
    row(
        "routing key that is no UTF-8",
        method(1, 60, 40, b"\0\0\0\x02\xff\xfe\0"),
        content_header(0),
        Q.Declare(queue="", exclusive=True),
        why=UTF_8,
        here=ConnectionClosed(501, NO_UTF_8, (60, 40)),
    ),
    row(
        "consumer tag that is no UTF-8",
        method(1, 60, 20, b"\0\0\x0bviolation.q\x02\xff\xfe\0\0\0\0\0"),
        NO_UTF_8,
        before=(Q.Declare(queue="violation.q", exclusive=True),),
        why=BLAME,
        here=ConnectionClosed(501, NO_UTF_8, (60, 20)),
    ),
    row(
        "queue name that is no UTF-8",
        method(1, 50, 10, b"\0\0\x02\xff\xfe\x04\0\0\0\0"),
        NO_UTF_8,
        why=BLAME,
        here=ConnectionClosed(501, NO_UTF_8, (50, 10)),
    ),
]

CONTENT = [
    row("content header without a method", content_header(0), NO_METHOD),
    row("body without a method", body(b"abc"), NO_METHOD),
    row("content header behind a method without content", DECLARE, content_header(0), NO_METHOD, before=()),
    row("method in place of the content header", PUBLISH, DECLARE, NO_HEADER, ids=(60, 40)),
    row("publish in place of the content header", PUBLISH, PUBLISH, NO_HEADER),
    row("body in place of the content header", PUBLISH, body(b"abc"), NO_HEADER, ids=(60, 40)),
    row(
        "method in the middle of the body",
        PUBLISH,
        content_header(6),
        body(b"abc"),
        DECLARE,
        NO_BODY,
        ids=(60, 40),
    ),
    row("method before the body", PUBLISH, content_header(6), DECLARE, NO_BODY, ids=(60, 40)),
    row("second content header", PUBLISH, content_header(6), content_header(6), NO_BODY, ids=(60, 40)),
    row("body longer than announced", PUBLISH, content_header(3), body(b"abcdef"), why=WAITS, here=TOO_LONG),
    row(
        "second frame longer than what is left",
        PUBLISH,
        content_header(4),
        body(b"abc"),
        body(b"def"),
        why=WAITS,
        here=TOO_LONG,
    ),
    row("body behind a content of nothing", PUBLISH, content_header(0), body(b"a"), NO_METHOD),
    row(
        "empty body frames are allowed",
        PUBLISH,
        content_header(3),
        body(b""),
        body(b"abc"),
        Q.Declare(queue="", exclusive=True),
    ),
    row(
        "content header of another class",
        PUBLISH,
        content_header(0, class_id=50),
        "UNEXPECTED_FRAME - expected content header for class 60, got one for class 50 instead",
        ids=(60, 40),
    ),
    row(
        "content header with a weight",
        PUBLISH,
        content_header(0, weight=1),
        Q.Declare(queue="", exclusive=True),
        NO_HEADER,
        ids=(60, 40),
    ),
    row(
        "content header cut off",
        PUBLISH,
        raw(2, 1, bytes(11)),
        Like("FRAME_ERROR - type 2, .*unknown_frame.*"),
    ),
    row(
        "content header without flags",
        PUBLISH,
        raw(2, 1, struct.pack(">HHQ", 60, 0, 0)),
        "INTERNAL_ERROR",
        why=HEADER,
        here=DAMAGED,
    ),
    row(
        "content header whose properties are missing",
        PUBLISH,
        content_header(0, flags=b"\xff\xfc"),
        "INTERNAL_ERROR",
        why=HEADER,
        here=DAMAGED,
    ),
    row(
        "content header with bytes behind its properties",
        PUBLISH,
        content_header(0, flags=b"\0\0more"),
        "INTERNAL_ERROR",
        why=HEADER,
        here=DAMAGED,
    ),
    row(
        "content header with more than one word of flags",
        PUBLISH,
        content_header(0, flags=b"\0\x01\0\0"),
        "INTERNAL_ERROR",
        why=HEADER,
        here=DAMAGED,
    ),
    row(
        "body above the limit",
        PUBLISH,
        content_header((1 << 27) + 1),
        why=EARLY,
        here=too_large((1 << 27) + 1),
    ),
    row("body of 2 to the 63", PUBLISH, content_header(1 << 63), why=EARLY, here=too_large(1 << 63)),
    row(
        "other channel in the middle of a content is no violation",
        PUBLISH,
        content_header(3),
        (2, Q.Declare(queue="", exclusive=True)),
        body(b"abc"),
    ),
    row(
        "channel.close in the middle of a content",
        PUBLISH,
        content_header(3),
        H.Close(200, "bye", 0, 0),
        NO_BODY,
        ids=(60, 40),
    ),
    row(
        "heartbeat in the middle of a content is no violation",
        PUBLISH,
        content_header(3),
        heartbeat.Heartbeat(),
        body(b"abc"),
        Q.Declare(queue="", exclusive=True),
    ),
]

STATES = [
    row(
        "channel above channel-max", (11, H.Open()), (11, Q.Declare(queue="", exclusive=True)), channel_max=10
    ),
    row("highest channel is allowed", (10, H.Open()), channel_max=10),
    row("one channel more than channel-max", (3, H.Open()), TOO_MANY, ids=(0, 0), channel_max=2),
    row("method on a channel that is not open", (5, Q.Declare(queue="violation.q")), NOT_OPEN),
    row(
        "publish on a channel that is not open",
        (5, PUBLISH),
        content_header(0, channel=5),
        NOT_OPEN,
        ids=(60, 40),
    ),
    row("content header on a channel that is not open", content_header(0, channel=5), NO_METHOD),
    row("body on a channel that is not open", body(b"abc", channel=5), NO_METHOD),
    row("channel.close of a channel that is not open", (5, H.Close(200, "bye", 0, 0)), NOT_OPEN),
    row("channel.close-ok of a channel that is not open", (5, H.CloseOk()), NOT_OPEN),
    row("channel.close-ok that nobody asked for", H.CloseOk(), UNIMPLEMENTED),
    row("channel.open twice", H.Open(), "CHANNEL_ERROR - second 'channel.open' seen"),
    row("channel.open on channel 0", (0, H.Open()), WRONG_STATE),
    row("channel.close on channel 0", (0, H.Close(200, "bye", 0, 0)), WRONG_STATE),
    row("channel.flow that stops the broker", H.Flow(False), "NOT_IMPLEMENTED - active=false"),
    row("channel.flow that does not", H.Flow(True)),
    row("channel.flow-ok that nobody asked for", H.FlowOk(True), UNIMPLEMENTED),
    row("queue.declare on channel 0", (0, Q.Declare(queue="violation.q")), WRONG_STATE),
    row("publish on channel 0", (0, PUBLISH), WRONG_STATE),
    row("content header on channel 0", content_header(0, channel=0), Like("UNEXPECTED_FRAME - type 2, .*")),
    row("body on channel 0", body(b"abc", channel=0), Like("UNEXPECTED_FRAME - type 3, .*")),
    row("tx.select on channel 0", (0, commands.Tx.Select()), WRONG_STATE),
    row("connection.open twice", (0, C.Open("/")), WRONG_STATE),
    row(
        "start-ok in an open connection", (0, C.StartOk({}, "PLAIN", "\0guest\0guest", "en_US")), WRONG_STATE
    ),
    row("secure-ok in an open connection", (0, C.SecureOk("x")), WRONG_STATE),
    row("tune-ok in an open connection", (0, C.TuneOk(2047, 131072, 0)), WRONG_STATE),
    row("connection.close-ok that nobody asked for", (0, C.CloseOk()), WRONG_STATE),
    row(
        "connection.update-secret",
        (0, C.UpdateSecret("new", "because")),
        Answered(("Connection.UpdateSecretOk",)),
    ),
    row("connection.open on channel 1", (1, C.Open("/")), UNIMPLEMENTED),
    row("connection.close on channel 1", (1, C.Close(200, "bye", 0, 0)), UNIMPLEMENTED),
    row("connection.close-ok on channel 1", (1, C.CloseOk()), UNIMPLEMENTED),
    row(
        "start-ok on channel 1 of an open connection",
        (1, C.StartOk({}, "PLAIN", "\0guest\0guest", "en_US")),
        UNIMPLEMENTED,
    ),
    row("connection.close on a channel that is not open", (5, C.Close(200, "bye", 0, 0)), NOT_OPEN),
]

FROM_THE_SERVER = [
    row("connection.start from the client", (0, C.Start(0, 9, {}, "PLAIN", "en_US")), WRONG_STATE),
    row("connection.tune from the client", (0, C.Tune(0, 0, 0)), WRONG_STATE),
    row("connection.open-ok from the client", (0, C.OpenOk()), WRONG_STATE),
    row("connection.blocked from the client", (0, C.Blocked("full")), WRONG_STATE),
    row("channel.open-ok from the client", H.OpenOk(), UNIMPLEMENTED),
    row("exchange.declare-ok from the client", E.DeclareOk(), UNIMPLEMENTED),
    row("queue.declare-ok from the client", Q.DeclareOk("violation.q", 0, 0), UNIMPLEMENTED),
    row("basic.qos-ok from the client", B.QosOk(), UNIMPLEMENTED),
    row("basic.consume-ok from the client", B.ConsumeOk("tag"), UNIMPLEMENTED),
    row("basic.cancel-ok from the client", B.CancelOk("tag"), UNIMPLEMENTED),
    row(
        "basic.return from the client",
        B.Return(312, "NO_ROUTE", "", ""),
        content_header(0),
        UNIMPLEMENTED,
        ids=(60, 50),
    ),
    row(
        "basic.deliver from the client",
        B.Deliver("tag", 1, False, "", ""),
        content_header(0),
        UNIMPLEMENTED,
        ids=(60, 60),
    ),
    row(
        "basic.get-ok from the client",
        B.GetOk(1, False, "", "", 0),
        content_header(0),
        UNIMPLEMENTED,
        ids=(60, 71),
    ),
    row("basic.get-empty from the client", B.GetEmpty(), UNIMPLEMENTED),
    row("basic.recover-ok from the client", B.RecoverOk(), UNIMPLEMENTED),
    row("confirm.select-ok from the client", commands.Confirm.SelectOk(), UNIMPLEMENTED),
    row("tx.select-ok from the client", commands.Tx.SelectOk(), UNIMPLEMENTED),
    row("tx.commit-ok from the client", commands.Tx.CommitOk(), UNIMPLEMENTED),
]

ROWS = FRAMES + CONTENT + STATES + FROM_THE_SERVER
