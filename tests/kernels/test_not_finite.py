"""NaN and infinity pass through the kernels, so that the starter's checks find them: nothing may turn them into numbers."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from forced import forced, instruction_sets
from kernel_models import Tensors, blocks_of, run

from families import config_of, model_of, prompt, random_gpt
from mdi.kernels import library
from mdi.kernels.blocks import Context, Linear
from mdi.kernels.layout import Matrix, pack
from mdi.kernels.weight_formats import LAYOUTS

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")

BAD = [float("nan"), float("inf"), -float("inf")]
CACHES = ["float32", "bf16", "fp16", "int8"]


def product(force: str, matrix: Matrix, x: np.ndarray, softcap: float | None = None) -> np.ndarray:
    with forced(force):
        context = Context()
    return Linear(context, matrix, softcap=softcap)(x)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("form", LAYOUTS)
@pytest.mark.parametrize("force", instruction_sets())
def test_a_row_with_such_a_number_gives_nothing_finite_and_other_rows_keep_their_bits(
    force: str, form: str, bad: float
) -> None:
    rng = np.random.default_rng(1)
    matrix = pack(form, rng.standard_normal((33, 150)).astype(np.float32))
    x = rng.standard_normal((11, 150)).astype(np.float32)
    x[4, 70] = 50  # far larger than its group
    for n_rows in (1, 5, 11):  # one alone, some in tiles, and enough for a matrix unit
        clean = product(force, matrix, x[:n_rows])
        for place in (0, 15, 16, 63, 64, 70, 149):
            damaged = x[:n_rows].copy()
            damaged[n_rows // 2, place] = bad
            y = product(force, matrix, damaged)
            assert not np.isfinite(y[n_rows // 2]).any(), (n_rows, place)
            others = np.arange(n_rows) != n_rows // 2
            assert y[others].tobytes() == clean[others].tobytes()


@pytest.mark.parametrize("force", instruction_sets())
def test_rows_that_are_finite_but_whose_sum_is_not_are_rounded_as_any_others(force: str) -> None:
    matrix = pack("int8", np.eye(64, dtype=np.float32) * 1e-3)
    x = np.full((1, 64), 3e38, dtype=np.float32)
    assert np.isfinite(product(force, matrix, x)).all()


@pytest.mark.parametrize("force", instruction_sets())
def test_functions_keep_nan(force: str) -> None:
    loaded = library.load()
    assert loaded is not None
    x = np.full(17, np.nan, dtype=np.float32)
    x[3] = 1
    for which in range(6):
        y = np.empty_like(x)
        with forced(force):
            loaded.mdi_function(
                which, ctypes.c_void_p(x.ctypes.data), ctypes.c_int64(x.size), ctypes.c_void_p(y.ctypes.data)
            )
        assert np.array_equal(np.isnan(y), np.isnan(x)), which


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("force", instruction_sets())
def test_the_soft_cap_of_logits_hides_nothing(force: str, bad: float) -> None:
    matrix = pack("float32", np.eye(20, dtype=np.float32))
    x = np.zeros((2, 20), dtype=np.float32)
    x[1, 7] = bad
    y = product(force, matrix, x, softcap=30.0)
    assert np.isfinite(y[0]).all() and not np.isfinite(y[1, 7])


@pytest.mark.parametrize("row", ["query", "key", "value"])
@pytest.mark.parametrize("cache_type", CACHES)
@pytest.mark.parametrize("family", ["Qwen2.5-0.5B", "Gemma-2-9b"])
@pytest.mark.parametrize("force", instruction_sets())
def test_attention_hides_no_number_that_is_not_finite(force: str, family: str, cache_type: str, row: str) -> None:
    """Gemma 2 caps scores, where tanh would make a number of infinity."""
    gpt = model_of(family)
    heads, groups, size = gpt.config.n_head, gpt.config.n_query_groups, gpt.config.head_size
    at = {"query": 0, "key": heads * size, "value": (heads + groups) * size}[row] + 1
    for bad in BAD:

        def damage(block: int, tensors: Tensors, bad: float = bad) -> None:
            if block == 1:
                bias = np.zeros((heads + 2 * groups) * size, dtype=np.float32)
                bias[at] = bad
                tensors["attn.qkv.bias"] = bias

        blocks = blocks_of(gpt, "float32", cache_type, force=force, changed=damage)
        rows = run(blocks, gpt, [prompt(40, 3)], seed=1)[0]
        assert not np.isfinite(rows).all(axis=1).any(), bad


@pytest.mark.parametrize("force", instruction_sets())
def test_a_key_beyond_the_caches_type_does_not_vanish(force: str) -> None:
    """70,000 is infinity in half precision. Later rows have finite scores, too, beside which minus infinity has no weight."""
    gpt = model_of("tiny-llama-1.1b")
    heads = gpt.config.n_head * gpt.config.head_size

    def damage(block: int, tensors: Tensors) -> None:
        qkv = np.random.default_rng(2).standard_normal((heads + 48, 48)).astype(np.float32)
        qkv[heads + 1] = 0
        qkv[heads + 1, 0] = 1e5  # a number of the first row's key alone
        qkv[1] = -1
        tensors["attn.qkv.weight"] = pack("float32", qkv)

    rows = np.eye(5, 48, dtype=np.float32)
    for cache_type, is_finite in (("float32", True), ("fp16", False)):
        found = blocks_of(gpt, "float32", cache_type, force=force, changed=damage).half(0, 0, rows, [(0, 0, 5)])
        assert (np.isfinite(found[1:]).all(axis=1) == is_finite).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("cache_type", CACHES)
@pytest.mark.parametrize("force", instruction_sets())
def test_a_score_beyond_float32_does_not_vanish(force: str, cache_type: str, softcap: float | None, sign: int) -> None:
    """The query and the key are finite. With int8 the score is too large only with the key's scale."""
    query, key = (3e36, 200.0) if cache_type == "fp16" else (1e20, 1e20)
    gpt = random_gpt(config_of("tiny-llama-1.1b", attention_logit_softcapping=softcap), 1)
    size, heads = gpt.config.head_size, gpt.config.n_head * gpt.config.head_size

    def damage(block: int, tensors: Tensors) -> None:
        qkv = np.zeros((heads + 2 * gpt.config.n_query_groups * size, 48), dtype=np.float32)
        qkv[0, 1], qkv[heads, 0] = query, sign * key
        tensors["attn.qkv.weight"] = pack("float32", qkv)

    blocks = blocks_of(gpt, "float32", cache_type, force=force, changed=damage)
    found = blocks.half(0, 0, np.eye(2, 48, dtype=np.float32), [(0, 0, 2)])
    assert np.isfinite(found[0]).all() and not np.isfinite(found[1]).any()


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("force", instruction_sets())
def test_a_router_with_such_a_score_gives_nothing_finite(force: str, bad: float) -> None:
    gpt = model_of("Mixtral-8x7B-v0.1")

    def damage(block: int, tensors: Tensors) -> None:
        router = tensors["mlp.gate.weight"]
        assert isinstance(router, Matrix)
        if block == 1:
            data = router.data.copy()
            data.view(np.float32)[5 * 16 + 2] = bad  # of input 5, for expert 2
            tensors["mlp.gate.weight"] = replace(router, data=data)

    rows = run(blocks_of(gpt, force=force, changed=damage), gpt, [prompt(40, 3)], seed=1)[0]
    assert not np.isfinite(rows).all(axis=1).any()


@pytest.mark.parametrize("form", LAYOUTS)
@pytest.mark.parametrize("force", instruction_sets())
@pytest.mark.parametrize("name", ["attn.qkv", "attn.proj", "mlp.fc_1", "mlp.proj"])
def test_a_damaged_weight_of_a_packed_file_reaches_the_result(name: str, force: str, form: str) -> None:
    """What packing would refuse: a file may have been made elsewhere, or be damaged."""
    gpt = model_of("tiny-llama-1.1b")

    def damage(block: int, tensors: Tensors) -> None:
        weight = tensors[f"{name}.weight"]
        assert isinstance(weight, Matrix)
        if block == 1:
            data = weight.data.copy()
            nan = 0x7FC00000 if form == "float32" else 0x7FC07FC0 if form == "bf16" else 0x7E007E00
            data.view(np.uint32)[0] = (
                0xFFFFFFFF if form == "mxfp4" else nan
            )  # the first weight; where it has some, scales
            tensors[f"{name}.weight"] = replace(weight, data=data)

    rows = run(blocks_of(gpt, form, force=force, changed=damage), gpt, [prompt(40, 3)], seed=1)[0]
    assert not np.isfinite(rows).all(axis=1).any()
