"""Prepares one secondary for a run: reach it, configure it, send missing weights, check that it stays alive."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import mdi
from mdi.cancel import Cancel, Periodic
from mdi.control.client import ControlClient
from mdi.control.messages import InitRequest, PartSpec
from mdi.control.reach import BUSY_S, reach_node
from mdi.errors import Code, ControlError, MdiError, NodeLostError, RingError
from mdi.host.diagnosis import port_remedy
from mdi.kernels import library
from mdi.run.part_sending import STALL_S, Holders, PartSending, PartSource
from mdi.spec.arithmetic import Arithmetic
from mdi.spec.cluster import NodeConfig
from mdi.spec.decode import decode
from mdi.stages.store import CacheReport
from mdi.units import duration, size

AGAIN_S = 0.1  # before a node that is busy is asked again
SIGN_S = 1.0  # after which a node that was ready at once hears of its starter again
N_BROKEN = 3  # connections of a watch that break one after the other without a status
WINDOW_S = 10.0  # the rate of a transfer is that of the last seconds: a slow start says nothing about the rest

logger = logging.getLogger("mdi")


class SecondarySetup:
    """Works in the threads `setup-<node>` and `watch-<node>`; `wait` tells the outcome.

    Args:
        client: of the node.
        request: its task.
        weights: where its parts come from.
        wait_s: how long to wait for a node that does not answer yet.
        cancel: of the set-up of all nodes: its end ends this one, and a failure of this one cancels it.
        is_known: whether it took part in the run's ring before: then it is there, and of a version that fits.
        holders: other nodes that may have parts.

    Attributes:
        is_ready_at_once: whether it had its stage in memory.
        sent_rows: once `caches` has returned: None if it has no caches of the ring before; else how many positions of each text
            it has sent on and can send again.
    """

    def __init__(
        self, client: ControlClient, request: InitRequest, weights: PartSource, wait_s: float, cancel: Cancel,
        is_known: bool = False, holders: Holders | None = None,
    ) -> None:  # fmt: skip
        self._client = client
        self._request = request
        self._weights = weights
        self._wait_s = wait_s
        self._is_known = is_known
        self._holders = holders or Holders()
        self._answer: dict[str, Any] = {}  # its last status
        self._changed = threading.Condition()  # notified with each status, and at the end
        self.is_ready_at_once = False
        self._done = threading.Event()
        self._cancel = cancel
        self.error: MdiError | None = None
        self.ring_port: Any = None  # the node's status, once it has answered
        self.process = ""
        self.sent_rows: dict[int, int] | None = None
        self._progress: Progress | None = None  # of the weights that are being sent
        self._setup = threading.Thread(target=self._run, name=f"setup-{self.name}", daemon=True)
        self._watch = threading.Thread(target=self._watch_node, name=f"watch-{self.name}", daemon=True)
        self._setup.start()

    @property
    def name(self) -> str:
        return self._client.node.name

    def wait(self) -> None:
        """Until the node is ready. Raises the error that ended the set-up of all nodes."""
        with self._cancel.waking(self._done.set):
            while not self._done.wait(self._cancel.left_s(SIGN_S)):
                self._cancel.check()
        self._cancel.check()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        for thread in (self._setup, self._watch):
            if thread.ident is not None:
                thread.join(timeout_s)

    def _run(self) -> None:
        try:
            if not self._is_known:
                self._reach()
            self._configure()
            self.is_ready_at_once = self._answer["state"] == "READY"
            self._watch.start()
            with self._cancel.waking(self._wake):
                self._send(self._ask_missing())
                self._wait_until(lambda status: status["state"] == "READY")
            logger.info("%s is ready", self.name)
        except MdiError as e:
            self._fail(e)
        except Exception as e:
            logger.debug("setup of %s failed", self.name, exc_info=True)
            self._fail(RingError(f"setting up {self.name} failed: {type(e).__name__}: {e}"))
        finally:
            self._done.set()

    def _fail(self, error: MdiError) -> None:
        with self._changed:
            if self._cancel.is_cancelled:
                return  # another node was first, or the other thread of this one
            self.error = error
            self._cancel.cancel(error)
            if self._cancel.error is not error:
                self.error = None

    def _reach(self) -> None:
        """Wait until the node answers."""
        status = reach_node(self._client, self._wait_s, self._cancel)
        self._note(status)
        if (version := status.get("version")) != mdi.__version__:
            logger.warning(
                "warning: %s runs version %s of MDI-LLM, this machine version %s: they work together, but install "
                "the same version on both", self.name, version, mdi.__version__,
            )  # fmt: skip
        if (theirs := status.get("arithmetic")) != (ours := library.arithmetic()):
            logger.warning(
                "warning: %s computes in %s arithmetic, this machine in %s: numbers agree up to rounding, so a text may "
                "differ on other nodes", self.name, theirs, ours,
            )  # fmt: skip

    def _note(self, status: dict[str, Any]) -> None:
        self.ring_port, self.process = status.get("ring_port"), str(status.get("process", ""))

    def _configure(self) -> None:
        """Send the run configuration. A node that has its stage in memory answers that it is ready."""
        deadline = time.monotonic() + BUSY_S
        is_reported = False
        while True:
            self._cancel.check()
            try:
                answer = self._client.init(self._request)
                self._answer = self._checked(answer) if "state" in answer else self._loading_status()
                return self._note(self._answer)
            except ControlError as e:
                if e.status is None:
                    raise self._lost(e) from None
                if not e.code.again or time.monotonic() > deadline:
                    raise
                if not is_reported:
                    logger.info("%s; waiting up to %.0f s for its end", e, BUSY_S)
                    is_reported = True
                self._cancel.wait(AGAIN_S)

    def _ask_missing(self) -> list[tuple[PartSpec, int]]:
        """The parts that the node lacks, and how many bytes of each it has from an earlier try."""
        report = Periodic()

        def is_known(status: dict[str, Any]) -> bool:
            if report.is_due():
                logger.info("%s checks which weights it already has", self.name)
            return status.get("missing") is not None

        return self._missing_in(self._wait_until(is_known))

    def _missing_now(self) -> dict[PartSpec, int]:
        self._take(self._loading_status())
        return dict(self._ask_missing())

    def _wait_until(self, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first of its statuses for which something holds; they are pushed (see `_watch_node`).

        Raises:
            NodeLostError, RingError: it has given up, or made no progress for too long.
        """
        patience = Patience(self.name, len(self._request.parts), STALL_S, time.monotonic())
        while True:
            with self._changed:
                status = self._checked(self._answer)
                if is_so(status):
                    return status
                self._cancel.check()
                patience.look(status, time.monotonic())
                self._changed.wait(SIGN_S)

    def _take(self, status: dict[str, Any]) -> None:
        with self._changed:
            self._answer = status
            self._changed.notify_all()

    def _missing_in(self, status: dict[str, Any]) -> list[tuple[PartSpec, int]]:
        """The parts that a node reports missing. Raises ControlError if that cannot be read."""
        specs = {part.sha256: part for part in self._request.parts}
        try:
            parts = [(specs[entry["sha256"]], int(entry["have_bytes"])) for entry in status["missing"]]
            if any(not 0 <= have <= part.n_bytes for part, have in parts) or len(set(parts)) < len(parts):
                raise ValueError
            return parts
        except (KeyError, TypeError, ValueError):
            raise ControlError(f"{self._client.where} sent a list of missing parts that cannot be read") from None

    def _send(self, missing: list[tuple[PartSpec, int]]) -> None:
        if not missing:
            return
        total, had = sum(part.n_bytes for part, _ in missing), sum(have for _, have in missing)
        logger.info("sending %s of weights to %s", size(total - had), self.name)
        self._progress = progress = Progress(self.name, total, had, time.monotonic())
        sending = PartSending(
            self._client, self._request.run, self._weights, self._holders, self._cancel,
            self._missing_now,
        )  # fmt: skip
        for part, have in missing:
            sending.send(part, have)
        self._progress = None
        logger.info("%s", progress.summary(time.monotonic()))

    def caches(self, is_asked: bool) -> CacheReport:
        """How much cache the node can hold, now that it is ready; as it said then, or `is_asked` again.

        Raises:
            NodeLostError, RingError, ControlError: it is not there any more, or says it in no readable way.
        """
        try:
            status = self._loading_status() if is_asked else self._answer
        except RingError as e:  # it was ready, and has given up since: others may replace it
            raise e if isinstance(e, NodeLostError) else NodeLostError(self.name, str(e), e.code) from None
        self.sent_rows = _sent_rows(status) if status.get("caches_kept") is True else None
        try:
            return CacheReport.from_json(status.get("caches"), self._client.where)
        except ControlError as e:
            self.error = e  # another node may have its blocks
            raise

    @property
    def arithmetic(self) -> Arithmetic:
        """Of the node's stage, once it is ready. Raises ControlError."""
        try:
            told, where = self._answer.get("stage_arithmetic"), f"{self._client.where}: stage_arithmetic"
            return decode(Arithmetic, told, where, ControlError)
        except ControlError as e:
            self.error = e
            raise

    @property
    def has_window(self) -> bool:
        """Whether the node reads its weights from the disk for each frame; False before it is ready."""
        return self._answer.get("window") is True

    def _loading_status(self) -> dict[str, Any]:
        """Status of a node that is getting ready; RingError if it has given up."""
        self._cancel.check()
        try:
            return self._checked(self._client.status(self._request.run))
        except ControlError as e:
            raise self._lost(e) from None

    def _checked(self, status: dict[str, Any]) -> dict[str, Any]:
        if status["state"] not in ("LOADING", "READY"):
            error = RingError(f"{self.name} could not get ready: {status.get('error') or status['state']}")
            error.code = Code.of(status.get("error_code") or Code.RING)
            raise error
        return status

    def _watch_node(self) -> None:
        """Hear the node's statuses, and give signs of life, until all nodes are ready: this needs no sender and no disk.

        Renews the lease: a node that is ready must not count its starter as dead while the others still load.
        """
        report, n_broken = Periodic(), 0
        try:
            if self.is_ready_at_once:  # texts may be waiting for its ring
                self._cancel.wait(SIGN_S)
            while True:
                try:
                    for status in self._client.watch(self._request.run, self._request.epoch, self._cancel):
                        n_broken = 0
                        self._take(status)
                        if report.is_due():
                            self._report(status)
                    return
                except ControlError as e:
                    n_broken += 1
                    if e.problem != "closed" or n_broken > N_BROKEN:
                        return self._fail(self._lost(e))
        except MdiError:  # it was cancelled
            pass

    def _report(self, status: dict[str, Any]) -> None:
        """A line about the bytes that the node has received; bytes in the sender's buffers do not count."""
        ours, progress, loading = self._progress, status.get("progress"), status.get("loading")
        if status["state"] == "LOADING" and isinstance(loading, dict):
            logger.info("%s loads its weights: %s of %s parts", self.name, loading.get("done"), loading.get("total"))
        n_bytes = progress.get("bytes") if isinstance(progress, dict) else None
        if ours is not None and isinstance(n_bytes, int):
            ours.update(n_bytes, time.monotonic())
            logger.info("%s", ours)

    def _lost(self, error: ControlError) -> NodeLostError:
        lost = NodeLostError(self.name, f"{self.name} was lost while it got ready: {error}")
        return with_true_port(lost, self._client.node, self.ring_port)


