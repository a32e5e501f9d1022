"""The HTTP side of a node: parse, call, answer. A `Node` does the work.

One `cherrypy.Application` on its own cheroot server, because CherryPy's engine is global to a process; one request per
connection, so that a body which is refused need not be read to its end.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any, Protocol

import cherrypy
from cheroot import wsgi
from cheroot.server import HTTPConnection

from mdi.control.body import BodyBrokenError, read_json
from mdi.control.connection_workers import REQUEST_S, ConnectionWorkers
from mdi.control.gate import Gate, public_status
from mdi.control.join import JOIN_LIMIT_BYTES, Host
from mdi.control.messages import CONTROL_VERSION, InitRequest
from mdi.control.web_pages import check_sender
from mdi.errors import ControlError, MdiError, UsageError
from mdi.net.keys import KeyFile
from mdi.net.message import DeadlineSocket, status_of

MOVED = ("parts", "profile", "probe", "forward", "echo")  # which older nodes call
HEADER_LIMIT_BYTES = 64 << 10
BACKLOG = 128  # a crowd of strangers must not fill the queue that the starter waits in
END_S = 2  # for answers that are on their way

logger = logging.getLogger(__name__)


class Node(Protocol):
    """What a node does when it is asked over HTTP. Each method may raise MdiError; a ControlError chooses the status."""

    def status(self, run: str | None) -> dict[str, Any]:
        """Status of the node. `run` names the run on whose behalf it is asked: a sign of life of its starter."""

    def init(self, request: InitRequest) -> dict[str, Any]:
        """Take part in a run; the answer names the missing parts."""

    def stop(self, run: str, leave: bool, ring: str | None = None) -> None:
        """End the run; with `leave`, the process as well; with `ring`, an epoch, only that ring."""


class StatusOnly:
    """Base for a node that only answers `GET /`: the starter."""

    def init(self, request: InitRequest) -> dict[str, Any]:
        raise ControlError("this node is a starter: it configures others", 409, code="role")

    def stop(self, run: str, leave: bool, ring: str | None = None) -> None:
        raise ControlError("this node is a starter: stop it there", 409, code="role")


def _answer(handler: Callable[..., Any], gate: Gate, is_public: bool = False) -> Callable[..., bytes]:
    """Turn a handler's return value, or its MdiError, into a JSON answer; for callers with the key only, unless public."""

    signature = inspect.signature(handler)

    def answered(*args: Any, **kwargs: Any) -> bytes:
        request = cherrypy.request
        cherrypy.response.headers["Content-Type"] = "application/json"
        request.asker = None
        try:
            check_sender(request.headers, gate.is_open)
            uri, addr = request.wsgi_environ["REQUEST_URI"], request.remote.ip
            request.asker = gate.ask(request.method, uri, request.headers, addr)
            if request.asker is None and not (gate.is_open or is_public):
                raise gate.refusal(addr)
            _check_arguments(signature, args, kwargs)
            result = handler(*args, **kwargs)
        except MdiError as e:
            cherrypy.response.status = status_of(e)
            result = {"error": str(e), "code": e.code}
        except BodyBrokenError:
            cherrypy.response.status = 400
            result = {"error": "the body was cut off", "code": ControlError.code}
        body = json.dumps(result).encode()
        status = int(cherrypy.response.status or 200)
        cherrypy.response.headers.update(gate.headers(request.asker, status, body))
        return body

    return answered


def _check_arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """ControlError (404) if the path or the query has something that the handler does not take."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as e:
        raise ControlError(f"no such address: {e}", 404) from None
    for name, value in kwargs.items():
        if not isinstance(value, str):
            raise ControlError(f"{name!r} is given more than once", 400)


def _allow(method: str) -> None:
    if cherrypy.request.method != method:
        cherrypy.response.headers["Allow"] = method
        raise ControlError(f"{cherrypy.request.method} is not for this address; use {method}", 405)


class _Pages:
    _cp_config = {"request.process_request_body": False}

    def __init__(self, node: Node, workers: ConnectionWorkers, gate: Gate, host: Host | None) -> None:
        self._node = node
        self._workers = workers
        self._gate = gate
        self._host = host
        self.index = cherrypy.expose(_answer(self._index, gate, is_public=True))
        self.init = cherrypy.expose(_answer(self._init, gate))
        self.stop = cherrypy.expose(_answer(self._stop, gate))
        self.join = cherrypy.expose(_answer(self._join, gate, is_public=True))
        self.default = cherrypy.expose(_answer(self._default, gate))

    def _index(self, *, run: str | None = None) -> dict[str, Any]:
        _allow("GET")
        self._workers.heard()
        if self._gate.is_open or cherrypy.request.asker is not None:
            return self._node.status(run)
        return public_status(self._node.status(None))

    def _init(self) -> dict[str, Any]:
        _allow("POST")
        answer = self._node.init(InitRequest.from_json(self._read_json()))
        self._workers.own(cherrypy.request.remote.ip)
        return answer

    def _stop(self) -> dict[str, Any]:
        _allow("PUT")
        body = self._read_json()
        if not isinstance(body, dict) or not isinstance(body.get("run"), str):
            raise ControlError("field 'run': expected the id of the run to end", 400)
        ring = body.get("ring")
        if ring is not None and not isinstance(ring, str):
            raise ControlError("field 'ring': expected the epoch of the ring to end", 400)
        self._node.stop(body["run"], body.get("leave") is True, ring)
        return {}

    def _join(self) -> dict[str, str]:
        """An invited board gets the key; the caller does not have it yet."""
        _allow("POST")
        if self._host is None:
            raise ControlError("this node has no open invitation", 404)
        return self._host.answer(read_json(JOIN_LIMIT_BYTES), cherrypy.request.remote.ip)

    def _read_json(self) -> Any:
        body = read_json()
        self._workers.heard()
        return body

    def _default(self, *args: str, **kwargs: str) -> dict[str, Any]:
        if args and args[0] in MOVED:
            raise ControlError(
                f"/{args[0]} is not asked over HTTP any more, but with a message on the ring's port, since version 8 of the "
                f"control protocol (this node has version {CONTROL_VERSION}): install the same version of MDI-LLM on both",
                404,
                code="version",
            )
        raise ControlError("no such address; there are GET /, POST /init, PUT /stop, POST /join", 404)


def _plain_error(status: str, message: str, traceback: str, version: str) -> bytes:
    cherrypy.response.headers["Content-Type"] = "application/json"
    logger.debug("HTTP %s: %s\n%s", status, message, traceback)
    return json.dumps({"error": f"{status}: {message}", "code": MdiError.code}).encode()


class _Request(cherrypy.Application.request_class):
    """A request that is refused before its application's settings are found must not show where this program is installed."""

    show_tracebacks = False
    error_page = {"default": _plain_error}


