"""The computing thread of a secondary: it takes the next frame of each ring in turn.

A ring whose next node reads nothing is skipped until it does, so no ring waits for another one's neighbours: links have queues
and threads of their own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from mdi.cancel import Cancel
from mdi.engine.worker import SecondaryLoop
from mdi.errors import Code, ControlError, MdiError, RingEndedError
from mdi.host.threads import compute_with
from mdi.net.link import STUCK_BLOCKS, STUCK_S, Watch, Work
from mdi.net.ring import TcpRing

SIGN_S = 1.0


class AbandonedError(MdiError):
    """The ring ended before it began, or this node does not take part any more."""

    def __init__(self, message: str, code: Code = Code.RUN) -> None:
        super().__init__(message)
        self.code = code


class MainThreadTask:
    """Work of an HTTP request that must run on the computing thread: `run` does it there, while another waits in `result`.

    Args:
        work: gives the answer as a JSON object; its argument ends when nobody waits any more.
    """

    def __init__(self, work: Callable[[Cancel], dict[str, Any]]) -> None:
        self._work = work
        self._cancel = Cancel()
        self._done = threading.Event()
        self._answer: dict[str, Any] = {}
        self._error: MdiError | None = None

    def run(self) -> None:
        """Do the work; its errors go to the thread that waits."""
        try:
            self._answer = self._work(self._cancel)
        except MdiError as e:
            self._error = e
        except Exception as e:  # for example out of memory, or a missing kernel: this node continues
            self._error = ControlError(f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}", 500)
        finally:
            self._done.set()

    def drop(self, error: MdiError) -> None:
        """It will not be done."""
        self._error = self._error or error
        self._cancel.cancel(self._error)
        self._done.set()

    def result(self, timeout_s: float, note: Callable[[], None]) -> dict[str, Any]:
        """The answer; raises what went wrong, or ControlError (504) after `timeout_s`.

        Args:
            note: called every second meanwhile; with its error the work ends.
        """
        deadline = time.monotonic() + timeout_s
        while not self._done.wait(min(SIGN_S, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                self.drop(ControlError(f"not done within {timeout_s:.0f} s", 504))
                break
            try:
                note()
            except OSError:
                self.drop(ControlError("nobody waits for it any more"))
                raise
        if self._error is not None:
            raise self._error
        return self._answer


class Turn:
    """One ring's part in it, from `RoundRobin.add` to the end of the ring.

    Args:
        loop: what computes its frames.
        ring: the one whose frames these are; made with `arrivals=RoundRobin.changed`.
        n_threads: to compute with; None is the process' number.
        n_finished: blocks that the loop's stage has finished so far.
        read_bytes: of weights that it has read from the disk so far.

    Attributes:
        wait_s: how long the thread had nothing to do since this ring's first frame; before it, there was no text.
        has_begun: whether it had a turn.
    """

    def __init__(
        self, loop: SecondaryLoop, ring: TcpRing, n_threads: int | None, n_finished: Callable[[], int] = lambda: 0,
        read_bytes: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        self.loop = loop
        self.ring = ring
        self.n_threads = n_threads
        self.n_finished, self.read_bytes = n_finished, read_bytes
        self.wait_s = 0.0
        self.since_s = time.perf_counter()  # since when it takes part
        self.has_begun = False
        self._over = threading.Event()
        self._error: Exception | None = None

    def end(self, error: Exception | None) -> None:
        self._error = error
        self._over.set()

    def wait(self) -> None:
        """Wait for the end of the ring; raises what ended it, if that was not in good order."""
        self._over.wait()
        if self._error is not None:
            raise self._error


class RoundRobin:
    """`run` is the thread; all other methods may be called from any.

    Args:
        stuck_s: the thread is stuck after so long without a finished block, see `mdi.net.link`.
        clock: seconds, rising.

    Attributes:
        changed: to be notified when a ring may have a frame, see TcpRing.
        turns: of the rings that take part.
        is_running: whether the thread computes, or waits for something to compute.
    """

    def __init__(self, stuck_s: float = STUCK_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.changed = threading.Condition()
        self.turns: list[Turn] = []  # the ring that was served last goes to the end
        self._tasks: deque[MainThreadTask] = deque()
        self._closed = self.is_running = False
        self._n_threads: int | None = None
        self._stuck_s, self._clock = stuck_s, clock
        self._served: tuple[Turn, int] | None = None  # whose frame is in hand, and what its stage had finished before
        self._n_done, self._block_s = 0, 0.0
        self._watch = Watch()

    @property
    def work(self) -> Work:
        """How far the thread is. Bytes from the disk count as well: a block of a large model may take a slow disk minutes."""
        served = self._served
        if served is None:
            return Work(self._n_done)
        turn, before = served
        limit_s = max(self._stuck_s, STUCK_BLOCKS * self._block_s)
        return Work(self._n_done + turn.n_finished() - before + turn.read_bytes(), limit_s)

    @property
    def is_stuck(self) -> bool:
        """Whether the thread has not finished a block for too long."""
        return self._watch.stuck_s(self.work, self._clock()) is not None

    def note_sign(self) -> None:
        """The thread lives: it waits for other nodes."""
        self._n_done += 1

    def add(self, turn: Turn) -> None:
        """Let a ring take part until it is over; after `close` it has ended at once."""
        with self.changed:
            if not self._closed:
                turn.since_s = time.perf_counter()
                self.turns.append(turn)
                return self.changed.notify_all()
        turn.end(_ended())

    def post(self, task: MainThreadTask) -> None:
        """Run something else on the thread, before the next frame."""
        with self.changed:
            if not self._closed:
                self._tasks.append(task)
                return self.changed.notify_all()
        task.drop(ControlError("the node is ending", 503, code=Code.LEAVING))

    def close(self) -> None:
        """Let `run` return after the frame that it is at; what takes part ends with it."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
            is_running = self.is_running
        if not is_running:
            self._end_all()

    def run(self) -> None:
        """Compute until `close`."""
        with self.changed:
            self.is_running = True
        try:
            while self._do_next():
                pass
        finally:
            with self.changed:
                self._closed, self.is_running = True, False
            self._end_all()

    def _do_next(self) -> bool:
        """False at the end. Between two calls nothing refers to a stage, which may be dropped then."""
        work = self._next()
        if isinstance(work, MainThreadTask):
            work.run()
        elif work is not None:
            self._serve(work)
        return work is not None

    def _end_all(self) -> None:
        """Returns only after the last frame was computed, because the caller then frees the caches."""
        with self.changed:
            turns, self.turns = self.turns, []
            tasks, self._tasks = self._tasks, deque()
        for turn in turns:
            turn.end(_ended())
        for task in tasks:
            task.drop(ControlError("the node is ending", 503, code=Code.LEAVING))

    def _next(self) -> Turn | MainThreadTask | None:
        """Wait for the next thing to do; None at the end."""
        begin = 0.0
        with self.changed:
            while not self._closed:
                if self._tasks:
                    return self._tasks.popleft()
                if (turn := self._pending()) is not None:
                    self._count_wait(begin)
                    return turn
                begin = begin or time.perf_counter()
                self.changed.wait()
        return None

    def _pending(self) -> Turn | None:
        """The ring whose turn it is, of those that have something to do."""
        for i, turn in enumerate(self.turns):
            if turn.ring.is_pending:
                self.turns.append(self.turns.pop(i))
                return turn
        return None

    def _count_wait(self, begin: float) -> None:
        if begin:
            now = time.perf_counter()
            for turn in self.turns:
                turn.wait_s += now - max(begin, turn.since_s)

    def _serve(self, turn: Turn) -> None:
        if not turn.has_begun:
            turn.wait_s = 0.0
        if turn.n_threads != self._n_threads or not turn.has_begun:  # torch may have been loaded for this very ring
            self._n_threads, turn.has_begun = turn.n_threads, True
            compute_with(turn.n_threads)
        error: Exception | None = None
        try:
            return self._step(turn)
        except RingEndedError:
            pass
        except Exception as e:  # an error of this stage or ring; the others continue
            error = e
        with self.changed:
            if turn in self.turns:
                self.turns.remove(turn)
        turn.end(error)

    def _step(self, turn: Turn) -> None:
        before, begin = turn.n_finished(), self._clock()
        self._served = turn, before
        self._watch.stuck_s(self.work, begin)
        try:
            turn.loop.step()
        finally:
            if n_finished := turn.n_finished() - before:
                self._block_s = max(self._block_s, (self._clock() - begin) / n_finished)
            self._n_done += n_finished + 1
            self._served = None


def _ended() -> AbandonedError:
    return AbandonedError("it was asked to end", Code.LEFT)
