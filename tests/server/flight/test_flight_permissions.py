"""Every call of the Flight listener: without a login, with a wrong password, without and with permission.

Not here: AMQP (``interop/test_permissions.py``), what a user of AMQP may do on a channel.
"""

from __future__ import annotations

import base64
import inspect
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.flight as arrow_flight
import pytest
from pamqp import commands as c

from broker_core.core import errors
from broker_core.core import password as passwords
from broker_core.flight import contract
from broker_core.flight.authorization import Basic
from broker_core.launcher import Broker
from broker_core.message.message import MESSAGE_SCHEMA
from broker_core.message.properties import Properties
from broker_core.node.channel import LocalChannel
from broker_core.server.access import throttle
from broker_core.server.flight import audit, call_permissions
from tests.amqp_peer import Peer
from tests.permission_rows import PASSWORD, USER
from tests.server.flight.flight_calls import CALLS, HEADER, TICKETS, Raw, messages

ROOT, NOBODY = "root", "nobody"  # an administrator; a user without permissions
CHEAP = passwords.Cost(4)
IN: tuple[str, str, str] = ("read", "queue", "in")
APP = ("app", "", "app")
LOOK, OPERATE, ADMINISTER = (("tag", "", tag) for tag in ("monitoring", "operator", "administrator"))
WRITE = ("write", "exchange", "amq.default")
Need = tuple[str, str, str]


class Row(NamedTuple):
    """``needs`` None: a login alone. (): any permission."""

    call: str
    needs: tuple[Need, ...] | None = ()


ROWS = (
    Row("hello", None),
    Row("engine.identity"),
    *(Row(f"engine.{word}", (IN,)) for word in ("logs", "log_ids", "available", "offsets")),
    *(Row(f"engine.{word}", (IN,)) for word in ("wait", "dead_letter_route")),
    *(Row(f"engine.{word}", (IN, APP)) for word in ("claim", "resolve", "count", "ack", "resume")),
    *(
        Row(f"engine.{word}", (APP,))
        for word in ("open_batch", "commit_batch", "unapplied", "mark_applied", "unmirrored")
    ),
    *(
        Row(f"engine.{word}", (APP,))
        for word in ("mark_mirrored", "last_entry", "app", "entries", "publish_refused")
    ),
    Row("engine.commit_branches"),
    Row("engine.rollback_batch", (APP,)),
    *(Row(f"engine.{word}", (LOOK,)) for word in ("apps", "staged_batches")),
    *(Row(f"engine.{word}", (OPERATE,)) for word in ("skip", "note", "release")),
    Row(
        "channel.exchange_declare",
        (("configure", "exchange", "x"), ("read", "exchange", "x"), ("write", "exchange", "amq.fanout")),
    ),
    Row("channel.exchange_delete", (("configure", "exchange", "x"),)),
    Row("channel.queue_declare", (("configure", "queue", "w"),)),
    Row("channel.queue_bind", (("write", "queue", "in"), ("read", "exchange", "amq.headers"))),
    Row("channel.queue_unbind", (("write", "queue", "in"), ("read", "exchange", "amq.headers"))),
    Row("channel.queue_purge", (("read", "queue", "w"),)),
    Row("channel.queue_delete", (("configure", "queue", "w"),)),
    Row("channel.publish", (WRITE,)),
    Row("channel.publish_all", (WRITE,)),
    *(Row(f"channel.{word}", (IN,)) for word in ("get", "get_at")),
    *(Row(f"channel.{word}") for word in ("ack", "nack", "reject", "recover", "tx_select")),
    *(Row(f"channel.{word}") for word in ("confirm_select", "tx_timeout", "tx_current")),
    *(Row(f"channel.{word}") for word in ("tx_commit", "take_returned", "tx_rollback", "prepare")),
    *(Row(f"admin.{word}", (LOOK,)) for word in (*call_permissions.LISTS, "prepared")),
    Row("admin.status", (LOOK,)),
    Row("admin.close", (OPERATE,)),
    *(
        Row(f"admin.{word}") for word in ("commit", "rollback", "rollback_all", "forget")
    ),  # access/test_shares.py
    *(
        Row(f"admin.{word}")
        for word in (
            *("committed", "outcome", "recover", "call_took_place", "transaction", "history", "message"),
            "ledger",
        )
    ),
    Row("admin.give_up", (ADMINISTER,)),
    Row("admin.skip_damaged", (ADMINISTER,)),
    *(Row(f"admin.{word}", (ADMINISTER,)) for word in audit.ACCOUNTS),
    Row("read", (IN, APP)),
    Row("stage", (WRITE,)),
    Row("adopt"),  # its rows are read before what they name is known: see ``test_staging.py``
    Row("get.read", (IN, APP)),
    Row("get.browse", (IN,)),
    Row("get.branches", (APP,)),
    Row("get.backup", (ADMINISTER,)),
    Row("put", (WRITE,)),
)
ARGUMENTS: dict[str, Any] = {
    **dict(CALLS),
    "hello": {},
    "admin.give_up": {},
    "admin.skip_damaged": {"queue": "q"},
    "get.read": TICKETS[0],
    "get.browse": TICKETS[1],
    "get.branches": {"branches": ["staged"]},
    "get.backup": {"backup": True},
}


