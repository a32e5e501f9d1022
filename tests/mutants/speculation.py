"""Guessed tokens: which rows count, and what they may not change."""

from __future__ import annotations

from mutants.mutant import Mutant

TEST = "tests/test_guessed_frames.py"

MUTANTS = [
    Mutant(
        "rows behind a wrong guess count", "Scheduler._is_current", "sequence.turn == part.turn", "True",
        f"{TEST}::test_guesses_change_no_text",
    ),
    Mutant(
        "a wrong guess leaves no trace", "Sequence.return_to", "self.turn += 1", "pass",
        f"{TEST}::test_guesses_change_no_text",
    ),
    Mutant(
        "void answers count as frames of the text", "Sequence.return_to", "self.n_flying = 0", "pass",
        f"{TEST}::test_void_rows_are_left_out_before_the_head",
    ),
    Mutant(
        "any drawn token confirms a guess", "Sequence.take_drawn", "self.guessed[0] == token",
        "True", f"{TEST}::test_guesses_change_no_text",
    ),
    Mutant(
        "void rows go through the head", "StarterEngine._draw", "if is_live:",
        "if part.seq_id in self._live and part.n_logits:",
        f"{TEST}::test_void_rows_are_left_out_before_the_head",
    ),
    Mutant(
        "a wrong guess's numbers end the run", "StarterEngine._finite", "elif place:", "elif False:",
        f"{TEST}::test_a_wrong_guess_with_numbers_that_are_not_finite_ends_nothing",
    ),
    Mutant(
        "tokens behind a reader's end are given out", "StarterEngine._tell", "if request is None:\n                continue",
        "if request is None:\n                return",
        f"{TEST}::test_an_end_by_the_reader_in_the_middle_of_a_frame_ends_that_text_alone",
    ),
    Mutant(
        "guesses go beyond a text's end", "Scheduler._guesses", "sequence.n_positions - begin, ", "",
        f"{TEST}::test_guesses_change_no_text",
    ),
    Mutant(
        "guesses go further than a window can go back", "Scheduler._guesses", "MOST_GUESSES - len(sequence.guessed), ", "",
        f"{TEST}::test_guesses_change_no_text",
    ),
    Mutant(
        "a constraint fails behind its end", "StarterEngine._wanted_of", "if not i:", "if True:",
        f"{TEST}::test_guesses_change_no_text",
    ),
    Mutant(
        "guesses step the text's own constraint", "StarterEngine._wanted_of", "constraint.copy() if i == 1 else constraint",
        "constraint", f"{TEST}::test_guesses_change_no_text",
    ),
    Mutant(
        "penalties do not see the guesses before", "StarterEngine._wanted_of", "ids = [*ids, token]", "pass",
        f"{TEST}::test_guesses_change_no_text",
    ),
    Mutant(
        "a kept prefix forgets how far its windows went", "Prefixes.find", "max(len(kept.ids), kept.n_far)",
        "len(kept.ids)", f"{TEST}::test_a_prefix_is_not_cut_where_its_windows_have_moved_on",
    ),
    Mutant(
        "rows that a frame did not give are thought sent", "Scheduler._take_drawn",
        "sequence.return_to(len(sequence.ids) - 1)", "pass", f"{TEST}::test_rows_that_gave_no_token_are_sent_again",
    ),
    Mutant(
        "a small model with other tokens guesses", "open_draft", "codec.tokens != model.codec.tokens", "False",
        "tests/test_guessed_runs.py::test_a_small_model_with_other_tokens_is_refused",
    ),
    Mutant(
        "frames wait for each other in the slowest stage", "most_frames", "int(round_s / stage_s + DEPTH_SLACK)", "8",
        "tests/test_speculation.py::test_guesses_that_are_always_wrong_cost_hardly_anything",
    ),
    Mutant(
        "rows are sent whatever they cost", "Speculation.limits", "if speed > best:", "if True:",
        "tests/test_speculation.py::test_dear_rows_are_not_sent",
    ),
    Mutant(
        "texts of other owners are looked into", "Speculation.begin",
        "() if text.owner is None else tuple(self._ended.get(text.owner, ()))",
        "tuple(other for own in self._ended.values() for other in own)",
        "tests/test_speculation.py::test_texts_of_the_same_owner_are_looked_into_and_no_others",
    ),
    Mutant(
        "a source pauses as long each time", "_Rate.pause", "min(2 * self._pause, LONGEST_PAUSE)", "self._pause",
        "tests/test_speculation.py::test_a_source_that_is_wrong_pauses_longer_each_time",
    ),
    Mutant(
        "a new ring's times are thought to be none", "Speculation._pays", "not self.rounds.n_noted", "False",
        "tests/test_speculation.py::test_guesses_may_come_before_a_ring_is_measured",
    ),
    Mutant(
        "the small model takes no time", "CostModel.head_s", "time_of(starter.head_s, n_rows) + draft_s",
        "time_of(starter.head_s, n_rows)",
        "tests/placement/test_cost.py::test_a_small_model_takes_time_and_memory_of_the_starter",
    ),
    Mutant(
        "other texts are disturbed", "Speculation.limits", "n_places == 1 and n_texts > 1", "False",
        "tests/test_speculation.py::test_other_texts_that_fill_the_ring_are_not_disturbed",
    ),
]  # fmt: skip
