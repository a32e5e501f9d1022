"""One HTTP request to the control port of a node that may be hostile, with `requests`: bounded in time and in size.

A module of its own, because importing requests takes 0.1 s and 3.5 MB, and most secondaries ask nobody over HTTP.
"""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPResponse
from urllib3.connection import HTTPConnection
from urllib3.exceptions import HTTPError
from urllib3.exceptions import TimeoutError as LateError

from mdi.net.message import ANSWER_LIMIT_BYTES, DeadlineSocket, ExchangeError, connect, problem_of

CUT_OFF = "it closed the connection in the middle of its answer"


@dataclass(frozen=True)
class HttpAnswer:
    """`reason` is the text that the server gave beside its status; `body` at most ANSWER_LIMIT_BYTES."""

    status: int
    reason: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


def prepared(method: str, addr: str, port: int, target: str, body: bytes) -> requests.PreparedRequest:
    """The request as it will be sent, for whoever signs it.

    Args:
        target: path and query.

    Raises:
        ExchangeError: the address can be none.
    """
    host = f"[{addr}]" if ":" in addr else addr
    try:
        request = requests.Request(
            method, f"http://{host}:{port}{target}", {"Connection": "close"}, data=body
        ).prepare()
    except (ValueError, requests.RequestException) as e:
        raise ExchangeError("name", str(e)[:200]) from None
    return request


def exchange(
    request: requests.PreparedRequest, addr: str, port: int, connect_s: float, answer_s: float
) -> HttpAnswer:  # fmt: skip
    """Send a request and read its answer.

    Args:
        connect_s: for the connection.
        answer_s: for the body to leave and the whole answer to come.

    Raises:
        ExchangeError
    """
    with connect(addr, port, connect_s) as sock, _Session() as session, _explained():
        sock.settimeout(answer_s)  # of the body; it is not renewed by what is sent
        sock.read_within(answer_s)
        session.mount("http://", _Connected(sock))
        with session.send(request, timeout=answer_s, stream=True, allow_redirects=False) as response:
            raw: HTTPResponse = response.raw
            body = raw.read(ANSWER_LIMIT_BYTES + 1, decode_content=False)
    if len(body) > ANSWER_LIMIT_BYTES:
        raise ExchangeError("stranger", f"its answer is longer than {ANSWER_LIMIT_BYTES} bytes")
    if raw.length_remaining:
        raise ExchangeError("closed", CUT_OFF)
    headers = {name.title(): value for name, value in response.headers.items()}
    return HttpAnswer(response.status_code, response.reason, body, headers)


class _Session(requests.Session):
    """Goes to the node itself and nowhere else: no proxies, no passwords of ~/.netrc, no redirects."""

    def __init__(self) -> None:
        super().__init__()
        self.trust_env = False

    def get_redirect_target(self, resp: requests.Response) -> None:
        """None: where requests does not follow a redirect, it reads its body, of any size."""


class _Connected(HTTPAdapter):
    """Sends over a connection that is there already: timeouts of requests begin again with each byte, this socket's do not."""

    def __init__(self, sock: DeadlineSocket) -> None:
        class Connection(HTTPConnection):
            def connect(self) -> None:
                self.sock = sock

        class Pool(HTTPConnectionPool):
            ConnectionCls = Connection

        self._pool = Pool
        super().__init__()

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {"http": self._pool}


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turns what goes wrong on the way into an ExchangeError."""
    try:
        yield
    except (requests.RequestException, HTTPError, OSError, ValueError) as e:
        cause = _cause(e)
        if isinstance(cause, (TimeoutError, LateError)):
            raise ExchangeError("silent", "no answer in time") from None
        if isinstance(cause, http.client.IncompleteRead):
            raise ExchangeError("closed", CUT_OFF) from None
        if isinstance(cause, OSError) and not isinstance(cause, requests.RequestException):
            raise ExchangeError(problem_of(cause), cause.strerror or str(cause)) from None
        raise ExchangeError("stranger", f"it does not speak HTTP: {str(cause)[:100]!r}") from None


def _cause(error: Exception) -> Exception:
    """What requests and urllib3 have wrapped, which they keep among an error's arguments."""
    while inner := next((arg for arg in error.args if isinstance(arg, Exception)), None):
        error = inner
    return error