def with_true_port(error: NodeLostError, node: NodeConfig, ring_port: Any) -> NodeLostError:
    """The error of a ring port that could not be reached, with the node's own port if that is another one."""
    if not isinstance(ring_port, int) or ring_port == node.port_in:
        return error
    return NodeLostError(error.node, f"{error}. {port_remedy(ring_port, 'inference.port_in')}")


def _sent_rows(status: dict[str, Any]) -> dict[int, int]:
    """{} where that cannot be read."""
    found = status.get("sent_rows")
    try:
        return {int(seq_id): int(n) for seq_id, n in found.items()} if isinstance(found, dict) else {}
    except (TypeError, ValueError):
        return {}


# How it goes on


class Patience:
    """How long a starter waits for a loading node, in one step of its set-up: as long as it makes progress. Pure.

    Args:
        name: of the node.
        n_parts: number of parts that it looks for and loads; a larger count is no progress.
        limit_s: how long it may be without progress.
        now_s: any clock's time.
    """

    def __init__(self, name: str, n_parts: int, limit_s: float, now_s: float) -> None:
        self._name = name
        self._n_parts = n_parts
        self._limit_s = limit_s
        self._since_s = now_s
        self._done = 0

    def look(self, status: Mapping[str, Any], now_s: float) -> None:
        """Take the node's status. Raises NodeLostError if it was without progress for too long."""
        done = self._count(status.get("looking")) + self._count(status.get("loading"))
        if done > self._done:
            self._done, self._since_s = done, now_s
        elif now_s - self._since_s > self._limit_s:
            raise NodeLostError(
                self._name,
                f"{self._name} is loading, but has made no progress for {self._limit_s:.0f} s: look at "
                "what it prints, and start it again",
            )

    def _count(self, stage: Any) -> int:
        done = stage.get("done") if isinstance(stage, Mapping) else None
        return min(max(done, 0), self._n_parts) if isinstance(done, int) else 0


