"""Violations before the connection is open."""

from __future__ import annotations

from pamqp import commands, heartbeat

from tests.amqp_peer import HEADER, encoded, method, raw
from tests.server.amqp.violations.row import Answered, ConnectionClosed, Dropped, Like, Row

C = commands.Connection
OLD_PEER = {"product": "peer"}
PEER = {"product": "peer", "capabilities": {"authentication_failure_close": True}}


def start_ok(mechanism: str, response: str, properties: dict = PEER) -> tuple[int, C.StartOk]:
    return 0, C.StartOk(properties, mechanism, response, "en_US")


GOOD = start_ok("PLAIN", "\0guest\0guest")
AMQPLAIN = "\x05LOGINS\0\0\0\x05guest\x08PASSWORDS\0\0\0\x05guest"

SILENT = "RabbitMQ waits 3 s and closes the socket without a word; here the client is told the specification's reply code"
NO_0_8 = "this broker does not speak 0-8"
CLOSES = "either side may close at any time, and close is answered with close-ok (2.2.4)"
ANSWERED = Answered(("Connection.CloseOk",))


def state(name: str) -> str:
    return f"CHANNEL_ERROR - unexpected method in connection state {name}"


ROWS = [
    Row("header of 0-9", (b"AMQP\0\0\x09\0",), Dropped(b"AMQP\x00\x00\t\x01"), phase="connected"),
    Row(
        "header of 0-8",
        (b"AMQP\x01\x01\x08\0",),
        Answered(("Connection.Start",)),
        phase="connected",
        why=NO_0_8,
        here=Dropped(HEADER),
    ),
    Row("header of 1.0", (b"AMQP\0\x01\0\0",), Dropped(b"AMQP\x00\x00\t\x01"), phase="connected"),
    Row("header of 1.0 with SASL", (b"AMQP\x03\x01\0\0",), Dropped(b"AMQP\x00\x00\t\x01"), phase="connected"),
    Row("header of 0-10", (b"AMQP\x01\x01\0\x0a",), Dropped(b"AMQP\x00\x00\t\x01"), phase="connected"),
    Row("header of HTTP", (b"GET / HTTP/1.1\r\n\r\n",), Dropped(b"AMQP\x00\x00\t\x01"), phase="connected"),
    Row(
        "header of TLS",
        (bytes.fromhex("16030100c8010000c40303") + bytes(32),),
        Dropped(b"AMQP\x00\x00\t\x01"),
        phase="connected",
    ),
    Row(
        "method in place of the header",
        (start_ok("PLAIN", "\0guest\0guest"),),
        Dropped(b"AMQP\x00\x00\t\x01"),
        phase="connected",
    ),
    Row(
        "header twice",
        (HEADER,),
        Dropped(),
        phase="started",
        why=SILENT,
        here=ConnectionClosed(501, Like("FRAME_ERROR - type 65, .*"), (0, 0)),
    ),
    Row(
        "AMQPLAIN is served",
        (start_ok("AMQPLAIN", AMQPLAIN),),
        Answered(("Connection.Tune",)),
        phase="started",
    ),
    Row(
        "unknown locale is not looked at",
        ((0, C.StartOk(PEER, "PLAIN", "\0guest\0guest", "xx_XX")),),
        Answered(("Connection.Tune",)),
        phase="started",
    ),
    Row(
        "wrong password",
        (start_ok("PLAIN", "\0guest\0wrong"),),
        ConnectionClosed(
            403,
            "ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN. For details see "
            "the broker logfile.",
            (0, 0),
        ),
        phase="started",
    ),
    Row(
        "wrong password by AMQPLAIN",
        (start_ok("AMQPLAIN", AMQPLAIN.replace("Sguest", "Sguest")[:-5] + "wrong"),),
        ConnectionClosed(
            403,
            "ACCESS_REFUSED - Login was refused using authentication mechanism AMQPLAIN. For details "
            "see the broker logfile.",
            (0, 0),
        ),
        phase="started",
    ),
    Row(
        "wrong password of a client without authentication_failure_close",
        (start_ok("PLAIN", "\0guest\0x", OLD_PEER),),
        Dropped(),
        phase="started",
    ),
    Row(
        "unknown user",
        (start_ok("PLAIN", "\0nobody\0guest"),),
        ConnectionClosed(
            403,
            "ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN. For details see "
            "the broker logfile.",
            (0, 0),
        ),
        phase="started",
    ),
    Row(
        "unsupported mechanism",
        (start_ok("EXTERNAL", ""),),
        Dropped(),
        phase="started",
        why=SILENT,
        here=ConnectionClosed(503, "COMMAND_INVALID - unknown authentication mechanism 'EXTERNAL'", (10, 11)),
    ),
    Row(
        "unsupported mechanism of an old client",
        (start_ok("EXTERNAL", "", OLD_PEER),),
        Dropped(),
        phase="started",
        why=SILENT,
        here=ConnectionClosed(503, "COMMAND_INVALID - unknown authentication mechanism 'EXTERNAL'", (10, 11)),
    ),
    Row(
        "no mechanism",
        (start_ok("", "\0guest\0guest"),),
        Dropped(),
        phase="started",
        why=SILENT,
        here=ConnectionClosed(503, "COMMAND_INVALID - unknown authentication mechanism ''", (10, 11)),
    ),
    Row(
        "PLAIN without its zeros",
        (start_ok("PLAIN", "guest"),),
        Dropped(),
        phase="started",
        why=SILENT,
        here=ConnectionClosed(502, "SYNTAX_ERROR - PLAIN response invalid", (10, 11)),
    ),
    Row(
        "PLAIN without a password",
        (start_ok("PLAIN", "\0guest"),),
        Dropped(),
        phase="started",
        why=SILENT,
        here=ConnectionClosed(502, "SYNTAX_ERROR - PLAIN response invalid", (10, 11)),
    ),
    Row(
        "PLAIN with nothing",
        (start_ok("PLAIN", ""),),
        Dropped(),
        phase="started",
        why=SILENT,
        here=ConnectionClosed(502, "SYNTAX_ERROR - PLAIN response invalid", (10, 11)),
    ),
    Row(
        "AMQPLAIN without a password",
        (start_ok("AMQPLAIN", "\x05LOGINS\0\0\0\x05guest"),),
        Dropped(),
        phase="started",
        why=SILENT,
        here=ConnectionClosed(
            502, "SYNTAX_ERROR - AMQPLAIN auth info is missing LOGIN or PASSWORD field", (10, 11)
        ),
    ),
    Row(
        "AMQPLAIN that is no table",
        (start_ok("AMQPLAIN", "guest"),),
        Dropped(),
        phase="started",
        why=SILENT,
        here=ConnectionClosed(502, "SYNTAX_ERROR - AMQPLAIN response invalid", (10, 11)),
    ),
    Row(
        "tune-ok before start-ok",
        ((0, C.TuneOk(0, 131072, 0)),),
        Dropped(),
        phase="started",
        why=SILENT,
        here=ConnectionClosed(504, state("starting"), (10, 31)),
    ),
    Row(
        "connection.open before start-ok",
        ((0, C.Open("/")),),
        Dropped(),
        phase="started",
        why=SILENT,
        here=ConnectionClosed(504, state("starting"), (10, 40)),
    ),
    Row(
        "channel.open before start-ok",
        ((1, commands.Channel.Open()),),
        Dropped(),
        phase="started",
        why=SILENT,
        here=ConnectionClosed(505, Like("UNEXPECTED_FRAME - type 1, .*"), (0, 0)),
    ),
    Row(
        "start-ok on channel 1",
        ((1, GOOD[1]),),
        Dropped(),
        phase="started",
        why=SILENT,
        here=ConnectionClosed(505, Like("UNEXPECTED_FRAME - type 1, .*"), (0, 0)),
    ),
    Row(
        "heartbeat before start-ok, which then comes",
        (heartbeat.Heartbeat(), GOOD),
        Answered(("Connection.Tune",)),
        phase="started",
    ),
    Row(
        "connection.close before start-ok",
        ((0, C.Close(200, "bye", 0, 0)),),
        Dropped(),
        phase="started",
        why=CLOSES,
        here=ANSWERED,
    ),
    Row(
        "content header before start-ok",
        (raw(2, 0, bytes(14)),),
        Dropped(),
        phase="started",
        why=SILENT,
        here=ConnectionClosed(505, Like("UNEXPECTED_FRAME - type 2, .*"), (0, 0)),
    ),
    Row(
        "wrong frame end before start-ok",
        (encoded(*GOOD)[:-1] + b"\0",),
        Dropped(),
        phase="started",
        why=SILENT,
        here=ConnectionClosed(501, Like("FRAME_ERROR - type 1, .*invalid_frame_end_marker.*"), (0, 0)),
    ),
    Row(
        "unknown method before start-ok",
        (method(0, 10, 99),),
        Dropped(),
        phase="started",
        why=SILENT,
        here=ConnectionClosed(503, Like("COMMAND_INVALID - .*"), (0, 0)),
    ),
    Row(
        "start-ok cut off",
        (method(0, 10, 11, b"\0\0"),),
        Dropped(),
        phase="started",
        why=SILENT,
        here=ConnectionClosed(501, "FRAME_ERROR - cannot decode <<0,0>>", (10, 11)),
    ),
    Row(
        "start-ok twice",
        (GOOD,),
        Dropped(),
        phase="tune",
        why=SILENT,
        here=ConnectionClosed(504, state("tuning"), (10, 11)),
    ),
    Row(
        "secure-ok that nobody asked for",
        ((0, C.SecureOk("x")),),
        Dropped(),
        phase="tune",
        why=SILENT,
        here=ConnectionClosed(504, state("tuning"), (10, 21)),
    ),
    Row(
        "connection.open before tune-ok",
        ((0, C.Open("/")),),
        Dropped(),
        phase="tune",
        why=SILENT,
        here=ConnectionClosed(504, state("tuning"), (10, 40)),
    ),
    Row(
        "connection.close before tune-ok",
        ((0, C.Close(200, "bye", 0, 0)),),
        Dropped(),
        phase="tune",
        why=CLOSES,
        here=ANSWERED,
    ),
    Row(
        "channel-max above what was offered",
        ((0, C.TuneOk(4096, 131072, 0)),),
        Dropped(),
        phase="tune",
        why=SILENT,
        here=ConnectionClosed(
            530,
            "NOT_ALLOWED - negotiated channel_max = 4096 is higher than the maximum allowed value (2047)",
            (10, 31),
        ),
    ),
    Row(
        "channel-max without a limit",
        ((0, C.TuneOk(0, 131072, 0)),),
        Dropped(),
        phase="tune",
        why=SILENT,
        here=ConnectionClosed(
            530,
            "NOT_ALLOWED - negotiated channel_max = 0 (no limit) is higher than the maximum allowed "
            "value (2047)",
            (10, 31),
        ),
    ),
    Row(
        "frame-max above what was offered",
        ((0, C.TuneOk(2047, 131073, 0)),),
        Dropped(),
        phase="tune",
        why=SILENT,
        here=ConnectionClosed(
            530,
            "NOT_ALLOWED - negotiated frame_max = 131073 is higher than the maximum allowed value (131072)",
            (10, 31),
        ),
    ),
    Row(
        "frame-max without a limit",
        ((0, C.TuneOk(2047, 0, 0)),),
        Dropped(),
        phase="tune",
        why=SILENT,
        here=ConnectionClosed(
            530,
            Like(
                "NOT_ALLOWED - negotiated frame_max = 0.* is higher than the maximum allowed value "
                "\\(131072\\)"
            ),
            (10, 31),
        ),
    ),
    Row(
        "frame-max below the least",
        ((0, C.TuneOk(2047, 4095, 0)),),
        Dropped(),
        phase="tune",
        why=SILENT,
        here=ConnectionClosed(
            530,
            "NOT_ALLOWED - negotiated frame_max = 4095 is lower than the minimum allowed value (4096)",
            (10, 31),
        ),
    ),
    Row(
        "heartbeat interval above what was offered is the client's right",
        ((0, C.TuneOk(2047, 131072, 600)), (0, C.Open("/"))),
        Answered(("Connection.OpenOk",)),
        phase="tune",
    ),
    Row(
        "tune-ok twice",
        ((0, C.TuneOk(2047, 131072, 0)),),
        ConnectionClosed(504, "CHANNEL_ERROR - unexpected method in connection state opening", (10, 31)),
        phase="tuned",
    ),
    Row(
        "channel.open before connection.open",
        ((1, commands.Channel.Open()),),
        ConnectionClosed(505, Like("UNEXPECTED_FRAME - type 1, .*"), (0, 0)),
        phase="tuned",
    ),
    Row(
        "publish before connection.open",
        (commands.Basic.Publish(routing_key="x"),),
        ConnectionClosed(505, Like("UNEXPECTED_FRAME - type 1, .*"), (0, 0)),
        phase="tuned",
    ),
    Row(
        "unknown virtual host",
        ((0, C.Open("nowhere")),),
        ConnectionClosed(530, "NOT_ALLOWED - vhost nowhere not found", (10, 40)),
        phase="tuned",
    ),
    Row(
        "virtual host without a name",
        ((0, C.Open("")),),
        ConnectionClosed(530, "NOT_ALLOWED - vhost  not found", (10, 40)),
        phase="tuned",
    ),
    Row(
        "connection.close before connection.open",
        ((0, C.Close(200, "bye", 0, 0)),),
        ConnectionClosed(504, "CHANNEL_ERROR - unexpected method in connection state opening", (10, 50)),
        phase="tuned",
        why=CLOSES,
        here=ANSWERED,
    ),
]