def ask(
    url: str, row: Row, user: str = "", password: str = PASSWORD, vhost: str = "/"
) -> errors.TxmqError | None:
    """The error that the call of ``row`` gets; None for an answer."""
    raw = Raw(url, Basic(user, password).header if user else "", vhost)
    arguments = ARGUMENTS.get(row.call)
    try:
        if row.call == "put":
            found = raw._asked(lambda: _put(raw))
        elif row.call.startswith("get."):
            found = raw.get(contract.encode(arguments))
        else:
            found = raw.call(row.call, arguments)
    finally:
        raw.client.close()
    return found if isinstance(found, errors.TxmqError) else None


def _put(raw: Raw) -> None:
    descriptor = arrow_flight.FlightDescriptor.for_command(contract.encode(HEADER))
    writer, reader = raw.client.do_put(descriptor, contract.NO_COLUMNS)
    with writer:
        writer.write_metadata(contract.encode_numbered(0, messages(b"1")))
        writer.done_writing()
        while reader.read() is not None:
            pass


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    patched = pytest.MonkeyPatch()
    patched.setattr(throttle, "FIRST_S", 0.0)  # the rows are not slowed down by those before
    patched.setattr(throttle, "ADDRESS_S", 0.0)
    with patched.context(), Broker.open(tmp_path_factory.mktemp("flight"), amqp=["127.0.0.1:0"]) as made:
        with made.channel() as channel:
            for queue in ("in", "w", "other"):
                channel.queue_declare(queue)
            for number in range(3):
                channel.publish(str(number).encode(), routing_key="in")
        accounts = made.accounts
        for user in (USER, NOBODY, ROOT):
            accounts.add_user(user, passwords.hashed(PASSWORD, CHEAP))
        accounts.set_permissions(ROOT, ".*", ".*", ".*")
        accounts.set_tags(ROOT, ["administrator"])
        prepare(made)
        yield made
    patched.undo()


def prepare(broker: Broker) -> None:
    """Attempt "t" of the app is open, and a branch of another attempt is staged."""
    engine = broker.engine
    engine.open_batch("app", "q", 0, "fail", token="t")
    engine.open_batch("app", "q", 0, "fail", token="t2")
    of_app = {**HEADER, "token": "t2", "branch": "staged"}
    header = contract.decode(contract.BranchHeader, contract.encode(of_app))
    engine.stage_part(header, 0, messages(b"1"))


def allow(broker: Broker, needs: tuple[Need, ...], without: Need | None = None) -> None:
    """The user may do what ``needs`` say, and all but ``without``."""
    accounts = broker.accounts
    patterns = []
    for each in ("configure", "write", "read"):
        if without is None:
            names = [re.escape(name) for permission, _, name in needs if permission == each]
            patterns.append(f"^({'|'.join(names)})$")
        else:
            patterns.append(f"^(?!{re.escape(without[2])}$).*$" if without[0] == each else ".*")
    accounts.set_permissions(USER, *patterns)
    tags = [name for permission, _, name in needs if permission == "tag"]
    accounts.set_tags(USER, [] if without is not None and without[0] == "tag" else tags)
    owner = ROOT if without is not None and without[0] == "app" else USER

    def own(state: Any, change: Any, _now: int) -> None:
        state.users.own_app(change, "app", owner)

    broker.engine.local.run(own)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.call)
def test_a_call_without_login_or_with_a_wrong_password_is_refused(broker: Broker, row: Row) -> None:
    assert isinstance(ask(broker.url, row), errors.LoginRefused)
    assert isinstance(ask(broker.url, row, USER, "wrong"), errors.LoginRefused)
    assert isinstance(ask(broker.url, row, "unknown"), errors.LoginRefused)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.call)
