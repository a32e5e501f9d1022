"""Numbers that are not finite, or that a format cannot hold."""

from __future__ import annotations

from mutants.mutant import Mutant

KERNELS = "tests/kernels/test_not_finite.py"
RANGE = "tests/test_weight_range.py"

MUTANTS = [
    Mutant(
        "NaN is lost when a row is made bytes",
        "csrc:take_large",
        "all == all",
        "true",
        f"{KERNELS}::test_a_row_with_such_a_number_gives_nothing_finite_and_other_rows_keep_their_bits",
    ),
    Mutant(
        "exp makes a number of NaN",
        "csrc:exp",
        "min(splat(88.0f), max(low, x))",
        "min(max(x, low), splat(88.0f))",
        f"{KERNELS}::test_functions_keep_nan",
    ),
    Mutant(
        "a score of minus infinity has no weight",
        "csrc:score",
        "sub(x, sub(x, x))",
        "x",
        f"{KERNELS}::test_a_key_beyond_the_caches_type_does_not_vanish",
    ),
    Mutant(
        "int8 caches lose NaN",
        "csrc:largest_of",
        "largest(most) + sum(zero)",
        "largest(most)",
        f"{KERNELS}::test_attention_hides_no_number_that_is_not_finite",
    ),
    Mutant(
        "a router's score that is not finite is not chosen",
        "csrc:choose",
        "score[i] - score[i]",
        "0",
        f"{KERNELS}::test_a_router_with_such_a_score_gives_nothing_finite",
    ),
    Mutant(
        "the soft cap of logits hides infinity",
        "csrc:linear",
        "sub(raw, sub(raw, raw))",
        "raw",
        f"{KERNELS}::test_the_soft_cap_of_logits_hides_nothing",
    ),
    Mutant("nothing is too large for a format", "check_range", "most <= MOST[form]", "most < math.inf", RANGE),
    Mutant("numbers that are not finite may be clipped", "check_range", "not math.isfinite(most)", "False", RANGE),
    Mutant("clipping needs no permission", "check_range", "if not clips", "if False", RANGE),
    Mutant("int4 takes numbers as large as int8 does", "layout:MOST", "8 * _HALF", "127 * _HALF", RANGE),
    Mutant("packing does not look at numbers", "layout:pack", "not largest_of(block) <= MOST[form]", "False", RANGE),
    Mutant(
        "a whole tensor's largest number is not looked for",
        "layout:pack",
        "max(largest_of(weight[i : i + PACKED_ROWS]) for i in range(0, n_out, PACKED_ROWS))",
        "largest_of(block)",
        RANGE,
    ),
    Mutant("bits of bfloat16 are taken for numbers", "largest_of", "weight.dtype == np.uint16", "False", RANGE),
    Mutant(
        "norms are not looked at",
        "Packing.pack",
        'check_range("float32", largest_of(whole), name, self.clips)',
        "None",
        RANGE,
    ),
    Mutant(
        "gains of norms are not looked at",
        "folded",
        'check_range("float32", largest_of(gain), norm, packing.clips)',
        "None",
        RANGE,
    ),
    Mutant(
        "an embedding in int8 is not looked at",
        "int8_rows",
        'check_range("float32", largest_of(largest), name, clips=False)',
        "None",
        RANGE,
    ),
    Mutant(
        "casting does not look at numbers",
        "CastSource._cast",
        "fitted(stored, spec, self.dtype, name, self._clips)",
        "(stored, spec)",
        RANGE,
    ),
    Mutant(
        "torch in half precision does not look at weights",
        "torch_weights",
        'computing.dtype != "float16"',
        "True",
        RANGE,
    ),
    Mutant(
        "scales of GGUF's Q4_0 are not looked at",
        "halves_of",
        'check_range("fp16", largest_of(scales), name, clips=False)',
        "None",
        f"{RANGE}::test_a_gguf_file_with_a_scale_that_is_not_finite_is_refused",
    ),
    Mutant(
        "the request to clip does not reach packing",
        "choose_computing",
        "clips = asked.allow_clipping",
        "clips = False",
        RANGE,
    ),
    Mutant(
        "logits are not looked at",
        "StarterEngine._draw",
        'self._finite(self.stage.head(x), wanted, "the head gave logits")',
        "(self.stage.head(x), wanted)",
        f"{RANGE}::test_logits_that_are_not_finite_end_the_run",
    ),
]
