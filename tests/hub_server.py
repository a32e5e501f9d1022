"""A small local server that speaks the model hub's protocol, as far as huggingface_hub's client uses it to download."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit


@dataclass
class HubModel:
    """Attributes:
    files: name -> content.
    gated: whether the token `hf_good` is needed.
    cut_after: name -> bytes after which the connection breaks.
    at_half: name -> called when half of the file has been sent.
    revisions: names that this commit goes by.
    """

    files: dict[str, bytes]
    gated: bool = False
    cut_after: dict[str, int] = field(default_factory=dict)
    at_half: dict[str, Callable[[], None]] = field(default_factory=dict)
    revisions: tuple[str, ...] = ("main",)

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files)).encode()).hexdigest()


class HubServer:
    """Use as a context. `requests` lists (method, path, Range header or None) in the order of their arrival."""

    def __init__(self, models: dict[str, HubModel], datasets: dict[str, HubModel] | None = None) -> None:
        self.models = models
        self.datasets = datasets or {}
        self.requests: list[tuple[str, str, str | None]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._answer(self)

            def do_HEAD(self) -> None:
                hub._answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="hub")

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        path = urlsplit(request.path).path  # with a host if it is asked as a proxy
        self.requests.append((request.command, path, request.headers.get("Range")))
        request.close_connection = True
        api = re.fullmatch(r"/api/((?:models|datasets)/[^/]+/[^/]+)(?:/(?:revision|tree)/([^/]+))?", path)
        file = re.fullmatch(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = api or file
        where = match[1] if match else ""
        kind, _, name = (where if where.count("/") == 2 else f"models/{where}").partition("/")
        model = (self.datasets if kind == "datasets" else self.models).get(name)
        if match is None or model is None:
            return _send(request, 401, error="RepoNotFound")
        if (match[2] or "main") not in (*model.revisions, model.commit):
            return _send(request, 404, error="RevisionNotFound")
        if model.gated and request.headers.get("Authorization") != "Bearer hf_good":
            return _send(request, 403, error="GatedRepo")
        if api and "/tree/" in path:  # as huggingface_hub asks from 2.0 on
            files = [{"type": "file", "path": f, "size": len(d), "oid": "0"} for f, d in model.files.items()]
            return _send(request, 200, json.dumps(files).encode(), {"Content-Type": "application/json"})
        if api:
            return self._info(request, name, model)
        self._file(request, model, match[3])

    @staticmethod
    def _info(request: BaseHTTPRequestHandler, name: str, model: HubModel) -> None:
        siblings = [{"rfilename": file, "size": len(data), "blobId": "0"} for file, data in model.files.items()]
        info = {"id": name, "modelId": name, "sha": model.commit, "siblings": siblings, "tags": [], "private": False}
        _send(request, 200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    @staticmethod
    def _file(request: BaseHTTPRequestHandler, model: HubModel, name: str) -> None:
        if name not in model.files:
            return _send(request, 404, error="EntryNotFound")
        data = model.files[name]
        headers = {
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Repo-Commit": model.commit,
            "Accept-Ranges": "bytes",
        }
        status, start = 200, 0
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range") or ""):
            status, start = 206, int(match[1])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        _send(
            request, status, data[start:], headers, cut_after=model.cut_after.get(name), at_half=model.at_half.get(name)
        )


def _send(
    request: BaseHTTPRequestHandler,
    status: int,
    body: bytes = b"",
    headers: dict[str, str] | None = None,
    error: str | None = None,
    cut_after: int | None = None,
    at_half: Callable[[], None] | None = None,
) -> None:
    request.send_response(status)
    if error is not None:
        request.send_header("X-Error-Code", error)
        request.send_header("X-Error-Message", error)
    for key, value in (headers or {}).items():
        request.send_header(key, value)
    request.send_header("Content-Length", str(len(body)))
    request.send_header("Connection", "close")
    request.end_headers()
    if request.command != "HEAD":
        half = len(body) // 2 if at_half is not None else 0
        request.wfile.write(body[:half])
        if at_half is not None:
            at_half()
        request.wfile.write(body[half:cut_after])
