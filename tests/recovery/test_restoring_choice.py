"""Caches are restored by replay where the rows are there: by what stages and links take, that is never the slower way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mdi.engine.sent_rows import COMPUTE, FILL, PASS
from mdi.node.replay_plan import ReplayPlan, plan_replay
from mdi.recovery.replacement import Next, Stage


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
    plan: ReplayPlan | None, following: Next, n_frames: int, stage_s: Sequence[float], link_s: Sequence[float]
) -> list[float]:
    """When each frame's rows are in all caches again: by this plan, or, without one, computed by all nodes."""
    if plan is None:
        return through_the_ring(n_frames, stage_s, link_s)
    roles = {following.names[0]: FILL if plan.is_by_starter else COMPUTE, **plan.roles}
    computing = [s if name in following.fresh else 0.0 for name, s in zip(following.names, stage_s, strict=True)]
    sending = [
        s if roles.get(name, COMPUTE) in (FILL, PASS) else 0.0 for name, s in zip(following.names, link_s, strict=True)
    ]
    return through_the_ring(n_frames, computing, sending)


def plan(following: Next, sent: Mapping[str, Mapping[int, int]]) -> ReplayPlan | None:
    """By what each node says that it has sent."""

    def status(name: str) -> Any:
        told = {str(seq_id): n for seq_id, n in sent[name].items()}
        return SimpleNamespace(status=lambda run, timeout_s: {"sent_rows": told})

    return plan_replay(following, sent["starter"], {name: status(name) for name in following.names[1:]}, "run")


Loss = tuple[Next, list[float], list[float]]
times = st.floats(0.001, 1.0)


@st.composite
def losses(draw: st.DrawFn) -> Loss:
    """A ring of which some secondaries are replaced, with times of its stages and links for a frame."""
    n = draw(st.integers(2, 6))
    names = stage_names(n)
    fresh = draw(st.frozensets(st.sampled_from(names[1:]), min_size=1))
    stages = tuple(Stage(name, 2 * k, 2 * k + 2) for k, name in enumerate(names))
    of_all = st.lists(times, min_size=n, max_size=n)
    return Next(stages, False, fresh), draw(of_all), draw(of_all)


@settings(max_examples=30)
@given(losses(), st.integers(1, 9))
def test_the_way_that_is_taken_is_never_the_slower_one(loss: Loss, n_frames: int) -> None:
    following, stage_s, link_s = loss
    chosen = plan(following, dict.fromkeys(following.names, {0: 64, 1: 10}))
    assert chosen is not None and chosen.kept == {0: 64, 1: 10}
    by_rows = restored_s(chosen, following, n_frames, stage_s, link_s)
    by_tokens = restored_s(None, following, n_frames, stage_s, link_s)
    assert all(a <= b for a, b in zip(by_rows, by_tokens, strict=True)), "of each text, not only of the last"


@settings(max_examples=30)
@given(losses(), st.data())
def test_only_rows_that_all_who_send_have_are_replayed(loss: Loss, data: st.DataObject) -> None:
    following, _, _ = loss
    rows = st.dictionaries(st.integers(0, 3), st.integers(1, 99))
    sent = {name: data.draw(rows) for name in following.names}
    chosen = plan(following, sent)
    before = [following.names[k - 1] for k, name in enumerate(following.names) if name in following.fresh]
    senders = [sent[name] for name in before if name not in following.fresh]
    common = {seq_id: min(one[seq_id] for one in senders) for seq_id in set.intersection(*map(set, senders))}
    assert (chosen is None and not common) or (chosen is not None and chosen.kept == common)
