"""The application of Starlette: from a request to the answer of its route.

A request, in this order:
1. route: by the path as it was sent, so that ``%2F`` is a part of a name
2. origin: a page of another origin changes nothing, whatever the method
3. login, then the tags and the virtual host that the route needs
4. kept: an answer that this user had a moment ago, if it asks often
5. room: requests in progress, of the user and of all
6. body: no larger than allowed, and in time
7. answer: in the loop, or in a thread beside it if the route works and there is much

Tools come with a name and a password, and get JSON; browsers come with a session, and get pages
(``page/entrance.py``).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from broker_core.core import pieces
from broker_core.core.errors import TxmqError
from broker_core.server.access.caller import Caller
from broker_core.server.http import gate
from broker_core.server.http.backend import Backend
from broker_core.server.http.call import HttpAnswer, HttpCall, Visit
from broker_core.server.http.options import HttpOptions
from broker_core.server.http.page import entrance
from broker_core.server.http.refusal import HttpRefusal, bad_request, not_found, refusal_of
from broker_core.server.http.route import Route
from broker_core.server.http.state.answer_cache import AnswerCache
from broker_core.server.quotas import Quota

logger = logging.getLogger("txmq.http")

Handlers = Mapping[str, Route]
FEW = 200  # things that a list shows in the loop
# nothing of this listener is to be stored, framed or run by a browser
HEADERS = {
    "cache-control": "no-store",
    "vary": "origin, authorization",
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
}


class Paths:
    """Finds the route by the path as it was sent: a name in it may have a slash, as ``%2F``. A path without
    names is its own route. Each router has the other routes of one length and of one noun, so that few
    patterns are tried: one router of Starlette with all routes takes 40 to 180 us to find one, this one 2 to
    17.
    """

    def __init__(self, routes: Sequence[StarletteRoute], unknown: ASGIApp) -> None:
        self._unknown = unknown
        self._exact: dict[str, ASGIApp] = {each.path: each.app for each in routes if "{" not in each.path}
        found: dict[tuple[int, str], list[StarletteRoute]] = {}
        for route in routes:
            if route.path not in self._exact:
                found.setdefault(_place(route.path), []).append(route)
        self._routers = {
            place: Router(some, redirect_slashes=False, default=unknown) for place, some in found.items()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["raw_path"].decode("latin-1")
        path = path.removesuffix("/") or "/"  # as RabbitMQ does, and its Java client asks
        app = self._exact.get(path) or self._routers.get(_place(path)) or self._unknown
        await app({**scope, "path": path, "path_params": {}}, receive, send)


def _place(path: str) -> tuple[int, str]:
    steps = path.split("/", 3)
    return path.count("/"), steps[2] if len(steps) > 2 else ""


class Application:
    """``beside``: for routes that work, and ``waiting`` for those that wait for commits: while the disk
    hangs, an operator still looks. ``requests``: those in progress.
    """

    def __init__(
        self,
        backend: Backend,
        routes: Sequence[Route],
        options: HttpOptions,
        requests: Quota,
        beside: Executor,
        waiting: Executor,
    ) -> None:
        self._backend, self._options, self._requests = backend, options, requests
        self._beside, self._waiting = beside, waiting
        self._cache = AnswerCache()
        by_path: dict[str, dict[str, Route]] = {}
        for route in routes:
            by_path.setdefault(route.path, {})[route.method] = route
        self.asgi: ASGIApp = Paths(
            [
                StarletteRoute(path, _Endpoint(partial(self._answer, handlers), options.body_s))
                for path, handlers in by_path.items()
            ],
            _Endpoint(_no_route, options.body_s),
        )

    async def _answer(self, handlers: Handlers, request: Request) -> Response:
        caller = None
        action = method = request.scope["method"]
        try:
            route = handlers.get("GET" if method == "HEAD" else method)
            if route is None:
                return _not_allowed(request, handlers)
            action = f"{route.method} {route.path}"
            headers = _headers(request)
            if route.waits:
                _check_origin(headers)
            connection = request.scope["state"]["connection"]
            params = _params(request)
            visit = None
            if route.page:
                visit = entrance.visit(self._backend, request, connection)
                params = {**request.query_params, **params}
            caller = await self._caller(route, headers, connection, visit)
            if not self._is_open(route):
                gate.permit(caller, route.need)
            if route.need == "vhost":
                caller = gate.within(self._backend, caller, params.get("vhost", ""))
            key = _key(route, request, caller)
            cached = self._cache.find(key) if key is not None else None
            if cached is not None:
                return cached
            most = self._options.body_bytes if visit is None else entrance.FORM_BYTES
            with self._room(caller):
                found = await self._body(request, most) if _has_body(headers) else b""
                if visit is not None:
                    body: Mapping[str, Any] = entrance.form(request, found, visit)
                else:
                    body = await self._read(found) if found else {}
                reason = headers.get("x-reason", "")
                query = dict(request.query_params) if request.scope["query_string"] else {}
                changes = self._cache.changes
                call = HttpCall(self._backend, caller, params, query, body, reason, visit)
                response = await self._call_route(route, call)
            if route.waits:
                self._cache.changed()
            elif key is not None:
                self._cache.keep(key, response, changes, route.kept_s)
            return response
        except HttpRefusal as refusal:
            return self._refuse(request, caller, action, refusal)
        except TxmqError as error:
            return self._refuse(request, caller, action, refusal_of(error))
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception:
            logger.exception("%s failed", action)
            failed = HttpRefusal(500, "internal_error", "the broker's log has the reason")
            return self._refuse(request, caller, action, failed)

    def _room(self, caller: Caller) -> AbstractContextManager[None]:
        """Nobody takes none: who sends a login slowly, or guesses, would keep others from their login. Its
        connection is one of few (``UnauthenticatedLimit``), and its form is small.
        """
        user = caller.identity.user
        return self._requests.within(user) if user else nullcontext()

    def _is_open(self, route: Route) -> bool:
        return route.need == "metrics" and self._options.open_metrics

    async def _caller(
        self, route: Route, headers: Mapping[str, str], connection: Any, visit: Visit | None
    ) -> Caller:
        """Raises Refusal."""
        if self._is_open(route) or (visit is not None and route.need == "nobody"):
            return gate.nobody(self._backend, connection)
        if visit is not None:
            return entrance.caller(self._backend, visit)
        header, host = headers.get("authorization", ""), headers.get("host", "")
        return await gate.log_in(self._backend, connection, header, host)

    async def _read(self, body: bytes) -> Mapping[str, Any]:
        """Raises Refusal."""
        if len(body) <= pieces.SMALL_BYTES:
            return _object(body)
        return await asyncio.get_running_loop().run_in_executor(self._beside, _object, body)

    async def _call_route(self, route: Route, call: HttpCall) -> Response:
        if not route.works or (route.counted and self._backend.things <= FEW):
            found = route.answer(call)
            return _response(await found if isinstance(found, Awaitable) else found)
        loop = asyncio.get_running_loop()
        threads = self._waiting if route.waits else self._beside
        return await loop.run_in_executor(threads, lambda: _response(route.answer(call)))

    def _refuse(self, request: Request, caller: Any, action: str, refusal: HttpRefusal) -> Response:
        if refusal.denied and caller is not None:
            fields = {"listener": "http", "vhost": caller.state.vhost, "asked": action, "why": refusal.reason}
            who = caller.identity.user, caller.address
            self._backend.logins.audit.record("refused", *who, **fields)
            logger.info("%s of user '%s' at %s is refused: %s", action, *who, refusal.reason)
        return _refusal_response(request, refusal, page=entrance.is_page(request.scope["path"]))

    async def _body(self, request: Request, most: int) -> bytes:
        """Raises Refusal."""
        too_large = HttpRefusal(413, "body_too_large", f"a body has at most {most} bytes")
        length = request.headers.get("content-length", "0")
        if len(length) > 12 or int(length) > most:
            raise too_large
        found = bytearray()

        async def read() -> None:
            async for piece in request.stream():
                found.extend(piece)
                if len(found) > most:
                    raise too_large

        try:
            await asyncio.wait_for(read(), self._options.body_s)
        except asyncio.TimeoutError:
            raise HttpRefusal(
                408, "timeout", f"the body was not there within {self._options.body_s:g} s"
            ) from None
        return bytes(found)


def _object(found: bytes) -> Mapping[str, Any]:
    """Raises Refusal."""
    try:
        body = pieces.loads(found, _no_number, pieces.once)
        if b"\\ud" in found.lower():  # an escape may stand for half of a character
            pieces.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise bad_request("not_json: a text has a lone surrogate, which UTF-8 does not have") from None
    except pieces.GivenTwice as error:
        raise bad_request(f"not_json: {error}") from None
    except pieces.TooManyValues as error:
        raise HttpRefusal(413, "body_too_large", str(error)) from None
    except (ValueError, RecursionError):
        raise bad_request("not_json") from None
    if not isinstance(body, dict):
        raise bad_request("not_json: an object is needed")
    return body


class _Endpoint:
    """Takes every method of a path: Starlette would refuse some in a format of its own. ``drain_s``: how long
    a body that is refused is still read, and dropped.
    """

    def __init__(self, answer: Callable[[Request], Awaitable[Response]], drain_s: float) -> None:
        self._answer, self._drain_s = answer, drain_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = True  # of the body

        async def piece() -> Message:
            nonlocal left
            message = await receive()
            left = message.get("more_body", False)
            return message

        async def drain() -> None:
            while left:
                await piece()

        async def unfinished(message: Message) -> None:
            await send({**message, "more_body": True} if message["type"].endswith("body") else message)

        request = Request(scope, piece)
        response = _response(await self._answer(request))
        if response.headers.get("connection") != "close" or not left or "expect" in request.headers:
            await response(scope, receive, send)
            return
        # To close while bytes of the client are unread would reset the connection, and it would not see why.
        await response(scope, receive, unfinished)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(drain(), self._drain_s)
        await send({"type": "http.response.body", "body": b""})


def _no_number(text: str) -> None:
    """Python reads NaN and Infinity, which JSON does not have."""
    raise ValueError(text)


def _params(request: Request) -> dict[str, str]:
    """Raises Refusal."""
    try:
        return {name: unquote(value, errors="strict") for name, value in request.path_params.items()}
    except UnicodeDecodeError:
        raise bad_request("the path is not UTF-8") from None


def _key(route: Route, request: Request, caller: Caller) -> Hashable:
    """Of an answer that may be given again; None for the others."""
    if route.kept_s:
        return route.path
    if not route.often:
        return None
    scope = request.scope
    return scope["raw_path"], scope["query_string"], caller.identity, caller.rights.epoch


def _headers(request: Request) -> dict[str, str]:
    """The first of each name, as ``Request.headers`` finds it, decoded once."""
    sent = reversed(request.scope["headers"])
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in sent}


def _has_body(headers: Mapping[str, str]) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _check_origin(headers: Mapping[str, str]) -> None:
    """A browser sends the login of this listener with requests that pages of other origins make; with a GET
    it may leave out ``Origin``. Raises Refusal.
    """
    origin = headers.get("origin")
    foreign = origin is not None and urlsplit(origin).netloc != headers.get("host")
    if foreign or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise HttpRefusal(403, "forbidden", "a page of another origin requested a change")


def _not_allowed(request: Request, handlers: Handlers) -> Response:
    allowed = sorted({*handlers, "OPTIONS", *(["HEAD"] if "GET" in handlers else [])})
    if request.method == "OPTIONS":
        return Response(headers={"allow": ", ".join(allowed)})
    text = f"{request.method} is not one of {', '.join(allowed)}"
    response = _refusal_response(request, HttpRefusal(405, "method_not_allowed", text), page=False)
    response.headers["allow"] = ", ".join(allowed)
    return response


async def _no_route(request: Request) -> Response:
    return _refusal_response(request, not_found(), page=entrance.is_page(request.scope["path"]))


def _refusal_response(request: Request, refusal: HttpRefusal, *, page: bool) -> Response:
    """``page``: for a browser."""
    if page:
        response = entrance.refusal_page(request, refusal)
    else:
        response = _response(HttpAnswer(refusal.status, refusal.body))
        if refusal.status == 401:
            response.headers.update(gate.CHALLENGE)
    if refusal.status == 503:
        response.headers["retry-after"] = "1"
    if _has_body(request.headers):  # which may not have been read
        response.headers["connection"] = "close"
    return response


def _response(found: object) -> Response:
    if isinstance(found, Response):
        for name, value in HEADERS.items():
            found.headers.setdefault(name, value)
        return found
    answer = found if isinstance(found, HttpAnswer) else HttpAnswer(200, found)
    headers = {**HEADERS, **answer.headers}
    if answer.body is None:
        return Response(status_code=answer.status, headers=headers)
    try:
        content = _json(answer.body)
    except ValueError:  # a number that JSON does not have
        content = _json(_finite(answer.body))
    return Response(content, answer.status, headers, "application/json")


def _json(value: object) -> str:
    return pieces.dumps(value, default=_json_value, allow_nan=False)


def _finite(value: object) -> object:
    """The same with texts in place of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _json_value(value: object) -> object:
    """What JSON has no type for: of the arguments and headers of AMQP."""
    if isinstance(value, (bytes, bytearray)):
        return value.decode("utf-8", "replace")
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    return str(value)
