"""States, and blocks that read the cache of another one, in a ring: with guesses, prefixes, forks and losses, the tokens are
those of a plain computation on one list.
"""

from __future__ import annotations

import pytest

from made_up_caches import Kinds, MadeUpStage, State, paged, plain_tokens
from made_up_rings import N_TOKENS, Ring, Source, prompt
from mdi.errors import RingError

CUTS = (0, 3, 6, 8)
# Blocks 2 and 7 read the caches of others: of pages with a window, and of all positions.
STATES: Kinds = [paged(), paged(8), 1, State(), State(), paged(), paged(), 6]
SNAPSHOTS: Kinds = [State(40) if isinstance(one, State) else one for one in STATES]


def ring_of(kinds: Kinds) -> Ring:
    return Ring(lambda start, stop: MadeUpStage(kinds, start, stop), CUTS)


@pytest.mark.parametrize(("kinds", "is_guessed"), [(STATES, True), (SNAPSHOTS, False)])
@pytest.mark.parametrize("loss", ["none", "link", "0", "all"])
def test_tokens_are_those_of_one_list(kinds: Kinds, is_guessed: bool, loss: str) -> None:
    """The first two texts have the same prompt, which one computes; the last one is longer than what a state keeps of rows."""
    prompts = [prompt(70, 1), prompt(70, 1), prompt(3, 2), prompt(190, 3)]
    expected = [plain_tokens(kinds, ids, N_TOKENS) for ids in prompts]
    ring = ring_of(kinds)
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
    ring, first = ring_of(kinds), prompt(160, 1)
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
