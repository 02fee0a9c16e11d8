"""Violations before the connection is open."""

from __future__ import annotations

from functools import partial

from pamqp import commands, heartbeat

from tests.amqp_peer import HEADER, encoded, method, raw
from tests.server.amqp.violations.row import (
    BLAMED,
    Answered,
    AnySent,
    ConnectionClosed,
    Dropped,
    Like,
    Phase,
    Row,
    Text,
    closed,
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


def silent(name: str, phase: Phase, sent: AnySent, text: Text, ids: tuple[int, int] = BLAMED) -> Row:
    return row(name, sent, Dropped(), phase=phase, why=SILENT, here=closed(text, ids))


def refused(mechanism: str) -> ConnectionClosed:
    text = f"ACCESS_REFUSED - Login was refused using authentication mechanism {mechanism}. For details see the broker logfile."
    return ConnectionClosed(403, text, (0, 0))


def state(name: str) -> str:
    return f"CHANNEL_ERROR - unexpected method in connection state {name}"


connected = partial(row, phase="connected")
started = partial(row, phase="started")
tuned = partial(row, phase="tuned")


ROWS = [
    connected("header of 0-9", b"AMQP\0\0\x09\0", Dropped(HEADER)),
    connected(
        "header of 0-8",
        b"AMQP\x01\x01\x08\0",
        Answered(("Connection.Start",)),
        why=NO_0_8,
        here=Dropped(HEADER),
    ),
    connected("header of 1.0", b"AMQP\0\x01\0\0", Dropped(HEADER)),
    connected("header of 1.0 with SASL", b"AMQP\x03\x01\0\0", Dropped(HEADER)),
    connected("header of 0-10", b"AMQP\x01\x01\0\x0a", Dropped(HEADER)),
    connected("header of HTTP", b"GET / HTTP/1.1\r\n\r\n", Dropped(HEADER)),
    connected("header of TLS", bytes.fromhex("16030100c8010000c40303") + bytes(32), Dropped(HEADER)),
    connected("method in place of the header", start_ok("PLAIN", "\0guest\0guest"), Dropped(HEADER)),
    silent("header twice", "started", HEADER, Like("FRAME_ERROR - type 65, .*")),
    started("AMQPLAIN is served", start_ok("AMQPLAIN", AMQPLAIN), Answered(("Connection.Tune",))),
    started(
        "unknown locale is not looked at",
        (0, C.StartOk(PEER, "PLAIN", "\0guest\0guest", "xx_XX")),
        Answered(("Connection.Tune",)),
    ),
    started("wrong password", start_ok("PLAIN", "\0guest\0wrong"), refused("PLAIN")),
    started(
        "wrong password by AMQPLAIN",
        start_ok("AMQPLAIN", AMQPLAIN.replace("Sguest", "Sguest")[:-5] + "wrong"),
        refused("AMQPLAIN"),
    ),
    started(
        "wrong password of a client without authentication_failure_close",
        start_ok("PLAIN", "\0guest\0x", OLD_PEER),
        Dropped(),
    ),
    started("unknown user", start_ok("PLAIN", "\0nobody\0guest"), refused("PLAIN")),
    silent(
        "unsupported mechanism",
        "started",
        start_ok("EXTERNAL", ""),
        "COMMAND_INVALID - unknown authentication mechanism 'EXTERNAL'",
    ),
    silent(
        "unsupported mechanism of an old client",
        "started",
        start_ok("EXTERNAL", "", OLD_PEER),
        "COMMAND_INVALID - unknown authentication mechanism 'EXTERNAL'",
    ),
    silent(
        "no mechanism",
        "started",
        start_ok("", "\0guest\0guest"),
        "COMMAND_INVALID - unknown authentication mechanism ''",
    ),
    silent(
        "PLAIN without its zeros",
        "started",
        start_ok("PLAIN", "guest"),
        "SYNTAX_ERROR - PLAIN response invalid",
    ),
    silent(
        "PLAIN without a password",
        "started",
        start_ok("PLAIN", "\0guest"),
        "SYNTAX_ERROR - PLAIN response invalid",
    ),
    silent("PLAIN with nothing", "started", start_ok("PLAIN", ""), "SYNTAX_ERROR - PLAIN response invalid"),
    silent(
        "AMQPLAIN without a password",
        "started",
        start_ok("AMQPLAIN", "\x05LOGINS\0\0\0\x05guest"),
        "SYNTAX_ERROR - AMQPLAIN auth info is missing LOGIN or PASSWORD field",
    ),
    silent(
        "AMQPLAIN that is no table",
        "started",
        start_ok("AMQPLAIN", "guest"),
        "SYNTAX_ERROR - AMQPLAIN response invalid",
    ),
    silent("tune-ok before start-ok", "started", (0, C.TuneOk(0, 131072, 0)), state("starting")),
    silent("connection.open before start-ok", "started", (0, C.Open("/")), state("starting")),
    silent(
        "channel.open before start-ok",
        "started",
        (1, commands.Channel.Open()),
        Like("UNEXPECTED_FRAME - type 1, .*"),
        (0, 0),
    ),
    silent("start-ok on channel 1", "started", (1, GOOD[1]), Like("UNEXPECTED_FRAME - type 1, .*"), (0, 0)),
    started(
        "heartbeat before start-ok, which then comes",
        heartbeat.Heartbeat(),
        GOOD,
        Answered(("Connection.Tune",)),
    ),
    started(
        "connection.close before start-ok",
        (0, C.Close(200, "bye", 0, 0)),
        Dropped(),
        why=CLOSES,
        here=ANSWERED,
    ),
    silent(
        "content header before start-ok",
        "started",
        raw(2, 0, bytes(14)),
        Like("UNEXPECTED_FRAME - type 2, .*"),
    ),
    silent(
        "wrong frame end before start-ok",
        "started",
        encoded(*GOOD)[:-1] + b"\0",
        Like("FRAME_ERROR - type 1, .*invalid_frame_end_marker.*"),
    ),
    silent("unknown method before start-ok", "started", method(0, 10, 99), Like("COMMAND_INVALID - .*")),
    silent(
        "start-ok cut off",
        "started",
        method(0, 10, 11, b"\0\0"),
        "FRAME_ERROR - cannot decode <<0,0>>",
        (10, 11),
    ),
    silent("start-ok twice", "tune", GOOD, state("tuning")),
    silent("secure-ok that nobody asked for", "tune", (0, C.SecureOk("x")), state("tuning")),
    silent("connection.open before tune-ok", "tune", (0, C.Open("/")), state("tuning")),
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
        "NOT_ALLOWED - negotiated channel_max = 4096 is higher than the maximum allowed value (2047)",
    ),
    silent(
        "channel-max without a limit",
        "tune",
        (0, C.TuneOk(0, 131072, 0)),
        "NOT_ALLOWED - negotiated channel_max = 0 (no limit) is higher than the maximum allowed value (2047)",
    ),
    silent(
        "frame-max above what was offered",
        "tune",
        (0, C.TuneOk(2047, 131073, 0)),
        "NOT_ALLOWED - negotiated frame_max = 131073 is higher than the maximum allowed value (131072)",
    ),
    silent(
        "frame-max without a limit",
        "tune",
        (0, C.TuneOk(2047, 0, 0)),
        Like(
            "NOT_ALLOWED - negotiated frame_max = 0.* is higher than the maximum allowed value \\(131072\\)"
        ),
    ),
    silent(
        "frame-max below the least",
        "tune",
        (0, C.TuneOk(2047, 4095, 0)),
        "NOT_ALLOWED - negotiated frame_max = 4095 is lower than the minimum allowed value (4096)",
    ),
    row(
        "heartbeat interval above what was offered is the client's right",
        (0, C.TuneOk(2047, 131072, 600)),
        (0, C.Open("/")),
        Answered(("Connection.OpenOk",)),
        phase="tune",
    ),
    tuned(
        "tune-ok twice",
        (0, C.TuneOk(2047, 131072, 0)),
        "CHANNEL_ERROR - unexpected method in connection state opening",
    ),
    tuned(
        "channel.open before connection.open",
        (1, commands.Channel.Open()),
        Like("UNEXPECTED_FRAME - type 1, .*"),
        ids=(0, 0),
    ),
    tuned(
        "publish before connection.open",
        commands.Basic.Publish(routing_key="x"),
        Like("UNEXPECTED_FRAME - type 1, .*"),
        ids=(0, 0),
    ),
    tuned("unknown virtual host", (0, C.Open("nowhere")), "NOT_ALLOWED - vhost nowhere not found"),
    tuned("virtual host without a name", (0, C.Open("")), "NOT_ALLOWED - vhost  not found"),
    tuned(
        "connection.close before connection.open",
        (0, C.Close(200, "bye", 0, 0)),
        "CHANNEL_ERROR - unexpected method in connection state opening",
        why=CLOSES,
        here=ANSWERED,
    ),
]
