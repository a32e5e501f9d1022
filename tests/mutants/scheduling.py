"""The rows of frames, and what comes back for them."""

from mutants.mutant import Mutant

TEST = "tests/test_scheduler.py"

MUTANTS = [
    Mutant(
        "a row of an earlier life counts for the present one",
        "Scheduler._is_current",
        "sequence.life == part.life",
        "True",
        f"{TEST}::test_a_row_in_flight_of_a_text_that_was_put_out_and_let_in_again_counts_nothing",
    ),
    Mutant(
        "suspected texts run together",
        "Scheduler._admit",
        "sequence.seq_id in self._suspects and not self._suspects.isdisjoint(self._running)",
        "False",
        f"{TEST}::test_suspected_texts_run_one_by_one_until_each_has_its_next_token",
    ),
    Mutant(
        "a text is replayed although its rows were dropped",
        "Scheduler.resume",
        "0 < n_done <= kept.get(sequence.seq_id, 0)",
        "0 < n_done",
        f"{TEST}::test_a_text_is_replayed_only_if_all_its_rows_were_kept",
    ),
]