def test_a_call_needs_its_permissions_and_no_more(broker: Broker, row: Row) -> None:
    if row.needs is None:
        assert ask(broker.url, row, NOBODY) is None
        return
    found = ask(broker.url, row, NOBODY)
    assert isinstance(found, errors.AccessRefused) or row.call.startswith("channel."), found
    for need in row.needs:
        allow(broker, row.needs, need)
        refused = ask(broker.url, row, USER)
        assert isinstance(refused, errors.AccessRefused), (row.call, need, refused)
        assert f"refused for user '{USER}'" in refused.summary
    allow(broker, row.needs)
    found = ask(broker.url, row, USER)
    assert not isinstance(found, (errors.AccessRefused, errors.LoginRefused)), found


@pytest.mark.parametrize(
    "row", [row for row in ROWS if OPERATE in (row.needs or ())], ids=lambda row: row.call
)
def test_who_looks_does_not_decide(broker: Broker, row: Row) -> None:
    allow(broker, (LOOK,))
    refused = ask(broker.url, row, USER)
    assert isinstance(refused, errors.AccessRefused) and "the tag administrator or operator" in str(refused)


def test_an_operator_drops_the_attempt_of_another(broker: Broker) -> None:
    last = broker.engine.last_entry("app")  # another test may have resumed it
    broker.engine.open_batch("app", "q", 0 if last is None else last.batch_id + 1, "fail", token="lost")
    for need, is_kept in ((LOOK, True), (OPERATE, False)):
        allow(broker, (need,), ("app", "", "app"))
        broker.accounts.set_tags(USER, [need[2]])
        raw = Raw(broker.url, Basic(USER, PASSWORD).header)
        raw.call("engine.rollback_batch", {"token": "lost"})
        found = raw.call("engine.rollback_batch", {"token": "lost", "of": ""})
        assert isinstance(found, errors.AccessRefused) is is_kept, found
        assert any(each.token == "lost" for each in broker.engine.staged_batches()) is is_kept


OTHER = "other"  # a virtual host


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.call)
def test_permissions_of_another_virtual_host_do_not_help(broker: Broker, row: Row) -> None:
    """And with them nothing of this one is found there."""
    elsewhere(broker)
    allow(broker, ())
    broker.accounts.clear_permissions(USER)
    if row.needs is not None:
        found = ask(broker.url, row, USER)
        assert isinstance(found, errors.AccessRefused) or row.call.startswith("channel."), found
    before = [(queue.name, queue.messages, queue.owner) for queue in broker.queues()], broker.engine.apps()
    found = ask(broker.url, row, USER, vhost=OTHER)
    of_tag = any(need[0] == "tag" for need in row.needs or ())
    assert isinstance(found, errors.AccessRefused) == of_tag, found
    assert found is None or OTHER in found.summary or not isinstance(found, errors.QueueNotFound)
    assert (
        [(queue.name, queue.messages, queue.owner) for queue in broker.queues()],
        broker.engine.apps(),
    ) == before
    missing = ask(broker.url, row, USER, vhost="missing")
    assert (missing is None) == (row.call == "hello")
    assert missing is None or isinstance(missing, errors.NotAllowed), missing


def elsewhere(broker: Broker) -> None:
    """A fresh virtual host where the user may do everything that needs no tag."""
    if OTHER in broker.engine.state.virtual_hosts.by_name:
        broker.vhosts.delete_vhost(OTHER)
    broker.vhosts.add_vhost(OTHER)
    broker.accounts.set_permissions(USER, ".*", ".*", ".*", OTHER)


def test_who_knows_the_id_of_a_channel_can_do_nothing_with_it(broker: Broker) -> None:
    """Nor open it first, nor change what is known of its calls."""
    allow(broker, ())
    mine = Raw(broker.url, Basic(USER, PASSWORD).header)
    assert not isinstance(mine.call("channel.tx_select", {}), errors.TxmqError)
    theirs = Raw(broker.url, Basic(ROOT, PASSWORD).header)
    theirs.channel_id = mine.channel_id
    for word in ("tx_commit", "keepalive", "tx_select"):
        found = theirs.call(f"channel.{word}", {})
        assert isinstance(found, errors.ConnectionFailed), word
    took_place = {"channel": mine.channel_id, "number": 3, "since_us": 0}
    message = {"exchange": "", "routing_key": "in", "body": b"x", "properties": b"", "mandatory": False}
    say = {"channel": mine.channel_id, "number": 0, "arguments": {}}
    theirs.action("channel.open", contract.encode(say))
    for number, (word, given) in enumerate((("tx_select", {}), ("publish", message), ("tx_commit", {})), 1):
        theirs.action(f"channel.{word}", contract.encode({**say, "number": number, "arguments": given}))
    assert theirs.call("admin.call_took_place", took_place) == [b"true"]
    assert mine.call("admin.call_took_place", took_place) == [b"false"]
    theirs.action("channel.close", contract.encode(say))
    assert not isinstance(mine.call("channel.tx_rollback", {}), errors.TxmqError)