class Progress:
    """Bytes, rate and time left of one transfer, as the receiver reports it. Pure.

    Args:
        name: of the receiving node.
        total_bytes: of all parts that it lacked.
        had_bytes: bytes that an interrupted transfer left.
        now_s: any clock's time.
    """

    def __init__(self, name: str, total_bytes: int, had_bytes: int, now_s: float) -> None:
        self._name = name
        self._total = total_bytes
        self._had = self._done = min(had_bytes, total_bytes)
        self._begin_s = now_s
        self._points: deque[tuple[float, int]] = deque([(now_s, self._done)])

    def update(self, done_bytes: int, now_s: float) -> None:
        """The receiver has so much; it never has less than before, and never more than all."""
        self._done = min(max(self._done, done_bytes), self._total)
        self._points.append((now_s, self._done))
        while len(self._points) > 2 and self._points[1][0] <= now_s - WINDOW_S:
            self._points.popleft()

    @property
    def bytes_s(self) -> float:
        """Over the last seconds; 0 while nothing can be said."""
        (first_s, first), (last_s, last) = self._points[0], self._points[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0

    def __str__(self) -> str:
        """ "secondary0: 120.0 of 400.0 MB (30 %), 40.0 MB/s, 7 s left" """
        share = 100 * self._done // self._total if self._total else 100
        line = f"{self._name}: {size(self._done)} of {size(self._total)} ({share} %)"
        if self._done == self._total:
            return line
        rate = self.bytes_s
        if not rate:
            return line + ", nothing comes at the moment"
        return line + f", {size(rate)}/s, {duration((self._total - self._done) / rate)} left"

    def summary(self, now_s: float) -> str:
        """The last line, when everything has arrived and was checked."""
        taken = max(now_s - self._begin_s, 1e-9)
        sent = self._total - self._had
        rest = f" ({size(self._had)} were there)" if self._had else ""
        return f"{self._name} has its weights: {size(sent)} in {duration(taken)}, {size(sent / taken)}/s{rest}"
