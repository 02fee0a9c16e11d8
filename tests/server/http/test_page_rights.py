"""The page without a login, with each tag and for another virtual host's user; its forms and its sessions."""

from __future__ import annotations

import html
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from broker_core.launcher import Broker
from broker_core.server.http.routes import ROUTES
from broker_core.server.http.state import page_sessions
from broker_core.server.http.state.page_sessions import PageSessions
from tests.progress import wait_until
from tests.server.http.http_client import PASSWORD, Api, add_people, serving
from tests.server.http.http_rows import EVERYBODY, WHO
from tests.server.http.page_visitor import PageAnswer, Visitor
from txmq import cli

# every path of the page with what it needs, written down a second time; in a query: `V` is a virtual host
ROWS: tuple[tuple[str, str, str], ...] = (
    ("GET", "/", "everybody"),
    ("GET", "/ui/login", "everybody"),
    ("POST", "/ui/login", "everybody"),
    ("GET", "/ui/assets/{name}", "everybody"),
    ("POST", "/ui/logout", "management"),
    ("GET", "/ui", "management"),
    ("GET", "/ui/queues", "management"),
    ("GET", "/ui/connections", "management"),
    ("GET", "/ui/connection/close?name=gone", "own"),
    ("POST", "/ui/connection/close?name=gone", "own"),
    ("GET", "/ui/queue?vhost=V&name=gone", "vhost"),
    ("GET", "/ui/queue/purge?vhost=V&name=gone", "vhost"),
    ("POST", "/ui/queue/purge?vhost=V&name=gone", "vhost"),
    ("GET", "/ui/queue/delete?vhost=V&name=gone", "vhost"),
    ("POST", "/ui/queue/delete?vhost=V&name=gone", "vhost"),
    ("GET", "/ui/transaction?sequence=999999999", "management"),
    ("GET", "/ui/message?vhost=V&name=gone&offset=0", "vhost"),
    ("GET", "/ui/apps", "monitoring"),
    ("GET", "/ui/app?vhost=V&app=gone", "monitoring"),
    ("GET", "/ui/transactions?vhost=V&before=5", "monitoring"),
    ("GET", "/ui/store", "monitoring"),
    ("GET", "/ui/transaction/commit?vhost=V&xid=gone&of=boss", "monitoring"),
    ("GET", "/ui/transaction/rollback?vhost=V&xid=gone&of=boss", "monitoring"),
    ("POST", "/ui/transaction/commit?vhost=V&xid=gone&of=boss", "decides"),
    ("POST", "/ui/transaction/rollback?vhost=V&xid=gone&of=boss", "decides"),
)
CHANGES = [path for method, path, need in ROWS if method == "POST" and need != "everybody"]


@pytest.fixture
def nobody(broker: Broker) -> Iterator[Visitor]:
    visitor = Visitor(broker.http_urls[0])
    yield visitor
    visitor.close()


@pytest.fixture
def boss(broker: Broker) -> Iterator[Visitor]:
    visitor = Visitor(broker.http_urls[0], "boss")
    yield visitor
    visitor.close()


def ask(visitor: Visitor, method: str, path: str, vhost: str = "%2F") -> PageAnswer:
    at = path.replace("=V", f"={vhost}").replace("{name}", "page.css")
    return visitor.get(at) if method == "GET" else visitor.post(at, {})


def test_the_table_has_every_page() -> None:
    assert sorted((method, path.partition("?")[0]) for method, path, _ in ROWS) == sorted(
        (route.method, route.path) for route in ROUTES if route.page
    )