def test_a_channel_without_permissions_is_refused(broker: Broker) -> None:
    nobody = Raw(broker.url, Basic(NOBODY, PASSWORD).header)
    said = {"channel": "c", "number": 0, "arguments": {}}
    found = nobody.action("channel.open", contract.encode(said))
    assert isinstance(found, errors.AccessRefused)


def test_every_call_has_a_row_and_an_entry(broker: Broker) -> None:
    calls = {
        "hello",
        "read",
        "stage",
        "adopt",
        "put",
        *(f"get.{name}" for name in contract.Ticket.__dataclass_fields__ if name != "transaction"),
        *(f"engine.{word}" for word in contract.METHODS),
        *(f"channel.{word}" for word in call_permissions.CHANNEL),
        *(f"admin.{word}" for word in broker.server.admin_words),
    }
    assert {row.call for row in ROWS} == calls
    assert set(call_permissions.ENGINE) == set(contract.METHODS)
    of_a_channel = {name for name, member in vars(LocalChannel).items() if inspect.isfunction(member)}
    public = {name for name in of_a_channel if not name.startswith("_")} - {"close", "end_late"}
    assert set(call_permissions.CHANNEL) == public | {"publish_all", "take_returned"}
    assert set(call_permissions.ADMIN) == set(broker.server.admin_words)
    assert set(broker.server.streaming) == {"DoGet", "DoPut"}


