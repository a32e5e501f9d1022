"""Mutants of adapters: whose rows they change, which rows are shared, and what is refused."""

from __future__ import annotations

from mutants.mutant import Mutant

OWN = "tests/test_adapters.py"
TEXTS = f"{OWN}::test_each_text_has_the_tokens_of_its_merged_weights"
ROWS = "tests/test_virtual_rows.py"
TRAINED = f"{ROWS}::test_each_text_has_the_tokens_of_the_forward_that_was_trained"
CUT = f"{ROWS}::test_rows_have_the_same_bits_however_they_are_cut_and_in_any_company"
SHARED = f"{ROWS}::test_no_text_continues_from_rows_of_another_adapter"

MUTANTS = [
    Mutant(
        "a row gets all adapters", "csrc:adapt", "part.adapter == adapter[m] && part.layer == layer", "part.layer == layer",
        f"{OWN}::test_an_adapter_adds_what_it_says_beside_every_format",
    ),
    Mutant(
        "the first row of a text with an adapter is left out", "csrc:adapt", "adapter[m] = adapter_of(frame_.slices[s])",
        "adapter[m] = r ? adapter_of(frame_.slices[s]) : 0", TEXTS,
    ),
    Mutant(
        "A is not multiplied by the gains that are in rounded weights", "low_rank", "a * factor", "a",
        f"{OWN}::test_an_adapter_adds_what_it_says_beside_every_format",
    ),
    Mutant(
        "kept prefixes of another adapter are used", "Sequence.kept_for", 'f"{self.adapter}/{self.owner}"', "self.owner",
        f"{OWN}::test_no_text_continues_from_rows_of_another_adapter {SHARED}",
    ),
    Mutant(
        "running texts share prompts of another adapter", "Sequence.prompt_key", "self.owner, self.adapter, self.prompt_ids",
        'self.owner, "", self.prompt_ids', f"{OWN}::test_no_text_continues_from_rows_of_another_adapter",
    ),
    Mutant(
        "a rank-stabilized scale is an ordinary one", "LowRankAdapter._settings", "math.sqrt(rank)", "rank", TEXTS,
    ),
    Mutant(
        "secondaries get no adapters", "StarterWeights.parts_of",
        "self._with_adapters(family.secondary_parts(node, n_nodes, start, stop), start, stop)",
        "family.secondary_parts(node, n_nodes, start, stop)", TEXTS,
    ),
    Mutant(
        "the scale is not part of an adapter's hash", "LowRankAdapter._checked", "[rank, self.scale]", "[rank]",
        f"{OWN}::test_the_hash_is_that_of_all_that_an_adapter_adds",
    ),
    Mutant(
        "an adapter may say any rank", "LowRankAdapter._settings", "not 1 <= rank <= MOST_RANK", "False",
        f"{OWN}::test_a_setting_that_is_not_served_is_refused_by_name",
    ),
    Mutant(
        "what changes an adapter's formula is left out", "Adapter._check_plain", "self._told.get(key) not in _PLAIN[key]",
        "False", f"{OWN}::test_a_setting_that_is_not_served_is_refused_by_name",
    ),
    Mutant(
        "a node takes adapters of any rank", "check_stored", "1 <= n <= MOST_RANK", "True",
        f"{OWN}::test_a_node_checks_the_adapters_that_it_gets",
    ),
    Mutant(
        "shapes of an adapter are not looked at", "Adapter._check_spec", "spec.shape != shape", "False",
        f"{OWN}::test_a_file_that_does_not_fit_is_refused_by_name",
    ),
    Mutant(
        "an adapter of other weights is taken", "Adapter.__init__", "found != trained_on", "False",
        f"{OWN}::test_an_adapter_that_says_what_it_was_trained_on_is_compared",
    ),
    Mutant(
        "a node in torch takes adapters", "check_spec", "spec.adapter_parts and (spec.is_torch or spec.group is not None)",
        "False", f"{OWN}::test_what_adapters_cannot_do_is_refused_before_weights_are_sent",
    ),
    Mutant(
        "a prompt is added to the rows that stand for it", "LearnedRows.forward.learn",
        "computed[one.rows] + learned if block else learned", "computed[one.rows] + learned", TRAINED,
    ),
    Mutant(
        "a slice within a prompt gets its first rows", "LearnedRows.forward", "slice(start, start + n))", "slice(n))", CUT,
    ),
    Mutant(
        "rows behind a prefix have the first positions", "LearnedRows.forward",
        "begin + n, start + n, n_rows - n,", "begin + n, start, n_rows - n,", TRAINED,
    ),
    Mutant(
        "beside deep prompts a block has the LoRA of the first one", "Blocks._piece_of_stage",
        "self._low_rank_of_block[begin - self.start :].ctypes.data", "self._low_rank_of_block.ctypes.data", CUT,
    ),
    Mutant(
        "learned rows take no positions", "StarterEngine._sequence", "n_virtual + len(prompt) > self._max_length",
        "len(prompt) > self._max_length", f"{ROWS}::test_learned_rows_take_positions_of_the_context",
    ),
    Mutant(
        "a node takes learned rows of any width", "check_stored", "width == widths[match[3]]", "True",
        f"{ROWS}::test_a_node_checks_the_rows_that_it_gets",
    ),
    Mutant(
        "numbers that are not finite are served", "Adapter.__init__", "not np.isfinite(values).all()", "False",
        f"{ROWS}::test_a_strangers_folder_is_refused_in_one_line_before_a_node_is_asked",
    ),
    Mutant(
        "virtual positions are tokens of a penalty", "StarterEngine._sequence", "prompt[:1] * n_virtual",
        "tuple(range(n_virtual))",
        f"{ROWS}::test_virtual_positions_are_no_tokens",
    ),
    Mutant(
        "a chat leaves no place for learned rows", "_fit",
        "session.max_length - max((one.n_virtual for one in session.model.weights.adapters), default=0)", "session.max_length",
        f"{ROWS}::test_a_chat_goes_on_behind_learned_rows",
    ),
    Mutant(
        "a run that is resumed looks for its adapter in another folder", "_saved", "{name}{sign}{_whole(folder)}",
        "{name}{sign}{folder}", f"{ROWS}::test_a_run_that_was_interrupted_goes_on_with_its_adapter",
    ),
    Mutant(
        "a run is resumed with another adapter", "identity_of", "*(one.sha256 for one in weights.adapters),", "",
        f"{ROWS}::test_a_run_that_was_interrupted_goes_on_with_its_adapter",
    ),
    Mutant(
        "a page of a prefix has its first rows", "CacheRows._write", "_slots(self._keys, first, end)",
        "_slots(self._keys, 0, end - first)", "tests/kernels/test_cache_rows.py",
    ),
]  # fmt: skip
