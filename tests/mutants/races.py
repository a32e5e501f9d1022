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
        "tests/test_engine.py -k before_it_begins",
    ),
    Mutant(
        "what was said of an earlier ring ends the next one",
        "StarterEngine.run",
        "self._left == ring.epoch",
        "self._left is not None",
        "tests/test_engine.py -k before_it_begins",
    ),
    Mutant(
        "a move that fails ends the run",
        "RingKeeper.after_leave",
        "except MdiError as e:",
        "except LookupError as e:",
        "tests/recovery/test_keeper.py -k ends_no_run",
    ),
    Mutant(
        "a move that failed is not remembered",
        "RingKeeper.after_leave",
        "self.refused = planned",
        "pass",
        "tests/recovery/test_keeper.py -k ends_no_run",
    ),
    Mutant(
        "a node is learnt in two steps",
        "MovingCut.learn",
        "self._measured = profile, CostModel(profile, self._shape, self._workload)",
        "self._measured = profile, self._measured[1]; "
        "self._measured = profile, CostModel(profile, self._shape, self._workload)",
        "tests/recovery/test_slow_nodes.py -k is_learnt",
    ),
    Mutant(
        "the ring is read twice",
        "RunRings.leaving",
        "ring.leaving if",
        "self.ring.leaving if",
        f"{RACES} -k who_leaves",
    ),
    Mutant(
        "a ring that is formed after the end stays open",
        "EngineThread._run_rings",
        "if self.engine.is_closing:",
        "if False:",
        f"{RACES} -k after_the_end",
    ),
    Mutant(
        "a late request replaces the present ring",
        "Runs.replace",
        "ring_number_of(before.request) > ring_number_of(request)",
        "False",
        f"{RACES} -k late_request",
    ),
    Mutant(
        "no ring of a run can replace the one before",
        "Runs.replace",
        "ring_number_of(before.request) > ring_number_of(request)",
        "ring_number_of(before.request) >= ring_number_of(request)",
        f"{RACES} -k later_ring",
    ),
    Mutant(
        "rings are not counted",
        "RunRings.prepare",
        "self._n_rings += 1",
        "pass",
        "tests/recovery/test_failed_nodes.py -k rings_are_counted",
    ),
    Mutant(
        "a node that loads is asked 33 times a second",
        "growing_pauses",
        "min(SLOWER * pause_s, LONGEST_POLL_S)",
        "POLL_S",
        f"{RACES} -k less_often",
    ),
    Mutant(
        "the end of one unload lets requests enter another model that is being unloaded",
        "Models._give_up",
        "self.leaving.remove(name)",
        "self.leaving.clear()",
        f"{RACES} -k two_models",
    ),
    Mutant(
        "what other threads log waits for the API process",
        "_Records.enqueue",
        "super().enqueue(record)",
        "ModelHost  # noqa",
        f"{RACES} -k what_other_threads_log",
    ),
    Mutant(
        "who wants a model of an ended server waits for ever",
        "ModelHost.want",
        "if self._is_left:",
        "if False:",
        f"{RACES} -k has_ended",
    ),
]
