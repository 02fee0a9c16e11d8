"""A schema registry: the HTTP API that Confluent defined, as far as readers and writers of messages need it.

Not here: the bytes in front of a message (``wire_format.py``), the formats.
Invariant: an answer is one of the registry itself. Whatever else answers in its place, such as a proxy, fails
the call; so no message is rejected because the registry could not be asked.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from broker_core.errors import LoginRefused, OptionError, RegistryFailed

Answer = tuple[int, dict[str, Any]]  # the status of HTTP, and the object of the body

_MEDIA = "application/vnd.schemaregistry.v1+json"
_WAITS_S = (0.2, 1.0)  # before the second and the third attempt
_SUBJECT, _VERSION, _SCHEMA = 40401, 40402, 40403  # the registry's error codes: what is not found
_MOST_REFERENCES = 1_000
_LARGEST_ID = (1 << 31) - 1  # an id is an int of Java


@dataclass(frozen=True)
class RegisteredSchema:
    """``kind``: AVRO, JSON or PROTOBUF. ``texts``: the schema behind those that it refers to, each behind its
    own.
    """

    kind: str
    texts: tuple[str, ...]


# An id names the same schema forever, and a schema has the same id in its subject: both by registry.
_schemas: dict[tuple[str, str], dict[int, RegisteredSchema]] = {}
_ids: dict[tuple[str, str], dict[tuple[str, str, str], int]] = {}


@dataclass(frozen=True)
class SchemaRegistry:
    """A registry at ``url``: ``http[s]://[user:password@]host[:port][/path]``. ``ca``, ``cert``, ``key``: PEM
    files of the driver, for TLS. Only the driver asks it. Raises OptionError.
    """

    url: str
    user: str = ""
    password: str = field(default="", repr=False)
    ca: str = ""
    cert: str = ""
    key: str = ""
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        try:
            parts = urllib.parse.urlsplit(self.url.strip())
            host, port = parts.hostname, parts.port
        except (AttributeError, ValueError):
            parts, host, port = urllib.parse.urlsplit(""), None, None
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
            raise OptionError(
                "the schema registry has a wrong url", "allowed is http[s]://host[:port][/path]"
            )
        if (self.ca or self.cert or self.key) and parts.scheme == "http":
            raise OptionError("ca, cert and key of the schema registry are for https", "leave them out")
        if bool(self.cert) != bool(self.key):
            raise OptionError("cert and key of the schema registry go together", "give both or none")
        name = f"[{host}]" if ":" in host else host
        place = name if port is None else f"{name}:{port}"
        object.__setattr__(self, "url", f"{parts.scheme}://{place}{parts.path.rstrip('/')}")
        if parts.username is not None:
            object.__setattr__(self, "user", urllib.parse.unquote(parts.username))
            object.__setattr__(self, "password", urllib.parse.unquote(parts.password or ""))

    @classmethod
    def of(cls, given: SchemaRegistry | str) -> SchemaRegistry:
        """Raises OptionError."""
        if isinstance(given, (SchemaRegistry, str)):
            return cls(given) if isinstance(given, str) else given
        raise OptionError(f"registry={given!r:.100}", "give the url of a registry, or a SchemaRegistry")

    def schema(self, number: int) -> RegisteredSchema | None:
        """The schema of an id; None if the registry has none. Raises RegistryFailed, LoginRefused."""
        if number > _LARGEST_ID:
            return None
        known = _schemas.setdefault((self.url, self.user), {})
        if number not in known:
            status, told = self._call("GET", f"/schemas/ids/{number}")
            if status == 404 and told.get("error_code") == _SCHEMA:
                return None
            known[number] = self._registered(self._success(status, told))
        return known[number]

    def latest(self, subject: str, kind: str) -> RegisteredSchema:
        """The newest schema of a subject, of this kind. Raises OptionError, RegistryFailed, LoginRefused."""
        path = f"/subjects/{urllib.parse.quote(subject, safe='')}/versions/latest"
        status, told = self._call("GET", path)
        if status == 404 and told.get("error_code") in (_SUBJECT, _VERSION):
            raise OptionError(
                f"the schema registry {self.url} has no subject {subject!r}", "register its schema first"
            )
        found = self._registered(self._success(status, told))
        if found.kind != kind:
            raise OptionError(f"subject {subject!r} is {found.kind}, not {kind}", "name another one")
        return found

    def register(self, subject: str, kind: str, text: str) -> int:
        """The id of a schema in ``subject``, which gets it as its newest version if it is new there. Raises
        OptionError, RegistryFailed, LoginRefused.
        """
        known = _ids.setdefault((self.url, self.user), {})
        wanted = (subject, kind, text)
        if wanted not in known:
            path = f"/subjects/{urllib.parse.quote(subject, safe='')}/versions"
            status, told = self._call("POST", path, {"schema": text, "schemaType": kind})
            if status in (409, 422) and "error_code" in told:
                raise OptionError(
                    f"the schema registry {self.url} refuses a schema for subject {subject!r}: "
                    f"{told.get('message', status)!s:.500}",
                    "change the schema, or the compatibility of the subject",
                )
            number = self._success(status, told).get("id")
            if not isinstance(number, int) or not 0 <= number <= _LARGEST_ID:
                raise self._strange(f"the id {number!r}")
            known[wanted] = number
        return known[wanted]

    # -- answers ---------------------------------------------------------------------------------------------

    def _registered(self, told: Mapping[str, Any]) -> RegisteredSchema:
        texts: dict[tuple[str, int], str] = {}
        self._refer(told, texts, set())
        text, kind = told.get("schema"), told.get("schemaType", "AVRO")
        if not isinstance(text, str) or not isinstance(kind, str):
            raise self._strange("no schema")
        return RegisteredSchema(kind.upper(), (*texts.values(), text))

    def _refer(
        self, told: Mapping[str, Any], texts: dict[tuple[str, int], str], open_: set[tuple[str, int]]
    ) -> None:
        """Adds what ``told`` refers to, each behind its own references."""
        for reference in told.get("references") or ():
            try:
                wanted = (str(reference["subject"]), int(reference["version"]))
            except (KeyError, TypeError, ValueError):
                raise self._strange(f"the reference {reference!r:.100}") from None
            if wanted in texts:
                continue
            if wanted in open_ or len(texts) + len(open_) >= _MOST_REFERENCES:
                raise self._strange(f"references of {wanted[0]!r} without an end")
            path = f"/subjects/{urllib.parse.quote(wanted[0], safe='')}/versions/{wanted[1]}"
            found = self._success(*self._call("GET", path))
            if not isinstance(found.get("schema"), str):
                raise self._strange("no schema")
            self._refer(found, texts, open_ | {wanted})
            texts[wanted] = found["schema"]

    def _success(self, status: int, told: dict[str, Any]) -> dict[str, Any]:
        if status == 200:
            return told
        if status in (401, 403):
            raise LoginRefused(
                f"the schema registry {self.url} refuses user {self.user!r} (HTTP {status})",
                "give its user and password to SchemaRegistry",
            )
        raise self._strange(f"HTTP {status} {told.get('message', '')!s:.300}".rstrip())

    def _strange(self, what: str) -> RegistryFailed:
        return RegistryFailed(
            f"the schema registry {self.url} answered with {what}", "see its log and the url"
        )

    # -- HTTP ------------------------------------------------------------------------------------------------

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """One call, repeated while the registry is not there or not able."""
        for wait_s in (*_WAITS_S, None):
            try:
                status, told = self._once(method, path, body)
            except (OSError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", error)  # of an URLError
                if isinstance(reason, ssl.SSLCertVerificationError) or wait_s is None:
                    what = f"{type(reason).__name__}: {reason}"[:300]
                    raise RegistryFailed(
                        f"the schema registry {self.url} cannot be reached ({what})",
                        "nothing is decided; start it, or correct the url",
                    ) from None
            else:
                if (status < 500 and status != 429) or wait_s is None:
                    return status, told
            time.sleep(wait_s)
        raise AssertionError("unreachable")

    def _once(self, method: str, path: str, body: Mapping[str, Any] | None) -> Answer:
        headers = {"Accept": f"{_MEDIA}, application/json"}
        if body is not None:
            headers["Content-Type"] = _MEDIA
        if self.user:
            login = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
            headers["Authorization"] = f"Basic {login}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with self._opener().open(request, timeout=self.timeout_s) as answer:
                return answer.status, _object(answer.read())
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, _object(refused.read())

    def _opener(self) -> urllib.request.OpenerDirector:
        """It follows no redirect, which would send the password to another host."""
        opener = urllib.request.OpenerDirector()
        tls = self._context() if self.url.startswith("https:") else None
        for handler in (
            urllib.request.ProxyHandler(),
            urllib.request.HTTPHandler(),
            urllib.request.HTTPSHandler(context=tls),
            urllib.request.HTTPErrorProcessor(),
            urllib.request.HTTPDefaultErrorHandler(),
        ):
            opener.add_handler(handler)
        return opener

    def _context(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
            if self.cert:
                context.load_cert_chain(self.cert, self.key)
        except OSError as error:
            raise OptionError(f"a file for TLS of the schema registry cannot be read: {error}") from None
        return context


def _object(body: bytes) -> dict[str, Any]:
    try:
        told = json.loads(body)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
