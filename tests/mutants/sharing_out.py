"""Shares of blocks over the nodes of a group, and their sums."""

from __future__ import annotations

from mutants.mutant import Mutant

SHARDS = "tests/test_tensor_shards.py"
SUMS = "tests/test_tensor_sums.py"
BIASES = f"{SHARDS}::test_biases_are_added_once_by_a_node_that_has_something"
LOGITS = f"{SHARDS}::test_logits_equal_those_of_the_whole_model"
HELD = f"{SHARDS}::test_caches_hold_the_groups_that_a_node_reads"
ANY = f"{SHARDS}::test_any_heads_and_columns"
BY_RANK = f"{SUMS}::test_ways_that_add_by_rank_agree_to_the_bit"
SAME = f"{SUMS}::test_all_nodes_have_the_same_bits_and_the_sum"

MUTANTS = [
    Mutant(
        "node 0 adds the bias of attention though it has no heads",
        "Share.adds_attention_bias",
        "next(r for r in range(self.shares.n_nodes) if heads[r] < heads[r + 1])",
        "0",
        BIASES,
    ),
    Mutant(
        "the last node that has heads adds the bias, too",
        "Share.adds_attention_bias",
        "self.rank == next(r for r in range(self.shares.n_nodes) if heads[r] < heads[r + 1])",
        "heads[self.rank] < heads[self.rank + 1]",
        BIASES,
    ),
    Mutant(
        "node 0 adds the bias of the MLP though it has no columns",
        "Share.adds_mlp_bias",
        "next(r for r, (a, b) in enumerate(bounds) if a < b)",
        "0",
        BIASES,
    ),
    Mutant("the last group of a node is not held", "Share.groups", "-(-end // n)", "end // n", HELD),
    Mutant(
        "a node that has the middle of a group begins with the next one",
        "Share.groups",
        "return first // n, ",
        "return -(-first // n), ",
        HELD,
    ),
    Mutant(
        "the first head of a node reads the wrong keys",
        "Share.first_head",
        "self.heads[0] % self.heads_per_group if self.n_heads else 0",
        "0",
        ANY,
    ),
    Mutant(
        "a group that two nodes hold is counted twice",
        "Share.counts_group",
        "group * self.heads_per_group >= self.heads[0]",
        "True",
        f"{LOGITS}[Qwen3-0.6B] {LOGITS}[OLMo-2-1124-7B]",
    ),
    Mutant(
        "values are cut where keys are",
        "_of_attention",
        "_plus(groups, values)",
        "_plus(groups, keys)",
        f"{LOGITS}[Llama-3.1-8B]",
    ),
    Mutant(
        "a shared layer behind attention has the columns of the keys",
        "_of_attention",
        "Piece(columns=heads) if",
        "Piece(columns=groups) if",
        f"{LOGITS}[Llama-3.1-8B]",
    ),
    Mutant(
        "bounds are not those of the parts",
        "tensor.shares:_bounds",
        "done += part",
        "done = part",
        f"{SHARDS}::test_shares_are_in_proportion_to_what_nodes_can_do",
    ),
    Mutant(
        "sums of squares travel rounded",
        "AllReduce._sum",
        "x.shape[1] > 2",
        "True",
        f"{SUMS}::test_sums_of_squares_are_never_rounded",
    ),
    Mutant(
        "the star adds in another order",
        "_add_up",
        "own if r == rank else parts[r]",
        "own if r == 0 else parts[r if r > rank else r - 1]",
        BY_RANK,
    ),
    Mutant("a part is left out of the sum", "_add_up", "arrays[2:]", "arrays[3:]", SAME),
    Mutant("a node keeps its own sum unrounded", "_ring", "if not numbers.is_exact:", "if False:", SAME),
    Mutant(
        "the first node of a tree keeps its own sum unrounded",
        "_tree",
        "mesh.rank != 0 or not numbers.is_exact",
        "mesh.rank != 0",
        SAME,
    ),
    Mutant(
        "the pieces of an array lack its end",
        "tensor.sums:_pieces",
        "len(x) * (i + 1) // n",
        "len(x) // n * (i + 1)",
        SUMS,
    ),
    Mutant(
        "a group of one sends",
        "AllReduce.reduce",
        "self.mesh.size == 1",
        "False",
        f"{SUMS}::test_a_group_of_one_has_its_sum",
    ),
]