@pytest.mark.parametrize(("method", "path", "need"), [row for row in ROWS if row[2] != "everybody"])
def test_every_page_without_a_login_and_with_each_tag(
    broker: Broker, nobody: Visitor, method: str, path: str, need: str
) -> None:
    if method == "GET":
        answer = ask(nobody, method, path)
        assert answer.status == 303 and answer.location.startswith("/ui/login")
    else:
        assert nobody.post(path.replace("=V", "=%2F"), {}, form="x").status == 401
    allowed = {"own": WHO["monitoring"], "decides": ("manager", "operator", "boss")}.get(need) or WHO[need]
    for name in EVERYBODY:
        visitor = Visitor(broker.http_urls[0])
        refused = visitor.log_in(name)
        if name == "plain":  # has no tag
            assert refused.status == 401 and "Not management user" in refused.text and not visitor.cookie
            continue
        answer = ask(visitor, method, path)
        if need == "decides" and name == "manager":
            assert answer.status == 401 and "access to transactions of user" in answer.text
        elif name in allowed:
            assert answer.status in (200, 303, 404), (name, answer)
        else:
            assert answer.status == 401, (name, answer)
            last = json.loads((Path(broker.directory) / "audit.log").read_text().splitlines()[-1])
            assert (last["event"], last["user"]) == ("refused", name)
        visitor.close()


@pytest.mark.parametrize(("method", "path"), [row[:2] for row in ROWS if "vhost=V" in row[1]])
def test_a_virtual_host_of_others_is_shown_as_one_that_is_not_there(
    broker: Broker, method: str, path: str
) -> None:
    visitor = Visitor(broker.http_urls[0], "manager")
    other, nowhere = ask(visitor, method, path, "other"), ask(visitor, method, path, "nowhere")
    assert (other.status, other.text) == (nowhere.status, nowhere.text) and other.status == 401
    visitor.close()


def test_names_that_look_alike_are_told_apart_and_can_be_changed(broker: Broker, boss: Visitor) -> None:
    alike = {
        "alike": "alike",
        "alike ": "alike\\x20",
        " alike": "\\x20alike",
        "alike  one": "alike \\x20one",
        "alike\u200b": "alike\\u200b",
        "alike\\u200b": "alike\\\\u200b",
        "\u202ealike": "\\u202ealike",
        "alike\u3000": "alike\\u3000",
    }
    with broker.channel() as channel:
        for name in alike:
            channel.queue_declare(name)
    page = boss.get("/ui/queues?name=alike").text
    shown = [html.unescape(each) for each in re.findall(r">([^<]*alike[^<]*)</a>", page)]
    assert sorted(shown) == sorted(alike.values())
    assert not any(mark in page for mark in ("\u200b", "\u202e", "\u3000"))
    for name, text in alike.items():
        where = urlencode({"vhost": "/", "name": name})
        queue = boss.get(f"/ui/queue?{where}").text
        assert text in queue and f'name="name" value="{name}"' in queue
        assert text in boss.get(f"/ui/queue/delete?{where}").text
        assert boss.post(f"/ui/queue/delete?{where}", {}).status == 303
    left = {queue.name for queue in broker.queues()}
    assert left.isdisjoint(alike)


def test_no_page_has_an_escape_where_no_name_needs_one(boss: Visitor) -> None:
    for method, path, _ in ROWS:
        assert method == "POST" or "\\x20" not in ask(boss, method, path).text


