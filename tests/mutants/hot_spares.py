"""A hot spare: which node has one, what it sends on and keeps, and who takes a place."""

from __future__ import annotations

from mutants.mutant import Mutant

TESTS = "tests/recovery/test_hot_spare.py"

MUTANTS = [
    Mutant("its rows go round twice", "SecondaryLoop._pass_on", "self._as_it_came(frame)", "self._compute(frame)", TESTS),
    Mutant(
        "its buffer is sent while the next frame is read into it",
        "SecondaryLoop._as_it_came",
        "bytes(frame.payload)",
        "frame.payload",
        TESTS,
    ),
    Mutant(
        "rows of a replay go to a node that has them",
        "SecondaryLoop._as_it_came",
        "frame.is_replay and self._replay != PASS",
        "False",
        TESTS,
    ),
    Mutant(
        "it fills a replay with what its node sends",
        "replay_roles",
        "before in hot and before not in fresh",
        "False",
        TESTS,
    ),
    Mutant(
        "a hot spare without caches takes a place", "taken_over", "None if lost(stage.name) else stage", "stage", TESTS
    ),
    Mutant("its node stays though it is lost", "taken_over", "spare is not None and lost(stage.name)", "False", TESTS),
    Mutant("any blocks will do", "with_hot_spares", "ready or (free if may_load else [])", "ready or free", TESTS),
    Mutant("the smallest node has it", "_targets", "stage.start - stage.stop", "stage.stop - stage.start", TESTS),
    Mutant("a spare with the blocks is no better", "with_hot_spares", "ready or (free if may_load else [])", "free", TESTS),
    Mutant(
        "a hot spare that gets other blocks counts as one with caches",
        "Policy._completed",
        "not form.is_moved and spans[stage.name] != (stage.start, stage.stop)",
        "False",
        TESTS,
    ),
    Mutant("nodes are asked first", "Policy._by_hot_spare", "not search.suspected", "True", TESTS),
    Mutant(
        "a node that is back is no hot spare", "Policy.with_spare", "n in self._spares | self._first", "n in self._spares",
        TESTS,
    ),
    Mutant("a stranger becomes one", "Policy.with_spare", "n in self._spares | self._first", "True", TESTS),
    Mutant("caches end with a ring that is left", "Former.close_links", "if keeps_caches:", "if False:", TESTS),
    Mutant("a hot spare counts in a node's bits", "numbers_of", "{json.dumps(one): one for one in held[block]}.items()",
           "[(json.dumps(one), one) for one in held[block]]", TESTS),
    Mutant("what it computes is not recorded", "RecordedRing.release", "self._sends_first and self._mark is not None", "False",
           TESTS),
]  # fmt: skip
