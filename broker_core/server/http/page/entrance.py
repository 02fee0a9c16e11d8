"""How a browser comes in: its session, its forms, and what it is told when it is refused.

Not here: the login (``login.py``), sessions (``state/page_sessions.py``), rights (``gate.py``).
Invariant: a form changes something only with the secret of its session, and from a page of this origin
(``application.py``). The cookie is sent to the page alone, so the API needs a password with each request.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from urllib.parse import parse_qsl, quote

from starlette.requests import Request
from starlette.responses import Response

from broker_core.server.access.caller import Caller
from broker_core.server.http import gate
from broker_core.server.http.backend import Backend
from broker_core.server.http.call import Visit
from broker_core.server.http.connection import HttpConnection
from broker_core.server.http.page.rendering import HEADERS, render_page
from broker_core.server.http.refusal import HttpRefusal, bad_request

LOGIN = "/ui/login"
FIELDS, FORM_BYTES = 20, 64 * 1024  # of a form
LOGIN_NEEDED = "login_needed"


def is_page(path: str) -> bool:
    return path == "/" or path == "/ui" or path.startswith("/ui/")


def cookie_name(request: Request) -> str:
    """Brokers of one host share their cookies, whatever their ports are."""
    server = request.scope.get("server")
    return f"txmq_{server[1] if server else 0}"


def visit(backend: Backend, request: Request, connection: HttpConnection) -> Visit:
    """Raises Refusal: a change that no page of this origin asks for."""
    if request.method == "POST" and "origin" not in request.headers:
        raise HttpRefusal(403, "forbidden", "forms are accepted only from this broker's own pages")
    cookie = cookie_name(request)
    token = request.cookies.get(cookie, "")
    session = backend.sessions.find(token) if token else None
    query = request.scope["query_string"].decode("latin-1")
    target = request.scope["path"] + (f"?{query}" if query else "")
    return Visit(
        target,
        request.headers.get("host", ""),
        connection,
        cookie,
        request.url.scheme == "https",
        session,
        token,
    )


def caller(backend: Backend, visit: Visit) -> Caller:
    """Raises Refusal, NotAllowed (too many connections of the user)."""
    if visit.session is not None:
        found = gate.of_session(backend, visit.connection, visit.session)
        if found is not None:
            return found
        backend.sessions.close(visit.token)
    raise HttpRefusal(401, LOGIN_NEEDED, "Login required")


def form(request: Request, body: bytes, visit: Visit) -> Mapping[str, str]:
    """The fields. Raises Refusal: the form is not of the session."""
    try:
        fields = dict(
            parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=FIELDS, errors="strict")
        )
    except ValueError:
        raise bad_request("not a form") from None
    if request.method == "POST" and request.scope["path"] != LOGIN:
        secret = visit.session.form if visit.session is not None else ""
        sent = fields.get("form", "").encode(errors="replace")
        if not secret or not hmac.compare_digest(sent, secret.encode()):
            text = "the form belongs to another login: go back and load the page again"
            raise HttpRefusal(403, "forbidden", text)
    return fields


def refusal_page(request: Request, refusal: HttpRefusal) -> Response:
    if refusal.error == LOGIN_NEEDED and request.method in ("GET", "HEAD"):
        query = request.scope["query_string"].decode("latin-1")
        path = request.scope["path"] + (f"?{query}" if query else "")
        then = "" if path in ("/", "/ui") else f"?next={quote(path, safe='')}"
        return Response(status_code=303, headers={**HEADERS, "location": LOGIN + then})
    return render_page("refused.html", refusal.status, refusal=refusal)
