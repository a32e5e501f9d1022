"""The HTTP side of a node: parse, call, answer. A `Node` does the work.

One `cherrypy.Application` on its own cheroot server, because CherryPy's engine is global to a process; one request per
connection, so that a body which is refused need not be read to its end.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import cherrypy
from cheroot import wsgi
from cheroot.server import HTTPConnection

import mdi
from mdi.control.message_server import EchoOnly, MessageServer
from mdi.control.messages import CONTROL_VERSION, InitRequest
from mdi.control.signing import Asker, Gate, public_status
from mdi.control.web_pages import check_sender, is_here
from mdi.errors import Code, ControlError, MdiError, UsageError
from mdi.net.keys import KeyFile
from mdi.net.listener import RingListener, open_socket
from mdi.net.message import DeadlineSocket, status_of
from mdi.spec.cluster import NodeConfig
from mdi.spec.settings_file import parse_json

N_CONNECTIONS = 96
N_OF_OWNER = 32  # places more, for the address of the run's starter
N_PER_ADDRESS = 24  # from elsewhere than this machine; a starter has a handful
REQUEST_S = 10  # for a request to come whole; and, of a transfer of weights, for each piece

logger = logging.getLogger(__name__)


class _Worker(threading.Thread):
    """Serves one connection.

    Attributes:
        is_heard: the request has come, or is one that may take long: it is not dropped any more.
    """

    def __init__(self, pool: ConnectionWorkers, connection: Any) -> None:
        super().__init__(name="control-request", daemon=True)
        self.connection = connection
        self.addr: str = connection.remote_addr
        self.is_heard = False
        self._pool = pool

    def run(self) -> None:
        try:
            self.connection.communicate()
        except Exception:  # nothing that a client can do ends the server
            logger.debug("a request from %s failed", self.addr, exc_info=True)
        finally:
            with contextlib.suppress(OSError):
                self.connection.close()
            self._pool.leave(self)

    def drop(self) -> None:
        """Wake the thread: the connection is at its end."""
        with contextlib.suppress(OSError):
            self.connection.socket.shutdown(socket.SHUT_RDWR)


class ConnectionWorkers:
    """In the place of the pool of threads of a cheroot server, which calls `start`, `put` and `stop`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: dict[_Worker, None] = {}  # in the order in which they came
        self._owner: str | None = None

    def start(self) -> None:
        pass

    def put(self, connection: Any) -> None:
        """Serve a connection that was accepted; the one that makes room for it may be itself."""
        connection.socket.read_within(REQUEST_S)
        worker = _Worker(self, connection)
        with self._lock:
            dropped = self._to_drop(worker)
            if dropped is not worker:
                self._workers[worker] = None
            if dropped is not None:
                self._workers.pop(dropped, None)
        if dropped is worker:
            connection.close()
            return
        if dropped is not None:
            dropped.drop()
        try:
            worker.start()
        except RuntimeError as e:  # no thread can be had at the moment
            logger.debug("a request from %s cannot be answered: %s", worker.addr, e)
            self.leave(worker)
            connection.close()

    def own(self, addr: str) -> None:
        """The starter of the node's run is at this address: strangers do not take its places."""
        self._owner = addr

    def heard(self) -> None:
        """Called in the thread of a complete request, or of one that may take its time."""
        worker = threading.current_thread()
        if isinstance(worker, _Worker):
            worker.is_heard = True
            sock: DeadlineSocket = worker.connection.socket
            sock.read_each_within(REQUEST_S)

    def leave(self, worker: _Worker) -> None:
        with self._lock:
            self._workers.pop(worker, None)

    def stop(self, timeout_s: float) -> None:
        """Wait for answers that are being sent, and for no other connection."""
        with self._lock:
            workers = list(self._workers)
        for worker in workers:
            if not worker.is_heard:
                worker.drop()
        deadline = time.monotonic() + timeout_s
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        for worker in workers:
            if worker.is_alive():
                worker.drop()
                worker.join(0.1)

    def _to_drop(self, new: _Worker) -> _Worker | None:
        """The connection to drop for a new one; None if there is space."""
        from_there = [w for w in self._workers if w.addr == new.addr]
        if len(from_there) >= N_PER_ADDRESS and not is_here(new.addr):
            return next((w for w in from_there if not w.is_heard), new)
        limit = N_CONNECTIONS + (N_OF_OWNER if new.addr == self._owner else 0)
        if len(self._workers) < limit:
            return None
        unheard = [w for w in self._workers if not w.is_heard]
        return next((w for w in unheard if w.addr != self._owner), unheard[0] if unheard else new)


JSON_LIMIT_BYTES = 4 << 20


class BodyBrokenError(Exception):
    """The client went away in the middle of its body, or the body is not in the form that it was said to be."""


