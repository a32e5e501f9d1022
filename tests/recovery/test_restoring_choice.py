"""Caches are restored by replay where the rows are there: by what stages and links take, that is never the slower way."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from mdi.engine.replay import COMPUTE, FILL, PASS
from mdi.run.form import ReplayRoles, replay_roles
from mdi.run.policy import Form, Stage


def stage_names(n: int) -> tuple[str, ...]:
    return ("starter", *(f"secondary{i}" for i in range(n - 1)))


def through_the_ring(n_frames: int, stage_s: Sequence[float], link_s: Sequence[float]) -> list[float]:
    """When each of some frames has passed all stages; each stage and each link has one frame at a time, in order."""
    ready = [0.0] * n_frames
    for busy_s in (s for pair in zip(stage_s, link_s, strict=True) for s in pair):
        free = 0.0
        for k in range(n_frames):
            free = ready[k] = max(ready[k], free) + busy_s
    return ready


def restored_s(
    roles: ReplayRoles | None, following: Form, n_frames: int, stage_s: Sequence[float], link_s: Sequence[float]
) -> list[float]:
    """When each frame's rows are in all caches again: with these roles, or, without, computed by all nodes."""
    if roles is None:
        return through_the_ring(n_frames, stage_s, link_s)
    by_name = {following.names[0]: FILL if roles.is_by_starter else COMPUTE, **roles.by_name}
    computing = [s if name in following.fresh else 0.0 for name, s in zip(following.names, stage_s, strict=True)]
    sending = [
        s if by_name.get(name, COMPUTE) in (FILL, PASS) else 0.0
        for name, s in zip(following.names, link_s, strict=True)
    ]
    return through_the_ring(n_frames, computing, sending)


def roles_of(following: Form) -> ReplayRoles:
    roles = replay_roles(following.names, following.fresh)
    assert roles is not None
    return roles


Loss = tuple[Form, list[float], list[float]]
times = st.floats(0.001, 1.0)


@st.composite
def losses(draw: st.DrawFn) -> Loss:
    """A ring of which some secondaries are replaced, with times of its stages and links for a frame."""
    n = draw(st.integers(2, 6))
    names = stage_names(n)
    fresh = draw(st.frozensets(st.sampled_from(names[1:]), min_size=1))
    stages = tuple(Stage(name, 2 * k, 2 * k + 2) for k, name in enumerate(names))
    of_all = st.lists(times, min_size=n, max_size=n)
    return Form(stages, False, fresh), draw(of_all), draw(of_all)


@settings(max_examples=30)
@given(losses(), st.integers(1, 9))
def test_the_way_that_is_taken_is_never_the_slower_one(loss: Loss, n_frames: int) -> None:
    following, stage_s, link_s = loss
    by_rows = restored_s(roles_of(following), following, n_frames, stage_s, link_s)
    by_tokens = restored_s(None, following, n_frames, stage_s, link_s)
    assert all(a <= b for a, b in zip(by_rows, by_tokens, strict=True)), "of each text, not only of the last"


@settings(max_examples=30)
@given(losses(), st.data())
def test_only_rows_that_all_who_send_have_are_replayed(loss: Loss, data: st.DataObject) -> None:
    following, _, _ = loss
    rows = st.dictionaries(st.integers(0, 3), st.integers(1, 99))
    sent = {name: data.draw(rows) for name in following.names}
    chosen = roles_of(following).plan(sent["starter"], sent)
    before = [following.names[k - 1] for k, name in enumerate(following.names) if name in following.fresh]
    senders = [sent[name] for name in before if name not in following.fresh]
    common = {seq_id: min(one[seq_id] for one in senders) for seq_id in set.intersection(*map(set, senders))}
    assert (chosen is None and not common) or (chosen is not None and chosen.kept == common)


def test_only_positions_that_all_senders_have_are_replayed() -> None:
    """Starter and secondary1 come before nodes without caches; of a text only rows that both have can be sent again."""
    stages = tuple(Stage(name, 2 * k, 2 * k + 2) for k, name in enumerate(stage_names(4)))
    roles = roles_of(Form(stages, False, frozenset({"secondary0", "secondary2"})))
    told = {"secondary0": {1: 99}, "secondary1": {1: 3, 2: 8, 4: 5}, "secondary2": {}}
    chosen = roles.plan({1: 7, 2: 6, 3: 9}, told)
    assert chosen is not None and (chosen.is_by_starter, chosen.kept) == (True, {1: 3, 2: 6})
    assert roles.plan({3: 9}, told) is None, "no text is on both"
    assert roles.plan({1: 7}, {}) is None, "who tells nothing has nothing"


def test_without_the_starters_caches_no_rows_are_replayed() -> None:
    stages = tuple(Stage(name, 2 * k, 2 * k + 2) for k, name in enumerate(stage_names(3)))
    assert replay_roles([stage.name for stage in stages], frozenset({"starter"})) is None
    assert replay_roles(["starter"], frozenset()) is None, "of one node there is nobody who sent them"
