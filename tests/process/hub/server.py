"""A hub on the loopback: the part of huggingface.co's API that downloads and uploads use, and its
faults."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "7ae557604adf67be50417f59c2c2f167def9a775"
LARGE_BYTES = 1000  # from here on a file is a large one (LFS), with a sha256
UPLOADS = ("create", "validate-yaml", "preupload", "stored", "commit", "batch")


def oid(content: bytes) -> str:
    """The id by which a hub knows a file: sha256 of a large one, git's of another."""
    if len(content) >= LARGE_BYTES:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repository:
    """The files at one commit of a model or a data set."""

    files: dict[str, bytes]
    card: dict[str, Any] = field(default_factory=dict)
    commit: str = COMMIT
    num_bytes: dict[str, int] = field(default_factory=dict)  # that are listed, where they are wrong
    is_private: bool = False

    def listing(self, name: str) -> dict[str, Any]:
        siblings = []
        for path, content in self.files.items():
            size = self.num_bytes.get(path, len(content))
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            entry: dict[str, Any] = {"rfilename": path, "size": size, "blobId": blob}
            if len(content) >= LARGE_BYTES:
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"size": size, "sha256": sha256, "pointerSize": 130}
            siblings.append(entry)
        return {"id": name, "sha": self.commit, "siblings": siblings, "cardData": self.card} | {
            "private": self.is_private
        }


@dataclass
class Request:
    method: str
    host: str
    path: str
    token: str | None
    range: str | None


