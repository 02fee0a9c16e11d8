"""The table of permissions, with codes and texts: txmq's, and RabbitMQ's with ``TXMQ_INTEROP_URL`` and
``TXMQ_INTEROP_CTL`` (a rabbitmqctl).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pika
import pytest
from pamqp import commands as c

from broker_core.amqp.v0_9_1.methods import METHODS
from broker_core.core import password as passwords
from broker_core.launcher import Broker
from broker_core.server.access import throttle
from tests.amqp_peer import CAPABILITIES, Closed, Peer, encoded
from tests.permission_rows import (
    NOTHING,
    PASSWORD,
    ROWS,
    USER,
    Row,
    Set,
    answer,
    check,
    encode,
    prepare,
    refused,
    untouched,
)

ROOT = "root"  # may do everything
OTHER = "other"  # a virtual host where the user may do everything


class Site(NamedTuple):
    """A broker with the user of the rows. ``topic``: exchange, write, read; ``clear``: no permission."""

    host: str
    set_permissions: Set
    set_topic: Callable[[str, str, str], None]
    clear: Callable[[], None]
    everything_in: Callable[[str], None]  # another virtual host

    def url(self, user: str) -> str:
        return f"amqp://{user}:{PASSWORD.replace(' ', '%20')}@{self.host}/"

    def opened(self) -> contextlib.AbstractContextManager[Peer]:
        return opened(self, USER)


@contextlib.contextmanager
def opened(site: Site, user: str, vhost: str = "/") -> Iterator[Peer]:
    with Peer(f"amqp://{site.host}") as made:
        made.user, made.password = user, PASSWORD
        yield made.opened(1, vhost=vhost)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    other, control = os.environ.get("TXMQ_INTEROP_URL"), os.environ.get("TXMQ_INTEROP_CTL")
    if other and not control:
        pytest.skip("TXMQ_INTEROP_CTL is not set: users of the other broker cannot be made")
    if other and control:

        def ctl(*words: str) -> None:
            subprocess.run([control, "-q", *words], check=True, timeout=120)

        with contextlib.suppress(subprocess.CalledProcessError):
            ctl("delete_user", USER)
        with contextlib.suppress(subprocess.CalledProcessError):
            ctl("delete_user", ROOT)
        for user in (USER, ROOT):
            ctl("add_user", user, PASSWORD)
        ctl("set_permissions", ROOT, ".*", ".*", ".*")
        made = Site(
            urlsplit(other).netloc.rpartition("@")[2],
            lambda *patterns: ctl("set_permissions", USER, *patterns),
            lambda *patterns: ctl("set_topic_permissions", USER, *patterns),
            lambda: ctl("clear_permissions", USER),
            lambda vhost: ctl("set_permissions", "-p", vhost, USER, ".*", ".*", ".*"),
        )
        with contextlib.suppress(subprocess.CalledProcessError):
            ctl("delete_vhost", OTHER)
        ctl("add_vhost", OTHER)
        prepared(made)
        yield made
        return
    directory: Path = tmp_path_factory.mktemp("permissions")
    with Broker.open(directory, amqp=["127.0.0.1:0"]) as broker:
        accounts = broker.accounts
        for user in (USER, ROOT):
            accounts.add_user(user, passwords.hashed(PASSWORD, passwords.Cost(4)))
        accounts.set_permissions(ROOT, ".*", ".*", ".*")
        made = Site(
            urlsplit(broker.amqp_urls[0]).netloc,
            lambda *patterns: accounts.set_permissions(USER, *patterns),
            lambda *patterns: accounts.set_topic_permissions(USER, *patterns),
            lambda: accounts.clear_permissions(USER),
            lambda vhost: accounts.set_permissions(USER, ".*", ".*", ".*", vhost),
        )
        broker.vhosts.add_vhost(OTHER)
        prepared(made)
        yield made


def prepared(site: Site) -> None:
    with opened(site, ROOT) as root:
        prepare(root)
    site.everything_in(OTHER)  # which helps in none of the rows


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_command_needs_the_permissions_of_the_table(site: Site, row: Row) -> None:
    check(row, site.set_permissions, site.opened)


def test_every_method_that_a_client_may_send_has_a_row() -> None:
    sent = {key for key, kind in METHODS.items() if kind.SENT_BY != "server"}
    assert {divmod(row.frame.index, 1 << 16) for row in ROWS} == sent
    rows = {row.name.split(" ")[0] for row in ROWS}
    assert rows == {METHODS[key].NAME for key in sent}


def ends(client: Peer) -> tuple[int, str]:
    """Code and text of the connection.close that comes, with nothing before; RabbitMQ may close the socket
    without a word before the login.
    """
    try:
        closed = client.expect(c.Connection.Close, 0)
    except Closed:
        if "TXMQ_INTEROP_URL" not in os.environ:
            raise
        return 0, ""
    return closed.reply_code, closed.reply_text


def test_every_method_before_the_login_closes_the_connection_and_does_nothing(site: Site) -> None:
    prepared(site)
    for row in ROWS:
        if row.name == "connection.start-ok":
            continue  # it is the login
        with Peer(f"amqp://{site.host}") as client:
            client.started()
            client.write(encode(row))
            if row.login is not None and "TXMQ_INTEROP_URL" not in os.environ:
                client.expect(row.login, row.channel)
                continue
            code, text = ends(client)
        if row.channel:
            assert (code, text[:20]) in ((505, "UNEXPECTED_FRAME - t"), (0, "")), row.name
        else:
            expected = "CHANNEL_ERROR - unexpected method in connection state starting"
            assert (code, text) in ((504, expected), (0, "")), row.name
    with opened(site, ROOT) as root:
        untouched(root)


def test_every_method_behind_a_wrong_password_is_not_carried_out(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throttle, "FIRST_S", 0.0)  # the rows are not slowed down by those before
    monkeypatch.setattr(throttle, "ADDRESS_S", 0.0)
    site.set_permissions(".*", ".*", ".*")
    prepared(site)
    login = c.Connection.StartOk({"capabilities": CAPABILITIES}, "PLAIN", f"\0{USER}\0wrong", "en_US")
    opening = (c.Connection.TuneOk(2047, 131_072, 0), c.Connection.Open("/"))
    for row in ROWS:
        with Peer(f"amqp://{site.host}") as client:
            client.started()
            client.write(
                b"".join(encoded(0, frame) for frame in (login, *opening))
                + b"".join(encoded(1, frame) for frame in (c.Channel.Open(), *row.before))
                + encode(row)
            )
            code, text = ends(client)
        assert (code, text[:34]) == (403, "ACCESS_REFUSED - Login was refused"), row.name
    with opened(site, ROOT) as root:
        untouched(root)


def test_every_method_on_a_connection_that_was_not_let_in_is_refused(site: Site) -> None:
    prepared(site)
    site.clear()
    for row in ROWS:
        with Peer(f"amqp://{site.host}") as client:
            client.user, client.password = USER, PASSWORD
            client.tuned()
            client.send(0, c.Connection.TuneOk(2047, 131_072, 0), c.Connection.Open("/"))
            client.send(1, c.Channel.Open(), *row.before)
            client.write(encode(row))
            assert ends(client)[0] == 530, row.name
    with opened(site, ROOT) as root:
        untouched(root)


def test_a_user_with_no_pattern_that_matches_gets_what_needs_no_permission_alone(site: Site) -> None:
    prepared(site)
    site.set_permissions(NOTHING, NOTHING, NOTHING)
    for row in ROWS:
        with site.opened() as client:
            found = answer(client, row)
        refused = isinstance(found, c.Channel.Close) and found.reply_code == 403
        assert refused == bool(row.needs), (row.name, found)
    with opened(site, ROOT) as root:
        untouched(root)


def test_every_method_in_another_virtual_host_finds_nothing_of_this_one(site: Site) -> None:
    prepared(site)
    site.set_permissions(NOTHING, NOTHING, NOTHING)
    for row in ROWS:
        with opened(site, USER, OTHER) as client:
            found = answer(client, row)
        assert not refused(found), row.name
        if isinstance(found, c.Channel.Close) and found.reply_code == 404:
            assert found.reply_text.endswith(f"in vhost '{OTHER}'"), found.reply_text
    with opened(site, ROOT) as root:
        untouched(root)


def test_a_user_without_permissions_does_not_enter_the_vhost(site: Site) -> None:
    site.clear()
    with Peer(f"amqp://{site.host}") as client:
        client.user, client.password = USER, PASSWORD
        client.tuned()
        client.send(0, c.Connection.TuneOk(2047, 131_072, 0))
        client.send(0, c.Connection.Open("/"))
        closed = client.expect(c.Connection.Close, 0)
    assert (closed.reply_code, closed.reply_text) == (
        530,
        f"NOT_ALLOWED - access to vhost '/' refused for user '{USER}'",
    )


def test_permissions_come_before_existence(site: Site) -> None:
    site.set_permissions(NOTHING, NOTHING, NOTHING)
    with site.opened() as client:
        client.send(1, c.Queue.Bind(queue="nowhere", exchange="nothing", routing_key=""))
        assert client.expect(c.Channel.Close, 1).reply_code == 403
    site.set_permissions(".*", ".*", ".*")
    with site.opened() as client:
        client.send(1, c.Queue.Bind(queue="nowhere", exchange="nothing", routing_key=""))
        assert client.expect(c.Channel.Close, 1).reply_code == 404


def test_a_pattern_is_searched_and_an_empty_one_permits_the_empty_name(site: Site) -> None:
    site.set_permissions("", "", "mpt")
    with site.opened() as client:
        assert client.get(1, "q-empty") is None
        client.send(1, c.Basic.Get(queue="q"))
        assert client.expect(c.Channel.Close, 1).reply_code == 403
    with site.opened() as client:
        client.publish(1, "", "q", b"")
        closed = client.expect(c.Channel.Close, 1)
    assert closed.reply_text == (
        f"ACCESS_REFUSED - access to exchange 'amq.default' in vhost '/' refused for user '{USER}'"
    )


def test_topic_permissions_limit_the_routing_keys_of_topic_exchanges(site: Site) -> None:
    site.set_permissions(".*", ".*", ".*")
    site.set_topic("amq.topic", "^{username}\\.[a-z]+$", "^public")
    text = (
        "ACCESS_REFUSED - access to topic '{}' in exchange 'amq.topic' in vhost '/' refused for user "
        f"'{USER}'"
    )
    with site.opened() as client:
        client.publish(1, "amq.topic", f"{USER}.news", b"")
        client.publish(1, "amq.topic", "other.news", b"")
        assert client.expect(c.Channel.Close, 1).reply_text == text.format("other.news")
    for name in ("CC", "BCC"):  # RabbitMQ does so since 4.0
        with site.opened() as client:
            client.publish(1, "amq.topic", f"{USER}.news", b"", headers={name: [f"{USER}.a"]})
            client.publish(1, "amq.topic", f"{USER}.news", b"", headers={name: [f"{USER}.a", "other.b"]})
            assert client.expect(c.Channel.Close, 1).reply_text == text.format("other.b")
    with site.opened() as client:
        client.call(1, c.Queue.Bind(queue="q", exchange="amq.topic", routing_key="public.a"), c.Queue.BindOk)
        client.send(1, c.Queue.Bind(queue="q", exchange="amq.topic", routing_key="secret.a"))
        assert client.expect(c.Channel.Close, 1).reply_text == text.format("secret.a")
    with site.opened() as client:
        client.publish(1, "amq.direct", "anything", b"")
        client.call(1, c.Queue.Bind(queue="q", exchange="amq.direct", routing_key="any"), c.Queue.BindOk)


@pytest.mark.txmq_only  # RabbitMQ needs a plugin
@pytest.mark.parametrize("type", ["direct", "topic"])
def test_who_publishes_to_an_exchange_that_delays_needs_the_right_when_he_publishes(
    site: Site, type: str
) -> None:
    """What then is due is routed without him, also into queues that he may not write."""
    with opened(site, ROOT) as root:
        arguments = {"x-delayed-type": type}
        root.call(
            1,
            c.Exchange.Declare(0, "later", "x-delayed-message", arguments=arguments),
            c.Exchange.DeclareOk,
        )
    try:
        site.set_permissions(NOTHING, "^later$", NOTHING)
        site.set_topic("later", "^mine$", NOTHING)
        with site.opened() as client:
            client.publish(1, "later", "mine", b"", headers={"x-delay": 3_600_000})
            client.publish(1, "later", "other", b"", headers={"x-delay": 3_600_000})
            client.publish(1, "amq.delayed.later", "", b"")
            closed = client.expect(c.Channel.Close, 1).reply_text
        assert ("topic 'other' in exchange 'later'" in closed) == (type == "topic"), closed
        assert ("exchange 'amq.delayed.later'" in closed) == (type == "direct"), closed
        site.set_permissions(".*", NOTHING, ".*")
        with site.opened() as client:
            client.publish(1, "later", "mine", b"", headers={"x-delay": 1})
            assert "exchange 'later'" in client.expect(c.Channel.Close, 1).reply_text
        for method in (c.Basic.Get(queue="amq.delayed.later"), c.Queue.Purge(queue="amq.delayed.later")):
            with site.opened() as client:
                client.send(1, method)
                assert client.expect(c.Channel.Close, 1).reply_code == 404
    finally:
        with opened(site, ROOT) as root:
            root.call(1, c.Exchange.Delete(exchange="later"), c.Exchange.DeleteOk)


def test_pika_gets_the_refusal_as_its_own_exception(site: Site) -> None:
    site.set_permissions(NOTHING, NOTHING, "^q$")
    login = pika.PlainCredentials(USER, PASSWORD)
    host, _, port = site.host.partition(":")
    with pika.BlockingConnection(
        pika.ConnectionParameters(host, int(port or 5672), credentials=login)
    ) as made:
        channel = made.channel()
        channel.confirm_delivery()
        with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
            channel.basic_publish("x", "k", b"body")
        assert caught.value.reply_code == 403
        again = made.channel()
        again.queue_purge("q")
        with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
            again.queue_declare("mine")
        assert caught.value.reply_text == (
            f"ACCESS_REFUSED - access to queue 'mine' in vhost '/' refused for user '{USER}'"
        )


def test_a_wrong_password_and_an_unknown_user_get_the_same_answer(site: Site) -> None:
    answers = set()
    for user, password in ((USER, "wrong"), ("nobody", "wrong"), (USER, "")):
        with Peer(f"amqp://{site.host}") as client:
            client.started()
            client.start_ok(response=f"\0{user}\0{password}")
            closed = client.expect(c.Connection.Close, 0)
        answers.add((closed.reply_code, closed.reply_text))
    assert answers == {
        (
            403,
            "ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN. For details see the "
            "broker logfile.",
        )
    }
