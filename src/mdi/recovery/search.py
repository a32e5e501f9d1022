"""The state of a search for another ring in the place of a broken one."""

from __future__ import annotations

from mdi.errors import RingError
from mdi.recovery.replacement import Next, Stage


class Search:
    """See the module.

    Attributes:
        error: the last that was said of a loss.
        began, since: time.monotonic() of the first loss, and of the last one.
        last_s: time.perf_counter() of the last token before; of the first loss if there was none.
        before, processes_before: the stages of the ring that broke, and the processes of its secondaries.
        processes: what nodes have answered since.
        answering: nodes that answered when they were asked last.
        suspected: nodes that were reported lost.
        unfit: nodes that said they cannot take part.
        gone: nodes whose processes have ended.
        is_judged: whether texts were suspected for it.
        failed, left: nodes that reported their failure, and those of them that were told to end.
        most: blocks that nodes have said they can hold at most.
        n_failures: rings that could not be formed.
    """

    def __init__(self, error: RingError, now: float) -> None:
        self.error = error
        self.began = self.since = now
        self.last_s = 0.0
        self.before: dict[str, Stage] = {}
        self.processes_before: dict[str, str] = {}
        self.processes: dict[str, str] = {}
        self.answering: frozenset[str] = frozenset()
        self.suspected: set[str] = set()
        self.unfit: set[str] = set()
        self.gone: set[str] = set()
        self.is_judged = False
        self.failed: set[str] = set()
        self.left: set[str] = set()
        self.most: dict[str, int] = {}
        self.n_failures = 0

    def fresh(self, following: Next) -> frozenset[str]:
        """Nodes of the next ring that are not in the one before, have another process now, or failed by themselves."""
        then, now = self.processes_before, self.processes
        return frozenset(
            name
            for name in following.names
            if name not in self.before or name in self.failed or now.get(name) != then.get(name)
        )