@dataclass
class Hub:
    """The server's repositories and requests, and its faults by the last part of a path."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    statuses: dict[str, list[tuple[int, dict[str, str]]]] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)  # that are sent instead
    cuts: dict[str, list[int]] = field(default_factory=dict)  # bytes after which it hangs up
    stalls: dict[str, int] = field(default_factory=dict)  # bytes after which nothing comes
    resets: bool = False  # what hangs up breaks the connection
    ignores_ranges: bool = False
    storage: str = ""  # the host that large files are redirected to
    moved: dict[str, str] = field(default_factory=dict)  # repositories: old name, new name
    body: bytes | None = None  # of every answer
    owners: list[str] = field(default_factory=lambda: ["me"])  # that the token may write for
    stored: dict[str, bytes] = field(default_factory=dict)  # large files by sha256
    commits: list[str] = field(default_factory=list)  # the repository of each
    port: int = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def asked(self, part: str) -> list[Request]:
        """The requests whose path holds a text."""
        return [request for request in self.requests if part in request.path]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        self.note(path)
        last = path.rsplit("/", 1)[1]
        if hub.body is not None:
            return self.send(200, hub.body)
        for of in (last, "api" if path.startswith("/api/") else ""):
            if hub.statuses.get(of):
                status, more = hub.statuses[of].pop(0)
                return self.send(status, b"", more)
        for old, new in hub.moved.items():
            if old in path:
                return self.send(307, b"", {"Location": self.path.replace(old, new)})
        match = re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/revision/(.+))?", path)
        if match:
            repository = hub.repositories.get(f"{match[1]}/{match[2]}")
            hidden = (
                repository and repository.is_private and match[2].split("/")[0] not in hub.owners
            )
            if repository is None or hidden:
                return self.send(404, b"", {"X-Error-Code": "RepoNotFound"})
            if (match[3] or "main") not in ("main", repository.commit):
                return self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return self.send(200, json.dumps(repository.listing(match[2])).encode())
        match = re.fullmatch(r"/(storage/)?(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        repository = match and hub.repositories.get(f"{(match[2] or 'models/')}{match[3]}")
        if not match or not repository or match[5] not in repository.files:
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
        content = repository.files[match[5]]
        if hub.storage and len(content) >= LARGE_BYTES and not match[1]:
            return self.send(302, b"", {"Location": f"{hub.storage}/storage{path}"})
        return self.send_file(hub.contents.get(last, content), last)

    def note(self, path: str) -> None:
        headers = self.headers
        token, span = headers.get("Authorization"), headers.get("Range")
        self.hub.requests.append(Request(self.command, headers["Host"], path, token, span))

    def do_PUT(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        """An upload: repos/create, validate-yaml, preupload, objects/batch, stored/SHA, commit."""
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        self.note(path)
        kind = next(word for word in UPLOADS if f"/{word}" in path)
        if hub.cuts.get(kind):
            self.rfile.read(hub.cuts[kind].pop(0))
            self.close_connection = True
            return self.connection.shutdown(socket.SHUT_RDWR)
        stall = hub.stalls.get(kind)
        if stall is not None:
            self.rfile.read(stall)
            time.sleep(60)  # longer than a client of the tests lives
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if hub.statuses.get(kind):
            status, more = hub.statuses[kind].pop(0)
            return self.send(status, b'{"errors": [{"message": "a reason"}]}', more)
        if kind == "stored":
            sha256 = path.rsplit("/", 1)[1]
            assert hashlib.sha256(body).hexdigest() == sha256
            hub.stored[sha256] = body
            return self.send(200, b"")
        match = re.search(r"/([^/]+/[^/]+?)(?:\.git/info|/preupload|/commit)/", path)
        answer = getattr(self, kind.replace("-", "_"))(match[1] if match else "", body)
        if isinstance(answer, int):
            return self.send(answer, b"")
        return self.send(200, json.dumps(answer).encode())

    def create(self, name: str, body: bytes) -> Any:
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] not in self.hub.owners:
            return 403
        if f"models/{name}" in self.hub.repositories:
            return 409
        is_private = asked["visibility"] == "private"
        self.hub.repositories[f"models/{name}"] = Repository({}, is_private=is_private)
        return {"url": f"{self.hub.address}/{name}"}

    def validate_yaml(self, name: str, body: bytes) -> Any:
        return {"errors": [], "warnings": []}

    def preupload(self, name: str, body: bytes) -> Any:
        if name.split("/")[0] not in self.hub.owners:
            return 403
        there = self.hub.repositories[f"models/{name}"].files
        return {
            "files": [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["size"] >= LARGE_BYTES else "regular",
                    "shouldIgnore": False,
                    "oid": oid(there[file["path"]]) if file["path"] in there else None,
                }
                for file in json.loads(body)["files"]
            ]
        }

    def batch(self, name: str, body: bytes) -> Any:
        stored = f"{self.hub.storage or self.hub.address}/stored"
        return {
            "objects": [
                each
                | (
                    {}
                    if each["oid"] in self.hub.stored
                    else {"actions": {"upload": {"href": f"{stored}/{each['oid']}"}}}
                )
                for each in json.loads(body)["objects"]
            ]
        }

    def commit(self, name: str, body: bytes) -> Any:
        repository = self.hub.repositories[f"models/{name}"]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            if line["key"] == "lfsFile":
                repository.files[value["path"]] = self.hub.stored[value["oid"]]
        self.hub.commits.append(name)
        return {"commitUrl": f"{self.hub.address}/{name}/commit/{COMMIT}", "commitOid": COMMIT}

    def send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def send_file(self, content: bytes, last: str) -> None:
        hub, begin = self.hub, 0
        if (match := re.match(r"bytes=(\d+)-", self.headers.get("Range") or "")) and (
            not hub.ignores_ranges
        ):
            begin = int(match[1])
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(content) - begin))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        end = hub.cuts[last].pop(0) if hub.cuts.get(last) else len(content)
        stall = hub.stalls.get(last)
        self.wfile.write(content[begin : min(end, len(content) if stall is None else stall)])
        self.wfile.flush()
        if stall is not None:
            time.sleep(60)  # longer than a client waits, which hangs up
        self.close_connection = end < len(content)
        if hub.resets:
            time.sleep(0.5)  # a reset drops what has not been read
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what went wrong in an answer, unless the client has hung up."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def hub(host: str = "127.0.0.1") -> Iterator[Hub]:
    """A hub that answers until the test is over."""
    served = Hub()
    handler = type("Handler", (_Handler,), {"hub": served})
    server = _Server((host, 0), handler)
    served.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
