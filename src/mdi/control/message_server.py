"""The side of a node that is asked over its ring port: a bounded number of messages, each in a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from mdi.control.messages import (
    CONTROL_VERSION,
    BlocksRequest,
    ForwardRequest,
    Opening,
    PartRequest,
    ProbeRequest,
    ProfileRequest,
    RowsRequest,
    TensorsRequest,
    WatchRequest,
    version_error,
)
from mdi.control.swarm import ModelRequest, SwarmRequest
from mdi.errors import Code, ControlError, WireError
from mdi.net.listener import RingListener
from mdi.net.message import Asked, FrameCodec
from mdi.net.wire import Frame
from mdi.spec.settings_file import parse_json

N_MESSAGES = 96
N_OF_ANYBODY = 16  # of those that may be asked without the id of a run
SIGN_S = 1.0  # between two signs of life, in both directions
REQUEST_S = 10.0  # for all bytes of a message that are not weights
BLOCKS_LIMIT_BYTES = 1 << 30
ECHO_LIMIT_BYTES = JSON_LIMIT_BYTES = 4 << 20
END_S = 2.0

logger = logging.getLogger(__name__)


class Watched(Protocol):
    """A ring of a node, of which changes are pushed."""

    @property
    def has_ended(self) -> bool: ...

    def changed(self, timeout_s: float) -> dict[str, Any] | None:
        """Wait at most so long for a status that differs from the last one; None if there is none."""

    def touch(self) -> None:
        """Note that the starter lives."""


class PortNode(Protocol):
    """A node as its ring port asks it. Each method may raise MdiError."""

    def receive_part(self, run: str, sha256: str, offset: int, n_bytes: int, read: Callable[[int], bytes]) -> None:
        """Receive the bytes of a part from `offset` on; `read(n)` gives up to n of the `n_bytes` that are coming."""

    def watch(self, run: str, epoch: str | None) -> Watched:
        """A ring of a run; without an epoch, the latest."""

    def status(self, run: str | None) -> dict[str, Any]:
        """The status of a run or of the node, as `GET /` answers it; also a sign of life from the starter of the run."""

    def profile(self, request: ProfileRequest, note: Callable[[Any], None]) -> dict[str, Any]:
        """Measure itself; returns when that is done.

        Args:
            note: called every second with what it measures at the moment; raises OSError when nobody waits any more.
        """

    def probe(self, request: ProbeRequest) -> dict[str, Any]:
        """Try to reach another node, and report the result."""

    def forward(self, request: ForwardRequest) -> None:
        """Send a part to another node; done when that node has it."""

    def swarm(self, request: SwarmRequest) -> dict[str, Any]:
        """The announcements of the swarm that the caller does not know; takes the caller's own."""

    def model(self, request: ModelRequest) -> dict[str, Any]:
        """The model that it holds blocks of for all runs, see ModelFacts."""

    def compute_blocks(
        self, request: BlocksRequest, n_bytes: int, read: Callable[[int], bytes], sign: Callable[[], None]
    ) -> memoryview:
        """Blocks of a run in torch, forward or backward.

        Args:
            n_bytes: that come, `read(n)` gives up to n of them.
            sign: called after each block; raises OSError when nobody waits any more.
        """

    def take_tensors(self, request: TensorsRequest, n_bytes: int, read: Callable[[int], bytes]) -> None:
        """Keep tensors that questions about blocks name; `read(n)` gives up to n of the `n_bytes` that are coming."""

    def rows(self, request: RowsRequest) -> dict[str, Any]:
        """Rows of a text that it has sent or received, see ToldRows."""

    def check_echo(self) -> None:
        """Raises ControlError if bytes that measure a link would disturb a run."""


