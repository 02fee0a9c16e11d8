"""A schema registry on loopback: the part of Confluent's HTTP API that txmq uses, with its statuses and error codes.

Not here: compatibility. A schema that is not JSON is refused, one with the word "incompatible" conflicts. A schema
of Protobuf is added as a file, whose text says no more than its name.
"""

from __future__ import annotations

import base64
import json
import re
import ssl
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from google.protobuf.descriptor_pb2 import FileDescriptorProto

from tests.protobuf_files import serialized

Answer = tuple[int, Any]


class RegistryServer:
    """``asked``: the requests so far, as (method, path). ``broken``: what is answered instead, first to last.
    ``serializes``: what it answers to format=serialized: "always"; "never", as old ones, which ignore it; "version",
    as Karapace, which fails for an id whose schema refers to others.
    """

    def __init__(self, login: str = "", context: ssl.SSLContext | None = None) -> None:
        self.login = login
        self.asked: list[tuple[str, str]] = []
        self.broken: list[tuple[int, bytes]] = []
        self.by_id: dict[int, dict[str, Any]] = {}
        self.subjects: dict[str, list[int]] = {}
        self.serializes: Literal["always", "never", "version"] = "always"
        self.files: dict[int, str] = {}
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"registry": self}))
        if context is not None:
            self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        self.url = f"http{'s' if context else ''}://localhost:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def add(self, subject: str, schema: Any, kind: str = "AVRO", references: Any = ()) -> int:
        """As a producer registers a schema: the id of an equal one, or a new id."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        found = {"schema": text, **({"schemaType": kind} if kind != "AVRO" else {})}
        if references:
            found["references"] = list(references)
        number = next((number for number, known in self.by_id.items() if known == found), len(self.by_id) + 1)
        self.by_id[number] = found
        versions = self.subjects.setdefault(subject, [])
        if number not in versions:
            versions.append(number)
        return number

    def add_file(self, subject: str, file: FileDescriptorProto, *imported: str) -> int:
        """``imported``: the subjects of the files that it imports, whose names these are; their newest versions."""
        references = [
            {"name": name, "subject": name, "version": len(self.subjects[name])} for name in imported
        ]
        number = self.add(subject, f'syntax = "proto3"; // {file.name}', "PROTOBUF", references)
        self.files[number] = serialized(file)
        return number

    def _told(self, number: int, form: str) -> dict[str, Any]:
        if form and number in self.files and self.serializes != "never":
            return {**self.by_id[number], "schema": self.files[number]}
        return self.by_id[number]

    def answer(self, method: str, path: str, body: bytes) -> Answer:
        path, _, query = path.partition("?")
        form = "".join(urllib.parse.parse_qs(query).get("format", []))
        parts = [urllib.parse.unquote(part) for part in path.strip("/").split("/")]
        match method, parts:
            case "GET", ["schemas", "ids", number]:
                if not re.fullmatch(r"\d+", number) or int(number) >= 1 << 31:
                    return 404, {"error_code": 404, "message": "HTTP 404 Not Found"}
                if int(number) not in self.by_id:
                    return 404, {"error_code": 40403, "message": "Schema not found"}
                if form and self.serializes == "version" and self.by_id[int(number)].get("references"):
                    return 500, {"error_code": 500, "message": "Internal Server Error"}
                return 200, self._told(int(number), form)
            case "GET", ["schemas", "ids", number, "versions"]:
                return 200, [
                    {"subject": subject, "version": at}
                    for subject, known in self.subjects.items()
                    for at, each in enumerate(known, 1)
                    if each == int(number)
                ]
            case "GET", ["subjects", subject, "versions", version]:
                if subject not in self.subjects:
                    return 404, {"error_code": 40401, "message": f"Subject '{subject}' not found."}
                versions = self.subjects[subject]
                at = len(versions) if version == "latest" else int(version)
                if not 0 < at <= len(versions):
                    return 404, {"error_code": 40402, "message": f"Version {version} not found."}
                number = versions[at - 1]
                return 200, {"subject": subject, "version": at, "id": number, **self._told(number, form)}
            case "POST", ["subjects", subject, "versions"]:
                asked = json.loads(body)
                if "incompatible" in asked["schema"]:
                    return 409, {"error_code": 409, "message": "Schema being registered is incompatible"}
                try:
                    json.loads(asked["schema"])
                except ValueError:
                    return 422, {"error_code": 42201, "message": "Invalid schema"}
                return 200, {"id": self.add(subject, asked["schema"], asked.get("schemaType", "AVRO"))}
        return 404, {"error_code": 404, "message": "HTTP 404 Not Found"}


class _Handler(BaseHTTPRequestHandler):
    registry: RegistryServer

    def _answer(self) -> None:
        registry = self.registry
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        registry.asked.append((self.command, self.path))
        login = f"Basic {base64.b64encode(registry.login.encode()).decode()}"
        if registry.broken:
            status, told = registry.broken.pop(0)
        elif registry.login and self.headers.get("Authorization") != login:
            status, told = 401, b'{"error_code": 40101, "message": "Unauthorized"}'
        else:
            status, answer = registry.answer(self.command, self.path, body)
            told = json.dumps(answer).encode()
        self.send_response(status)
        if status in (301, 302, 307):
            self.send_header("Location", told.decode())
            told = b""
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    do_GET = do_POST = _answer

    def log_message(self, *_: Any) -> None:
        pass
