"""Positions that are scaled, and what BLOOM, Falcon RW, GPT-2, OPT, GLM and MiniMax have."""

from __future__ import annotations

from mutants.mutant import Mutant

POSITIONS = "tests/kernels/test_positions.py"
FAMILIES = "tests/test_own_families.py"
LOGITS = f"{FAMILIES}::test_logits_are_those_of_the_definition"
FORMS = "tests/test_hfconfig.py"

MUTANTS = [
    Mutant(
        "YaRN ends its ramp as litgpt does",
        "kernels.positions:_yarn",
        "n // 2 - 1 if is_litgpts else n - 1",
        "n // 2 - 1",
        POSITIONS,
    ),
    Mutant(
        "YaRN mixes the other way round",
        "kernels.positions:_yarn",
        "ramp if is_litgpts else one - ramp",
        "ramp",
        POSITIONS,
    ),
    Mutant("YaRN always truncates", "kernels.positions:_yarn", 'adjustments.get("truncate", True)', "True", POSITIONS),
    Mutant(
        "YaRN's attention factor is ignored",
        "kernels.positions:_yarn",
        'adjustments.get("attention_factor")',
        "None",
        POSITIONS,
    ),
    Mutant("YaRN's mscale is ignored", "kernels.positions:_yarn", "mscale and mscale_all", "False", POSITIONS),
    Mutant(
        "YaRN has no factor by default",
        "kernels.positions:_yarn",
        "if is_litgpts else 1.0",
        "if is_litgpts else 0.0",
        POSITIONS,
    ),
    Mutant(
        "YaRN's fast bound is fixed", "kernels.positions:_yarn", 'adjustments.get("beta_fast") or 32', "32", POSITIONS
    ),
    Mutant(
        "YaRN's slow bound is fixed", "kernels.positions:_yarn", 'adjustments.get("beta_slow") or 1', "1", POSITIONS
    ),
    Mutant(
        "longrope is long from its boundary on",
        "_longrope",
        "max_length > original",
        "max_length >= original",
        POSITIONS,
    ),
    Mutant(
        "longrope is not scaled", "_longrope", "math.sqrt(1 + math.log(factor) / math.log(original))", "1.0", POSITIONS
    ),
    Mutant("dynamic scaling forgets the length", "_dynamic", "max(max_length, trained)", "trained", POSITIONS),
    Mutant("dynamic scaling forgets its power", "_dynamic", "(n / (n - 2))", "1", POSITIONS),
    Mutant(
        "scores have no bias",
        "csrc:attend_rows",
        "stage_.score_bias ? own.bias.of((size_t)n_queries) : nullptr",
        "(const float**)nullptr",
        LOGITS,
    ),
    Mutant(
        "all pages have the bias of the first",
        "csrc:score",
        "queries.bias[at + i] + first_position",
        "queries.bias[at + i]",
        LOGITS,
    ),
    Mutant(
        "all heads have one slope",
        "csrc:attend_rows",
        "(first_head + i % repeat) * stage_.score_bias_floats",
        "0",
        LOGITS,
    ),
    Mutant(
        "shares have the slopes of the first heads",
        "ShardBlocks._made_score_bias",
        "slice(*self._share.heads)",
        "slice(self._share.n_heads)",
        f"{FAMILIES}::test_shares_of_a_group_add_up",
    ),
    Mutant(
        "other heads have the slopes of the first",
        "alibi_slopes",
        "2 * (n_head - n) + 1, 2",
        "(n_head - n) + 1",
        LOGITS,
    ),
    Mutant(
        "Falcon's slopes are not rounded",
        "score_bias",
        "_as_bf16(slopes)",
        "slopes",
        f"{FAMILIES}::test_falcons_positions_are_rounded_to_bfloat16",
    ),
    Mutant(
        "Falcon's positions are not rounded",
        "score_bias",
        "_as_bf16(positions)",
        "positions",
        f"{FAMILIES}::test_falcons_positions_are_rounded_to_bfloat16",
    ),
    Mutant("Falcon's bias is not divided", "score_bias", "math.sqrt(config.head_size)", "1.0", LOGITS),
    Mutant("learned positions are not added", "Ends.embed", "self._positions is not None", "False", LOGITS),
    Mutant(
        "learned positions begin anew in each frame",
        "Ends._checked_positions",
        "np.arange(start, start + n)",
        "np.arange(n)",
        LOGITS,
    ),
    Mutant("the embedding is not normed", "Ends.embed", "self._norm is None", "True", LOGITS),
    Mutant("norms come before the sums", "csrc:add_normed", "model_.norm_after_residual", "false", LOGITS),
    Mutant("there is a norm before the head", "Head.__init__", "config.norm_after_residual", "False", LOGITS),
    Mutant("ReLU lets all through", "csrc:activate", "kind == kRelu", "false", LOGITS),
    Mutant("experts are chosen without the correction", "csrc:choose", "by = sums", "by = score", LOGITS),
    Mutant(
        "negative corrections are none",
        "csrc:choose",
        "add(s, load_part(correction + i, n - i))",
        "add(s, max(splat(0.0f), load_part(correction + i, n - i)))",
        LOGITS,
    ),
    Mutant(
        "experts are weighted with their corrections",
        "csrc:choose",
        "e[0] = score[choice[i]]",
        "e[0] = by[choice[i]]",
        LOGITS,
    ),
    Mutant(
        "experts' weights do not add up to one", "csrc:choose", "probability[i] /= total", "probability[i] /= 1", LOGITS
    ),
    Mutant(
        "MiniMax's norms are of each head",
        "checkpoint.hfconfig:_minimax_m2",
        '"norm_qk_type": "olmo2"',
        '"norm_qk_type": "default"',
        FORMS,
    ),
    Mutant(
        "MiniMax rotates whole heads",
        "checkpoint.hfconfig:_minimax_m2",
        'hf["rotary_dim"] / hf["head_dim"]',
        "1.0",
        FORMS,
    ),
    Mutant(
        "GLM's first blocks have experts", "checkpoint.hfconfig:_glm4_moe", 'hf["first_k_dense_replace"]', "0", FORMS
    ),
    Mutant(
        "GLM's queries have no biases",
        "checkpoint.hfconfig:_glm4_moe",
        'bool(hf.get("attention_bias"))',
        "False",
        FORMS,
    ),
    Mutant("GLM has no shared experts", "checkpoint.hfconfig:_glm4_moe", 'hf["n_shared_experts"]', "0", FORMS),
    Mutant(
        "GLM's experts are not scaled",
        "checkpoint.hfconfig:_glm4_moe",
        'float(hf["routed_scaling_factor"])',
        "1.0",
        FORMS,
    ),
    Mutant(
        "GLM's queries have no norms", "checkpoint.hfconfig:_glm4_moe", 'bool(hf.get("use_qk_norm"))', "False", FORMS
    ),
    Mutant(
        "MiniMax's corrections are not found",
        "checkpoint.hffolder:BLOCK_MODULES",
        '"block_sparse_moe.gate", "block_sparse_moe"',
        '"block_sparse_moe.gate"',
        FAMILIES,
    ),
    Mutant(
        "one block more than config.json says is left out",
        "HfFolder._check_used",
        "n_layer + more",
        "n_layer + more + 1",
        "tests/test_hffolder.py",
    ),
    Mutant(
        "GGUF files of GLM have no norms of queries",
        "checkpoint.ggufconfig:_glm4_moe",
        '"blk.0.attn_q_norm.weight" in fields.header.tensors',
        "False",
        FAMILIES,
    ),
    Mutant(
        "blocks of GGUF files that predict further tokens are blocks of the model",
        "checkpoint.ggufconfig:_sizes",
        'n_layer -= fields.count("nextn_predict_layers")',
        "pass",
        FAMILIES,
    ),
    Mutant(
        "GGUF files with a softmax are read with sigmoids",
        "_check_router",
        'fields.get("expert_gating_func", _SIGMOID) != _SIGMOID',
        "False",
        FAMILIES,
    ),
    Mutant(
        "MiniMax is exported with whole heads rotated",
        "checkpoint.export:_own",
        "config.rope_n_elem",
        "config.head_size",
        FAMILIES,
    ),
    Mutant(
        "MiniMax's corrections are exported as GLM's",
        "_own_names",
        'names.get("correction", names[match[3]])',
        "names[match[3]]",
        FAMILIES,
    ),
    Mutant(
        "BLOOM's embedding has no norm",
        "checkpoint.hfconfig:_bloom",
        '"embedding_norm": True',
        '"embedding_norm": False',
        FORMS,
    ),
    Mutant(
        "OPT's table begins with the first position",
        "checkpoint.hffolder:FIRST_POSITION",
        '"embed_positions": 2',
        '"embed_positions": 0',
        "tests/references/test_logits.py",
    ),
    Mutant(
        "GPT-2's weights are not transposed",
        "checkpoint.hffolder:HfFolder._piece",
        "module in TRANSPOSED",
        "False",
        "tests/references/test_logits.py",
    ),
    Mutant(
        "rows are exported without the family's order",
        "checkpoint.export:_as_stored",
        "module in INTERLEAVED",
        "False",
        "tests/test_own_families.py::test_export_and_back",
    ),
    Mutant(
        "OPT's norms behind are exported as its first ones",
        "checkpoint.export:_OWN_NAMES",
        '("norm_2", "post_mlp_norm"), "final_layer_norm"',
        '("norm_2", "post_mlp_norm"), "self_attn_layer_norm"',
        "tests/test_own_families.py::test_export_and_back",
    ),
]
