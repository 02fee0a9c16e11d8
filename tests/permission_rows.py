"""Every method of AMQP that a client may send, with the permissions that it needs: RabbitMQ's table.

Not here: brokers. The same rows run against txmq (``server/test_permissions.py``) and, with
``TXMQ_INTEROP_URL`` and ``TXMQ_INTEROP_CTL``, against RabbitMQ (``interop/test_permissions.py``).
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from pamqp import base
from pamqp import commands as c

from tests.amqp_peer import AnyFrame, Peer, content, encoded

Need = tuple[str, str, str]  # permission, kind, name
Set = Callable[[str, str, str], None]  # the patterns of the user: configure, write, read

USER, PASSWORD = "limited", "a password"
NOTHING = "^$"


class Row(NamedTuple):
    """``frame`` needs ``needs``, in the order in which they are checked. ``answer`` None: nothing comes.

    ``login``: what an answer before the login is, where it is no violation of the order.
    """

    name: str
    frame: base.Frame
    answer: type[base.Frame] | None
    needs: tuple[Need, ...] = ()
    before: tuple[base.Frame, ...] = ()  # on the same channel
    channel: int = 1
    login: type[base.Frame] | None = None


def row(name: str, frame: base.Frame, *needs: str, **more: Any) -> Row:
    """``needs``: permission, kind and name. The answer is that of the method, unless ``answer`` says another."""
    group, method = frame.name.split(".")
    answer = getattr(getattr(c, group), f"{method}Ok", None) if frame.synchronous else None
    return Row(name, frame, more.pop("answer", answer), tuple(tuple(each.split()) for each in needs), **more)  # type: ignore[misc]


def _recover_async() -> base.Frame:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return c.Basic.RecoverAsync(requeue=True)


ROWS = (
    row("exchange.declare", c.Exchange.Declare(exchange="x-new"), "configure exchange x-new"),
    row(
        "exchange.declare with an alternate exchange",
        c.Exchange.Declare(exchange="x-alternate", arguments={"alternate-exchange": "x"}),
        "configure exchange x-alternate",
        "read exchange x-alternate",
        "write exchange x",
    ),
    row(
        "exchange.declare again with an alternate exchange",
        c.Exchange.Declare(exchange="x-diverting", arguments={"alternate-exchange": "x"}),
        "configure exchange x-diverting",
    ),
    row("exchange.declare passive", c.Exchange.Declare(exchange="x", passive=True)),
    row("exchange.delete", c.Exchange.Delete(exchange="x-gone"), "configure exchange x-gone"),
    row(
        "exchange.bind",
        c.Exchange.Bind(destination="x-other", source="x", routing_key="k"),
        "write exchange x-other",
        "read exchange x",
    ),
    row(
        "exchange.unbind",
        c.Exchange.Unbind(destination="x-other", source="x", routing_key="k"),
        "write exchange x-other",
        "read exchange x",
    ),
    row("queue.declare", c.Queue.Declare(queue="q-new"), "configure queue q-new"),
    row(
        "queue.declare with a dead-letter exchange",
        c.Queue.Declare(queue="q-letters", arguments={"x-dead-letter-exchange": "x"}),
        "configure queue q-letters",
        "read queue q-letters",
        "write exchange x",
    ),
    row(
        "queue.declare with the default exchange for dead letters",
        c.Queue.Declare(queue="q-default", arguments={"x-dead-letter-exchange": ""}),
        "configure queue q-default",
        "read queue q-default",
        "write exchange amq.default",
    ),
    row(
        "queue.declare again with a dead-letter exchange",
        c.Queue.Declare(queue="q-dying", arguments={"x-dead-letter-exchange": "x"}),
        "configure queue q-dying",
    ),
    row("queue.declare passive", c.Queue.Declare(queue="q", passive=True)),
    row("queue.delete", c.Queue.Delete(queue="q-gone"), "configure queue q-gone"),
    row(
        "queue.bind",
        c.Queue.Bind(queue="q", exchange="x", routing_key="k"),
        "write queue q",
        "read exchange x",
    ),
    row(
        "queue.unbind",
        c.Queue.Unbind(queue="q", exchange="x", routing_key="k"),
        "write queue q",
        "read exchange x",
    ),
    row("queue.purge", c.Queue.Purge(queue="q"), "read queue q"),
    row("basic.publish", c.Basic.Publish(exchange="x"), "write exchange x"),
    row(
        "basic.publish to the default exchange",
        c.Basic.Publish(exchange="", routing_key="q"),
        "write exchange amq.default",
    ),
    row("basic.get", c.Basic.Get(queue="q-empty"), "read queue q-empty", answer=c.Basic.GetEmpty),
    row("basic.consume", c.Basic.Consume(queue="q-empty", consumer_tag="t"), "read queue q-empty"),
    row("basic.cancel", c.Basic.Cancel(consumer_tag="t")),
    row("basic.qos", c.Basic.Qos(prefetch_count=1)),
    row("basic.ack", c.Basic.Ack(0, multiple=True)),
    row("basic.nack", c.Basic.Nack(0, multiple=True)),
    row("basic.reject", c.Basic.Reject(7), answer=c.Channel.Close),  # 406: there is no such tag
    row("basic.recover", c.Basic.Recover(requeue=True)),
    row("basic.recover-async", _recover_async()),
    row("tx.select", c.Tx.Select()),
    row("tx.commit", c.Tx.Commit(), before=(c.Tx.Select(),)),
    row("tx.rollback", c.Tx.Rollback(), before=(c.Tx.Select(),)),
    row("confirm.select", c.Confirm.Select()),
    row("channel.open", c.Channel.Open(), channel=2),
    row("channel.flow", c.Channel.Flow(active=True)),
    row(
        "channel.flow-ok", c.Channel.FlowOk(active=True), answer=c.Connection.Close
    ),  # 503: none was asked for
    row("channel.close", c.Channel.Close(200, "", 0, 0)),
    row("channel.close-ok", c.Channel.CloseOk(), answer=c.Connection.Close),
    # on an open connection, each of these comes too late: 504
    row(
        "connection.start-ok",
        c.Connection.StartOk({}, "PLAIN", f"\0{USER}\0wrong", "en_US"),
        answer=c.Connection.Close,
        channel=0,
    ),
    row("connection.secure-ok", c.Connection.SecureOk("x"), answer=c.Connection.Close, channel=0),
    row("connection.tune-ok", c.Connection.TuneOk(2047, 131_072, 0), answer=c.Connection.Close, channel=0),
    row("connection.open", c.Connection.Open("/"), answer=c.Connection.Close, channel=0),
    row("connection.close-ok", c.Connection.CloseOk(), answer=c.Connection.Close, channel=0),
    row("connection.update-secret", c.Connection.UpdateSecret("another", "renewed"), channel=0),
    row("connection.close", c.Connection.Close(200, "", 0, 0), channel=0, login=c.Connection.CloseOk),
)
OBJECTS = (
    c.Exchange.Declare(exchange="x"),
    c.Exchange.Declare(exchange="x-other"),
    c.Exchange.Declare(exchange="x-gone"),
    c.Exchange.Declare(exchange="x-diverting", arguments={"alternate-exchange": "x"}),
    c.Queue.Declare(queue="q"),
    c.Queue.Declare(queue="q-empty"),
    c.Queue.Declare(queue="q-gone"),
    c.Queue.Declare(queue="q-dying", arguments={"x-dead-letter-exchange": "x"}),
)
MADE = (
    *(c.Exchange.Delete(exchange=name) for name in ("x", "x-other", "x-gone", "x-diverting")),
    *(c.Exchange.Delete(exchange=name) for name in ("x-new", "x-alternate")),
    *(c.Queue.Delete(queue=name) for name in ("q", "q-empty", "q-gone", "q-dying")),
    *(c.Queue.Delete(queue=name) for name in ("q-new", "q-letters", "q-default")),
)


def prepare(peer: Peer) -> None:
    """What the rows use, as a user who may do everything; channel 1 is open."""
    for frame in (*MADE, *OBJECTS):
        peer.send(1, frame)
        peer.receive()


def untouched(peer: Peer) -> None:
    """What the rows use is as ``prepare`` left it, and they have made nothing; channel 1 is open."""
    for frame in OBJECTS:
        if isinstance(frame, c.Queue.Declare):
            found = peer.call(1, c.Queue.Declare(queue=frame.queue, passive=True), c.Queue.DeclareOk)
            assert (found.message_count, found.consumer_count) == (0, 0), frame.queue
        else:
            peer.call(1, c.Exchange.Declare(exchange=frame.exchange, passive=True), c.Exchange.DeclareOk)
    there = {frame.queue if isinstance(frame, c.Queue.Declare) else frame.exchange for frame in OBJECTS}
    for frame in MADE:
        kind = c.Queue if isinstance(frame, c.Queue.Delete) else c.Exchange
        name = frame.queue if isinstance(frame, c.Queue.Delete) else frame.exchange
        if name not in there:
            peer.send(2, c.Channel.Open(), kind.Declare(**{kind.__name__.lower(): name}, passive=True))
            peer.expect(c.Channel.OpenOk, 2)
            assert peer.expect(c.Channel.Close, 2).reply_code == 404, name
            peer.send(2, c.Channel.CloseOk())


def encode(row: Row) -> bytes:
    """The method of a row with its content, if it has one."""
    if isinstance(row.frame, c.Basic.Publish):
        return content(row.channel, row.frame, b"body")
    return encoded(row.channel, row.frame)


def answer(peer: Peer, row: Row) -> AnyFrame | None:
    """What the broker says to the frame of ``row``; None if it was taken without an answer."""
    for frame in row.before:
        peer.send(1, frame)
        peer.receive()
    peer.write(encode(row))
    if row.answer is None:  # what comes first, if nothing comes for the frame itself
        peer.send(1, c.Basic.Qos(prefetch_count=7))
        found = peer.receive()[1]
        return None if isinstance(found, c.Basic.QosOk) else found
    return peer.receive()[1]


def without(need: Need) -> tuple[str, str, str]:
    """Patterns that permit everything but this."""
    permission, _, name = need
    other = f"^(?!{re.escape(name)}$).*$"
    return tuple(other if each == permission else ".*" for each in ("configure", "write", "read"))  # type: ignore[return-value]


def only(needs: tuple[Need, ...]) -> tuple[str, str, str]:
    """Patterns that permit these names alone."""
    return tuple(  # type: ignore[return-value]
        "^(" + "|".join(re.escape(name) for permission, _, name in needs if permission == each) + ")$"
        for each in ("configure", "write", "read")
    )


def refused(found: AnyFrame | None) -> str:
    """The text of a refusal that closes the channel; "" if it is none."""
    return found.reply_text if isinstance(found, c.Channel.Close) and found.reply_code == 403 else ""


def check(
    row: Row, set_permissions: Set, opened: Callable[[], contextlib.AbstractContextManager[Peer]]
) -> None:
    """A user without one of the needs is refused, with RabbitMQ's text; one with them alone is not."""
    for need in row.needs:
        set_permissions(*without(need))
        with opened() as peer:
            _, kind, name = need
            expected = f"ACCESS_REFUSED - access to {kind} '{name}' in vhost '/' refused for user '{USER}'"
            assert refused(answer(peer, row)) == expected, (row.name, need)
    set_permissions(*only(row.needs))
    with opened() as peer:
        found = answer(peer, row)
        assert not refused(found), (row.name, refused(found))
        assert found is None if row.answer is None else isinstance(found, row.answer), (row.name, found)
