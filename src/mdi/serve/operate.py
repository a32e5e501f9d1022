"""Operators' paths: models are pulled, and loaded and unloaded, as adapters are, and a machine is invited.

An operator has a key of that role, or asks from this machine where there are no keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import re
import sys
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Scope

from mdi.checkpoint.folder import gguf_file
from mdi.checkpoint.model_store import is_model_name
from mdi.files import module_environment
from mdi.serve.api_errors import ApiError, invalid
from mdi.serve.endpoint import json_of

if TYPE_CHECKING:
    from mdi.serve.api_state import ApiState

BODY_LIMIT_BYTES = 1 << 12
MOST_PULLS = 2
N_KEPT = 8  # pulls that have ended, which are still listed
TEXT_LIMIT = 300  # characters of a pull's last words
_SHARE = re.compile(r"(\d{1,3})%")
_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}

logger = logging.getLogger("mdi")


def is_from_here(scope: Scope) -> bool:
    """Whether a request comes from this machine, and no proxy says that it was made elsewhere."""
    client = scope.get("client")
    names = {name for name, _ in scope["headers"]}
    if not client or names & {b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via"}:
        return False
    try:
        return ipaddress.ip_address(client[0].partition("%")[0]).is_loopback
    except ValueError:
        return False


def check_operator(request: Request) -> None:
    """Raises ApiError."""
    if not request.scope.get("mdi.is_operator"):
        raise ApiError(403, "only operators may do this: give the API key of an operator", "not_operator")


@dataclass
class Pull:
    """A download.

    Attributes:
        state: "running", "done", "failed" or "stopped".
        text: the last words of the command.
        done: share from 0 to 1; None while it is unknown.
    """

    name: str
    state: str = "running"
    text: str = "starting"
    done: float | None = None
    process: asyncio.subprocess.Process | None = field(default=None, repr=False)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "state": self.state, "text": self.text, "done": self.done}

    async def run(self, home: Path) -> None:
        """Run `mdi pull`, which continues what an earlier one began."""
        command = [sys.executable, "-m", "mdi.cli", "pull", self.name, "--ckpt-folder", str(home.absolute())]
        pipe, none = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        try:
            self.process = await asyncio.create_subprocess_exec(
                *command, stdin=none, stdout=pipe, stderr=asyncio.subprocess.STDOUT, env=module_environment(), cwd="/"
            )
        except OSError as e:
            self.state, self.text = "failed", f"mdi pull cannot be started: {e.strerror or e}"
            return
        assert self.process.stdout is not None
        rest = ""
        while data := await self.process.stdout.read(1 << 12):
            *lines, rest = re.split(r"[\r\n]+", (rest + data.decode(errors="replace"))[-(1 << 13) :])
            self.note(*lines)
        self.note(rest)
        status = await self.process.wait()
        if self.state == "running":
            self.state = "failed" if status else "done"
        logger.info("pull of %s: %s", self.name, self.state)

    def note(self, *lines: str) -> None:
        for line in filter(None, map(str.strip, lines)):
            self.text = "".join(c for c in line if c.isprintable())[:TEXT_LIMIT]
            if found := _SHARE.search(line):
                self.done = min(1.0, int(found[1]) / 100)

    def stop(self) -> None:
        if self.state == "running":
            self.state = "stopped"
            if self.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    self.process.terminate()


class Operator:
    """Models and pulls of one server. Belongs to one event loop."""

    def __init__(self, api: ApiState) -> None:
        self._api = api
        self.pulls: dict[str, Pull] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def models(self) -> dict[str, Any]:
        """All models of the folder with their states, and pulls."""
        api = self._api
        folders = api.catalog.folders()
        sizes = await asyncio.to_thread(lambda: {name: size_of(path) for name, path in folders.items()})
        state = api.engine.state
        models = []
        for name in folders:
            status = state.statuses.get(name, {"state": "idle", "text": "", "done": 0.0})
            told = "unloading" if name in api.models.leaving else status["state"]
            told = "idle" if told == "serving" and not state.is_serving(name) else told
            models.append({"name": name, "bytes": sizes[name], "state": told, "text": status["text"]})
        return {"models": models, "pulls": [pull.to_json() for pull in self.pulls.values()]}

    def pull(self, name: str) -> None:
        """Begin to download a model. Raises ApiError."""
        if not is_model_name(name):
            raise invalid("model", "expected the name of a model on the hub: org/name, or org/name:TAG")
        running = [pull for pull in self.pulls.values() if pull.state == "running"]
        if any(pull.name == name for pull in running):
            return
        if len(running) >= MOST_PULLS:
            raise ApiError(409, f"{MOST_PULLS} models are being pulled: wait until one is here", "busy")
        self.pulls.pop(name, None)
        for old in [pull.name for pull in self.pulls.values() if pull.state != "running"][: -N_KEPT + 1]:
            del self.pulls[old]
        pull = self.pulls[name] = Pull(name)
        logger.info("pull of %s begins", name)
        task = asyncio.create_task(pull.run(self._api.catalog.home))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def do(self, what: Any, name: Any) -> None:
        """Begin what an operator wants with a model. Raises ApiError."""
        if not isinstance(name, str) or not name:
            raise invalid("model", "expected the name of a model")
        if what == "pull":
            self.pull(name)
        elif what == "stop":
            if name in self.pulls:
                self.pulls[name].stop()
        elif what == "load":
            self._api.models.load(name)
        elif what == "unload":
            self._api.models.unload(name)
        else:
            raise invalid("do", "expected load, unload, pull or stop")

    async def finished(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it to its end, also if the client goes away. Raises ApiError."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    def close(self) -> None:
        for pull in self.pulls.values():
            pull.stop()


def routes(api: ApiState, operator: Operator) -> list[Route]:
    """`/api/adapters`, `/api/models` and `/api/machines`."""

    async def models(request: Request) -> Response:
        check_operator(request)
        if request.method == "POST":
            body = await body_of(request)
            operator.do(body.get("do"), body.get("model"))
        return JSONResponse(await operator.models(), headers=_HEADERS)

    async def machines(request: Request) -> Response:
        """GET whether an invitation is open, POST a new one, DELETE it. The code is in the answer to POST only."""
        check_operator(request)
        key = request.scope.get("mdi.key")
        args = {"who": "this machine" if key is None else key.name}
        what = {"GET": "invitation", "HEAD": "invitation", "POST": "invite", "DELETE": "revoke"}[request.method]
        if what == "invite" and request.url.scheme != "https" and not is_from_here(request.scope):
            raise ApiError(
                403, "an invitation is shown on https or on the server's own machine only: start the server with "
                "--tls-cert and --tls-key, or run `mdi key FILE --invite` there", "not_private",
            )  # fmt: skip
        return JSONResponse(await api.engine.ask(what, args), headers=_HEADERS)

    async def adapters(request: Request) -> Response:
        """GET their names; POST {"do": "load", "adapter": NAME, "folder": DIR} or {"do": "unload", "adapter": NAME}."""
        check_operator(request)
        if request.method == "POST":
            body = await body_of(request)
            what, name, folder = body.get("do"), body.get("adapter"), body.get("folder")
            if not isinstance(name, str) or not name:
                raise invalid("adapter", "expected the name of an adapter")
            if what == "load":
                if not isinstance(folder, str) or not Path(folder).is_absolute():
                    raise invalid("folder", "expected the whole path of a folder on the server's machine")
                await operator.finished(api.models.load_adapter(name, folder))
            elif what == "unload":
                await operator.finished(api.models.unload_adapter(name))
            else:
                raise invalid("do", "expected load or unload")
        return JSONResponse({"adapters": [*api.catalog.adapters]}, headers=_HEADERS)

    return [
        Route("/api/adapters", adapters, methods=["GET", "POST"]),
        Route("/api/models", models, methods=["GET", "POST"]),
        Route("/api/machines", machines, methods=["GET", "POST", "DELETE"]),
    ]


async def body_of(request: Request) -> dict[str, Any]:
    """The fields of a small body. Raises ApiError."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > BODY_LIMIT_BYTES:
            raise ApiError(413, f"the body has more than {BODY_LIMIT_BYTES} bytes", "body_too_large")
    body = json_of(bytes(data))
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", "invalid_body")
    return body


def size_of(path: Path) -> int:
    """Bytes of the files in a model's folder, and of the GGUF file that it stands for."""
    try:
        files = {one for one in (path.iterdir() if path.is_dir() else [path]) if one.is_file()}
        file = gguf_file(path)
        return sum(one.stat().st_size for one in files | ({file} if file is not None else set()))
    except OSError:
        return 0
