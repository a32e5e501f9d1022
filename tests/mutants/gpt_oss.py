"""What gpt-oss has: sinks, biases of routers and experts, clamped MLPs, stacked experts."""

from __future__ import annotations

from mutants.mutant import Mutant

FAMILIES = "tests/test_own_families.py"
LOGITS = f"{FAMILIES}::test_logits_are_those_of_the_definition"
FINITE = f"{FAMILIES}::test_neither_clamps_nor_sinks_hide_what_is_not_finite"
REFERENCES = "tests/references/test_logits.py"
GGUF = "tests/test_gguf_gpt_oss.py"

MUTANTS = [
    Mutant("sinks are not counted", "csrc:attend_rows", "block.sinks ? 1.0f : 0.0f", "0.0f", LOGITS),
    Mutant(
        "groups have the sinks of the first one",
        "csrc:attend_rows",
        "block.sinks[first_head + i % repeat]",
        "block.sinks[i % repeat]",
        LOGITS,
    ),
    Mutant(
        "shares have the sinks of the first heads",
        "tensor.shares:piece_of",
        "Piece(rows=(share.heads,))",
        "Piece(rows=((0, share.n_heads),))",
        f"{FAMILIES}::test_shares_of_a_group_add_up",
    ),
    Mutant("gates are not clamped", "csrc:clamped_glu", "min(limit, gate)", "gate", LOGITS),
    Mutant("a gate hides infinity", "csrc:clamped_glu", "sub(gate, sub(gate, gate))", "gate", FINITE),
    Mutant("what a gate lets through hides infinity", "csrc:clamped_glu", "sub(up, sub(up, up))", "up", FINITE),
    Mutant(
        "what a gate lets through has no lower bound",
        "csrc:clamped_glu",
        "max(sub(splat(0.0f), limit), min(limit, up))",
        "min(limit, up)",
        LOGITS,
    ),
    Mutant("gates let nothing through at zero", "csrc:clamped_glu", "add(up, splat(1.0f))", "up", LOGITS),
    Mutant("gates are SiLU", "csrc:clamped_glu", "splat(1.702f)", "splat(1.0f)", LOGITS),
    Mutant("the router has no bias", "checkpoint.shapes:_experts", "config.router_bias", "False", LOGITS),
    Mutant(
        "layers are windowed the other way round",
        "checkpoint.hfconfig:_gpt_oss",
        "_windows(hf, 2)",
        "[1 - one for one in _windows(hf, 2)]",
        "tests/test_hfconfig.py",
    ),
    Mutant(
        "rows of gates and of what they let through follow each other",
        "checkpoint.hffolder:HfFolder._stacked",
        '(int(expert[2] == "fc_2"), 2 * shape[0], 2)',
        '(shape[0] * (expert[2] == "fc_2"), shape[0] * (1 + (expert[2] == "fc_2")), 1)',
        REFERENCES,
    ),
    Mutant(
        "stacked weights are not transposed",
        "checkpoint.hffolder:HfFolder._stacked",
        'is_transposed=ending == "weight"',
        "is_transposed=False",
        REFERENCES,
    ),
    Mutant(
        "YaRN of GGUF files is truncated",
        "checkpoint.ggufconfig:_gpt_oss",
        '"truncate": False',
        '"truncate": True',
        GGUF,
    ),
    Mutant(
        "a part of an answer ends it",
        "checkpoint.gguftokenizer:_ends",
        'ends.discard(tokens.index("<|end|>"))',
        "pass",
        GGUF,
    ),
    Mutant(
        "all experts are the first",
        "checkpoint.hffolder:HfFolder._stacked",
        "Piece(tensor, rows, int(expert[1])",
        "Piece(tensor, rows, 0",
        REFERENCES,
    ),
]
