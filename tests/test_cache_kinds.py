"""States, and blocks that read the cache of another one, in a ring: with guesses, prefixes, forks and losses, the tokens are
those of a plain computation on one list.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator

import pytest

from loopback import DEADLINE_S, Nodes, Text
from made_up_caches import N_IDS, Kinds, MadeUpStage, State, paged, plain_tokens
from mdi.engine.memory import CacheMemory, NodeCaches
from mdi.engine.replay import SentRows
from mdi.engine.rows import ArrayRows
from mdi.engine.scheduler import Scheduler
from mdi.engine.sequence import SamplingParams, Sequence
from mdi.engine.starter import StarterEngine
from mdi.engine.worker import SecondaryLoop
from mdi.errors import RingError

CUTS = (0, 3, 6, 8)
# Blocks 2 and 7 read the caches of others: of pages with a window, and of all positions.
STATES: Kinds = [paged(), paged(8), 1, State(), State(), paged(), paged(), 6]
SNAPSHOTS: Kinds = [State(40) if isinstance(one, State) else one for one in STATES]
N_TOKENS = 50
MAX_LENGTH = 400


def prompt(n: int, seed: int) -> list[int]:
    return [random.Random(seed).randrange(N_IDS) for _ in range(n)]


class Source:
    """Guesses of which seven in ten are right."""

    def __init__(self, truth: dict[int, list[int]]) -> None:
        self._truth, self._random = truth, random.Random(3)

    def limits(self, sequence: Sequence, n_places: int, n_texts: int, n_beside: int) -> tuple[int, int]:
        return n_places, 3

    def propose(self, sequence: Sequence, n: int) -> list[int]:
        begin = len(sequence.ids) - sequence.n_prompt + len(sequence.guessed)
        found = self._truth[sequence.seq_id][begin : begin + n]
        return [one if self._random.random() < 0.7 else (one + 1) % N_IDS for one in found]

    def judge(self, sequence: Sequence, n_right: int, is_wrong: bool) -> None:
        assert n_right >= 0

    begin_ring = begin = sent = returned = forget = is_watching = lambda self, *_: None
    under_way = ()


class Ring:
    """An engine and two secondaries over TCP; a node can be lost, and the next ring has a new one in its place."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds
        self.stages = [self._stage(i) for i in range(3)]
        nodes = [NodeCaches(f"node{i}", 1 << 30, one.classes) for i, one in enumerate(self.stages)]
        scheduler = Scheduler(memory=CacheMemory(tuple(nodes)))
        self.engine = StarterEngine(self.stages[0], scheduler, MAX_LENGTH, ArrayRows())
        self.engine.sent = SentRows(1 << 20)
        self.errors: list[Exception] = []
        self.nodes: Nodes | None = None

    def _stage(self, index: int) -> MadeUpStage:
        return MadeUpStage(self.kinds, CUTS[index], CUTS[index + 1])

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
        self.nodes = nodes = Nodes(3, capacity=4)
        threads = [threading.Thread(target=self._secondary, args=(i,), name=f"secondary{i - 1}") for i in (1, 2)]
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
            SecondaryLoop(self.stages[index], ArrayRows(), self.nodes.rings[index], index == 2).run()
        except RingError:
            pass  # it was lost
        except Exception as e:
            self.errors.append(e)
            self.nodes.kill(index)

    def come_back(self, loss: str) -> None:
        """Of secondary0 its link was lost, or it has lost its caches; then the starter has the rows that it sent, or all begin
        again.
        """
        self.engine.kept = None if loss == "all" else self.engine.sent.counts
        self.engine.has_fresh = self.engine.fills_replays = loss == "rows"
        if loss != "link":
            self.stages[1] = self._stage(1)
        if loss == "all":
            self.stages[2].caches.clear()


@pytest.mark.parametrize(("kinds", "is_guessed"), [(STATES, True), (SNAPSHOTS, False)])
@pytest.mark.parametrize("loss", ["none", "link", "rows", "all"])
def test_tokens_are_those_of_one_list(kinds: Kinds, is_guessed: bool, loss: str) -> None:
    """The first two texts have the same prompt, which one computes; the last one is longer than what a state keeps of rows."""
    prompts = [prompt(70, 1), prompt(70, 1), prompt(3, 2), prompt(190, 3)]
    expected = [plain_tokens(kinds, ids, N_TOKENS) for ids in prompts]
    ring = Ring(kinds)
    if is_guessed:
        ring.engine.speculation = Source(dict(enumerate(expected)))  # type: ignore[assignment]
    lose_at = None if loss == "none" else 20
    texts = [ring.submit(ids, lose_at if i == 3 else None, owner="a") for i, ids in enumerate(prompts)]
    if loss != "none":
        with ring.closed() as run, pytest.raises(RingError):
            run()
        ring.come_back(loss)
    with ring.closed() as run:
        run()
    assert [text.ids for text in texts] == expected
    assert any(text.request.sequence.n_evictions for text in texts) == (loss == "all"), "begun again"
    assert ring.engine.n_reused >= 69 and (ring.engine.scheduler.n_guessed > 20) == is_guessed


@pytest.mark.parametrize(("every", "n_far"), [(None, 0), (40, 80), (0, 119)])
def test_prefixes_are_shared_where_caches_can_be_cut(every: int | None, n_far: int) -> None:
    """The next turn goes on behind the answer. One that differs early begins at a snapshot, anew if there are none, or, where
    there are no states (0), at any position.
    """
    state = paged() if every == 0 else State(every)
    kinds = [paged() if one == paged(8) else state if isinstance(one, State) else one for one in STATES]
    ring, first = Ring(kinds), prompt(160, 1)
    answer = ring.submit(first, owner="a")
    with ring.closed() as run:
        run()
        assert answer.ids == plain_tokens(kinds, first, N_TOKENS)
        far, near = [*first[:119], *prompt(30, 4)], [*first, *answer.ids, *prompt(20, 5)]
        for ids, n_reused in ((far, n_far), (near, 160 + N_TOKENS - 1)):
            before, text = ring.engine.n_reused, ring.submit(ids, owner="a")
            run()
            assert text.ids == plain_tokens(kinds, ids, N_TOKENS)
            assert ring.engine.n_reused - before == n_reused
