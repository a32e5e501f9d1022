"""One HTTP exchange with a deadline for every wait and a largest size for the answer."""

from __future__ import annotations

import contextlib
import errno
import http.client
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from mdi.control.deadline import DeadlineSocket

ANSWER_LIMIT_BYTES = 4 << 20

# No route, or one that forbids it: Linux tells of a blackhole as an invalid argument.
_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EINVAL, errno.EACCES, errno.EPERM)


class ExchangeError(Exception):
    """There is no usable answer.

    Attributes:
        problem: why, as a key of `mdi.control.reach.PROBLEMS`.
    """

    def __init__(self, problem: str, message: str) -> None:
        super().__init__(message)
        self.problem = problem


@dataclass(frozen=True)
class HttpAnswer:
    """`reason` is the text that the server gave beside its status; `body` at most ANSWER_LIMIT_BYTES."""

    status: int
    reason: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


def exchange(
    method: str,
    addr: str,
    port: int,
    target: str,
    body: bytes | Iterable[bytes | memoryview],
    n_bytes: int,
    connect_s: float,
    answer_s: float,
    headers: Mapping[str, str] | None = None,
) -> HttpAnswer:
    """Send a request and read its answer.

    Args:
        target: path and query.
        body, n_bytes: the bytes to send, and their number; an error of the iterable passes through.
        connect_s: for the connection.
        answer_s: for each piece of the body to leave, and then for the whole answer.
        headers: to send besides those of every exchange.

    Raises:
        ExchangeError
    """
    sock = _connect(addr, port, connect_s)
    try:
        connection = http.client.HTTPConnection(addr, port)
    except http.client.InvalidURL as e:
        sock.close()
        raise ExchangeError("name", str(e)) from None
    connection.sock = sock
    sock.settimeout(answer_s)
    with contextlib.closing(connection), _explained():
        # A server that refuses a body answers before it has read it, and its answer is worth more than the broken pipe.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, ConnectionAbortedError):
            own = {"Content-Length": str(n_bytes), "Connection": "close"}
            connection.request(method, target, body, {**own, **(headers or {})})
        sock.read_within(answer_s)
        with connection.getresponse() as response:
            found = HttpAnswer(
                response.status, response.reason, response.read(ANSWER_LIMIT_BYTES + 1), _titled(response)
            )
            is_whole = not response.length
    if len(found.body) > ANSWER_LIMIT_BYTES:
        raise ExchangeError("stranger", f"its answer is longer than {ANSWER_LIMIT_BYTES} bytes")
    if not is_whole:
        raise ExchangeError("closed", "it closed the connection in the middle of its answer")
    return found


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turns what goes wrong on the way into an ExchangeError."""
    try:
        yield
    except TimeoutError:
        raise ExchangeError("silent", "no answer in time") from None
    except OSError as e:
        raise ExchangeError(problem_of(e), e.strerror or str(e)) from None
    except (http.client.RemoteDisconnected, http.client.IncompleteRead):
        raise ExchangeError("closed", "it closed the connection without an answer") from None
    except (http.client.HTTPException, ValueError) as e:
        raise ExchangeError("stranger", f"it does not speak HTTP: {str(e)[:100]!r}") from None


def _titled(response: http.client.HTTPResponse) -> dict[str, str]:
    return {name.title(): value for name, value in response.headers.items()}


def problem_of(error: Exception) -> str:
    """What the network did, as a key of `mdi.control.reach.PROBLEMS`."""
    if isinstance(error, (TimeoutError, BlockingIOError)):
        return "timeout"
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return "name"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, OSError) and error.errno in _NO_WAY:
        return "unreachable"
    return "closed"


def _connect(addr: str, port: int, connect_s: float) -> DeadlineSocket:
    try:
        plain = socket.create_connection((addr, port), connect_s)
    except TimeoutError:
        raise ExchangeError("timeout", "no answer in time") from None
    except (OSError, ValueError) as e:  # ValueError: a name that no resolver takes
        problem = problem_of(e) if isinstance(e, OSError) else "name"
        raise ExchangeError(problem, getattr(e, "strerror", None) or str(e)[:200]) from None
    sock = DeadlineSocket.around(plain)
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
