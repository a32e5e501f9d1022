"""Quantized weights of files, and the kernels' mxfp4."""

from __future__ import annotations

from mutants.mutant import Mutant

FILES, LAYOUT, BLOCKS = "tests/test_quantized.py", "tests/kernels/test_layout.py", "tests/kernels/test_kernel_blocks.py"
RAGGED = f"{BLOCKS}::test_ragged_shapes_of_one_layer"
GGUF = "tests/test_gguf.py"

MUTANTS = [
    Mutant(
        "halves of mxfp4 are multiplied without their table",
        "csrc:half_weights",
        "looked_up(halves, kTwiceE2m1)",
        "halves",
        RAGGED,
    ),
    Mutant(
        "a record of mxfp4 repeats the lines of its first half",
        "csrc:step_lines",
        "step % n * kStepLines<kFormat> * 64",
        "step % n * 0",
        RAGGED,
    ),
    Mutant(
        "the second half of a record of mxfp4 has the scales of the first",
        "csrc:step_scales",
        "(step % n * 2 + group)",
        "group",
        RAGGED,
    ),
    Mutant(
        "numbers that were not rounded meet the bits of mxfp4 instead of its numbers",
        "csrc:add_large",
        "kTwiceE2m1[(int)a]",
        "a",
        f"{BLOCKS}::test_large_numbers_keep_the_precision_of_the_others",
    ),
    Mutant(
        "a scale that is no number is not seen in the result",
        "csrc:load_exponents",
        "(uint32_t)p[i] << 23",
        "(uint32_t)(p[i] & 127) << 23",
        "tests/kernels/test_not_finite.py",
    ),
    Mutant(
        "twice the numbers of mxfp4 are summed, and stay doubled",
        "csrc:whole_sum",
        "splat(0.5f)",
        "splat(1.0f)",
        RAGGED,
    ),
    Mutant(
        "a number in the middle between two of mxfp4 becomes the smaller one",
        "quantize_mxfp4",
        "(magnitude & 1) & np.isin",
        "(magnitude & 0) & np.isin",
        LAYOUT,
    ),
    Mutant(
        "mxfp4 has the scale of the standard only",
        "quantize_mxfp4",
        "np.minimum(low + 1, LARGEST_SCALE - 127)",
        "low",
        LAYOUT,
    ),
    Mutant(
        "attention is in mxfp4, too", "format_within", '".mlp." not in name', "False", "tests/test_weight_formats.py"
    ),
    Mutant(
        "FP8 that is no number is read", "Fp8Tensor._numbers", "(rows & _NAN) == _NAN", "(rows & _NAN) == 0xFF", FILES
    ),
    Mutant(
        "blocks of FP8 are as wide as high",
        "Fp8Tensor._numbers",
        "np.repeat(scales, width, axis=1)",
        "np.repeat(scales, width - 1, axis=1)",
        FILES,
    ),
    Mutant(
        "all rows of FP8 have the scale of one",
        "Fp8Tensor._numbers",
        "factors[np.arange(first, last) // height - start]",
        "factors[:1]",
        FILES,
    ),
    Mutant(
        "all experts are the first one",
        "Mxfp4Tensor._rows",
        "slice(self._expert, self._expert + 1)",
        "slice(0, 1)",
        FILES,
    ),
    Mutant("a scale of MXFP4 that is no number is read", "Mxfp4Tensor.halves", "> LARGEST_SCALE", "> 255", FILES),
    Mutant(
        "a scale of a GGUF file's MXFP4 that is no number is read", "_check_powers", "> LARGEST_SCALE", "> 255", GGUF
    ),
    Mutant(
        "scales of int4 are carried over rounded",
        "PackedInt4.has_halves",
        "not np.array_equal(scales.astype(np.float16).astype(np.float32), scales)",
        "False",
        FILES,
    ),
    Mutant(
        "rows of a scale do not follow their weights",
        "Mxfp4Tensor.halves",
        "Halves(scales, blocks",
        "Halves(scales[::-1], blocks",
        FILES,
    ),
    Mutant(
        "shards of what is carried over are rounded",
        "ShardSource.shard_of",
        "form != self._source.native",
        "True",
        FILES,
    ),
    Mutant("auto rounds mxfp4", "formats_to_try", 'weights.native == "mxfp4"', "False", "tests/test_format_choice.py"),
    Mutant("nobody is told of a second rounding", "warn_of_rounding", "form != native", "form == native", FILES),
    Mutant(
        "zero points are as good as none", "_check_compressed", "symmetric=(True,)", "symmetric=(True, False)", FILES
    ),
    Mutant(
        "a head is whole in plain numbers when gains are multiplied into it",
        "checkpoint.packing:folded",
        "changed(rows(name), ",
        "changed(rows(name)[:] + 0, ",
        f"{FILES}::test_a_head_is_never_whole_in_plain_numbers",
    ),
    Mutant(
        "a decoded tensor is whole while it is packed",
        "HfFolder._rows",
        "read(slice(first, last))",
        "read(slice(0, piece.rows[1] if piece.rows else self._files[piece.tensor].specs[piece.tensor].shape[0]))[first:last]",
        f"{FILES}::test_loading_takes_what_plans_count",
    ),
    Mutant(
        "rows of a matrix that is put together of several come from its first one",
        "kernels.lazy_rows:spans",
        "start += count",
        "start += 0",
        "tests/test_hffolder.py",
    ),
    Mutant(
        "plans count a whole tensor in plain numbers while it loads",
        "placement.model:_block",
        "widest(own.values())",
        "max(map(math.prod, own.values()))",
        "tests/test_shape.py tests/test_hfconfig.py",
    ),
]
