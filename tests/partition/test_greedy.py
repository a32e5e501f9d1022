"""OPA and GMA on our ring, and the weights behind OPA."""

from __future__ import annotations

import pytest

from clusters import MB, block, cluster, model, node
from mdi.errors import PlacementError, UsageError
from mdi.partition import ahp
from mdi.partition.cost import CostModel
from mdi.partition.greedy import opa_scores, opa_weights
from mdi.partition.methods import by_hand, place
from mdi.partition.model import Workload


def cost_of(*memory_and_cores: tuple[float, float], n_layer: int = 6, n_sequences: int = 1) -> CostModel:
    nodes = (node(f"n{i}", memory_mb=mb, n_cores=cores) for i, (mb, cores) in enumerate(memory_and_cores))
    return CostModel(cluster(*nodes), model(n_layer), Workload(n_sequences, 10))


def test_the_starter_keeps_embedding_and_head_wherever_it_ranks() -> None:
    found = place(cost_of((150, 1), (100, 1), (90, 1)), "gma")
    # left over: n0 150 - 50 - 40 = 60, n1 50, n2 40 MB; n0 must load its 20 MB head twice, so that 4 blocks are left
    assert found.names == ("n0", "n1") and found.counts == (4, 2)

    found = place(cost_of((115, 1), (300, 1), (100, 1)), "gma")
    assert found.names == ("n0", "n1") and found.counts == (0, 6)
    assert dict(found.left_out) == {"n2": "all blocks were placed before its turn"}


def test_gma_goes_by_memory_and_opa_looks_at_cores_as_well() -> None:
    cost = cost_of((115, 1), (300, 1), (300, 8))
    assert place(cost, "gma").names == ("n0", "n1")
    assert place(cost, "opa").names == ("n0", "n2")


def test_preferences_decide() -> None:
    cost = cost_of((115, 1), (1300, 1), (300, 3))
    memory, cores = ({("memory", "cores"): value} for value in (9.0, 1.0))
    assert place(cost, "opa", memory).names == ("n0", "n1")  # a GB more counts 0.9, two cores more 0.2
    assert place(cost, "opa", cores).names == ("n0", "n2")  # 0.5 and 1


def test_what_fills_nobody_is_refused_with_what_is_missing() -> None:
    cost = cost_of((150, 1), (60, 1))
    with pytest.raises(PlacementError, match="gma places 4 of 6 blocks") as e:
        place(cost, "gma")
    assert e.value.missing == (("", 2 * (10 * MB + 32 * 2048)),)
    with pytest.raises(PlacementError, match="n0 has .* too little for embedding and head") as e:
        place(cost_of((80, 1), (900, 1)), "gma")
    assert e.value.missing[0][0] == "n0"


def test_where_blocks_differ_the_largest_counts() -> None:
    shape = model(blocks=(block(30), *[block(10)] * 5))
    cost = CostModel(cluster(node("a", memory_mb=170), node("b", memory_mb=400)), shape, Workload(1, 10))
    found = place(cost, "gma")
    assert found.counts[0] <= 2 and sum(found.counts) == 6


def test_even_and_by_hand_say_where_the_memory_is_too_small() -> None:
    cost = cost_of((500, 1), (75, 1), (500, 1))
    with pytest.raises(PlacementError, match=r"'even': n1 has .* too little") as e:
        place(cost, "even")
    ((name, lack),) = e.value.missing
    counts = (0, 3, 3)  # the head is worth two blocks
    assert name == "n1" and lack == cost.memory(1, 0, counts[1], 3).total - 75 * MB
    with pytest.raises(PlacementError, match="n1 has"):
        by_hand(cost, (1, 4, 1))
    assert by_hand(cost, (3, 1, 2)).ranges == ((0, 3), (3, 4), (4, 6))


def test_even_leaves_out_what_has_no_block() -> None:
    found = place(cost_of(*[(500, 1)] * 5, n_layer=2), "even")
    assert found.counts == (0, 1, 1) and [name for name, _ in found.left_out] == ["n3", "n4"]


def test_unknown_placement() -> None:
    with pytest.raises(UsageError, match="expected throughput, latency, opa, gma, even"):
        place(cost_of((500, 1)), "best")


def test_weights_of_two_criteria() -> None:
    assert opa_weights({("memory", "cores"): 5}) == pytest.approx((5 / 6, 1 / 6))
    assert opa_weights({("cores", "memory"): 3}) == pytest.approx((1 / 4, 3 / 4))
    assert opa_scores([10, 4], [2, 8], {("memory", "cores"): 4}) == pytest.approx([0.8 * 10 + 0.4, 0.8 * 4 + 1.6])


def test_consistent_judgements_give_their_own_weights() -> None:
    matrix = ahp.comparison_matrix("abc", {("a", "b"): 2, ("b", "c"): 3, ("a", "c"): 6})
    assert ahp.weights(matrix) == pytest.approx((0.6, 0.3, 0.1))
    assert ahp.consistency_ratio(matrix) == pytest.approx(0, abs=1e-9)


def test_contradictions_are_seen() -> None:
    # a over b over c over a, each clearly: no weights can mean that
    matrix = ahp.comparison_matrix("abc", {("a", "b"): 5, ("b", "c"): 5, ("c", "a"): 5})
    assert ahp.weights(matrix) == pytest.approx((1 / 3,) * 3)
    # largest eigenvalue of this circulant: 1 + 5 + 1/5
    assert ahp.consistency_ratio(matrix) == pytest.approx((6.2 - 3) / 2 / 0.58)


@pytest.mark.parametrize(
    ("preferences", "words"),
    [({}, "no preference"), ({("a", "b"): 10}, "1/9 to 9"), ({("a", "x"): 2}, "two of"), ({("a", "a"): 2}, "two of")],
)
def test_preferences_that_make_no_sense(preferences: dict[tuple[str, str], float], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ahp.comparison_matrix("ab", preferences)
