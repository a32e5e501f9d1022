"""One way to give up: a token that whoever waits holds, with a deadline, and with children that end with it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from mdi.errors import Code, MdiError


class CancelledError(MdiError):
    """The result of a wait is not wanted any more."""

    code = Code.CANCELLED


class Cancel:
    """Cancelled by `cancel`, by its deadline, or with its parent. All methods may be called from any thread.

    A command makes one; runs and requests derive children. Loops call `check`, and wait with `wait`; a call that blocks
    otherwise (a socket's recv) registers with `waking` how it is woken.

    Args:
        timeout_s: until the deadline; None has none besides the parent's.
        parent: whose end ends this one, too.
        late: what the deadline raises, made when it has passed.
    """

    def __init__(
        self, timeout_s: float | None = None, parent: Cancel | None = None, late: Callable[[], BaseException] | None = None
    ) -> None:  # fmt: skip
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._parent = parent
        self._late = late or (lambda: CancelledError(f"not done after {timeout_s:g} s"))
        self._changed = threading.Condition(threading.RLock())  # a signal handler may cancel
        self._error: BaseException | None = None
        self.wakers: list[Callable[[], None]] = []
        if parent is not None:
            parent._adopt(self)

    def _adopt(self, child: Cancel) -> None:
        with self._changed:
            if self._error is None:
                self.wakers.append(child._end_with_parent)
                return
        child._end_with_parent()

    def _end_with_parent(self) -> None:
        assert self._parent is not None
        error = self._parent.error
        assert error is not None
        self.cancel(error)

    def child(self, timeout_s: float | None = None, late: Callable[[], BaseException] | None = None) -> Cancel:
        """Ends with this one, or before. `close` it when it is not needed any more, if this one lives for long."""
        return Cancel(timeout_s, self, late)

    def close(self) -> None:
        """Forget it at its parent; harmless if repeated."""
        if self._parent is not None:
            with self._parent._changed, contextlib.suppress(ValueError):
                self._parent.wakers.remove(self._end_with_parent)

    def __enter__(self) -> Cancel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cancel(self, error: BaseException | None = None) -> None:
        """Have `check` raise `error` from now on, and wake who waits; only the first call counts."""
        with self._changed:
            if self._error is not None:
                return
            self._error = error or CancelledError("cancelled")
            wakers, self.wakers = self.wakers, []
            self._changed.notify_all()
        for wake in wakers:
            wake()

    @property
    def error(self) -> BaseException | None:
        """The error that `check` raises; None while it goes on."""
        with self._changed:
            error = self._error
        if error is None and self._deadline is not None and time.monotonic() >= self._deadline:
            self.cancel(self._late())
            return self.error
        return self._parent.error if error is None and self._parent is not None else error

    @property
    def is_cancelled(self) -> bool:
        return self.error is not None

    def check(self) -> None:
        """Raise the error that it was cancelled with."""
        if (error := self.error) is not None:
            raise error

    def left_s(self, most: float) -> float:
        """Seconds to the nearest deadline, `most` at most; for timeouts of calls."""
        if self._deadline is not None:
            most = max(0.0, min(most, self._deadline - time.monotonic()))
        return most if self._parent is None else self._parent.left_s(most)

    def wait(self, seconds: float) -> None:
        """Sleep so long, or until it is cancelled: then raise its error."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.check()
            with self._changed:
                if self._error is None:
                    self._changed.wait(self.left_s(left))
        self.check()

    @contextlib.contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """Within: `wake` is called once when it is cancelled by a call (not by a deadline: use `left_s` as a timeout).

        It is called from the thread that cancels, at once if that has happened already, and must not block.
        """
        with self._changed:
            is_late = self._error is not None
            if not is_late:
                self.wakers.append(wake)
        if is_late:
            wake()
        try:
            yield
        finally:
            with self._changed, contextlib.suppress(ValueError):
                self.wakers.remove(wake)


REPORT_S = 2.0


class Periodic:
    """`is_due` once every `each_s`, first after that time."""

    def __init__(self, each_s: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._each_s, self._clock = each_s, clock
        self.begin_s = self._last_s = clock()

    def is_due(self) -> bool:
        """Whether it is time to say something; if so, the next time begins now."""
        now = self._clock()
        if now - self._last_s <= (REPORT_S if self._each_s is None else self._each_s):
            return False
        self._last_s = now
        return True

    @property
    def passed_s(self) -> float:
        """Since the beginning."""
        return self._clock() - self.begin_s
