"""Guessed tokens: which rows count, and what they may not change."""

from __future__ import annotations

from mutants.mutant import Mutant

TEST = "tests/test_guessed_frames.py"
LIMITS = "tests/test_guessed_limits.py"

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
        "each text has the whole depth of a ring that several share", "Speculation._most_frames",
        "most // max(1, self._n_texts)", "most",
        "tests/test_speculation.py::test_texts_that_share_a_ring_share_its_depth",
    ),
    Mutant(
        "texts without guesses are thought to fill all nodes", "Speculation.returned", "time_s / self._n_texts",
        "time_s / self._n_nodes",
        "tests/test_speculation.py::test_texts_that_share_a_ring_share_its_depth",
    ),
    Mutant(
        "a plan has one row of a text in a frame", "PlanReport.with_draft", "range(1, most_rows + 1)", "range(1, 2)",
        "tests/test_cli_plan.py::test_a_rate_of_right_guesses_predicts_the_speed_of_one_text",
    ),
    Mutant(
        "a plan has several rows of a mixture in a frame", "plan_on", "bool(config.n_expert)", "False",
        "tests/test_cli_plan.py::test_one_node_computes_several_rows_of_a_text_but_of_experts",
    ),
    Mutant(
        "rows are sent whatever they cost", "Speculation._best", "if speed > best:", "if True:",
        "tests/test_speculation.py::test_dear_rows_are_not_sent",
    ),
    Mutant(
        "a late frame is the price for ever", "Prices.forget_more", "group <= _group(n_rows)", "True",
        "tests/test_speculation.py::test_one_late_frame_does_not_end_guesses_for_good",
    ),
    Mutant(
        "each number of rows is known by itself", "prices:_group", "n_rows // step * step", "n_rows",
        "tests/test_speculation.py::test_a_frame_that_waited_can_make_a_price_smaller_only",
    ),
    Mutant(
        "rows between those that are known cost as the first", "Prices.of", "(last_s - first_s) / (last - first)", "0.0",
        "tests/test_speculation.py::test_prices_of_many_rows_are_those_of_about_as_many",
    ),
    Mutant(
        "the last place counts, however little is equal before it", "Index.find", "max(found, (_n_equal(text, ids, at), at))",
        "max(found[::-1], (at, _n_equal(text, ids, at)))[::-1]",
        "tests/test_speculation.py::test_of_the_last_places_that_one_counts_which_is_equal_the_furthest_back",
    ),
    Mutant(
        "an index has no places from before it grew", "Index.find", "before.append(last.get(run, 0))", "before.append(0)",
        "tests/test_speculation.py::test_an_index_that_has_grown_finds_what_all_places_say",
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
        "rows of other texts in a frame cost nothing", "Speculation._rows_beside",
        "self.rounds.of(self._n_beside + 1 + n) - plain_s", "self.rounds.of(1 + n) - self.rounds.of(1)",
        "tests/test_speculation.py::test_the_first_texts_of_a_frame_have_guesses_until_rows_get_dear",
    ),
    Mutant(
        "nobody guesses where several texts fill a ring", "Speculation.limits", "self._is_full and self.most_rows == 1",
        "self._is_full",
        f"{LIMITS}::test_texts_of_one_node_are_guessed_beside_each_other_and_stay_the_same",
    ),
    Mutant(
        "a text that found no place in a frame is thought wrong", "Speculation.limits",
        "self._is_full and not rate.is_judged", "False",
        "tests/test_speculation.py::test_the_first_texts_of_a_frame_have_guesses_until_rows_get_dear",
    ),
    Mutant(
        "rows of guesses take no memory", "Sequence.n_cached", "max(min(len(self.ids), self.n_positions), self.n_far)",
        "min(len(self.ids), self.n_positions)", f"{LIMITS}::test_rows_of_guesses_take_memory_and_are_counted",
    ),
    Mutant(
        "guesses take memory that texts need", "Scheduler._guesses", "or not self._has_room(sequence, begin + n)",
        "", f"{LIMITS}::test_guesses_neither_put_out_a_text_nor_drop_kept_caches",
    ),
    Mutant(
        "it is forgotten how far an ended text's guesses went", "Scheduler._leave", "max(sequence.n_sent, sequence.n_far)",
        "sequence.n_sent", f"{LIMITS}::test_a_text_begins_behind_an_ended_one_only_where_guesses_have_not_moved_its_windows",
    ),
    Mutant(
        "it is forgotten how far a running text's guesses went", "Scheduler._leads", "max(other.n_sent, other.n_far)",
        "other.n_sent", f"{LIMITS}::test_a_text_begins_behind_a_running_one_only_where_guesses_have_not_moved_its_windows",
    ),
    Mutant(
        "a frame has more rows than a link lets through", "Scheduler._guesses", ", self.decode_rows // n_texts - n_known",
        "", f"{LIMITS}::test_a_frame_has_no_more_rows_with_guesses_than_it_may_have",
    ),
    Mutant(
        "frames of guesses alone take places of others", "Scheduler.schedule",
        "n_known - self._n_bare < self.n_frames", "n_known < self.n_frames",
        f"{LIMITS}::test_frames_of_guesses_alone_take_no_place_of_a_prompt",
    ),
    Mutant(
        "frames of guesses alone count as a text's share", "Scheduler._share", "part.n_logits > part.n_guessed",
        "part.n_logits > 0", f"{LIMITS}::test_frames_of_guesses_alone_hold_up_no_other_text",
    ),
    Mutant(
        "a copy leaves later than its frame", "Scheduler.schedule", "tuple(self._copies)", "tuple(self._copies[:1])",
        f"{LIMITS}::test_texts_that_wait_for_a_copy_are_not_disturbed_by_guesses_of_its_source",
    ),
    Mutant(
        "guesses leave while a text waits", "Scheduler._guess_slices", "self._waiting or self._ready or ",
        "", f"{LIMITS}::test_nothing_is_guessed_while_a_text_waits",
    ),
    Mutant(
        "beams are guessed", "Scheduler._guesses", " or sequence.cohort",
        "", f"{LIMITS}::test_texts_that_are_continued_together_are_not_guessed",
    ),
    Mutant(
        "rows of guesses are a prompt in a trace", "Recorder.add", "s.n_rows != s.n_logits",
        "s.n_rows != 1", f"{LIMITS}::test_rows_of_guesses_are_no_prompt_in_a_trace",
    ),
    Mutant(
        "certain tokens are a prompt in a trace", "Scheduler.prompt_rows", "if part.is_prompt or plan.is_replay",
        "if part.n_rows != part.n_logits", f"{LIMITS}::test_rows_of_certain_tokens_are_no_prompt_in_a_trace",
    ),
    Mutant(
        "other nodes know nothing of certain tokens", "RunTrace._node", "prompts.get(s.frame, s.n_prompt_rows)",
        "s.n_prompt_rows", "tests/tracing/test_trace.py::test_what_is_a_prompt_is_known_to_the_starter",
    ),
    Mutant(
        "rows of guesses are a prompt for the pace", "PromptPace.sent", "part.n_rows for part in plan.slices if part.is_prompt",
        "part.n_rows for part in plan.slices if part.n_rows != 1", f"{LIMITS}::test_rows_of_guesses_are_no_prompt_for_the_pace",
    ),
    Mutant(
        "frames with prompts are measured as rows of guesses", "Speculation.sent", "if is_prompt:",
        "if False:", f"{LIMITS}::test_frames_with_prompts_say_nothing_about_the_price_of_rows",
    ),
    Mutant(
        "guesses under way count as known positions", "Scheduler.in_flight",
        "min(part.start + part.n_rows, len(self._running[part.seq_id].ids))", "part.start + part.n_rows",
        f"{LIMITS}::test_what_was_under_way_at_a_loss_are_known_tokens_alone",
    ),
    Mutant(
        "void rows count as under way", "Scheduler.in_flight", "if self._is_current(part)",
        "if part.seq_id in self._running", f"{LIMITS}::test_what_was_under_way_at_a_loss_are_known_tokens_alone",
    ),
    Mutant(
        "rounds that guesses save are thought to be left", "Sequence.n_rounds_left", "if 0 < self.n_confirmed < n_drawn",
        "if False", f"{LIMITS}::test_rounds_left_are_fewer_where_guesses_are_right",
    ),
    Mutant(
        "rows of wrong guesses are replayed", "Scheduler.resume", "sequence.return_to(n_done)",
        "sequence.n_sent = n_done", f"{LIMITS}::test_caches_are_replayed_in_the_middle_of_guesses",
    ),
    Mutant(
        "sent rows of wrong guesses stay", "SentRows._append",
        "del text.scales[part.start * scale :], text.values[part.start * value :]", "pass",
        f"{LIMITS}::test_caches_are_replayed_in_the_middle_of_guesses",
    ),
    Mutant(
        "a guess that ends the text is sent", "Speculation._allowed", "token in ends or ",
        "", f"{LIMITS}::test_guesses_that_the_model_does_not_know_or_that_end_the_text_are_not_sent",
    ),
    Mutant(
        "a guess that the model does not know is sent", "Speculation._allowed", "token >= n_ids",
        "False", f"{LIMITS}::test_guesses_that_the_model_does_not_know_or_that_end_the_text_are_not_sent",
    ),
    Mutant(
        "the small model goes on behind a wrong guess", "Draft.learn", "del self._cached[at:]",
        "pass", f"{LIMITS}::test_a_small_model_guesses_the_same_whatever_was_guessed_before",
    ),
    Mutant(
        "tokens of a round are not counted", "tokens_per_round", "n_tokens - n_confirmed",
        "n_tokens", f"{LIMITS}::test_the_tokens_of_a_round_are_counted",
    ),
    Mutant(
        "mixtures guess several rows a frame", "Run._speculation", "bool(model.config.n_expert)", "False",
        "tests/test_guessed_runs.py::test_a_mixture_of_experts_guesses_one_row_a_frame",
    ),
    Mutant(
        "two tokens may follow, and the first is taken", "StarterEngine._certain", "np.count_nonzero(allowed) == 1",
        "np.count_nonzero(allowed) <= 2", f"{TEST}::test_guesses_change_no_text",
    ),
    Mutant(
        "a token whose logarithm is wanted is not drawn", "StarterEngine._certain",
        "request.constraint is None or sequence.params.n_logprobs is not None", "request.constraint is None",
        f"{TEST}::test_tokens_that_nothing_else_may_follow_are_not_waited_for",
    ),
    Mutant(
        "tokens that were not drawn fill a frame beyond its rows", "Scheduler._decode_slices", " and n_rows < self.decode_rows",
        "", f"{TEST}::test_a_frame_has_no_more_certain_rows_than_it_may_have",
    ),
    Mutant(
        "nodes that share cores get several frames of a text", "Speculation._most_frames", "if self._is_deep else 1",
        "if True else 1",
        "tests/test_speculation.py::test_a_text_has_one_frame_in_flight_where_nodes_do_not_wait",
    ),
    Mutant(
        "the time of guesses is not counted", "Speculation._speed", "self._guess_s.get(kind, 0.0) * (n_rows - 1)", "0.0",
        "tests/test_speculation.py::test_a_source_that_takes_longer_than_it_saves_is_left_alone",
    ),
    Mutant(
        "slow guesses go on for as long as fast ones", "_Trial.note", "slower < CLEARLY", "True",
        "tests/test_speculation.py::test_guesses_that_make_frames_slower_stop_soon_whatever_was_promised",
    ),
    Mutant(
        "torch is trusted with guesses", "StarterEngine.run", "self._speculation if self.may_guess else None",
        "self._speculation", "tests/test_guessed_runs.py::test_nothing_is_guessed_where_torch_computes_unless_it_is_asked_for",
    ),
]  # fmt: skip
