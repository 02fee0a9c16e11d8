"""Whole streams of a client with bytes changed, cut out or doubled anywhere: each ends with a reply code at
most, and only for itself.

The pure decoder has a fuzzer of its own; here the states behind it and the broker are in it too.
"""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

from pamqp import base, commands

from tests.amqp_peer import HEADER, Closed, Peer, content, encoded, peer
from tests.amqp_server import serving

C, H, Q, B, E, T = (
    commands.Connection,
    commands.Channel,
    commands.Queue,
    commands.Basic,
    commands.Exchange,
    commands.Tx,
)
STREAMS = 400
MINE = {"queue": "damaged"}


def frames() -> list[bytes]:
    """What a client says from its first byte to its last, without waiting for an answer."""
    arguments = {
        "x-message-ttl": 60_000,
        "x-max-length": 1_000,
        "x-dead-letter-exchange": "amq.fanout",
        "x-max-priority": 5,
    }
    bind = Q.Bind(exchange="damaged", routing_key="a.*", arguments={"x-match": "all", "n": 1}, **MINE)
    properties = {
        "headers": {"a": 1, "b": ["c", {"d": None}]},
        "priority": 3,
        "delivery_mode": 2,
        "expiration": "60000",
        "user_id": "guest",
    }
    methods: list[base.Frame] = [
        H.Open(),
        E.Declare(exchange="damaged", exchange_type="topic", auto_delete=True),
        E.Bind(destination="damaged", source="amq.direct", routing_key="k"),
        Q.Declare(exclusive=True, arguments=arguments, **MINE),
        bind,
        B.Qos(prefetch_count=10),
        B.Consume(consumer_tag="tag", arguments={"x-priority": 3}, **MINE),
        B.Get(**MINE),
        B.Recover(True),
        T.Select(),
        B.Ack(0, True),
        B.Nack(0, True, False),
        T.Commit(),
        T.Rollback(),
        Q.Purge(**MINE),
        B.Cancel("tag"),
        Q.Unbind(exchange="damaged", routing_key="a.*", **MINE),
        Q.Delete(**MINE),
        H.Close(200, "bye", 0, 0),
    ]
    said = [HEADER, encoded(0, C.StartOk({"product": "peer"}, "PLAIN", "\0guest\0guest", "en_US"))]
    said += [encoded(0, C.TuneOk(2047, 131_072, 0)), encoded(0, C.Open("/"))]
    for method in methods:
        said.append(encoded(1, method))
        if method.name in ("Basic.Consume", "Tx.Select"):
            for number in range(5):
                publish = B.Publish(exchange="damaged", routing_key="a.b", mandatory=number == 3)
                said.append(content(1, publish, b"x" * 10 * number, **properties))
    said += [encoded(2, H.Open()), encoded(2, commands.Confirm.Select())]
    said += [content(2, B.Publish(routing_key="nowhere"), b"x", **properties)]
    said += [encoded(0, C.Close(200, "bye", 0, 0))]
    return said


def damaged(said: list[bytes], choice: random.Random) -> bytes:
    """Whole frames missing, twice or elsewhere, and bytes changed, missing or put in."""
    parts = list(said)
    for _ in range(choice.choice((0, 0, 1, 3))):
        where = choice.randrange(1, len(parts))
        kind = choice.choice(("drop", "double", "move"))
        part = parts.pop(where)
        if kind == "double":
            parts[where:where] = [part, part]
        elif kind == "move":
            parts.insert(choice.randrange(1, len(parts)), part)
    data = bytearray(b"".join(parts))
    for _ in range(choice.choice((0, 1, 1, 2, 5))):
        at = choice.randrange(len(data))
        kind = choice.choice(("change", "bit", "cut", "insert", "end"))
        if kind == "change":
            data[at] = choice.randrange(256)
        elif kind == "bit":
            data[at] ^= 1 << choice.randrange(8)
        elif kind == "cut":
            del data[at : at + choice.randrange(1, 20)]
        elif kind == "insert":
            data[at:at] = choice.randbytes(choice.randrange(1, 20))
        else:
            del data[at:]
        if not data:
            break
    return bytes(data)


def answers(client: Peer) -> list[base.Frame]:
    """The methods that come until the socket ends."""
    found = []
    with contextlib.suppress(Closed):
        while True:
            frame = client.receive()[1]
            if isinstance(frame, base.Frame):
                found.append(frame)
    return found


def test_damaged_stream_ends_itself_with_a_reply_code_and_nobody_else(tmp_path: Path, seed: int) -> None:
    choice = random.Random(seed)
    said = frames()
    codes: set[int] = set()
    with serving(tmp_path / "data") as served, peer(served.amqp_url, 1) as witness:
        witness.call(1, Q.Declare(queue="witness", exclusive=True), Q.DeclareOk)
        with Peer(served.amqp_url) as whole:
            whole.write(b"".join(said))
            names = [answer.name for answer in answers(whole)]
            assert names[-1] == "Connection.CloseOk" and "Tx.CommitOk" in names, (
                "undamaged, it is a conversation without an error"
            )
        for number in range(STREAMS):
            data = damaged(said, choice)
            with Peer(served.amqp_url, timeout_s=20) as client:
                client.write(data)
                client.shutdown()
                for answer in answers(client):
                    if isinstance(answer, (C.Close, H.Close)):
                        assert answer.reply_code != 541, f"stream {number}: {answer.reply_text}: {data!r}"
                        codes.add(answer.reply_code)
            witness.publish(1, "", "witness", b"%d" % number)
            served_still = witness.get(1, "witness")
            assert served_still is not None and served_still[1] == b"%d" % number
        assert len(codes) >= 5, f"the damage is of too few kinds: {codes}"
        witness.end()