class EchoOnly:
    """Base of a node that is asked for echoes only: a starter."""

    def _refuse(self) -> ControlError:
        return ControlError("this node is a starter: it asks others", 409, code=Code.ROLE)

    def receive_part(self, run: str, sha256: str, offset: int, n_bytes: int, read: Callable[[int], bytes]) -> None:
        raise self._refuse()

    def watch(self, run: str, epoch: str | None) -> Watched:
        raise self._refuse()

    def profile(self, request: ProfileRequest, note: Callable[[Any], None]) -> dict[str, Any]:
        raise self._refuse()

    def probe(self, request: ProbeRequest) -> dict[str, Any]:
        raise self._refuse()

    def forward(self, request: ForwardRequest) -> None:
        raise self._refuse()

    def swarm(self, request: SwarmRequest) -> dict[str, Any]:
        raise self._refuse()

    def model(self, request: ModelRequest) -> dict[str, Any]:
        raise self._refuse()

    def compute_blocks(
        self, request: BlocksRequest, n_bytes: int, read: Callable[[int], bytes], sign: Callable[[], None]
    ) -> memoryview:
        raise self._refuse()

    def take_tensors(self, request: TensorsRequest, n_bytes: int, read: Callable[[int], bytes]) -> None:
        raise self._refuse()

    def rows(self, request: RowsRequest) -> dict[str, Any]:
        raise self._refuse()

    def check_echo(self) -> None:
        pass


@dataclass(frozen=True)
class _Kind:
    """How one kind of message is answered; `of_run`: only callers that know a run get more than a refusal."""

    answer: Callable[[Asked, dict[str, Any]], dict[str, Any] | None]
    of_run: bool
    limit_bytes: int | None = None  # of what belongs to it


