"""A node is lost: who takes its place, who waits, who is suspected."""

from __future__ import annotations

from mutants.mutant import Mutant

KEEPER = "tests/recovery/test_policy.py"
DECISIONS = "tests/recovery/test_recovery_decisions.py"

MUTANTS = [
    Mutant(
        "a text that got a token since is suspected",
        "Suspects.add",
        "self._n_before.get(seq_id) == n_known.get(seq_id)",
        "True",
        DECISIONS,
    ),
    Mutant(
        "a text at other positions is suspected", "_overlap", "max(a[0], b[0]) < min(a[1], b[1])", "True", DECISIONS
    ),
    Mutant(
        "positions that only touch are the same ones",
        "_overlap",
        "max(a[0], b[0]) < min",
        "max(a[0], b[0]) <= min",
        DECISIONS,
    ),
    Mutant("a loss of which nothing is known clears suspicion", "Suspects.add", "not in_flight", "False", DECISIONS),
    Mutant("suspicion does not grow narrower", "Suspects.add", "common & self._found or common", "common", DECISIONS),
    Mutant("a node waits after its first loss", "Absences.wait_s", "n_losses < 2", "n_losses < 1", DECISIONS),
    Mutant(
        "a node that is lost again and again waits no longer each time",
        "Absences.wait_s",
        "2 ** min(n_losses - 2, 30)",
        "1",
        DECISIONS,
    ),
    Mutant("a node waits for days", "Absences.wait_s", "min(LONGEST_ABSENCE_S,", "max(LONGEST_ABSENCE_S,", DECISIONS),
    Mutant("one spare takes the places of two nodes", "in_place", "free.pop(0)", "free[0]", DECISIONS),
    Mutant(
        "a node of the ring is its own spare",
        "in_place",
        "name not in {stage.name for stage in ring}",
        "True",
        DECISIONS,
    ),
    Mutant(
        "all blocks move though a spare could take those of the lost node",
        "in_place",
        "if not free:",
        "if True:",
        DECISIONS,
    ),
    Mutant(
        "nodes that have nothing of a lost one are named as holding its blocks",
        "present_holders",
        "max(s.start, lost.start) < min(s.stop, lost.stop)",
        "True",
        DECISIONS,
    ),
    Mutant("two suspected texts are both ended", "Policy._completed", "if len(common) == 1", "if common", KEEPER),
    Mutant(
        "a silent node makes texts suspected",
        "Policy._completed",
        "not search.is_judged and ended_nodes & search.suspected",
        "not search.is_judged",
        KEEPER,
    ),
    Mutant(
        "texts are judged at every try of one search", "Policy._completed", "search.is_judged = True", "pass", KEEPER
    ),
    Mutant("a ring is tried for ever", "Policy._after_failure", "search.n_failures > N_FAILURES", "False", KEEPER),
    Mutant(
        "a node that cannot hold its blocks is asked again",
        "Policy._after_failure",
        "search.unfit.add(error.node)",
        "pass",
        KEEPER,
    ),
    Mutant(
        "a node that was asked to end is waited for",
        "Policy._patience_s",
        "and stage.name not in search.left",
        "",
        KEEPER,
    ),
    Mutant(
        "a node that may be slow is given up",
        "Policy._ring_of",
        "any(self._may_live(stage.name, roll, search, now) for stage in lost)",
        "False",
        KEEPER,
    ),
    Mutant(
        "blocks go to others before a lost node may be back",
        "Policy._ring_of",
        "now < search.since + self._patience_s(lost, search)",
        "False",
        KEEPER,
    ),
    Mutant(
        "a node that has just been lost again is used at once",
        "Policy._is_present",
        "return self.absences.has_ended(stage.name, now)",
        "return True",
        KEEPER,
    ),
    Mutant(
        "after a full disk half a line stays in the journal",
        "Journal._sync",
        "os.ftruncate(self._file, self._n_bytes)",
        "pass",
        "tests/test_journal.py::test_a_line_that_could_not_be_written_whole_does_not_stay",
    ),
]
