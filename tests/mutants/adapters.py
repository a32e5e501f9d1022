"""Mutants of adapters: whose rows they change, which rows are shared, and what is refused."""

from __future__ import annotations

from mutants.mutant import Mutant

OWN = "tests/test_adapters.py"
TEXTS = f"{OWN}::test_each_text_has_the_tokens_of_its_merged_weights"
BITS = f"{OWN}::test_a_batch_has_the_bits_of_each_row_alone"

MUTANTS = [
    Mutant(
        "a row gets all adapters", "csrc:adapt", "part.adapter == adapter[m] && part.layer == layer", "part.layer == layer",
        f"{OWN}::test_an_adapter_adds_what_it_says_beside_every_format",
    ),
    Mutant(
        "the first row of a text with an adapter is left out", "csrc:adapt", "adapter[m] = adapter_of(frame_.slices[s])",
        "adapter[m] = r ? adapter_of(frame_.slices[s]) : 0", BITS,
    ),
    Mutant(
        "A is not multiplied by the gains that are in rounded weights", "low_rank", "a * factor", "a",
        f"{OWN}::test_an_adapter_adds_what_it_says_beside_every_format",
    ),
    Mutant(
        "kept prefixes of another adapter are used", "Sequence.kept_for", 'f"{self.adapter}/{self.owner}"', "self.owner",
        f"{OWN}::test_no_text_continues_from_rows_of_another_adapter",
    ),
    Mutant(
        "running texts share prompts of another adapter", "Sequence.prompt_key", "self.owner, self.adapter, self.prompt_ids",
        'self.owner, "", self.prompt_ids', f"{OWN}::test_no_text_continues_from_rows_of_another_adapter",
    ),
    Mutant(
        "a rank-stabilized scale is an ordinary one", "Adapter._settings", "math.sqrt(rank)", "rank", TEXTS,
    ),
    Mutant(
        "secondaries get no adapters", "StarterWeights.parts_of",
        "self._with_adapters(family.secondary_parts(node, n_nodes, start, stop), start, stop)",
        "family.secondary_parts(node, n_nodes, start, stop)", TEXTS,
    ),
    Mutant(
        "the scale is not part of an adapter's hash", "Adapter.__init__", "[rank, self.scale]", "[rank]",
        f"{OWN}::test_the_hash_is_that_of_all_that_an_adapter_adds",
    ),
    Mutant(
        "an adapter may say any rank", "Adapter._settings", "not 1 <= rank <= MOST_RANK", "False",
        f"{OWN}::test_a_setting_that_is_not_served_is_refused_by_name",
    ),
    Mutant(
        "what changes an adapter's formula is left out", "Adapter._settings", "told.get(key) not in plain", "False",
        f"{OWN}::test_a_setting_that_is_not_served_is_refused_by_name",
    ),
    Mutant(
        "a node takes adapters of any rank", "check_stored", "1 <= rank <= MOST_RANK", "True",
        f"{OWN}::test_a_node_checks_the_adapters_that_it_gets",
    ),
    Mutant(
        "shapes of an adapter are not looked at", "Adapter._modules", "spec.shape != shape", "False",
        f"{OWN}::test_a_file_that_does_not_fit_is_refused_by_name",
    ),
    Mutant(
        "an adapter of other weights is taken", "Adapter.__init__", "found != told", "False",
        f"{OWN}::test_an_adapter_that_says_what_it_was_trained_on_is_compared",
    ),
    Mutant(
        "a node in torch takes adapters", "check_spec", "spec.adapter_parts and (spec.is_torch or spec.group is not None)",
        "False", f"{OWN}::test_what_adapters_cannot_do_is_refused_before_weights_are_sent",
    ),
]  # fmt: skip