class MessageServer:
    """Answers the messages that come to a ring port, until `close`.

    Messages that anybody may send have few places, and a deadline for all their bytes; the others have to know a run. So
    strangers, where there is no key, take no place of a run's starter.
    """

    def __init__(self, node: PortNode, listener: RingListener) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._open: dict[Asked, threading.Thread] = {}
        self._anybody = threading.BoundedSemaphore(N_OF_ANYBODY)
        self._is_closed = False
        self._kinds = {
            "part": _Kind(self._part, of_run=True, limit_bytes=1 << 45),
            "watch": _Kind(self._watch, of_run=True),
            "forward": _Kind(self._forward, of_run=True),
            "blocks": _Kind(self._blocks, of_run=True, limit_bytes=BLOCKS_LIMIT_BYTES),
            "tensors": _Kind(self._tensors, of_run=True, limit_bytes=BLOCKS_LIMIT_BYTES),
            "rows": _Kind(self._rows, of_run=True),
            "status": _Kind(self._status, of_run=False),
            "profile": _Kind(self._profile, of_run=False, limit_bytes=JSON_LIMIT_BYTES),
            "probe": _Kind(self._probe, of_run=False),
            "swarm": _Kind(self._swarm, of_run=False, limit_bytes=JSON_LIMIT_BYTES),
            "model": _Kind(self._model, of_run=False),
            "echo": _Kind(self._echo, of_run=False, limit_bytes=ECHO_LIMIT_BYTES),
        }
        listener.on_message = self._accept

    def close(self) -> None:
        """End all messages. Harmless if repeated."""
        with self._lock:
            self._is_closed = True
            threads = dict(self._open)
        end = time.monotonic() + END_S
        for asked in threads:
            asked.sock.wake()
        for thread in threads.values():
            thread.join(max(0.0, end - time.monotonic()))

    def _accept(self, sock: socket.socket, codec: FrameCodec, opening: Frame, peer: str) -> None:
        asked = Asked(sock, codec, opening.epoch, peer)
        thread = threading.Thread(target=self._serve, args=(asked, bytes(opening.payload)), name="message", daemon=True)
        with self._lock:
            try:
                if not self._is_closed and len(self._open) < N_MESSAGES:
                    thread.start()  # it waits for the lock before it ends
                    self._open[asked] = thread
                    return
            except RuntimeError as e:  # no thread can be had at the moment
                logger.debug("a message from %s cannot be answered: %s", peer, e)
        asked.sock.close()

    def _serve(self, asked: Asked, opening: bytes) -> None:
        try:
            asked.answer(answer=self._answer_to(asked, opening))
        except Exception as e:  # nothing that a caller can do ends the node
            logger.debug("a message from %s failed: %s", asked.addr, e, exc_info=True)
            asked.refuse(e)
        finally:
            with self._lock:
                del self._open[asked]
            asked.sock.close()

    def _answer_to(self, asked: Asked, data: bytes) -> dict[str, Any]:
        opening = Opening.from_bytes(data)
        if opening.version != CONTROL_VERSION:
            raise version_error("the caller", opening.version)
        kind = self._kinds.get(opening.ask)
        if kind is None:
            raise ControlError(f"no such message: {opening.ask[:40]!r}; there are {', '.join(self._kinds)}", 404)
        limit = kind.limit_bytes or 0
        if opening.n_bytes > limit:
            raise ControlError(f"a message of {opening.n_bytes} bytes; at most {limit} are accepted here", 413)
        asked.n_bytes = opening.n_bytes
        with contextlib.ExitStack() as stack:
            if not kind.of_run:
                if not self._anybody.acquire(blocking=False):
                    raise ControlError("the node answers many others: ask again in a moment", 409, code=Code.BUSY)
                stack.callback(self._anybody.release)
                asked.sock.read_within(REQUEST_S)
            return kind.answer(asked, opening.args) or {}

    def _part(self, asked: Asked, args: dict[str, Any]) -> None:
        request = PartRequest.from_json(args)
        self._node.receive_part(request.run, request.sha256, request.offset, asked.n_bytes, asked.read)

    def _watch(self, asked: Asked, args: dict[str, Any]) -> None:
        """Push each status of a ring, and hear that its starter lives, until the ring has ended or the starter has left."""
        request = WatchRequest.from_json(args)
        watched = self._node.watch(request.run, request.epoch)
        watched.touch()
        while not self._is_closed:
            has_ended = watched.has_ended
            status = watched.changed(0 if has_ended else SIGN_S)
            if status is not None or not has_ended:
                asked.push(**({} if status is None else {"push": status}))
            if has_ended:
                return
            is_signed = asked.is_signed()
            if is_signed is None:
                raise WireError("the caller has left")
            if is_signed:
                watched.touch()

    def _status(self, asked: Asked, args: dict[str, Any]) -> dict[str, Any]:
        return self._node.status(WatchRequest.from_json(args).run)

    def _forward(self, asked: Asked, args: dict[str, Any]) -> None:
        self._node.forward(ForwardRequest.from_json(args))

    def _blocks(self, asked: Asked, args: dict[str, Any]) -> None:
        found = self._node.compute_blocks(BlocksRequest.from_json(args), asked.n_bytes, asked.read, asked.push)
        asked.push(push={"n_bytes": len(found)})
        asked.give(found)

    def _tensors(self, asked: Asked, args: dict[str, Any]) -> None:
        self._node.take_tensors(TensorsRequest.from_json(args), asked.n_bytes, asked.read)

    def _rows(self, asked: Asked, args: dict[str, Any]) -> dict[str, Any]:
        return self._node.rows(RowsRequest.from_json(args))

    def _profile(self, asked: Asked, args: dict[str, Any]) -> dict[str, Any]:
        return self._node.profile(ProfileRequest.from_json(self._json(asked)), lambda what: asked.push(push=what))

    def _swarm(self, asked: Asked, args: dict[str, Any]) -> dict[str, Any]:
        return self._node.swarm(SwarmRequest.from_json(self._json(asked)))

    def _model(self, asked: Asked, args: dict[str, Any]) -> dict[str, Any]:
        return self._node.model(ModelRequest.from_json(args))

    def _probe(self, asked: Asked, args: dict[str, Any]) -> dict[str, Any]:
        return self._node.probe(ProbeRequest.from_json(args))

    def _echo(self, asked: Asked, args: dict[str, Any]) -> dict[str, Any]:
        """Bytes that only measure the way here: read and forgotten."""
        self._node.check_echo()
        n_left = asked.n_bytes
        while n_left and (piece := asked.read(n_left)):
            n_left -= len(piece)
        if n_left:
            raise ControlError("the bytes were cut off", 400)
        return {"n_bytes": asked.n_bytes}

    def _json(self, asked: Asked) -> Any:
        """The bytes that belong to a message. Raises ControlError."""
        body = b"".join(iter(lambda: asked.read(asked.n_bytes), b""))
        if len(body) != asked.n_bytes:
            raise ControlError("the bytes were cut off", 400)
        try:
            return parse_json(body)
        except ValueError as e:
            raise ControlError(f"the message is not JSON: {str(e)[:200]}", 400) from None
