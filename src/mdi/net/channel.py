"""A bounded queue between two threads. Closing it wakes whoever waits. Does not use sockets."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Channel(Generic[T]):
    """FIFO of at most `capacity` items.

    `queue.Queue` has no portable way to wake a waiting reader for good, nor to pass the waiting items by; both are what
    the end of a run needs.

    Args:
        changed: notified of everything that happens here. Several channels may share one, so that one thread reads them all.
        on_space: called, from the thread of the reader, when a full channel has a free place again.
    """

    def __init__(
        self, capacity: int, changed: threading.Condition | None = None, on_space: Callable[[], None] | None = None
    ) -> None:
        self.capacity = capacity
        self._items: deque[T] = deque()
        self.changed = threading.Condition() if changed is None else changed
        self._on_space = on_space
        self._closed = False
        self._woken = False
        self.wait_s = 0.0  # time that get() spent waiting; written by the reader's thread only

    def put(self, item: T) -> bool:
        """Append, waiting while the channel is full. False if it is closed: the item was not taken."""
        with self.changed:
            self.changed.wait_for(lambda: self._closed or len(self._items) < self.capacity)
            if self._closed:
                return False
            self._items.append(item)
            self.changed.notify_all()
            return True

    def put_first(self, item: T) -> bool:
        """Put an item before all others, whatever the capacity. False if the channel is closed."""
        with self.changed:
            if self._closed:
                return False
            self._items.appendleft(item)
            self.changed.notify_all()
            return True

    def get(self, timeout_s: float | None = None) -> T | None:
        """The next item; None when the channel is closed, after `wake`, or after `timeout_s` without an item."""
        begin = time.perf_counter()
        with self.changed:
            self.changed.wait_for(lambda: self._closed or self._woken or bool(self._items), timeout_s)
            self.wait_s += time.perf_counter() - begin
            self._woken = False
            if self._closed or not self._items:
                return None
            item = self._items.popleft()
            self.changed.notify_all()
            was_full = len(self._items) == self.capacity - 1
        if was_full and self._on_space is not None:  # outside of the lock: the callee may use this channel
            self._on_space()
        return item

    def poll(self) -> T | None:
        """The next item; None if there is none. Never waits."""
        with self.changed:
            if not self._items:
                return None
            item = self._items.popleft()
            self.changed.notify_all()
            return item

    def wake(self) -> None:
        """Let get() return without waiting once, be it with None; takes no room, however often it is called."""
        with self.changed:
            self._woken = True
            self.changed.notify_all()

    def close(self) -> None:
        """Drop the queue and wake all threads; from now on get() gives None and put() False."""
        with self.changed:
            self._closed = True
            self._items.clear()
            self.changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def n_items(self) -> int:
        """How many are queued. Takes no lock."""
        return len(self._items)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to read. Takes no lock."""
        return not self._items

    @property
    def is_full(self) -> bool:
        """Whether `put` would wait. Takes no lock."""
        return not self._closed and len(self._items) >= self.capacity
