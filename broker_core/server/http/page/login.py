"""The login of a browser, its end, and files that need none.

Invariant: the login goes the way of every listener: same users, throttle and audit log.
"""

from __future__ import annotations

import re
from urllib.parse import quote

from starlette.responses import Response

from broker_core.server.http import gate
from broker_core.server.http.call import HttpCall, Visit
from broker_core.server.http.page.rendering import ASSETS, HEADERS, TYPES, redirect, render_page
from broker_core.server.http.refusal import HttpRefusal, not_found
from broker_core.server.http.route import Route
from broker_core.server.http.state.page_sessions import LONGEST_S

HOME = "/ui"
_OWN_PAGE = re.compile(r"/ui(?:/[a-z/]*)?(?:\?[\w%&=.~+-]*)?", re.ASCII)


def _next(text: object) -> str:
    """A page of this listener; anything else is the first one."""
    return str(text) if _OWN_PAGE.fullmatch(str(text)) else HOME


def _form(call: HttpCall) -> Response:
    if _visit(call).session is not None:
        return redirect(call, _next(call.query.get("next", "")))
    return render_page("login.html", next=_next(call.query.get("next", "")), reason="", name="")


async def _log_in(call: HttpCall) -> Response:
    at, then = _visit(call), _next(call.body.get("next", ""))
    user, password = str(call.body.get("user", "")), str(call.body.get("password", ""))
    if len(user) + len(password) > gate.LONGEST:
        raise HttpRefusal(401, "not_authorised", "Login failed")
    backend = call.backend
    try:
        caller = await gate.check(backend, at.connection, user, password, at.host)
        gate.permit(caller, "management")
    except HttpRefusal as refusal:
        return render_page("login.html", refusal.status, next=then, reason=refusal.reason, name=user[:80])
    basis = backend.logins.basis(user, caller.address)
    if basis is None:  # it was deleted meanwhile
        raise HttpRefusal(401, "not_authorised", "Login failed")
    backend.sessions.close(at.token)
    token = backend.sessions.open(user, basis)
    return Response(
        status_code=303,
        headers={**HEADERS, "location": then, "set-cookie": _cookie(at, token, int(LONGEST_S))},
    )


def _log_out(call: HttpCall) -> Response:
    at = _visit(call)
    call.backend.sessions.close(at.token)
    call.record("logout")
    headers = {**HEADERS, "location": "/ui/login", "set-cookie": _cookie(at, "", 0)}
    return Response(status_code=303, headers=headers)


def _cookie(at: Visit, token: str, seconds: int) -> str:
    secure = "; Secure" if at.secure else ""
    return f"{at.cookie}={quote(token)}; Path=/ui; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}"


def _visit(call: HttpCall) -> Visit:
    assert call.at is not None
    return call.at


def _asset(call: HttpCall) -> Response:
    name = call.params["name"]
    content = ASSETS.get(name)
    if content is None:
        raise not_found()
    kind = TYPES[name.rpartition(".")[2]]
    headers = {
        "cache-control": "public, max-age=31536000, immutable",
        "content-type": f"{kind}; charset=utf-8",
    }
    return Response(content, headers=headers)


ROUTES = (
    Route("GET", "/", "nobody", lambda call: redirect(call, HOME), "To the page", works=False, page=True),
    Route("GET", "/ui/login", "nobody", _form, "The page: login", works=False, page=True),
    Route("POST", "/ui/login", "nobody", _log_in, "The page: log in", works=False, page=True),
    Route("POST", "/ui/logout", "management", _log_out, "The page: log out", works=False, page=True),
    Route(
        "GET", "/ui/assets/{name}", "nobody", _asset, "The page: styles and scripts", works=False, page=True
    ),
)
