"""One HTTP exchange with a deadline for every wait and a largest size for the answer."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mdi.net.message import ANSWER_LIMIT_BYTES, ExchangeError, connect, problem_of


@dataclass(frozen=True)
class HttpAnswer:
    """`reason` is the text that the server gave beside its status; `body` at most ANSWER_LIMIT_BYTES."""

    status: int
    reason: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


def exchange(
    method: str, addr: str, port: int, target: str, body: bytes, connect_s: float, answer_s: float,
    headers: Mapping[str, str] | None = None,
) -> HttpAnswer:  # fmt: skip
    """Send a request and read its answer.

    Args:
        target: path and query.
        connect_s: for the connection.
        answer_s: for the body to leave, and then for the whole answer.
        headers: to send besides those of every exchange.

    Raises:
        ExchangeError
    """
    sock = connect(addr, port, connect_s)
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
            own = {"Content-Length": str(len(body)), "Connection": "close"}
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
