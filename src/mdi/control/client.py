"""A node as another one asks it: over HTTP on its control port, with messages on its ring port. Failures are ControlErrors."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mdi.cancel import Cancel
from mdi.control.messages import (
    CONTROL_VERSION,
    BlocksRequest,
    ForwardRequest,
    InitRequest,
    PartSpec,
    ProbeRequest,
    ProfileRequest,
    RowsRequest,
    TensorsRequest,
    ToldRows,
)
from mdi.control.signing import (
    BODY_HEADER,
    NONCE_HEADER,
    SIGNATURE_HEADER,
    NoncesKept,
    body_hash,
    is_answer,
    sign_request,
)
from mdi.control.swarm import Announced, ModelFacts, ModelRequest, SwarmRequest, announcements_of
from mdi.errors import AccessError, Code, ControlError
from mdi.net.keys import KeyFile
from mdi.net.message import ExchangeError, Message
from mdi.spec.cluster import NodeConfig
from mdi.units import duration

if TYPE_CHECKING:
    from requests import PreparedRequest

    from mdi.control.exchange import HttpAnswer

CONNECT_S = 4.0
ANSWER_S = 6.0
# A node that has taken a part's last byte still has to bring it to its disk: minutes, on a slow card.
PART_ANSWER_S = 300.0
# Measuring takes a few seconds; a slow board that builds large blocks takes longer.
PROBE_ANSWER_S = 60.0
ECHO_S = 10.0
BLOCK_S = 120.0  # for a block of many texts, forward or backward
SIGN_S = 1.0  # between two signs of life to a node that is watched
ERROR_LIMIT = 1000  # characters of a peer's words


class ControlClient:
    """Talks to the ports of one node; may be used by several threads.

    Args:
        keys: of the cluster. Where there are some, requests are signed, only signed answers are believed, and messages are
            sealed.
    """

    def __init__(self, node: NodeConfig, keys: KeyFile | None = None) -> None:
        self.node = node
        self._keys = keys
        self.nonces = NoncesKept()

    @property
    def where(self) -> str:
        return f"{self.node.name} at {self.node.addr}:{self.node.port}"

    def status(self, run: str | None = None, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """`GET /`; with `run`, asked on the ring's port, and a sign of life to the node that waits for that run."""
        if run:
            return self._status_in(self.ask("status", {"run": run}, timeout_s), self.port_where)
        return self._status_in(self.request("GET", "/", timeout_s), self.where)

    def init(self, request: InitRequest) -> dict[str, Any]:
        """`POST /init`; the answer says which parts are missing."""
        return self._ask("POST", "/init", request.to_json(), ANSWER_S * 5)

    def stop(self, run: str, leave: bool = False, timeout_s: float = ANSWER_S, ring: str | None = None) -> None:
        """`PUT /stop`: end a run, and with `leave` the process; with `ring`, an epoch, only that ring of the run."""
        only = {} if ring is None else {"ring": ring}
        self._ask("PUT", "/stop", {"run": run, "leave": leave, **only}, timeout_s)

    def send_part(
        self, part: PartSpec, run: str, offset: int, pieces: Iterable[bytes | memoryview],
        timeout_s: float = PART_ANSWER_S,
    ) -> None:  # fmt: skip
        """Send the bytes of a part from `offset` on; returns when the node has it."""
        args = {"run": run, "sha256": part.sha256, "offset": offset}
        self.ask("part", args, timeout_s, pieces, part.n_bytes - offset)

    def forward(self, request: ForwardRequest, cancel: Cancel | None = None) -> None:
        """Have the node send a part to another one."""
        self.ask("forward", request.to_json(), PART_ANSWER_S, cancel=cancel)

    def profile(
        self, request: ProfileRequest, on_progress: Callable[[Any], None] = lambda what: None, cancel: Cancel | None = None
    ) -> dict[str, Any]:  # fmt: skip
        """Have the node measure itself; returns when that is done. It says every second that it is still there.

        Args:
            on_progress: called with what it measures at the moment.
            cancel: ends the waiting, with its error.
        """
        body, cancel = json.dumps(request.to_json()).encode(), cancel or Cancel()
        with (
            self.open_message("profile", {}, len(body), ANSWER_S) as message,
            self._problems(self.port_where),
            cancel.waking(message.sock.wake),
        ):
            while True:
                try:
                    found = message.read(ANSWER_S)
                except ExchangeError:
                    cancel.check()
                    raise
                if "go" in found:
                    message.send([body], ANSWER_S)
                elif "push" in found:
                    on_progress(found["push"])
                elif found:
                    return self._last(found)

    def blocks(self, request: BlocksRequest, pieces: Sequence[memoryview], wanted: int) -> bytearray:
        """The node's blocks over rows, in torch: the bytes of the rows behind them, or of the gradients before them and of what
        was learned; `wanted` of them.
        """
        n_bytes = sum(map(len, pieces))
        with (
            self.open_message("blocks", request.to_json(), n_bytes, ANSWER_S) as message,
            self._problems(self.port_where),
        ):
            while True:
                found = message.read(BLOCK_S)
                if "go" in found:
                    message.send(pieces, BLOCK_S)
                elif (push := found.get("push")) is not None:
                    if not isinstance(push, dict) or push.get("n_bytes") != wanted:
                        raise ControlError(f"{self.port_where} answers with other rows than it was asked for")
                    data = message.receive(wanted, BLOCK_S)
                    self._last(message.read(ANSWER_S))
                    return data
                elif found:
                    self._last(found)
                    raise ControlError(f"{self.port_where} answers without rows")

    def tensors(self, request: TensorsRequest, pieces: Sequence[memoryview]) -> None:
        """Give the node tensors, which questions about blocks name by their hash."""
        self.ask("tensors", request.to_json(), BLOCK_S, pieces, sum(map(len, pieces)))

    def rows(self, request: RowsRequest) -> ToldRows:
        """The node's answer about rows of a text."""
        return ToldRows.from_json(self.ask("rows", request.to_json(), ANSWER_S), self.port_where)

    def probe(self, request: ProbeRequest) -> dict[str, Any]:
        """How the node reaches another one."""
        return self.ask("probe", request.to_json(), PROBE_ANSWER_S)

    def echo(self, n_bytes: int, cancel: Cancel | None = None) -> None:
        """So many bytes on their way there, and a short answer."""
        self.ask("echo", {}, ECHO_S, [bytes(n_bytes)], n_bytes, cancel)

    def swarm(
        self, request: SwarmRequest, timeout_s: float = ANSWER_S, cancel: Cancel | None = None
    ) -> tuple[Announced, ...]:  # fmt: skip
        """Announcements of nodes of the swarm that the node knows, and the caller does not."""
        body = json.dumps(request.to_json()).encode()
        return announcements_of(self.ask("swarm", {}, timeout_s, [body], len(body), cancel), self.port_where)

    def model(self, request: ModelRequest, cancel: Cancel | None = None) -> ModelFacts:
        """The model that a standing node holds blocks of, and hashes of its parts. It may have to read weights."""
        answer = self.ask("model", request.to_json(), PART_ANSWER_S, cancel=cancel)
        return ModelFacts.from_json(answer, self.port_where)

    def watch(self, run: str, epoch: str | None, cancel: Cancel) -> Iterator[dict[str, Any]]:
        """Each status of a ring of a run, as it changes, until the ring has ended; says meanwhile that the starter lives.

        Args:
            epoch: of the ring; None is the run's latest.
            cancel: ends the waiting, with its error.
        """
        with (
            self.open_message("watch", {"run": run, "epoch": epoch}, 0, ANSWER_S) as message,
            self._problems(self.port_where),
        ):
            heard = signed = time.monotonic()
            with cancel.waking(message.sock.wake):
                while True:
                    cancel.check()
                    if message.sock.is_readable(cancel.left_s(SIGN_S)):
                        heard = time.monotonic()
                        try:
                            found = message.read(ANSWER_S)
                        except ExchangeError:
                            cancel.check()
                            raise
                        if "push" in found:
                            yield self._status_in(found["push"], self.port_where)
                        elif found:
                            self._last(found)
                            return
                    now = time.monotonic()
                    if now - heard > ANSWER_S:
                        raise ExchangeError("silent", "no answer in time")
                    if now - signed >= SIGN_S:
                        signed = now
                        message.sign()

    # Messages on the ring port

    @property
    def port_where(self) -> str:
        return f"{self.node.name} at {self.node.addr}:{self.node.port_in}"

    def ask(
        self, ask: str, args: dict[str, Any], timeout_s: float, pieces: Iterable[bytes | memoryview] = (), n_bytes: int = 0,
        cancel: Cancel | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """The answer to a message with `n_bytes` of `pieces`; `cancel` ends the waiting, with its error."""
        cancel = cancel or Cancel()
        with (
            self.open_message(ask, args, n_bytes, timeout_s) as message,
            self._problems(self.port_where),
            cancel.waking(message.sock.wake),
        ):
            try:
                found = message.read(timeout_s)
                if "go" in found:
                    message.send(pieces, timeout_s)
                    found = message.read(timeout_s)
            except ExchangeError:
                cancel.check()
                raise
            return self._last(found)

    def open_message(self, ask: str, args: dict[str, Any], n_bytes: int, timeout_s: float) -> Message:
        opening = {"ask": ask, "version": CONTROL_VERSION, "n_bytes": n_bytes, "args": args}
        node, wait_s = self.node, min(ANSWER_S, timeout_s)
        with self._problems(self.port_where):
            return Message(node.addr, node.port_in, opening, self._keys, min(CONNECT_S, timeout_s), wait_s)

    @staticmethod
    def _status_in(status: Any, where: str) -> dict[str, Any]:
        if not isinstance(status, dict) or not isinstance(status.get("state"), str):
            raise ControlError(f"{where} is not a node of MDI-LLM: its status has no state", problem="stranger")
        return status

    def _last(self, found: dict[str, Any]) -> dict[str, Any]:
        """The content of a last answer; ControlError if it is a refusal, or none."""
        answer, status = found.get("answer"), found.get("status")
        if isinstance(answer, dict):
            return answer
        if "error" not in found or not isinstance(status, int):
            raise ControlError(
                f"{self.port_where} is not a node of MDI-LLM: its answer cannot be read", problem="stranger"
            )
        words = str(found["error"])[:ERROR_LIMIT]
        raise ControlError(f"{self.port_where}: {words}", status, code=Code.of(found.get("code")))

    @contextlib.contextmanager
    def _problems(self, where: str) -> Iterator[None]:
        """Turns what the way to the node does into a ControlError."""
        try:
            yield
        except ExchangeError as e:
            raise ControlError(f"{where} does not answer ({e})", problem=e.problem) from None
        except AccessError as e:
            raise ControlError(f"{where}: {e}", 401, "key", code=Code.KEY) from None

    # HTTP on the control port

    def _ask(self, method: str, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        return self.request(method, path, timeout_s, json.dumps(body).encode())

    def request(self, method: str, target: str, timeout_s: float, body: bytes = b"") -> dict[str, Any]:
        if self._keys is None:
            found = self._exchange(self._prepared(method, target, body), timeout_s)
            if NONCE_HEADER in found.headers:
                raise self._no_entry("has a cluster key, and this command was started without")
        else:
            found = self._signed(self._keys.first, method, target, timeout_s, body)
        return self._content(found)

    def _signed(self, secret: bytes, method: str, target: str, timeout_s: float, body: bytes) -> HttpAnswer:
        """Exchange a signed request for a signed answer. Raises ControlError."""

        def ask(nonce: str) -> tuple[str, HttpAnswer]:
            request = self._prepared(method, target, body)
            sent = request.body or b""
            assert isinstance(sent, bytes) and request.method is not None
            hashed = body_hash(sent)
            signature = sign_request(secret, request.method, request.path_url, hashed, nonce)
            request.headers.update({NONCE_HEADER: nonce, SIGNATURE_HEADER: signature, BODY_HEADER: hashed})
            return signature, self._exchange(request, timeout_s)

        signature, found = ask(self.nonces.take() or self._fetch_nonce(timeout_s))
        if self._is_stale(found):  # for example, the node was started again
            signature, found = ask(self._fetch_nonce(timeout_s))
        answered, nonce = found.headers.get(SIGNATURE_HEADER, ""), found.headers.get(NONCE_HEADER, "")
        if not is_answer(answered, secret, signature, found.status, found.body, nonce):
            raise self._no_entry("does not have the same cluster key as this node")
        self.nonces.keep(nonce)
        return found

    def _fetch_nonce(self, timeout_s: float) -> str:
        """Anybody may have one. Raises ControlError if the node gives none: it has no key."""
        found = self._exchange(self._prepared("GET", "/", b""), timeout_s)
        nonce = found.headers.get(NONCE_HEADER)
        if nonce is None:
            self._content(found)  # is it a node at all?
            raise self._no_entry("has no cluster key")
        return nonce

    def _no_entry(self, why: str) -> ControlError:
        return ControlError(f"{self.where} {why}: start all nodes with the same --key FILE", 401, "key", code=Code.KEY)

    def _prepared(self, method: str, target: str, body: bytes) -> PreparedRequest:
        from mdi.control.exchange import prepared

        with self._problems(self.where):
            return prepared(method, self.node.addr, self.node.port, target, body)

    def _exchange(self, request: PreparedRequest, timeout_s: float) -> HttpAnswer:
        from mdi.control.exchange import exchange

        with self._problems(self.where):
            return exchange(request, self.node.addr, self.node.port, min(CONNECT_S, timeout_s), timeout_s)

    @staticmethod
    def _is_stale(found: HttpAnswer) -> bool:
        """Whether the nonce was not good any more. Nobody has signed this, so it is only a reason to try once more."""
        try:
            return found.status == 401 and Code.of(json.loads(found.body)["code"]) is Code.NONCE
        except (ValueError, KeyError, TypeError, RecursionError):
            return False

    def _content(self, found: HttpAnswer) -> dict[str, Any]:
        try:
            answer = json.loads(found.body)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise ControlError(
                f"{self.where} is not a node of MDI-LLM: its answer is not a JSON object", found.status, "stranger"
            )
        if found.status != 200:
            words = str(answer.get("error", found.reason))[:ERROR_LIMIT]
            raise ControlError(f"{self.where}: {words}", found.status, code=Code.of(answer.get("code")))
        return answer


def ask_to_join(addr: str, port: int, request: dict[str, Any]) -> Any:
    """The answer of the node there; ControlError if there is none, or it says no."""
    from mdi.control.exchange import exchange, prepared

    body, where = json.dumps(request).encode(), f"{addr}:{port}"
    try:
        found = exchange(prepared("POST", addr, port, "/join", body), addr, port, CONNECT_S, ANSWER_S)
        answer = json.loads(found.body)
    except ExchangeError as e:
        raise ControlError(
            f"{where} does not answer ({e}): is `mdi key --invite` still running there?", problem=e.problem
        ) from None
    except (ValueError, RecursionError):
        raise ControlError(f"{where} is not a node of MDI-LLM", problem="stranger") from None
    if found.status == 401:
        raise ControlError(
            f"{where} refuses the code: it is wrong, was used, or is older than 15 minutes", 401, code=Code.KEY
        )
    if found.status != 200:
        raise ControlError(f"{where} has no open invitation: run `mdi key --invite` there", found.status)
    return answer


T = TypeVar("T")


class FanOut(Generic[T]):
    """Begins all calls at once.

    Args:
        calls: by the name of the node that each asks, or of a group of nodes.

    Attributes:
        results: of the calls that are done.
    """

    def __init__(self, calls: Mapping[str, Callable[[], T]]) -> None:
        self.results: dict[str, T] = {}
        self._errors: list[Exception] = []
        self._threads = {
            name: threading.Thread(target=self._call, args=(name, call), name=f"ask-{name}", daemon=True)
            for name, call in calls.items()
        }
        for thread in self._threads.values():
            thread.start()

    def _call(self, name: str, call: Callable[[], T]) -> None:
        try:
            self.results[name] = call()
        except Exception as e:
            self._errors.append(e)

    @property
    def is_working(self) -> bool:
        """Whether some are not done."""
        return any(thread.is_alive() for thread in self._threads.values())

    def raise_error(self) -> None:
        """Raise the first error that a call has raised so far, if one has."""
        if self._errors:
            raise self._errors[0]

    def join(self, timeout_s: float, cancel: Cancel | None = None) -> None:
        """Wait for all, but no longer than this, and not after the end of `cancel`; errors stay untold."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads.values():
            while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
                if cancel is not None and cancel.is_cancelled:
                    return
                thread.join(left if cancel is None else min(0.1, left))

    def wait(self, cancel: Cancel | None = None, timeout_s: float = float("inf")) -> list[T]:
        """The results of all calls, in order.

        Args:
            cancel: its end ends the waiting, with its error.

        Raises:
            Exception: the first that a call raised, without waiting for the other calls.
            ControlError: some were not done in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if cancel is not None:
                cancel.check()
            late = [name for name, thread in self._threads.items() if thread.is_alive()]
            self.raise_error()
            if not late:
                return [self.results[name] for name in self._threads]
            if time.monotonic() >= deadline:
                raise ControlError(f"{', '.join(late)} did not answer within {duration(timeout_s)}")
            self._threads[late[0]].join(min(0.1, max(0.0, deadline - time.monotonic())))
