"""An engine and secondaries over TCP whose stages are made up: blocks of numbers, of which a test knows all tokens."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from loopback import DEADLINE_S, Nodes, Text
from made_up_caches import N_IDS
from mdi.engine.memory import CacheMemory, NodeCaches
from mdi.engine.replay import COMPUTE, FILL, PASS, SentRows
from mdi.engine.rows import ArrayRows
from mdi.engine.scheduler import Scheduler
from mdi.engine.sequence import SamplingParams
from mdi.engine.sequence import Sequence as Tokens
from mdi.engine.starter import StarterEngine
from mdi.engine.worker import SecondaryLoop
from mdi.errors import RingError
from mdi.net.ring import LoopbackRing

N_TOKENS = 50
MAX_LENGTH = 400


def prompt(n: int, seed: int) -> list[int]:
    return [random.Random(seed).randrange(N_IDS) for _ in range(n)]


class Source:
    """Guesses of which seven in ten are right."""

    def __init__(self, truth: dict[int, list[int]]) -> None:
        self._truth, self._random = truth, random.Random(3)

    def limits(self, sequence: Tokens, n_places: int, n_texts: int, n_beside: int) -> tuple[int, int]:
        return n_places, 3

    def propose(self, sequence: Tokens, n: int) -> list[int]:
        begin = len(sequence.ids) - sequence.n_prompt + len(sequence.guessed)
        found = self._truth[sequence.seq_id][begin : begin + n]
        return [one if self._random.random() < 0.7 else (one + 1) % N_IDS for one in found]

    def judge(self, sequence: Tokens, n_right: int, is_wrong: bool) -> None:
        assert n_right >= 0

    begin_ring = begin = sent = returned = forget = is_watching = lambda self, *_: None
    under_way = ()


class Ring:
    """An engine and its secondaries over TCP; a node can be lost, and the next ring has a new one in its place.

    Args:
        make: a stage of the blocks [start, stop).
        cuts: where each stage begins, and the end of the last one.
    """

    def __init__(self, make: Callable[[int, int], Any], cuts: Sequence[int]) -> None:
        self._make, self._cuts = make, cuts
        self.n_nodes = len(cuts) - 1
        self.stages = [self._stage(i) for i in range(self.n_nodes)]
        self.sent = [SentRows(1 << 20) for _ in self.stages]
        self.roles = [COMPUTE] * self.n_nodes
        nodes = [NodeCaches(f"node{i}", 1 << 30, one.classes) for i, one in enumerate(self.stages)]
        scheduler = Scheduler(memory=CacheMemory(tuple(nodes)))
        self.engine = StarterEngine(self.stages[0], scheduler, MAX_LENGTH, ArrayRows())
        self.engine.sent = self.sent[0]
        self.errors: list[Exception] = []
        self.nodes: Nodes | None = None

    def _stage(self, index: int) -> Any:
        return self._make(self._cuts[index], self._cuts[index + 1])

    def submit(self, ids: list[int], lose_at: int | None = None, owner: str | None = None) -> Text:
        """With `lose_at`, secondary0 is lost when so many tokens have come."""
        left = [lose_at]

        def ends(token: int) -> bool:
            if left[0] is not None:
                left[0] -= 1
                if not left[0] and self.nodes is not None:
                    self.nodes.kill(1)
            return False

        params = SamplingParams(N_TOKENS, temperature=0)
        return Text(self.engine.submit(ids, params, None if lose_at is None else ends, owner=owner))

    @contextlib.contextmanager
    def closed(self) -> Iterator[Callable[[], None]]:
        """A new ring; what runs all texts over it."""
        if self.n_nodes == 1:
            yield lambda: self.engine.run(LoopbackRing(4))
            return
        self.nodes = nodes = Nodes(self.n_nodes, capacity=4)
        threads = [
            threading.Thread(target=self._secondary, args=(i,), name=f"secondary{i - 1}")
            for i in range(1, self.n_nodes)
        ]
        for thread in threads:
            thread.start()
        try:
            yield lambda: self.engine.run(nodes.rings[0])
        finally:
            nodes.rings[0].stop("the test is over")
            for thread in threads:
                thread.join(DEADLINE_S)
            nodes.close()
        assert not self.errors

    def _secondary(self, index: int) -> None:
        assert self.nodes is not None
        try:
            ring, is_last = self.nodes.rings[index], index == self.n_nodes - 1
            loop = SecondaryLoop(
                self.stages[index], ArrayRows(), ring, is_last, sent=self.sent[index], replay=self.roles[index]
            )
            loop.run()
        except RingError:
            pass  # it was lost
        except Exception as e:
            self.errors.append(e)
            self.nodes.kill(index)

    def come_back(self, loss: str) -> None:
        """A link was lost ("link"), or secondaries ("0", "1", "01") have lost their caches, for which the node before the first
        of them has the rows that it sent; or all begin again ("all").
        """
        lost = [] if loss == "link" else [*range(1, self.n_nodes)] if loss == "all" else [1 + int(one) for one in loss]
        for i in lost:
            self.stages[i], self.sent[i] = self._stage(i), SentRows(1 << 20)
        self.roles = [PASS if i in lost and i + 1 in lost else COMPUTE for i in range(self.n_nodes)]
        if loss == "all":
            self.engine.kept = None
            return
        filler = lost[0] - 1 if lost else 0
        if filler:
            self.roles[filler] = FILL
        self.engine.kept = self.sent[filler].counts
        self.engine.fills_replays, self.engine.has_fresh = bool(lost) and not filler, bool(lost)
