"""A browser without a screen: a cookie, forms, and what a page says."""

from __future__ import annotations

import html
import http.client
import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

from tests.server.http.http_client import PASSWORD


class PageAnswer(NamedTuple):
    status: int
    text: str
    headers: Mapping[str, str]

    @property
    def location(self) -> str:
        return self.headers.get("location", "")

    @property
    def form(self) -> str:
        """The secret of its forms."""
        found = re.search(r'name="form" value="([^"]+)"', self.text)
        assert found is not None, self.text
        return html.unescape(found[1])


class Visitor:
    """``user`` "": nobody has logged in."""

    def __init__(self, url: str, user: str = "", password: str = PASSWORD) -> None:
        parts = urlsplit(url)
        self.origin, self.cookie = url, ""
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
        if user:
            answer = self.log_in(user, password)
            assert answer.status == 303, answer

    def log_in(self, user: str, password: str = PASSWORD, then: str = "") -> PageAnswer:
        return self.post("/ui/login", {"user": user, "password": password, "next": then}, form=None)

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> PageAnswer:
        return self.ask("GET", path, None, headers or {})

    def post(
        self,
        path: str,
        fields: Mapping[str, Any] | bytes = b"",
        headers: Mapping[str, str] | None = None,
        form: str | None = "",
    ) -> PageAnswer:
        """``form``: the secret; "" is that of a page, None is none."""
        if isinstance(fields, bytes):
            body = fields
        else:
            secret = {} if form is None else {"form": form or self.get("/ui").form}
            body = urlencode({**fields, **secret}, errors="surrogatepass").encode()
        told = {"origin": self.origin, "content-type": "application/x-www-form-urlencoded", **(headers or {})}
        return self.ask("POST", path, body, told)

    def ask(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> PageAnswer:
        sent = {"cookie": self.cookie} if self.cookie else {}
        sent |= {name: text for name, text in headers.items() if text}
        try:
            self._connection.request(method, path, body, sent)
            response = self._connection.getresponse()
        except (http.client.RemoteDisconnected, ConnectionError):  # closed after a refusal, or idle
            self._connection.close()
            self._connection.request(method, path, body, sent)
            response = self._connection.getresponse()
        text = response.read().decode()
        told = {name.lower(): value for name, value in response.getheaders()}
        if "set-cookie" in told:
            self.cookie = told["set-cookie"].partition(";")[0]
        return PageAnswer(response.status, text, told)

    def close(self) -> None:
        self._connection.close()
