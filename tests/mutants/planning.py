"""What a plan counts, and what a window holds."""

from __future__ import annotations

from mutants.mutant import Mutant

COST = "tests/placement/test_cost.py"
REACH = f"{COST}::test_a_stage_reaches_as_far_as_it_fits_with_its_caches"
KEPT = f"{COST}::test_kept_rows_are_part_of_what_a_node_needs_whatever_it_holds"

MUTANTS = [
    Mutant(
        "the search of a placement forgets caches",
        "Terms.reach",
        "self._cost.weights, self._cost.held",
        "self._cost.weights, self._cost.weights",
        REACH,
    ),
    Mutant(
        "the search of a placement forgets what loading takes",
        "Terms.reach",
        "weights[start] + loading",
        "weights[start] + 1e18",
        REACH,
    ),
    Mutant(
        "the check of a stage forgets caches", "Terms.fits", "weights + caches <= running", "weights <= running", REACH
    ),
    Mutant(
        "plans forget kept rows",
        "CostModel.fixed_bytes",
        "self.own_bytes(i) + self.kept_bytes",
        "self.own_bytes(i)",
        KEPT,
    ),
    Mutant(
        "the table of memory forgets kept rows",
        "CostModel.memory",
        "self.shape.runtime_bytes + self.kept_bytes",
        "self.shape.runtime_bytes",
        KEPT,
    ),
    Mutant(
        "every slot of a window is as large as the largest unit",
        "WindowPlan.slot_bytes",
        "position % self.n_slots",
        "0",
        "tests/window/test_window_bytes.py::test_each_slot_is_as_large_as_the_largest_unit_that_comes_into_it",
    ),
    Mutant(
        "a slot of a window is as large as its last unit",
        "WindowPlan.slot_bytes",
        "max(sizes[slot], self.units[i].n_bytes)",
        "self.units[i].n_bytes",
        "tests/window/test_window_bytes.py::test_each_slot_is_as_large_as_the_largest_unit_that_comes_into_it",
    ),
]
