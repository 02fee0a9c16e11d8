"""The page in a real browser: every page, decisions by hand, hostile names, many queues, a broker that dies."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker_core.launcher import Broker
from broker_core.server.http import server
from broker_core.server.http.page.transactions import LAST
from tests.progress import GUARD_S, wait_until
from tests.server.conftest import Served
from tests.server.http.browser import WAIT_MS, Tab, chromium
from tests.server.http.http_client import PASSWORD, add_people, serving
from tests.server.http.page_scene import HOSTILE, PAGES, PICTURES, SHOWN, Scene, going_on, scene

pytestmark = [pytest.mark.slow, pytest.mark.soak]
SAMPLES = 60  # until a picture has curves
MANY = 1_000
SHOWN_LAST = """() => [
    [...document.querySelectorAll("#last tbody th")].map((each) => Number(each.textContent)),
    document.querySelector("#last a[rel=next]").getAttribute("href"),
]"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Iterator[Broker]:
    """With samples five times a second, so that plots have something to show."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "INTERVAL_S", 0.2)
        with serving(tmp_path_factory.mktemp("page")) as made:
            add_people(made)
            yield made


@pytest.fixture(scope="module")
def played(broker: Broker) -> Iterator[Scene]:
    with scene(broker) as found:
        with going_on(found):
            history = broker.http.backend.history  # type: ignore[union-attr]
            wait_until(lambda: history._samples >= SAMPLES)
        yield found


@pytest.fixture
def tab(broker: Broker, browser: Any, played: Scene) -> Iterator[Tab]:
    found = Tab(browser, broker.http_urls[0])
    found.log_in()
    found.page.wait_for_selector("#tiles")
    yield found
    found.close()
    assert found.wrong == []


def messages(broker: Broker, queue: str) -> int:
    return next(each.messages for each in broker.queues() if each.name == queue)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_in_light_and_dark(
    broker: Broker, browser: Any, played: Scene, scheme: str, tmp_path: Path
) -> None:
    """Nothing is wrong in the console, nothing is asked of another host, and the picture has something."""
    tab = Tab(browser, broker.http_urls[0], color_scheme=scheme)
    tab.log_in()
    with going_on(played):
        for name, path in PAGES.items():
            answer = tab.go(path.format(user="boss"))
            assert answer.status == 200, name
            tab.page.wait_for_load_state("networkidle")
            plots = tab.page.locator(".plot").count()
            assert tab.page.locator(".plot canvas").count() == plots, name
            picture = tmp_path / f"page-{name}-{scheme}.png"
            tab.page.screenshot(path=str(picture))
            assert picture.stat().st_size > 20_000
    back = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(244, 245, 247)") == (scheme == "light")
    assert tab.wrong == [] and all(each.startswith(broker.http_urls[0]) for each in tab.asked)
    tab.close()


def test_the_pages_have_their_pictures_in_the_documentation() -> None:
    text = (PICTURES.parent / "http.md").read_text()
    for shown in SHOWN:
        assert f"pictures/page-{shown}.png" in text
        assert (PICTURES / f"page-{shown}.png").stat().st_size > 20_000
    assert {path.stem.removeprefix("page-") for path in PICTURES.glob("page-*")} == SHOWN


def test_a_narrow_screen_shows_every_page_without_moving_sideways(
    broker: Broker, browser: Any, played: Scene
) -> None:
    tab = Tab(browser, broker.http_urls[0], viewport={"width": 360, "height": 740})
    tab.log_in()
    for name, path in {**PAGES, "refused": "/ui/queue?vhost=%2F&name=missing"}.items():
        tab.go(path.format(user="boss"))
        assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
    tab.go("/ui/apps?name=missing")
    text = tab.page.evaluate(
        "() => { const range = document.createRange(); range.selectNodeContents(document.querySelector('td.none')); "
        "return range.getBoundingClientRect().right <= innerWidth }"
    )
    assert text, "the sentence of an empty table"
    tab.close()


def test_a_refused_login_says_so_and_a_right_one_leads_to_the_page_that_was_asked_for(
    broker: Broker, browser: Any, played: Scene
) -> None:
    tab = Tab(browser, broker.http_urls[0])
    tab.log_in("boss", "wrong", "/ui/queue?vhost=%2F&name=orders")
    tab.page.wait_for_selector(".bad")
    assert "Login failed" in tab.text() and tab.page.input_value("input[name=password]") == ""
    tab.page.fill("input[name=password]", PASSWORD)
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector("#tiles")
    assert tab.page.url.endswith("/ui/queue?vhost=%2F&name=orders")
    tab.page.click("text=Log out")
    tab.page.wait_for_selector("input[name=password]")
    tab.go("/ui/queues")
    assert "/ui/login" in tab.page.url
    tab.close()


def test_a_transaction_in_doubt_is_decided_by_hand_after_a_confirmation(
    broker: Broker, played: Scene, tab: Tab
) -> None:
    before = messages(broker, "payments")
    tab.go("/ui/transactions")
    row = tab.page.locator("tr", has_text="transfer-7f3a")
    row.get_by_text("Commit…").click()
    tab.page.wait_for_selector("#do")
    assert "3 messages (900 B) are published" in tab.text() and "final" in tab.text()
    tab.page.click("text=Cancel")
    tab.page.wait_for_selector("#prepared")
    assert messages(broker, "payments") == before and len(broker.local.prepared()) == 2
    row.get_by_text("Commit…").click()
    tab.page.click("#do")
    tab.page.wait_for_selector(".notice")
    assert "transfer-7f3a is committed" in tab.text(".notice")
    assert messages(broker, "payments") == before + 3
    tab.page.locator("tr", has_text="nightly-settlement").get_by_text("Roll back…").click()
    assert "120 messages (35.2 KiB) are dropped" in tab.text()
    tab.page.click("#do")
    tab.page.wait_for_selector(".notice")
    assert "None." in tab.text("#prepared") and messages(broker, "payments") == before + 3
    tab.go("/ui/transactions")
    assert tab.page.locator(".notice").count() == 0  # it is shown once


def test_a_hostile_name_and_body_are_text(tab: Tab) -> None:
    for path in ("/ui", "/ui/queues"):
        tab.go(path)
        assert HOSTILE in tab.text() and tab.page.title().endswith("txmq")
    tab.page.get_by_text(HOSTILE).click()
    tab.page.wait_for_selector("#peek")
    assert tab.page.title() == f"{HOSTILE} · txmq"
    tab.page.click("button[value='10']")
    tab.page.wait_for_selector("pre")
    assert tab.page.locator("pre").first.inner_text() == "<img src=x onerror=document.title='taken'>"
    assert tab.page.locator("pre").nth(1).inner_text().startswith("00 01 02 03")
    tab.page.click("text=Purge…")
    assert f"Purge queue {HOSTILE} in /?" in tab.text() and "2 ready messages are dropped" in tab.text()
    tab.page.click("#do")
    tab.page.wait_for_selector(".notice")
    assert "is purged" in tab.text(".notice") and tab.page.title() != "taken"


def test_a_message_shows_its_life_and_a_transaction_what_it_did(broker: Broker, tab: Tab) -> None:
    """With a hostile name: from a peeked message to its transaction, and back."""
    name = f"past {HOSTILE}"
    with broker.channel() as channel:
        channel.queue_declare(name)
        channel.tx_select()
        channel.publish(b"one", "", name)
        channel.publish(b"two", "", name)
        channel.tx_commit()
    with broker.channel() as channel:
        channel.get(name, no_ack=True)
    tab.go("/ui/queues?name=past")
    tab.page.get_by_text(name).click()
    tab.page.click("button[value='1']")
    tab.page.click("text=Offset 1")
    tab.page.wait_for_selector("#steps")
    assert tab.text("h2") == "ready" and "published" in tab.text("#steps") and name in tab.text("h1")
    sequence = tab.page.locator("#steps a").first.inner_text()
    tab.page.locator("#steps a").first.click()
    tab.page.wait_for_selector("#effects")
    row = tab.page.locator("#effects tbody tr")
    assert row.count() == 1 and row.locator("td").all_inner_texts()[:3] == [name, "2", "0–1"]
    row.get_by_text("0", exact=True).click()
    tab.page.wait_for_selector("#steps")
    assert tab.text("h2") == "settled" and "acknowledged" in tab.text("#steps")
    tab.go("/ui/transactions")
    tab.page.fill("#search", sequence)
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector("#effects")
    assert name in tab.text("#effects") and tab.page.title() == f"Transaction {sequence} · txmq"


def test_the_last_transactions_lead_to_older_ones_and_to_what_each_did(broker: Broker, tab: Tab) -> None:
    """Each of them is on one page, also while others commit."""
    with broker.channel() as channel:
        channel.queue_declare("steps")
        for _ in range(2 * LAST + 10):
            channel.publish(b"x", "", "steps")
    tab.go("/ui/transactions")
    numbers: list[int] = []
    for page in range(3):
        found, older = tab.page.evaluate(SHOWN_LAST)  # at once: the newest page moves
        assert found == sorted(found, reverse=True) and len(found) == LAST
        assert not numbers or found[0] < numbers[-1]
        numbers += found
        with broker.channel() as channel:
            channel.publish(b"x", "", "steps")
        if page == 0:
            tab.go(older)
        elif page == 1:
            tab.page.locator("#last").get_by_text("older").click()
            tab.page.wait_for_url(f"**{older}")
    assert len(set(numbers)) == 3 * LAST and "published 1 in steps" in tab.text("#last")
    tab.page.locator("#last tbody th a").first.click()
    tab.page.wait_for_selector("#effects")
    assert "steps" in tab.text("#effects") and tab.page.title().startswith(
        f"Transaction {numbers[2 * LAST]} "
    )
    tab.go("/ui/transactions?before=3")
    tab.page.get_by_text("newest").click()
    tab.page.wait_for_url(lambda url: "before" not in url)
    tab.page.locator("section", has=tab.page.locator("#last")).get_by_text("other", exact=True).click()
    tab.page.wait_for_url("**vhost=other")
    assert "The history has no transactions." in tab.text("#last")


def test_numbers_move_without_a_reload_and_what_has_the_focus_keeps_it(broker: Broker, tab: Tab) -> None:
    tab.go("/ui/queues?name=heartbeats")
    tab.page.evaluate("window.here = 1")
    tab.page.locator("#rows tbody a").first.focus()
    with broker.channel() as channel:
        for _ in range(1234):
            channel.publish(b"x", "", "heartbeats")
    tab.page.wait_for_selector("#rows td:has-text('1,234')")
    assert tab.page.evaluate("window.here") == 1
    assert tab.page.evaluate("document.activeElement.textContent") == "heartbeats"


def test_keys_reach_everything(tab: Tab) -> None:
    tab.page.keyboard.press("Tab")
    assert tab.page.evaluate("document.activeElement.textContent") == "Skip to content"
    tab.page.keyboard.press("2")
    tab.page.wait_for_url("**/ui/queues")
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("orders.c")
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_url("**name=orders.c")
    assert tab.page.locator("#rows tbody tr").count() == 1
    for _ in range(40):
        tab.page.keyboard.press("Tab")
        if tab.page.evaluate("document.activeElement.textContent") == "orders.confirmed":
            break
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_url("**/ui/queue?*")
    assert tab.page.get_by_role("heading", name="orders.confirmed").count() == 1


def test_without_scripts_the_page_shows_and_changes_everything(
    broker: Broker, browser: Any, played: Scene
) -> None:
    with broker.channel() as channel:
        channel.queue_declare("unwanted")
    tab = Tab(browser, broker.http_urls[0], java_script_enabled=False)
    tab.log_in()
    for path in PAGES.values():
        assert tab.go(path).status in (200, 404)  # 404: a decided transaction
    tab.go("/ui/queue?vhost=%2F&name=unwanted")
    tab.page.click("text=Delete…")
    tab.page.click("#do")
    assert "Queue unwanted is deleted" in tab.text(".notice")
    assert "unwanted" not in [each.name for each in broker.queues()]
    tab.close()


def test_a_connection_is_closed_by_hand(broker: Broker, played: Scene, tab: Tab) -> None:
    tab.go("/ui/connections")
    assert "mailer-1" in tab.text() and "transactions" in tab.text("#channels")
    tab.page.locator("#connections").get_by_text("Close…").click()
    assert "rolled back" in tab.text()
    tab.page.click("#do")
    tab.page.wait_for_selector(".notice")
    assert "is closed" in tab.text(".notice")
    wait_until(lambda: not broker.http.backend.connections())  # type: ignore[union-attr]


def test_a_thousand_queues_are_searched_and_sorted_in_pages(broker: Broker, tab: Tab) -> None:
    def declare(state: Any, change: Any, _now: int) -> None:
        for number in range(MANY):
            state.topology.declare_queue(change, f"many-{number:04}", durable=False)

    broker.local.run(declare)
    with broker.channel() as channel:
        channel.publish(b"x", "", "many-0777")
        channel.publish(b"x", "", "many-0777")
        channel.publish(b"x", "", "many-0778")
    tab.go("/ui/queues?name=many-")
    assert tab.page.locator("#rows tbody tr").count() == 100 and "1,000 of 1,0" in tab.text(".pages")
    tab.page.click("text=next")
    tab.page.wait_for_url("**page=2")
    assert tab.page.locator("#rows tbody tr").first.inner_text().startswith("many-0100")
    tab.page.click("thead >> text=Ready")
    tab.page.wait_for_url("**by=ready**")
    names = tab.page.locator("#rows tbody th").all_inner_texts()
    assert names[:2] == ["many-0777", "many-0778"]
    assert tab.page.locator("th[aria-sort=descending]").inner_text().startswith("Ready")
    tab.page.fill("#search", "many-0999")
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_url("**name=many-0999")
    assert tab.page.locator("#rows tbody tr").count() == 1


@pytest.mark.crash
def test_the_broker_is_killed_while_the_page_is_open(served: Served, browser: Any) -> None:
    """The page says so, keeps the last numbers, and offers a login when the broker is back."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    served.start("", "--http", f"127.0.0.1:{port}")
    tab = Tab(browser, f"http://127.0.0.1:{port}")
    tab.log_in("guest", "guest", "/ui/store")
    tab.page.wait_for_selector("#tiles")
    served.kill()
    tab.page.wait_for_selector("#trouble:not([hidden])", timeout=GUARD_S * 1000)
    assert "does not answer" in tab.text("#trouble") and "Segments" in tab.text()
    assert tab.page.evaluate("document.body.classList.contains('stale')")
    served.start("", "--http", f"127.0.0.1:{port}")
    tab.page.wait_for_selector("#trouble a", timeout=WAIT_MS)
    assert "You are logged out" in tab.text("#trouble")
    tab.page.click("#trouble a")
    tab.page.fill("input[name=user]", "guest")
    tab.page.fill("input[name=password]", "guest")
    tab.page.click("button.main")
    tab.page.wait_for_selector("#tiles")
    assert tab.page.url.endswith("/ui/store")
    tab.close()