def test_an_empty_broker_says_what_to_do_first_to_those_who_see_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As commands that run as they stand there; the password is in the environment."""
    monkeypatch.setenv("TXMQ_PASSWORD", PASSWORD)
    with serving(tmp_path) as broker:
        add_people(broker)
        boss, stranger = Visitor(broker.http_urls[0], "boss"), Visitor(broker.http_urls[0], "stranger")
        assert "txmq queue declare orders" not in stranger.get("/ui").text
        commands = re.findall(
            r"txmq ((?:queue|message) .*?)(?=\n|</pre>)", html.unescape(boss.get("/ui").text)
        )
        assert [cli.main(command.split()) for command in commands] == [0, 0]
        with broker.channel() as channel:
            delivery = channel.get("orders")
            assert delivery is not None and delivery.message.body == b"hello"
        wait_until(lambda: "txmq queue declare orders" not in boss.get("/ui").text)
        boss.close()
        stranger.close()


def test_pages_show_a_stranger_nothing_of_others(broker: Broker) -> None:
    with broker.channel() as channel:
        channel.queue_declare("secret-queue")
    visitor = Visitor(broker.http_urls[0], "stranger")
    for path in ("/ui", "/ui/queues", "/ui/connections", "/ui/queues?name=secret"):
        answer = visitor.get(path)
        assert answer.status == 200 and "secret-queue" not in answer.text
        assert "/ui/store" not in answer.text and "/ui/apps" not in answer.text
    assert visitor.get("/ui/queue?vhost=%2F&name=secret-queue").status == 401
    visitor.close()


# -- forms ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", CHANGES)
def test_a_form_without_the_secret_of_its_session_or_of_another_origin_changes_nothing(
    broker: Broker, boss: Visitor, path: str
) -> None:
    at = path.replace("=V", "=%2F")
    other = Visitor(broker.http_urls[0], "boss")
    for form in (None, "x", other.get("/ui").form):
        assert boss.post(at, {}, form=form).status == 403
    secret = boss.get("/ui").form
    for origin in ("http://evil.example", "null", ""):
        assert boss.post(at, {}, {"origin": origin}, form=secret).status == 403
    assert boss.get("/ui").status == 200  # a logout would have ended it
    other.close()


def test_a_page_of_another_origin_logs_nobody_in(nobody: Visitor) -> None:
    fields = {"user": "boss", "password": PASSWORD}
    for origin in ("http://evil.example", "null", ""):
        assert nobody.post("/ui/login", fields, {"origin": origin}, form=None).status == 403
    assert not nobody.cookie


@pytest.mark.parametrize("path", [path for method, path, _ in ROWS if method == "POST"])
def test_any_form_is_no_defect(broker: Broker, path: str, seed: int) -> None:
    source = random.Random(f"{seed} {path}")
    visitor = Visitor(broker.http_urls[0], "boss")
    values = ("", "x" * 300, "\x00", "\ud800", "<script>", "/", "..", "boss", "commit", "é", "1")
    names = ("user", "password", "next", "vhost", "name", "xid", "of", "form", "peek", "\ud800", "")
    for _ in range(40):
        fields = {source.choice(names): source.choice(values) for _ in range(source.randint(0, 6))}
        at = path.partition("?")[0]
        query = "&".join(
            f"{source.choice(names[:-2])}={source.choice(('%2F', '%00', '%ED%A0%80', '%FF', '..', 'x' * 400, ''))}"
            for _ in range(source.randint(0, 5))
        )
        body: Any = source.choice((fields, b"\xff\xfe", b"&" * 500, b"a=1&" * 100, b"=", b"%"))
        if at == "/ui/logout" and isinstance(body, dict):
            body = b"form=x"
        answer = visitor.post(f"{at}?{query}" if query else at, body, form=None)
        assert answer.status < 500, (at, query, body, answer)
        if answer.status == 303 and at == "/ui/login":
            visitor.log_in("boss")
    visitor.close()


@pytest.mark.parametrize("path", [path for method, path, _ in ROWS if method == "GET"])
def test_any_query_is_no_defect(broker: Broker, path: str, seed: int) -> None:
    source = random.Random(f"{seed} {path}")
    visitor = Visitor(broker.http_urls[0], "boss")
    values = (
        "%2F",
        "%00",
        "%ED%A0%80",
        "%FF",
        "..",
        "x" * 400,
        "",
        "-1",
        "0",
        "1e9",
        "9" * 12,
        "%3Cscript%3E",
        "ready",
        "(",
    )
    names = (
        "vhost",
        "name",
        "app",
        "xid",
        "of",
        "page",
        "sequence",
        "before",
        "offset",
        "by",
        "down",
        "peek",
        "next",
    )
    for _ in range(30):
        query = "&".join(
            f"{source.choice(names)}={source.choice(values)}" for _ in range(source.randint(0, 6))
        )
        answer = visitor.get(f"{path.partition('?')[0].replace('{name}', 'page.css')}?{query}")
        assert answer.status < 500, (path, query, answer)
        assert "<script>" not in answer.text.replace("<script defer", "")
    visitor.close()


# -- sessions ------------------------------------------------------------------------------------------------
def test_a_cookie_is_for_the_page_alone_and_unreadable(broker: Broker, nobody: Visitor) -> None:
    told = nobody.log_in("boss").headers["set-cookie"]
    for part in ("HttpOnly", "SameSite=Strict", "Path=/ui", "Max-Age="):
        assert part in told
    assert "Secure" not in told  # this listener speaks no TLS
    answer = Api(broker.http_urls[0], "").ask("GET", "/api/whoami", headers={"cookie": nobody.cookie})
    assert answer.status == 401
    page = nobody.get("/ui")
    assert page.headers["cache-control"] == "no-store"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy


def test_a_session_ends_with_its_user_its_password_and_a_logout(broker: Broker, boss: Visitor) -> None:
    api = Api(broker.http_urls[0], "boss")
    assert api.ask("PUT", "/api/users/leaving", {"password": "one", "tags": "management"}).status == 201
    for change in ("password", "tag", "logout", "deleted"):
        api.ask("PUT", "/api/users/leaving", {"password": "one", "tags": "management"})
        visitor = Visitor(broker.http_urls[0], "leaving", "one")
        assert visitor.get("/ui").status == 200
        if change == "password":
            api.ask("PUT", "/api/users/leaving", {"password": "two", "tags": "management"})
        elif change == "tag":
            api.ask("PUT", "/api/users/leaving", {"password": "one", "tags": ""})
        elif change == "deleted":
            api.ask("DELETE", "/api/users/leaving")
        else:
            kept = visitor.cookie
            visitor.post("/ui/logout", {})
            visitor.cookie = kept
        answer = visitor.get("/ui")
        assert answer.status in (303, 401) and "Log out" not in answer.text, change
        visitor.close()
    api.close()


def test_a_refused_login_is_throttled_and_in_the_audit_log(broker: Broker, nobody: Visitor) -> None:
    refusals = broker.http.backend.logins.refusals  # type: ignore[union-attr]
    for _ in range(2):
        answer = nobody.log_in("boss", "hunter2 <b>")
        assert answer.status == 401 and "Login failed" in answer.text and not nobody.cookie
        assert "hunter2" not in answer.text  # the password is not shown again
    assert broker.http.backend.logins.refusals == refusals + 2  # type: ignore[union-attr]
    text = (Path(broker.directory) / "audit.log").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert any(line["event"] == "login" and line.get("answer") == "refused" for line in lines)
    assert "hunter2" not in text


@pytest.mark.parametrize(
    ("then", "to"),
    [
        ("/ui/queue?vhost=%2F&name=a%2Fb", "/ui/queue?vhost=%2F&name=a%2Fb"),
        ("", "/ui"),
        ("//evil.example", "/ui"),
        ("https://evil.example/ui", "/ui"),
        ("/ui/../../evil", "/ui"),
        ("/\\evil.example", "/ui"),
        ("/ui\r\nset-cookie: x=1", "/ui"),
        ("/uievil", "/ui"),
        ("javascript:alert(1)", "/ui"),
    ],
)
def test_a_login_leads_to_a_page_of_this_listener_alone(nobody: Visitor, then: str, to: str) -> None:
    assert nobody.log_in("boss", then=then).location == to


def test_sessions_end_by_time_and_are_bounded() -> None:
    now = 0.0
    sessions = PageSessions(lambda: now)
    token = sessions.open("ann", "basis")
    for _ in range(200):
        now += page_sessions.IDLE_S - 1
        if sessions.find(token) is None:
            break
    assert page_sessions.LONGEST_S < now <= page_sessions.LONGEST_S + page_sessions.IDLE_S
    token = sessions.open("ann", "basis")
    now += page_sessions.IDLE_S + 1
    assert sessions.find(token) is None and len(sessions) == 0
    first, *_, last = [sessions.open("ann", "basis") for _ in range(page_sessions.OF_USER + 1)]
    assert sessions.find(first) is None and sessions.find(last) is not None
    assert len(sessions) == page_sessions.OF_USER
    for number in range(page_sessions.MOST * 2):
        sessions.open(f"user-{number}", "basis")
    assert len(sessions) == page_sessions.MOST
