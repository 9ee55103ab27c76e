"""A small stand-in for the Hugging Face Hub on the loopback interface."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """What the server has and does. `log` lists the requests: (method, path, headers)."""

    model_id: str
    revisions: dict[str, dict[str, bytes]]  # commit -> files
    branches: dict[str, str]  # name -> commit
    token: str | None = None  # asked for when set
    gated: bool = False  # a token alone is not enough
    cut_after: int | None = None  # once: break the connection after so many bytes of the largest file
    broken: str | None = None  # the server fails at this file
    slow: bool = False  # files come a megabyte at a time, 50 in a second at most
    sent: int = 0  # bytes of slow files so far
    log: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    endpoint: str = ""

    def requested(self, method: str) -> list[str]:
        """The files asked for with `method`, each once for each time."""
        paths = [path for m, path, _ in self.log if m == method and "/resolve/" in path]
        return sorted(path.split("/resolve/")[1].split("/", 1)[1] for path in paths)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def _refuse(self, status: int, code: str, message: str, body: bool) -> None:
        content = json.dumps({"error": message}).encode()
        self._send(status, content, {"X-Error-Code": code, "X-Error-Message": message}, body)

    def _answer(self, body: bool) -> None:
        hub = self.hub
        path = unquote(urlsplit(self.path).path)
        hub.log.append((self.command, path, dict(self.headers)))
        token = self.headers.get("Authorization")
        api, files = f"/api/models/{hub.model_id}", f"/{hub.model_id}/resolve/"
        if not path.startswith((api, files)):
            return self._refuse(404 if token else 401, "RepoNotFound", "Repository not found", body)
        if hub.token is not None and token is None:
            code = "GatedRepo" if hub.gated else "RepoNotFound"
            return self._refuse(401, code, "Access is restricted", body)
        if hub.token is not None and token != f"Bearer {hub.token}":
            return self._send(401, b"{}", {"X-Error-Message": "Invalid credentials"}, body)
        if hub.gated:
            return self._refuse(403, "GatedRepo", "Ask for access first", body)
        if path.startswith(files):
            revision, name = path[len(files) :].split("/", 1)
        else:
            revision, name = path[len(api) :].split("/")[2], ""
        commit = hub.branches.get(revision, revision)
        if commit not in hub.revisions:
            return self._refuse(404, "RevisionNotFound", "Invalid rev id", body)
        content = hub.revisions[commit]
        if name:
            if name not in content:
                return self._refuse(404, "EntryNotFound", "Entry not found", body)
            if body and name == hub.broken:
                return self._send(500, b"", {}, body)
            return self._file(name, content[name], commit, body)
        answer: Any = [
            {"type": "file", "path": n, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
            for n, c in content.items()
        ]
        if "/tree/" not in path:
            answer = {"id": hub.model_id, "sha": commit, "siblings": [{"rfilename": n} for n in content]}
        return self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"}, body)

    def _file(self, name: str, content: bytes, commit: str, body: bool) -> None:
        hub = self.hub
        headers = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        start, status = 0, 200
        if self.headers.get("Range"):
            start, status = int(self.headers["Range"].removeprefix("bytes=").split("-")[0]), 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        part = content[start:]
        if (
            body
            and hub.cut_after is not None
            and len(content) == max(map(len, hub.revisions[commit].values()))
        ):
            cut, hub.cut_after = hub.cut_after, None
            self._send(status, part, headers, False)
            self.wfile.write(part[:cut])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
            return
        if hub.slow and body:
            return self._trickle(status, part, headers)
        self._send(status, part, headers, body)

    def _trickle(self, status: int, part: bytes, headers: dict[str, str]) -> None:
        self._send(status, part, headers, False)  # the head alone
        with suppress(ConnectionError):  # the reader may leave
            for begin in range(0, len(part), 1 << 20):
                self.wfile.write(part[begin : begin + (1 << 20)])
                self.hub.sent += 1 << 20
                time.sleep(0.02)
        self.close_connection = True


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
