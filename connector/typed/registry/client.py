"""A schema registry: the HTTP API that Confluent defined, as far as readers and writers of messages need it.

Not here: the bytes in front of a message (``wire_format.py``), the formats.
Invariant: an answer is one of the registry itself. Whatever else answers in its place, such as a proxy, fails
the call; so no message is rejected because the registry could not be asked.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from broker_core.core.errors import LoginRefused, OptionError, RegistryFailed

Answer = tuple[int, dict[str, Any]]  # the status of HTTP, and the object of the body

_MEDIA = "application/vnd.schemaregistry.v1+json"
_WAITS_S = (0.2, 1.0)  # before the second and the third attempt
_SUBJECT, _VERSION, _SCHEMA = 40401, 40402, 40403  # the registry's error codes: what is not found
_MOST_REFERENCES, _DEEPEST_REFERENCE = 1_000, 100
_SERIALIZED = "?format=serialized"  # of Confluent: as a FileDescriptorProto, in base64
_ONLY_TEXT = "has its schemas of Protobuf only as .proto files, and does not know format=serialized"
_COMPILE = (
    "compile the file with protoc --include_imports --descriptor_set_out=FILE, and give "
    "schema=(name of the message, FILE)"
)
_LIST = ""  # the name of an answer that is no object
_LARGEST_ID = (1 << 31) - 1  # an id is an int of Java


@dataclass(frozen=True)
class RegisteredSchema:
    """``kind``: AVRO, JSON or PROTOBUF. ``texts``: the schema behind those that it refers to, each behind its
    own. ``references``: those again, with the names by which they are referred to.
    """

    kind: str
    texts: tuple[str, ...]
    references: tuple[tuple[str, str], ...] = field(default=(), compare=False)


# An id names the same schema forever, and a schema has the same id in its subject: both by registry.
_schemas: dict[tuple[str, str], dict[int, RegisteredSchema]] = {}
_serialized: dict[tuple[str, str], dict[int, RegisteredSchema]] = {}
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
                "the url of the schema registry is invalid", "allowed is http[s]://host[:port][/path]"
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
    def of(cls, registry: SchemaRegistry | str) -> SchemaRegistry:
        """Returns a registry for a url, or the registry itself. Raises OptionError."""
        if isinstance(registry, (SchemaRegistry, str)):
            return cls(registry) if isinstance(registry, str) else registry
        raise OptionError(f"registry={registry!r:.100}", "give the url of a registry, or a SchemaRegistry")

    def schema(self, number: int) -> RegisteredSchema | None:
        """The schema of an id; None if the registry has none. Raises RegistryFailed, LoginRefused."""
        if number > _LARGEST_ID:
            return None
        cached = _schemas.setdefault((self.url, self.user), {})
        if number not in cached:
            status, answer = self._call("GET", f"/schemas/ids/{number}")
            if status == 404 and answer.get("error_code") == _SCHEMA:
                return None
            cached[number] = self._registered(self._success(status, answer))
        return cached[number]

    def serialized(self, number: int) -> RegisteredSchema | None:
        """As ``schema``; the texts of one of Protobuf are FileDescriptorProtos in base64. Raises OptionError
        if the registry has them only as .proto files.
        """
        plain = self.schema(number)
        if plain is None or plain.kind != "PROTOBUF":
            return plain
        cached = _serialized.setdefault((self.url, self.user), {})
        if number not in cached:
            status, answer = self._call("GET", f"/schemas/ids/{number}{_SERIALIZED}")
            if status >= 500 and status != 501:  # Karapace, if the schema refers to others
                listed: Any = self._call("GET", f"/schemas/ids/{number}/versions")[1].get(_LIST)
                with contextlib.suppress(IndexError, KeyError, TypeError):  # else it is the first answer
                    path = _version(listed[0]["subject"], listed[0]["version"])
                    status, answer = self._call("GET", path + _SERIALIZED)
            cached[number] = self._described(status, answer)
        return cached[number]

    def latest(self, subject: str, kind: str) -> RegisteredSchema:
        """The newest schema of a subject, of this kind. Raises OptionError, RegistryFailed, LoginRefused."""
        return self._registered(self._latest(subject, kind))

    def latest_serialized(self, subject: str) -> tuple[int, RegisteredSchema]:
        """The newest schema of Protobuf of a subject, as of ``serialized``, and its id. Raises as that."""
        answer = self._latest(subject, "PROTOBUF")
        number = self._id(answer)
        cached = _serialized.setdefault((self.url, self.user), {})
        if number not in cached:
            path = _version(subject, answer.get("version", "latest"))
            cached[number] = self._described(*self._call("GET", path + _SERIALIZED))
        return number, cached[number]

    def _latest(self, subject: str, kind: str) -> dict[str, Any]:
        status, answer = self._call("GET", _version(subject, "latest"))
        if status == 404 and answer.get("error_code") in (_SUBJECT, _VERSION):
            raise OptionError(
                f"the schema registry {self.url} has no subject {subject!r}", "register its schema first"
            )
        found = self._success(status, answer).get("schemaType", "AVRO")
        if isinstance(found, str) and found.upper() != kind:
            raise OptionError(f"subject {subject!r} is {found.upper()}, not {kind}", "name another one")
        return answer

    def register(self, subject: str, kind: str, text: str) -> int:
        """The id of a schema in ``subject``, which gets it as its newest version if it is new there. Raises
        OptionError, RegistryFailed, LoginRefused.
        """
        cached = _ids.setdefault((self.url, self.user), {})
        key = (subject, kind, text)
        if key not in cached:
            path = f"/subjects/{urllib.parse.quote(subject, safe='')}/versions"
            status, answer = self._call("POST", path, {"schema": text, "schemaType": kind})
            if status in (409, 422) and "error_code" in answer:
                raise OptionError(
                    f"the schema registry {self.url} refuses a schema for subject {subject!r}: "
                    f"{answer.get('message', status)!s:.500}",
                    "change the schema, or the compatibility of the subject",
                )
            cached[key] = self._id(self._success(status, answer))
        return cached[key]

    # -- answers ---------------------------------------------------------------------------------------------

    def _id(self, answer: Mapping[str, object]) -> int:
        number = answer.get("id")
        if not isinstance(number, int) or not 0 <= number <= _LARGEST_ID:
            raise self._strange(f"the id {number!r:.100}")
        return number

    def _registered(self, answer: Mapping[str, object], form: str = "") -> RegisteredSchema:
        text, kind = answer.get("schema"), answer.get("schemaType", "AVRO")
        if not isinstance(text, str) or not isinstance(kind, str):
            raise self._strange("no schema")
        texts: dict[tuple[str, int], str] = {}
        references: list[tuple[str, str]] = []
        if kind.upper() != "PROTOBUF" or form:  # a .proto file is not read
            self._refer(answer, form, texts, references, set())
        return RegisteredSchema(kind.upper(), (*texts.values(), text), tuple(references))

    def _described(self, status: int, answer: dict[str, object]) -> RegisteredSchema:
        """The answer to a request for FileDescriptorProtos."""
        try:
            found = self._registered(answer, _SERIALIZED) if status == 200 else None
            if found is not None:
                for text in found.texts:
                    base64.b64decode(text, validate=True)
                return found
        except ValueError:  # a .proto file
            pass
        if status in (401, 403, 429) or (status >= 500 and status != 501):
            self._success(status, answer)
        raise OptionError(f"the schema registry {self.url} {_ONLY_TEXT}", _COMPILE)

    def _refer(
        self,
        answer: Mapping[str, object],
        form: str,
        texts: dict[tuple[str, int], str],
        found: list[tuple[str, str]],
        open_: set[tuple[str, int]],
    ) -> None:
        """Adds what ``answer`` refers to, each behind its own references."""
        references: Any = answer.get("references") or ()
        try:
            listed = [
                ((str(one["subject"]), int(one["version"])), str(one.get("name", ""))) for one in references
            ]
        except (AttributeError, KeyError, TypeError, ValueError):
            raise self._strange(f"the references {references!r:.100}") from None
        for key, name in listed:
            if key in open_ or len(open_) >= _DEEPEST_REFERENCE or len(texts) >= _MOST_REFERENCES:
                raise self._strange(f"references of {key[0]!r} without an end")
            if key not in texts:
                schema = self._success(*self._call("GET", _version(*key) + form))
                if not isinstance(schema.get("schema"), str):
                    raise self._strange("no schema")
                self._refer(schema, form, texts, found, open_ | {key})
                texts[key] = schema["schema"]
            found.append((name, texts[key]))

    def _success(self, status: int, answer: dict[str, object]) -> dict[str, Any]:
        if status == 200:
            return answer
        if status in (401, 403):
            raise LoginRefused(
                f"the schema registry {self.url} refuses user {self.user!r} (HTTP {status})",
                "give its user and password to SchemaRegistry",
            )
        raise self._strange(f"HTTP {status} {answer.get('message', '')!s:.300}".rstrip())

    def _strange(self, what: str) -> RegistryFailed:
        return RegistryFailed(
            f"the schema registry {self.url} answered with {what}", "see its log and the url"
        )

    # -- HTTP ------------------------------------------------------------------------------------------------

    def _call(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Answer:
        """One call, repeated while the registry is not there or not able."""
        for wait_s in (*_WAITS_S, None):
            try:
                status, answer = self._once(method, path, body)
            except (OSError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", error)  # of an URLError
                if isinstance(reason, ssl.SSLCertVerificationError) or wait_s is None:
                    what = f"{type(reason).__name__}: {reason}"[:300]
                    raise RegistryFailed(
                        f"the schema registry {self.url} cannot be reached ({what})",
                        "start it, or correct the url; nothing was decided",
                    ) from None
            else:
                if (status < 500 and status != 429) or wait_s is None:
                    return status, answer
            time.sleep(wait_s)
        raise AssertionError("unreachable")

    def _once(self, method: str, path: str, body: Mapping[str, object] | None) -> Answer:
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
            files = f"ca={self.ca!r}, cert={self.cert!r}, key={self.key!r}, read in {os.getcwd()!r}"
            raise OptionError(f"a file for TLS of the schema registry ({files}): {error}") from None
        return context


def _version(subject: str, version: int | str) -> str:
    parts = (urllib.parse.quote(str(each), safe="") for each in (subject, version))
    return "/subjects/{}/versions/{}".format(*parts)


def _object(body: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return answer if isinstance(answer, dict) else {_LIST: answer}
