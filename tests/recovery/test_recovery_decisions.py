"""Who takes whose blocks, how the model is cut anew, who waits how long, and which text is suspected."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusters import cluster, model, node
from mdi.errors import Code, ControlError, NodeLostError, RingError, UsageError
from mdi.placement.model import Workload
from mdi.placement.profile import DEFAULT_BYTES_S, LinkProfile
from mdi.run.cut import LOAD_BYTES_S, READ_BYTES_S, Holder, MovingCut, better_with, cut, slower_links, slowest_s
from mdi.run.policy import (
    Absences,
    Answer,
    Answered,
    End,
    Form,
    NotFormed,
    Policy,
    Roll,
    Stage,
    Suspects,
    Wait,
    in_place,
    present_holders,
    taken_over,
    with_hot_spares,
    with_the_rest,
)  # fmt: skip
from mdi.run.report import Records

RING = (Stage("starter", 0, 2), Stage("a", 2, 5), Stage("b", 5, 9))


def no_cut(stages: object, most: object) -> None:
    raise AssertionError("nothing is to be cut anew")


# Places


def test_a_spare_takes_the_blocks_of_the_lost_node_and_nobody_else_moves() -> None:
    found = in_place(RING, frozenset({"starter", "b"}), ["x", "y"])
    assert found == Form((RING[0], Stage("x", 2, 5), RING[2]), is_moved=False)
    assert present_holders(RING[1], found.stages) == ("x",)


def test_several_lost_nodes_need_several_spares() -> None:
    present = frozenset({"starter"})
    assert in_place(RING, present, ["x"]) is None
    found = in_place(RING, present, ["x", "y"])
    assert found is not None and found.names == ("starter", "x", "y") and found.counts == (2, 3, 4)


def test_a_node_that_has_its_place_in_the_ring_takes_no_other() -> None:
    found = in_place(RING, frozenset({"starter", "b"}), ["b", "x"])
    assert found is not None and found.names == ("starter", "x", "b")


def test_nobody_is_lost() -> None:
    assert in_place(RING, frozenset({"starter", "a", "b"}), []) == Form(RING, is_moved=False)


def test_blocks_go_to_those_that_are_left_and_to_all_spares() -> None:
    asked = []

    def even(stages: object, most: object) -> tuple[int, ...]:
        asked.append(stages)
        return (1, 8)

    found = with_the_rest(RING, frozenset({"starter"}), ["x"], {}, even)
    assert asked == [[RING[0], Stage("x", 2, 5)]]
    assert found == Form((Stage("starter", 0, 1), Stage("x", 1, 9)), is_moved=True)
    assert present_holders(RING[2], found.stages) == ("x",) and present_holders(RING[0], found.stages) == (
        "starter",
        "x",
    )
    assert with_the_rest(RING, frozenset({"starter"}), [], {}, lambda stages, most: None) is None


# Hot spares


def hot_before(wanted: Sequence[str], spares: Sequence[str], **more: Any) -> list[str]:
    """Names of the ring, those of hot spares with a star."""
    ring = with_hot_spares(RING, wanted, spares, **more)
    assert all(
        (one.start, one.stop) == (after.start, after.stop) for one, after in itertools.pairwise(ring) if one.is_hot
    )
    return [f"{stage.name}*" if stage.is_hot else stage.name for stage in ring]


def test_hot_spares_stand_before_the_nodes_that_are_named_and_then_before_the_largest() -> None:
    assert hot_before(["auto"], ["x", "y"]) == ["starter", "a", "x*", "b"]
    assert hot_before(["a"], ["x", "y"]) == ["starter", "x*", "a", "b"]
    assert hot_before(["auto", "a"], ["x", "y"]) == ["starter", "x*", "a", "y*", "b"]
    assert hot_before(["starter"], ["x"]) == ["starter", "a", "x*", "b"], "the starter has none"
    assert hot_before(["auto", "auto"], ["x"]) == ["starter", "a", "x*", "b"], "as far as there are spares"
    assert hot_before(["auto"], ["a"]) == ["starter", "a", "b"], "which has its place in the ring"
    assert hot_before([], ["x"]) == ["starter", "a", "b"]


def test_a_hot_spare_that_has_the_blocks_is_taken_first() -> None:
    had = {"before": (Stage("x", 5, 8), Stage("y", 4, 9), Stage("z", 5, 9))}
    assert hot_before(["auto"], ["x", "y", "z"], **had) == ["starter", "a", "z*", "b"]
    assert hot_before(["a"], ["x", "y", "z"], **had) == ["starter", "x*", "a", "b"]
    assert hot_before(["b", "a"], ["x", "z"], **had, may_load=False) == ["starter", "a", "z*", "b"]


def test_who_takes_the_place_of_whom() -> None:
    ring = with_hot_spares(RING, ["b"], ["x"])
    assert Form(ring, is_moved=False).hot == {"x"} and Form(ring, is_moved=False).counts == (2, 3, 4)
    for lost, expected in (("", "b"), ("b", "x"), ("x", "b"), ("bx", "b"), ("a", "b")):
        found = taken_over(ring, lambda name, lost=lost: name in lost)
        assert [stage.name for stage in found] == ["starter", "a", expected] and not any(s.is_hot for s in found)


def test_who_has_the_blocks_of_a_lost_node() -> None:
    stages = (Stage("a", 0, 2), Stage("x", 2, 5, is_hot=True), Stage("b", 2, 5), Stage("c", 5, 6))
    assert present_holders(Stage("lost", 1, 5), stages) == ("a", "b")
    assert present_holders(Stage("lost", 2, 5), stages) == ("b",)
    assert present_holders(Stage("lost", 5, 9), stages) == ("c",)
    assert present_holders(Stage("lost", 3, 3), stages) == ()


def test_a_ring_gets_the_hot_spares_that_it_lacks() -> None:
    policy = Policy(RING, ["x", "y"], no_cut, 6.0, hot=["auto"])
    found = policy.with_spare(RING, ["y"])
    assert found is not None and found.names == ("starter", "a", "y", "b")
    assert (found.is_moved, found.fresh, found.hot) == (False, {"y"}, {"y"})
    assert policy.with_spare(found.stages, ["x"]) is None, "it lacks none"
    assert policy.with_spare(RING, ["stranger"]) is None
    short = (Stage("starter", 0, 2), Stage("a", 2, 9))
    for free, expected in ((["b", "x"], "x"), (["b"], "b")):
        found = policy.with_spare(short, free)
        assert found is not None and found.names == ("starter", expected, "a")


def test_a_better_ring_that_cannot_be_prepared_is_tried_again_only_if_a_node_was_lost() -> None:
    form = Form(RING, is_moved=True)
    for error, failed, is_refused in (
        (UsageError("no disk"), "x", True), (NodeLostError("x", "gone"), "x", False), (NodeLostError("x", "gone"), None, True),
        (ControlError("it goes", code=Code.LEAVING), "x", False), (NodeLostError("a", "gone"), "a", True),
    ):  # fmt: skip
        policy = Policy(RING, [], no_cut, 6.0)
        for _ in range(2):  # after the first loss a node may come back at once
            policy.refuse(form, error, failed, 100.0)
        assert (policy.refused is form) == is_refused == policy.may_use("x", 100.0), error
        assert policy.may_use("x", 106.0)


# Answers


@pytest.mark.parametrize("memory, expected", [
    ({"available_bytes": 7}, 7), ({"available_bytes": True}, 0), ({"available_bytes": "7"}, 0), ({}, 0), ([7], 0), (None, 0),
])  # fmt: skip
def test_what_a_node_answers_is_not_believed(memory: Any, expected: int) -> None:
    told = {"memory": memory, "process": "p", "state": "IDLE", "leaving": False}
    found = Answer.from_json("a", told)
    assert found == Answer("a", "p", "IDLE", expected, False) and found.is_free
    assert not Answer.from_json("a", told | {"leaving": True}).is_free
    assert Answer.from_json("a", told | {"leaving": 1}).is_free
    assert not Answer.from_json("a", told | {"state": "RUNNING"}).is_free
    assert Answer.from_json("a", {}) == Answer("a", "", "", 0, False)


# Cuts


def holders(*nodes: tuple[tuple[int, int], float, float, float]) -> list[Holder]:
    """Of (blocks there, time of a block, time of moving one, bytes for blocks); the first is the starter."""
    return [
        Holder(str(k), has, block_s, 0.0, move_s, n_bytes, least=min(k, 1))
        for k, (has, block_s, move_s, n_bytes) in enumerate(nodes)
    ]


def test_a_pair_is_as_slow_as_its_slower_direction() -> None:
    names = ("starter", "a", "b", "c")
    links = tuple(LinkProfile(x, y, 2e-4, 1e8) for x in names for y in names if x != y)
    profile, usual = cluster(*map(node, names), links=links), 2e-4 + 1e5 / 1e8
    others = {(x, y): usual for x in names for y in names if x != y}
    for way, back in ((0.2, 0.5), (0.5, 0.2), (0.5, usual), (usual, 0.5)):
        found = slower_links(profile, others | {("a", "b"): way, ("b", "a"): back, ("a", "gone"): 9.0}, 1e5)
        slow = {pair: seconds for pair, seconds in found.items() if seconds}
        assert slow == {("a", "b"): pytest.approx(0.5 - usual), ("b", "a"): pytest.approx(0.5 - usual)}
    assert slower_links(profile, others | {("a", "b"): 2 * usual + 0.0099}, 1e5) == {}
    assert slower_links(profile, others | {("a", "b"): 2 * usual + 0.0101}, 1e5) != {}


def test_seconds_of_moving_and_of_a_frame_without_measurements() -> None:
    shape = model(6, head_bytes=1e9)
    moving = MovingCut(shape, None, Workload(4, 100), 1e9, lambda: 1)
    ring = (Stage("starter", 0, 2), Stage("a", 2, 4), Stage("b", 0, 0))
    load_s, link_s = 1e9 / LOAD_BYTES_S, 1e9 / DEFAULT_BYTES_S
    assert moving.moving_s(ring, (1, 3, 2)) == pytest.approx(3 * (load_s + link_s)), "a gets one, and b two"
    assert moving.moving_s(ring, (4, 0, 2)) == pytest.approx(2 * load_s + 2 * (load_s + link_s))
    block_s, head_s = shape.reference.weight_bytes / READ_BYTES_S, 1e9 / READ_BYTES_S
    assert moving.round_s(ring, (0, 1, 5)) == pytest.approx(max(head_s, 5 * block_s))
    assert moving.round_s(ring, (6, 0, 0)) == pytest.approx(head_s + 6 * block_s)


def test_one_more_node_stands_where_the_fewest_blocks_move() -> None:
    shape = model(6, head_bytes=0)
    moving = MovingCut(shape, None, Workload(4, 100), 1e9, lambda: 10**6)
    ring = (Stage("starter", 0, 3), Stage("a", 3, 6))
    found = better_with(ring, "b", moving)
    assert found is not None and found.names == ("starter", "b", "a") and found.counts == (2, 2, 2)
    assert better_with(found.stages, "c", moving) is None, "one of four still has two"


def test_few_rounds_move_few_blocks_and_many_rounds_make_the_stages_even() -> None:
    nodes = holders(((0, 4), 1.0, 10.0, 99), ((4, 8), 1.0, 10.0, 99))
    assert cut(nodes, [1.0] * 12, 0.001) in [(8, 4), (4, 8)]
    assert cut(nodes, [1.0] * 12, 1000) == (6, 6)


def test_memory_and_what_nodes_have_said_are_limits() -> None:
    nodes = holders(((0, 4), 1.0, 0.0, 5.0), ((4, 8), 1.0, 0.0, 99))
    assert cut(nodes, [1.0] * 12, 1000) == (5, 7)
    assert cut(nodes[:1], [1.0] * 12, 1000) is None
    limited = [nodes[0], Holder("1", (4, 8), 1.0, 0.0, 0.0, 99, most=6)]
    assert cut(limited, [1.0] * 12, 1000) is None


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 4), st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([0.1, 2.0])),
        min_size=1, max_size=4,
    ),
    st.integers(1, 7), st.sampled_from([0.0, 1.0, 50.0]), st.none() | st.sets(st.integers(1, 6)),
)  # fmt: skip
def test_the_cut_is_the_best_of_all(
    nodes: list[tuple[int, int, float, float]], n: int, n_frames: float, inner: set[int] | None
) -> None:
    made = holders(*(((a, a + length), block_s, move_s, 99) for a, length, block_s, move_s in nodes))
    cuts = None if inner is None else sorted({0, n, *(c for c in inner if c < n)})
    found = cut(made, [1.0] * n, n_frames, cuts)

    def cost(counts: tuple[int, ...]) -> float:
        ends = [0, *itertools.accumulate(counts)]
        moved = sum(h.move_s * h.n_moved(a, b) for h, a, b in zip(made, ends, ends[1:], strict=False))
        return moved + n_frames * slowest_s(made, counts)

    every = [c for c in itertools.product(range(n + 1), repeat=len(made)) if sum(c) == n and all(c[1:])]
    every = [c for c in every if cuts is None or all(edge in cuts for edge in itertools.accumulate(c))]
    if not every:
        assert found is None
    else:
        assert found is not None
        assert cost(found) == pytest.approx(min(map(cost, every)))


def test_a_swarm_s_first_ring_is_sought_again_when_some_node_left() -> None:
    """Whoever it was: the error of a ring names none. Nodes that get their blocks from the run end it."""
    ring = (Stage("starter", 0, 0), Stage("a", 0, 2), Stage("b", 2, 4))
    other = Form((ring[0], Stage("c", 0, 2), ring[2]), is_moved=False)
    error = NotFormed(RingError("a node left while the ring was formed"), Form(ring, is_moved=False))
    answers = {name: Answer(name, name, "READY", 0, False) for name in ("b", "c")}
    for held, is_kind in ((lambda ring, present, others: other, Form), (None, End)):
        policy = Policy(ring, (), no_cut, 6.0, is_measured=True, held=held)
        assert policy.next(None, 0.0) == Form(ring, is_moved=False)
        decision = policy.next(error, 1.0)
        for now in (2.0, 3.0):
            if isinstance(decision, Wait):
                decision = policy.next(Answered(Roll(answers, frozenset({"a"}))), now)
                assert isinstance(decision, Form) and decision.stages == other.stages
                decision = policy.next(error, now) if now < 3.0 else decision
        assert isinstance(decision, is_kind)


def test_a_ring_of_a_swarm_is_sought_among_nodes_that_stay() -> None:
    ring, asked = (Stage("starter", 0, 0), Stage("a", 0, 2), Stage("b", 2, 4)), []

    def held(ring: Sequence[Stage], present: frozenset[str], others: Sequence[str]) -> Form:
        asked.append(list(others))
        return Form((ring[0], Stage("d", 0, 2), ring[2]), is_moved=False)

    policy = Policy(ring, (), no_cut, 6.0, is_measured=True, held=held)
    policy.next(None, 0.0)
    policy.next(NotFormed(RingError("a node left while the ring was formed"), Form(ring, is_moved=False)), 1.0)
    answers = {name: Answer(name, name, "READY", 0, name == "c") for name in ("b", "c", "d")}
    policy.next(Answered(Roll(answers, frozenset({"a"}))), 2.0)
    assert asked == [["d"]]


# Waiting


def test_a_node_that_is_excluded_does_not_come_back() -> None:
    absences = Absences(6.0)
    absences.add("b", 0.0)
    absences.exclude("a")
    assert not absences.has_ended("a", 1e9) and absences.has_ended("b", 1e9)


def test_a_node_that_comes_and_goes_waits_longer_each_time() -> None:
    absences = Absences(6.0)
    assert absences.has_ended("a", 0.0)
    waits = []
    for n in range(1, 6):
        absences.add("a", 100.0 * n)
        waits.append(next(float(s) for s in range(100) if absences.has_ended("a", 100.0 * n + s)))
    assert waits == [0.0, 6.0, 12.0, 24.0, 48.0] and absences.has_ended("b", 0.0)
    assert not absences.has_ended("a", 547.0) and absences.has_ended("a", 548.0)
    assert absences.wait_s(1000) <= 600.0


# Suspects


def test_one_text_under_way_at_two_losses_in_a_row_is_found() -> None:
    suspects = Suspects()
    assert suspects.add({1: (7, 8), 2: (9, 10)}, {}) == frozenset()
    assert suspects.add({1: (0, 64), 3: (0, 5)}, {}) == {1}


def test_a_text_that_went_on_in_between_is_innocent() -> None:
    suspects = Suspects()
    suspects.add({1: (7, 8)}, {})
    assert suspects.add({1: (8, 9)}, {}) == frozenset()


def test_a_text_that_got_a_token_in_between_is_innocent_though_its_caches_are_computed_again() -> None:
    """Over the next ring all its positions are under way again, those of the loss before among them."""
    suspects = Suspects()
    suspects.add({1: (7, 8), 2: (4, 5)}, {1: 8, 2: 5})
    assert suspects.add({1: (0, 9), 2: (0, 5)}, {1: 9, 2: 5}) == {2}


def test_a_loss_before_the_ring_began_says_nothing() -> None:
    suspects = Suspects()
    suspects.add({1: (7, 8)}, {})
    assert suspects.add({}, {}) == frozenset()
    assert suspects.add({1: (0, 9)}, {}) == {1}


def test_of_several_suspects_the_next_loss_finds_the_one() -> None:
    suspects = Suspects()
    suspects.add({1: (7, 8), 2: (9, 10)}, {})
    assert suspects.add({1: (0, 64), 2: (0, 64), 4: (0, 3)}, {}) == {1, 2}
    assert suspects.add({2: (0, 64), 4: (0, 3)}, {}) == {2}, "4 was not suspected"


# Records


def test_seconds_are_from_the_last_token_to_the_first() -> None:
    records = Records()
    records.begin(["a"], 10.0)
    records.replace("a", ["x"])
    assert [one.seconds for one in records.so_far(None)] == [None]
    records.end(12.5)
    records.begin(["b"], 20.0)
    records.begin(["x"], 20.0)  # lost while the ring was formed anew
    records.replace("b", ["starter", "c"])
    assert [one.seconds for one in records.so_far(19.0)] == [2.5, None, None], "a token of the ring that broke"
    told = [one.to_json() for one in records.so_far(21.0)]
    assert told == [
        {"node": "a", "replaced_by": "x", "restored_by": "tokens", "seconds": 2.5},
        {"node": "b", "replaced_by": "starter, c", "restored_by": "tokens", "seconds": 1.0},
        {"node": "x", "replaced_by": "", "restored_by": "tokens", "seconds": 1.0},
    ]