def number_of(text: str) -> int | None:
    """A count in a header or a query; None if it is not a number, or has more digits than any size here."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def content_length() -> int:
    headers = cherrypy.request.headers
    n_bytes = number_of(headers.get("Content-Length", ""))
    if n_bytes is None or "Transfer-Encoding" in headers:
        raise ControlError("a request with a body needs a Content-Length and no transfer encoding", 411)
    return n_bytes


def read_body(n_bytes: int) -> bytes:
    """At most so many bytes of the body; b"" at its end."""
    try:
        data: bytes = cherrypy.request.rfile.read(n_bytes)
    except (OSError, ValueError) as e:  # cheroot's own errors are of the second
        raise BodyBrokenError(str(e)) from None
    return data


def read_json(limit_bytes: int = JSON_LIMIT_BYTES) -> Any:
    n_bytes = content_length()
    if n_bytes > limit_bytes:
        raise ControlError(f"a body of {n_bytes} bytes; at most {limit_bytes} are accepted here", 413)
    body = read_body(n_bytes)
    if len(body) != n_bytes:
        raise ControlError("the body was cut off", 400)
    asker: Asker | None = cherrypy.request.asker
    if asker is not None:
        asker.check_body(body)
    try:
        return parse_json(body)
    except ValueError as e:
        raise ControlError(f"the body is not JSON: {str(e)[:200]}", 400) from None


MOVED = ("parts", "profile", "probe", "forward", "echo")  # which older nodes call
HEADER_LIMIT_BYTES = 64 << 10
JOIN_LIMIT_BYTES = 1024
BACKLOG = 128  # a crowd of strangers must not fill the queue that the starter waits in
END_S = 2  # for answers that are on their way


class Host(Protocol):
    """A side that can be joined: an Invitation."""

    def answer(self, request: Any, addr: str) -> dict[str, str]:
        """Answer for the guest at an address; raises AccessError."""


class Node(Protocol):
    """Actions of a node for HTTP requests. Each method may raise MdiError; a ControlError chooses the status."""

    def status(self, run: str | None) -> dict[str, Any]:
        """Status of the node. `run` names the run on whose behalf it is asked: a sign of life of its starter."""

    def init(self, request: InitRequest) -> dict[str, Any]:
        """Take part in a run; the answer names the missing parts."""

    def stop(self, run: str, leave: bool, ring: str | None = None) -> None:
        """End the run; with `leave`, the process as well; with `ring`, an epoch, only that ring."""


class StatusOnly:
    """Base for a node that only answers `GET /`: the starter."""

    def init(self, request: InitRequest) -> dict[str, Any]:
        raise ControlError("this node is a starter: it configures others", 409, code=Code.ROLE)

    def stop(self, run: str, leave: bool, ring: str | None = None) -> None:
        raise ControlError("this node is a starter: stop it there", 409, code=Code.ROLE)


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
            result = {"error": "the body was cut off", "code": Code.CONTROL}
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

    def _index(self) -> dict[str, Any]:
        _allow("GET")
        self._workers.heard()
        if self._gate.is_open or cherrypy.request.asker is not None:
            return self._node.status(None)
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
                code=Code.VERSION,
            )
        raise ControlError("no such address; there are GET /, POST /init, PUT /stop, POST /join", 404)


def _plain_error(status: str, message: str, traceback: str, version: str) -> bytes:
    cherrypy.response.headers["Content-Type"] = "application/json"
    logger.debug("HTTP %s: %s\n%s", status, message, traceback)
    return json.dumps({"error": f"{status}: {message}", "code": Code.FAILED}).encode()


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
        """Log at debug level: strangers can provoke these lines without end."""
        logger.debug("HTTP: %s", msg, exc_info=traceback)

    def _serve_unservicable(self) -> None:
        """A thread of cheroot for connections that its pool refuses. `ConnectionWorkers` refuses none, so it ends at once."""

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


class _BeforeRun(StatusOnly, EchoOnly):
    def __init__(self, name: str) -> None:
        self._name = name

    def status(self, run: str | None) -> dict[str, Any]:
        return {
            "name": self._name,
            "version": mdi.__version__,
            "control_version": CONTROL_VERSION,
            "state": "IDLE",
            "clock_s": time.time(),
        }


@contextlib.contextmanager
def open_ports(starter: NodeConfig, keys: KeyFile | None = None) -> Iterator[tuple[int, int]]:
    """Listen on the starter's control and ring port; gives both ports. UsageError if one cannot be listened on."""
    sock = open_socket(starter.listen_addr, starter.port_in, "starter's inference port_in")
    listener = RingListener(sock, starter.name, keys)
    node = _BeforeRun(starter.name)
    messages = MessageServer(node, listener)
    try:
        control = ControlServer(node, starter.listen_addr, starter.port, starter.name, keys)
        try:
            yield control.port, listener.port
        finally:
            control.close()
    finally:
        messages.close()
        listener.close()
