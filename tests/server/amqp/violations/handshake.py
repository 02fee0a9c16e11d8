"""Violations before the connection is open."""

from __future__ import annotations

from pamqp import commands, heartbeat

from tests.amqp_peer import HEADER, encoded, method, raw
from tests.server.amqp.violations.row import (
    Answered,
    AnySent,
    ConnectionClosed,
    Dropped,
    Like,
    Phase,
    Row,
    Text,
    row,
)

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


def silent(name: str, phase: Phase, sent: AnySent, code: int, text: Text, ids: tuple[int, int]) -> Row:
    return row(name, sent, Dropped(), phase=phase, why=SILENT, here=ConnectionClosed(code, text, ids))


def state(name: str) -> str:
    return f"CHANNEL_ERROR - unexpected method in connection state {name}"


ROWS = [
    row("header of 0-9", b"AMQP\0\0\x09\0", Dropped(b"AMQP\x00\x00\t\x01"), phase="connected"),
    row(
        "header of 0-8",
        b"AMQP\x01\x01\x08\0",
        Answered(("Connection.Start",)),
        phase="connected",
        why=NO_0_8,
        here=Dropped(HEADER),
    ),
    row("header of 1.0", b"AMQP\0\x01\0\0", Dropped(b"AMQP\x00\x00\t\x01"), phase="connected"),
    row("header of 1.0 with SASL", b"AMQP\x03\x01\0\0", Dropped(b"AMQP\x00\x00\t\x01"), phase="connected"),
    row("header of 0-10", b"AMQP\x01\x01\0\x0a", Dropped(b"AMQP\x00\x00\t\x01"), phase="connected"),
    row("header of HTTP", b"GET / HTTP/1.1\r\n\r\n", Dropped(b"AMQP\x00\x00\t\x01"), phase="connected"),
    row(
        "header of TLS",
        bytes.fromhex("16030100c8010000c40303") + bytes(32),
        Dropped(b"AMQP\x00\x00\t\x01"),
        phase="connected",
    ),
    row(
        "method in place of the header",
        start_ok("PLAIN", "\0guest\0guest"),
        Dropped(b"AMQP\x00\x00\t\x01"),
        phase="connected",
    ),
    silent("header twice", "started", HEADER, 501, Like("FRAME_ERROR - type 65, .*"), (0, 0)),
    row(
        "AMQPLAIN is served", start_ok("AMQPLAIN", AMQPLAIN), Answered(("Connection.Tune",)), phase="started"
    ),
    row(
        "unknown locale is not looked at",
        (0, C.StartOk(PEER, "PLAIN", "\0guest\0guest", "xx_XX")),
        Answered(("Connection.Tune",)),
        phase="started",
    ),
    row(
        "wrong password",
        start_ok("PLAIN", "\0guest\0wrong"),
        ConnectionClosed(
            403,
            "ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN. For details see "
            "the broker logfile.",
            (0, 0),
        ),
        phase="started",
    ),
    row(
        "wrong password by AMQPLAIN",
        start_ok("AMQPLAIN", AMQPLAIN.replace("Sguest", "Sguest")[:-5] + "wrong"),
        ConnectionClosed(
            403,
            "ACCESS_REFUSED - Login was refused using authentication mechanism AMQPLAIN. For details "
            "see the broker logfile.",
            (0, 0),
        ),
        phase="started",
    ),
    row(
        "wrong password of a client without authentication_failure_close",
        start_ok("PLAIN", "\0guest\0x", OLD_PEER),
        Dropped(),
        phase="started",
    ),
    row(
        "unknown user",
        start_ok("PLAIN", "\0nobody\0guest"),
        ConnectionClosed(
            403,
            "ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN. For details see "
            "the broker logfile.",
            (0, 0),
        ),
        phase="started",
    ),
    silent(
        "unsupported mechanism",
        "started",
        start_ok("EXTERNAL", ""),
        503,
        "COMMAND_INVALID - unknown authentication mechanism 'EXTERNAL'",
        (10, 11),
    ),
    silent(
        "unsupported mechanism of an old client",
        "started",
        start_ok("EXTERNAL", "", OLD_PEER),
        503,
        "COMMAND_INVALID - unknown authentication mechanism 'EXTERNAL'",
        (10, 11),
    ),
    silent(
        "no mechanism",
        "started",
        start_ok("", "\0guest\0guest"),
        503,
        "COMMAND_INVALID - unknown authentication mechanism ''",
        (10, 11),
    ),
    silent(
        "PLAIN without its zeros",
        "started",
        start_ok("PLAIN", "guest"),
        502,
        "SYNTAX_ERROR - PLAIN response invalid",
        (10, 11),
    ),
    silent(
        "PLAIN without a password",
        "started",
        start_ok("PLAIN", "\0guest"),
        502,
        "SYNTAX_ERROR - PLAIN response invalid",
        (10, 11),
    ),
    silent(
        "PLAIN with nothing",
        "started",
        start_ok("PLAIN", ""),
        502,
        "SYNTAX_ERROR - PLAIN response invalid",
        (10, 11),
    ),
    silent(
        "AMQPLAIN without a password",
        "started",
        start_ok("AMQPLAIN", "\x05LOGINS\0\0\0\x05guest"),
        502,
        "SYNTAX_ERROR - AMQPLAIN auth info is missing LOGIN or PASSWORD field",
        (10, 11),
    ),
    silent(
        "AMQPLAIN that is no table",
        "started",
        start_ok("AMQPLAIN", "guest"),
        502,
        "SYNTAX_ERROR - AMQPLAIN response invalid",
        (10, 11),
    ),
    silent(
        "tune-ok before start-ok", "started", (0, C.TuneOk(0, 131072, 0)), 504, state("starting"), (10, 31)
    ),
    silent("connection.open before start-ok", "started", (0, C.Open("/")), 504, state("starting"), (10, 40)),
    silent(
        "channel.open before start-ok",
        "started",
        (1, commands.Channel.Open()),
        505,
        Like("UNEXPECTED_FRAME - type 1, .*"),
        (0, 0),
    ),
    silent(
        "start-ok on channel 1", "started", (1, GOOD[1]), 505, Like("UNEXPECTED_FRAME - type 1, .*"), (0, 0)
    ),
    row(
        "heartbeat before start-ok, which then comes",
        heartbeat.Heartbeat(),
        GOOD,
        Answered(("Connection.Tune",)),
        phase="started",
    ),
    row(
        "connection.close before start-ok",
        (0, C.Close(200, "bye", 0, 0)),
        Dropped(),
        phase="started",
        why=CLOSES,
        here=ANSWERED,
    ),
    silent(
        "content header before start-ok",
        "started",
        raw(2, 0, bytes(14)),
        505,
        Like("UNEXPECTED_FRAME - type 2, .*"),
        (0, 0),
    ),
    silent(
        "wrong frame end before start-ok",
        "started",
        encoded(*GOOD)[:-1] + b"\0",
        501,
        Like("FRAME_ERROR - type 1, .*invalid_frame_end_marker.*"),
        (0, 0),
    ),
    silent(
        "unknown method before start-ok",
        "started",
        method(0, 10, 99),
        503,
        Like("COMMAND_INVALID - .*"),
        (0, 0),
    ),
    silent(
        "start-ok cut off",
        "started",
        method(0, 10, 11, b"\0\0"),
        501,
        "FRAME_ERROR - cannot decode <<0,0>>",
        (10, 11),
    ),
    silent("start-ok twice", "tune", GOOD, 504, state("tuning"), (10, 11)),
    silent("secure-ok that nobody asked for", "tune", (0, C.SecureOk("x")), 504, state("tuning"), (10, 21)),
    silent("connection.open before tune-ok", "tune", (0, C.Open("/")), 504, state("tuning"), (10, 40)),
    row(
        "connection.close before tune-ok",
        (0, C.Close(200, "bye", 0, 0)),
        Dropped(),
        phase="tune",
        why=CLOSES,
        here=ANSWERED,
    ),
    silent(
        "channel-max above what was offered",
        "tune",
        (0, C.TuneOk(4096, 131072, 0)),
        530,
        "NOT_ALLOWED - negotiated channel_max = 4096 is higher than the maximum allowed value (2047)",
        (10, 31),
    ),
    silent(
        "channel-max without a limit",
        "tune",
        (0, C.TuneOk(0, 131072, 0)),
        530,
        "NOT_ALLOWED - negotiated channel_max = 0 (no limit) is higher than the maximum allowed value (2047)",
        (10, 31),
    ),
    silent(
        "frame-max above what was offered",
        "tune",
        (0, C.TuneOk(2047, 131073, 0)),
        530,
        "NOT_ALLOWED - negotiated frame_max = 131073 is higher than the maximum allowed value (131072)",
        (10, 31),
    ),
    silent(
        "frame-max without a limit",
        "tune",
        (0, C.TuneOk(2047, 0, 0)),
        530,
        Like(
            "NOT_ALLOWED - negotiated frame_max = 0.* is higher than the maximum allowed value \\(131072\\)"
        ),
        (10, 31),
    ),
    silent(
        "frame-max below the least",
        "tune",
        (0, C.TuneOk(2047, 4095, 0)),
        530,
        "NOT_ALLOWED - negotiated frame_max = 4095 is lower than the minimum allowed value (4096)",
        (10, 31),
    ),
    row(
        "heartbeat interval above what was offered is the client's right",
        (0, C.TuneOk(2047, 131072, 600)),
        (0, C.Open("/")),
        Answered(("Connection.OpenOk",)),
        phase="tune",
    ),
    row(
        "tune-ok twice",
        (0, C.TuneOk(2047, 131072, 0)),
        "CHANNEL_ERROR - unexpected method in connection state opening",
        phase="tuned",
    ),
    row(
        "channel.open before connection.open",
        (1, commands.Channel.Open()),
        Like("UNEXPECTED_FRAME - type 1, .*"),
        ids=(0, 0),
        phase="tuned",
    ),
    row(
        "publish before connection.open",
        commands.Basic.Publish(routing_key="x"),
        Like("UNEXPECTED_FRAME - type 1, .*"),
        ids=(0, 0),
        phase="tuned",
    ),
    row(
        "unknown virtual host", (0, C.Open("nowhere")), "NOT_ALLOWED - vhost nowhere not found", phase="tuned"
    ),
    row("virtual host without a name", (0, C.Open("")), "NOT_ALLOWED - vhost  not found", phase="tuned"),
    row(
        "connection.close before connection.open",
        (0, C.Close(200, "bye", 0, 0)),
        "CHANNEL_ERROR - unexpected method in connection state opening",
        phase="tuned",
        why=CLOSES,
        here=ANSWERED,
    ),
]
