"""Threads that meet at an unlucky moment."""

from __future__ import annotations

from mutants.mutant import Mutant

RACES = "tests/test_races.py"

MUTANTS = [
    Mutant(
        "a ring that is to be left before it begins is not left",
        "StarterEngine.run",
        "while not (self._closing",
        "self._left = None\n            while not (self._closing",
        "tests/test_engine.py::test_a_ring_that_is_to_be_left_before_it_begins_is_left",
    ),
    Mutant(
        "what was said of an earlier ring ends the next one",
        "StarterEngine.run",
        "self._left == ring.epoch",
        "self._left is not None",
        "tests/test_engine.py::test_a_ring_that_is_to_be_left_before_it_begins_is_left",
    ),
    Mutant(
        "a move that fails ends the run",
        "Policy._after_failure",
        "if search is None and self._has_begun:",
        "if False:",
        "tests/recovery/test_policy.py::test_a_move_that_fails_ends_no_run",
    ),
    Mutant(
        "a move that failed is not remembered",
        "Policy._after_failure",
        "self.refused = event.tried",
        "pass",
        "tests/recovery/test_policy.py::test_a_move_that_fails_ends_no_run",
    ),
    Mutant(
        "a node is learnt in two steps",
        "MovingCut.learn",
        "self._measured = profile, CostModel(profile, self._shape, self._workload)",
        "self._measured = profile, self._measured[1]; "
        "self._measured = profile, CostModel(profile, self._shape, self._workload)",
        "tests/recovery/test_joins.py::test_a_node_is_learnt_while_another_thread_plans",
    ),
    Mutant(
        "the ring is read twice",
        "Lookout._run",
        'getattr(link, "leaving", ())',
        "ring.link.leaving if link is not None else ()",
        f"{RACES}::test_a_ring_that_is_closed_while_it_is_asked_who_leaves",
    ),
    Mutant(
        "a ring that is formed after the end stays open",
        "RingLoop._run",
        "if self._cancel.is_cancelled:",
        "if False:",
        f"{RACES}::test_a_ring_that_is_formed_after_the_end_is_closed",
    ),
    Mutant(
        "a ring that is formed after the end is computed over",
        "RingLoop._run",
        "not self._cancel.is_cancelled and",
        "True and",
        f"{RACES}::test_a_ring_that_is_formed_after_the_end_is_closed",
    ),
    Mutant(
        "what was said of an earlier ring moves blocks of the present one",
        "RingLoop._wanted",
        "event.ring != ring.number",
        "False",
        f"{RACES}::test_a_node_that_leaves_while_another_ring_is_formed_is_relieved_afterwards",
    ),
    Mutant(
        "a late request replaces the present ring",
        "Runs.admit",
        "int(latest.request.epoch, 16) > int(request.epoch, 16)",
        "False",
        f"{RACES}::test_a_late_request_for_an_earlier_ring_does_not_replace_the_present_one",
    ),
    Mutant(
        "no ring of a run can replace the one before",
        "Runs.admit",
        "int(latest.request.epoch, 16) > int(request.epoch, 16)",
        "int(latest.request.epoch, 16) >= int(request.epoch, 16)",
        f"{RACES}::test_a_request_for_a_later_ring_replaces_the_present_one",
    ),
    Mutant(
        "rings are not counted",
        "Former._prepare",
        "self._n_rings += 1",
        "pass",
        "tests/recovery/test_failed_nodes.py::test_rings_are_counted_so_that_late_requests_are_known",
    ),
    Mutant(
        "a node that loads is asked how far it is",
        "SecondarySetup._wait_until",
        "self._checked(self._answer)",
        "self._loading_status()",
        "tests/test_setup.py::test_a_node_that_loads_is_not_asked_but_says_how_far_it_is",
    ),
    Mutant(
        "the end of one unload lets requests enter another model that is being unloaded",
        "Models._give_up",
        "self.leaving.discard(name)",
        "self.leaving.clear()",
        f"{RACES}::test_two_models_that_are_given_up_at_the_same_time",
    ),
    Mutant(
        "what other threads log waits for the API process",
        "_Records.enqueue",
        "super().enqueue(record)",
        "ModelHost  # noqa",
        f"{RACES}::test_what_other_threads_log_while_a_model_is_loaded_does_not_wait_for_the_api",
    ),
    Mutant(
        "who wants a model of an ended server waits for ever",
        "ModelHost.want",
        "if self._cancel.is_cancelled:",
        "if False:",
        f"{RACES}::test_who_wants_a_model_of_a_server_that_has_ended_is_told",
    ),
]
