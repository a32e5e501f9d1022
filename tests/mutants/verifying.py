"""Rows that are computed again, and nodes that compute nonsense."""

from __future__ import annotations

from mutants.mutant import Mutant

TESTS = "tests/recovery/test_verified.py"
SERVER = "tests/serve/test_untrue_texts.py"
LIES = f"{TESTS}::test_a_node_that_lies_is_left_out"
SPARE = f"{TESTS}::test_a_spare_gets_no_rows_of_a_liar"

MUTANTS = [
    Mutant("all rows count as right", "RowVerifier._wrong", "if is_same(told):", "if True:", LIES),
    Mutant("rows of a text are compared from its second piece on", "RowVerifier._do", "again.cached.get(job.seq_id, 0)",
           "max(64, again.cached.get(job.seq_id, 0))", LIES),
    Mutant("what a node says that it got is not compared", "RowVerifier._wrong",
           "if (got.dtype, got.n_cols, got.sha256) != (rows.dtype, rows.n_cols, hashlib.sha256(rows.payload).hexdigest()):",
           "if False:", f"{TESTS}::test_the_starter_is_believed"),
    Mutant("the last node's rows are not compared", "RowVerifier._came_back", "if p in text.hashes", "if p in ()", LIES),
    Mutant("other nodes compute nothing again", "RowVerifier._blocks_again", "self._others(ring, index) or ", "",
           f"{TESTS}::test_a_spare_computes_again_what_it_has_no_part_in"),
    Mutant("a spare keeps its ring when it is needed", "RingLoop.next_ring", "self.on_search()", "pass",
           f"{TESTS}::test_a_spare_gets_no_rows_of_a_liar"),
    Mutant("another node is believed without a third opinion", "RowVerifier._wrong", "if not again.name:", "if True:",
           f"{TESTS}::test_a_spare_that_lies_harms_nobody"),
    Mutant("a node that computes otherwise is asked", "RowVerifier._others", "found.numerics != self._numerics[index]",
           "False", f"{TESTS}::test_a_spare_that_computes_otherwise_is_not_asked"),
    Mutant("a node that lied about what it computed again is asked again", "RowVerifier._others", "name in self._liars",
           "False", f"{TESTS}::test_a_spare_that_lies_harms_nobody"),
    Mutant("without a third opinion the node of the ring alone is named", "RowVerifier._decided",
           "both = (name, first.name), reason", "both = (name,), reason",
           f"{TESTS}::test_without_a_third_opinion_both_are_named"),
    Mutant("a lost node stays the one that computes again", "RowVerifier._do", "self._lose(index, e)", "raise",
           f"{TESTS}::test_a_spare_that_ends_is_not_missed"),
    Mutant("tokens that are drawn again are told twice", "host:_Text.take", "self.told += tokens[n_same:]",
           "n_same = 0; self.told += tokens", SERVER),
    Mutant("wrong tokens of an earlier end stay", "host:_Text.take", "(n_same < len(tokens) or is_end)", "n_same < len(tokens)",
           SERVER),
    Mutant("a schema is not at the tokens that count", "Outlet._continued", "constraint.take(token)", "pass", SERVER),
    Mutant("logprobs of a text that goes on are those of its beginning", "Request.__init__",
           "self._n_given = len(sequence.generated)", "self._n_given = 0", f"{TESTS}::test_logprobs_go_on"),
    Mutant("wrong logprobs stay in an answer", "Completion.piece",
           "self._texts[i], self._logprobs[i] = self._echoed[i], TextLogprobs(model.codec)", "self._texts[i] = self._echoed[i]",
           SERVER),
    Mutant("beams are not refused", "StarterEngine.submit_beams", "if self.verifier is not None:", "if False:",
           f"{TESTS}::test_beams_are_refused"),
    Mutant("a text is told to have ended before it is verified", "RowVerifier.holds", "bool(text.pending or self._accused)",
           "False", LIES),
    Mutant("a text goes on behind wrong rows", "RowVerifier.n_right", "n if n < text.n_back else None", "None", LIES),
    Mutant("a node that lied is used again", "Absences.has_ended", "name not in self.excluded", "True",
           "tests/recovery/test_recovery_decisions.py::test_a_node_that_is_excluded_does_not_come_back"),
    Mutant("a liar's rows are replayed", "RingLoop._form", "engine.is_isolating or self._is_untrue", "engine.is_isolating",
           SPARE),
    Mutant("the rows of a verified text are freed at once", "Scheduler.schedule", "seq_id not in self.pinned", "True",
           f"{TESTS}::test_all_rows_of_honest_nodes_are_found_right"),
    Mutant("numbers that are not finite end the run", "StarterEngine._draw", "self.verifier is not None and self._is_untrue",
           "False and self._is_untrue", f"{TESTS}::test_numbers_that_are_not_finite_lead_to_the_node"),
]  # fmt: skip