class _Server(wsgi.Server):
    def clear_stats(self) -> None:
        """Cheroot keeps the numbers of each server in a table for ever, and with them the server and its node."""
        super().clear_stats()
        for name in [name for name, stats in logging.statistics.items() if stats is self.stats]:  # type: ignore[attr-defined]
            del logging.statistics[name]  # type: ignore[attr-defined]

    def error_log(self, msg: str = "", level: int = 20, traceback: bool = False) -> None:
        """What strangers can provoke without end is for the debug log."""
        logger.debug("HTTP: %s", msg, exc_info=traceback)

    @staticmethod
    def bind_socket(socket_: socket.socket, bind_addr: tuple[str, int]) -> socket.socket:
        try:
            socket_.bind(bind_addr)
        except BaseException:
            socket_.close()  # cheroot leaves it open
            raise
        return socket_


class _Connection(HTTPConnection):
    """cheroot leaves its writer to the garbage collector, which complains, from Python 3.13 on, that a client went away."""

    def __init__(self, server: Any, sock: socket.socket, *args: Any) -> None:
        super().__init__(server, DeadlineSocket.around(sock), *args)

    def close(self) -> None:
        super().close()
        with contextlib.suppress(OSError):
            self.wfile.raw.close()


class ControlServer:
    """Serves one node's control endpoints until `close`.

    Args:
        node: does the work of the requests.
        addr, port: where to listen; port 0 takes any free one, see `port`.
        keys: of the cluster. If there are some, callers without one of them see only name, version and state.
        host: answers `POST /join`; None without an invitation.

    Raises:
        UsageError: the address cannot be listened on.
    """

    def __init__(
        self,
        node: Node,
        addr: str,
        port: int,
        name: str,
        keys: KeyFile | None = None,
        host: Host | None = None,
    ) -> None:
        workers = ConnectionWorkers()
        self._pages = pages = _Pages(node, workers, Gate(keys, name), host)
        app = cherrypy.Application(pages, "", {"/": {"error_page.default": _plain_error}})
        app.request_class = _Request
        app.log.screen = False
        for log in (app.log.access_log, app.log.error_log):
            log.handlers = [logging.NullHandler()]  # without any, Python itself would write to stderr
            logging.Logger.manager.loggerDict.pop(log.name, None)  # where it would stay for ever, as in the next table
        cherrypy.engine.unsubscribe("graceful", app.log.reopen_files)
        app.log.error_log.propagate = app.log.access_log.propagate = False
        self.http = _Server(
            (addr, port), app, server_name=name, timeout=REQUEST_S, shutdown_timeout=END_S, request_queue_size=BACKLOG
        )
        self.http.requests = workers
        self.http.keep_alive_conn_limit = 0
        self.http.ConnectionClass = _Connection
        self.http.max_request_header_size = HEADER_LIMIT_BYTES
        try:
            self.http.prepare()
        except (OSError, UnicodeError) as e:
            raise UsageError(
                f"cannot listen on {addr}:{port} ({name}'s communication port): {e}. Is another node running there, or is "
                "this not an address of this machine? Choose another port, or set `bind`, in the nodes file"
            ) from None
        self._thread = threading.Thread(target=self.http.serve, name="control", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        port: int = self.http.bind_addr[1]
        return port

    def close(self) -> None:
        self.http.stop()
        self._thread.join(10)
        vars(self._pages).clear()  # its handlers know it: without this the node would wait for the garbage collector
