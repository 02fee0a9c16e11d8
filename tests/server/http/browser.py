"""Chromium of the machine, driven by Playwright; tests are skipped where either is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.server.http.http_client import PASSWORD

NAMES = ("chromium", "chromium-browser", "google-chrome")
WAIT_MS = 60_000


def executable() -> str:
    """Skips the test: there is no browser."""
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    return found


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of Playwright."""
    path = executable()
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: it is in the extra dev")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A page of one browser session, which remembers what went wrong on it."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.url = url
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        self.context.set_default_timeout(WAIT_MS)
        self.page = self.context.new_page()
        self.wrong: list[str] = []
        self.asked: list[str] = []
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", self._said)
        self.page.on("request", lambda request: self.asked.append(request.url))

    def _said(self, message: Any) -> None:
        if message.type == "error":
            self.wrong.append(message.text)

    def go(self, path: str) -> Any:
        return self.page.goto(self.url + path)

    def log_in(self, user: str = "boss", password: str = PASSWORD, path: str = "/ui") -> None:
        self.go(path)
        self.page.fill("input[name=user]", user)
        self.page.fill("input[name=password]", password)
        self.page.click("button.main")

    def text(self, where: str = "main") -> str:
        return str(self.page.inner_text(where))

    def close(self) -> None:
        self.context.close()