def test_a_call_without_an_entry_is_refused(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(broker, (IN,))
    monkeypatch.delitem(call_permissions.ENGINE, "logs")
    row = Row("engine.logs")
    assert isinstance(ask(broker.url, row, USER), errors.AccessRefused)
    assert ask(broker.url, row, ROOT) is None


def test_the_rows_that_are_staged_need_write_on_each_exchange(broker: Broker) -> None:
    allow(broker, (WRITE,))
    raw = Raw(broker.url, Basic(USER, PASSWORD).header)

    def staged(*exchanges: str) -> Any:
        rows = messages(*(b"1" for _ in exchanges))
        rows = rows.set_column(0, rows.schema.field("exchange"), pa.array(exchanges))
        header = contract.decode(contract.BranchHeader, contract.encode({**HEADER, "branch": exchanges[-1]}))
        return raw.action("stage", contract.encode_part(contract.PartHeader(header, 0), rows))

    assert not isinstance(staged("", ""), errors.TxmqError)
    found = staged("", "amq.direct")
    assert isinstance(found, errors.AccessRefused) and "exchange 'amq.direct'" in found.summary
    broker.accounts.set_permissions(USER, "", ".*", "")
    broker.accounts.set_topic_permissions(USER, "amq.topic", "^out$", "")
    found = staged("", "amq.topic")
    assert isinstance(found, errors.AccessRefused) and "to topic 'in'" in found.summary
    broker.accounts.clear_topic_permissions(USER)
    assert not isinstance(staged("", "amq.topic"), errors.TxmqError)


def test_each_key_under_cc_and_bcc_needs_its_topic_permission(broker: Broker) -> None:
    """As in AMQP, for a publish of a channel and for staged rows."""
    raw = Raw(broker.url, Basic(USER, PASSWORD).header)
    broker.accounts.set_permissions(USER, "", ".*", "")
    broker.accounts.set_topic_permissions(USER, "amq.topic", "^public", "")
    for name, key, permitted in itertools.product(("CC", "BCC"), ("secret", "public.b"), (False, True)):
        if permitted is not key.startswith("public"):
            continue
        properties = Properties(headers={name: ["public.a", key]}).encode()
        said = {"body": b"", "exchange": "amq.topic", "routing_key": "public", "properties": properties}
        rows = pa.RecordBatch.from_pylist([{**said}], schema=MESSAGE_SCHEMA)
        header = contract.decode(
            contract.BranchHeader, contract.encode({**HEADER, "token": f"{name} {key}", "branch": name + key})
        )
        part = contract.encode_part(contract.PartHeader(header, 0), rows)
        encoded = json.loads(contract.encode(said))
        for call in (
            lambda: raw.call("channel.publish", encoded),  # noqa: B023
            lambda: raw.call("channel.publish_all", {"messages": [encoded]}),  # noqa: B023
            lambda: raw.action("stage", part),  # noqa: B023
        ):
            found = call()
            if permitted:
                assert not isinstance(found, errors.TxmqError), found
            else:
                assert isinstance(found, errors.AccessRefused) and "to topic 'secret'" in found.summary
    broker.accounts.clear_topic_permissions(USER)


def test_a_user_id_must_be_the_user(broker: Broker) -> None:
    """Consumers trust it, because AMQP checks it; an administrator is no other user either."""
    broker.accounts.set_permissions(USER, "", ".*", "")
    for user, named, fits in ((USER, ROOT, False), (USER, USER, True), (ROOT, USER, False)):
        raw = Raw(broker.url, Basic(user, PASSWORD).header)
        properties = {"$bytes": base64.b64encode(Properties(user_id=named).encode()).decode()}
        said = {"body": {"$bytes": ""}, "routing_key": "w", "properties": properties}
        for word, arguments in (("publish", said), ("publish_all", {"messages": [said]})):
            found = raw.call(f"channel.{word}", arguments)
            assert isinstance(found, errors.PreconditionFailed) is not fits, found


@pytest.mark.parametrize("durable", [False, True])
def test_a_queue_that_is_exclusive_to_a_connection_is_not_seen_by_others(
    broker: Broker, durable: bool
) -> None:
    """By no call, nor how many messages it has; and direct replies are those of one client."""
    with broker.channel() as channel, Peer(broker.amqp_urls[0]) as peer:
        channel.queue_declare("private", exclusive=True, durable=durable)
        channel.publish(b"1", routing_key="private")
        peer.user, peer.password = ROOT, PASSWORD
        peer.opened(1)
        peer.call(1, c.Basic.Consume(queue="amq.rabbitmq.reply-to", no_ack=True), c.Basic.ConsumeOk)
        (replies,) = (name for name in broker.engine.state.topology.queues if name.startswith("amq.rabbitmq"))
        raw = Raw(broker.url, Basic(ROOT, PASSWORD).header)
        for queue, expected in (("private", errors.ResourceLocked), (replies, errors.QueueNotFound)):
            origin = {"at": "earliest"}
            for found in (
                raw.get(contract.encode({"browse": [[queue, 0, 1]]})),
                raw.call("engine.logs", {"queues": [queue]}),
                raw.call("engine.available", {"logs": [queue], "starts": None}),
                raw.call("engine.offsets", {"queues": [queue], "origin": origin}),
                raw.call("engine.wait", {"queues": [queue], "ends": {}, "timeout_s": 0.0}),
                raw.call("engine.dead_letter_route", {"queue": queue}),
                raw.call(
                    "engine.claim",
                    {
                        **dict(CALLS)["engine.claim"],
                        "app_id": "of root",
                        "queues": [queue],
                        "start": {queue: "start"},
                        "limit": {"max_rows": 1, "max_bytes": 10, "end": None},
                    },
                ),
            ):
                assert isinstance(found, expected), found


def test_a_changed_permission_holds_for_the_next_call(broker: Broker) -> None:
    raw = Raw(broker.url, Basic(USER, PASSWORD).header)
    read: Callable[[], Any] = lambda: raw.call("engine.logs", {"queues": ["in"]})  # noqa: E731
    for _ in range(3):
        broker.accounts.set_permissions(USER, "", "", ".*")
        assert not isinstance(read(), errors.TxmqError)
        broker.accounts.set_permissions(USER, "", "", "^$")
        assert isinstance(read(), errors.AccessRefused)


def test_the_read_of_a_deleted_user_ends(broker: Broker) -> None:
    broker.accounts.add_user("reader", passwords.hashed(PASSWORD, CHEAP))
    broker.accounts.set_permissions("reader", ".*", ".*", ".*")
    assert ask(broker.url, Row("get.browse"), "reader") is None
    held = Raw(broker.url, Basic("reader", PASSWORD).header)
    held.call("channel.publish", {"body": {"$bytes": "AAA="}, "routing_key": "other"})
    assert not isinstance(held.call("channel.get", {"queue": "other"}), errors.TxmqError)
    assert [queue.unacknowledged for queue in broker.queues() if queue.name == "other"] == [1]
    broker.accounts.delete_user("reader")  # its channel is closed, what it held is ready
    assert [queue.unacknowledged for queue in broker.queues() if queue.name == "other"] == [0]
    assert isinstance(ask(broker.url, Row("get.browse"), "reader"), errors.LoginRefused)
