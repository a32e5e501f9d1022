"""Blocks shared out over several nodes against litgpt's own model: the same greedy tokens, for every family, uneven shares."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from litgpt.model import GPT

from families import CONTEXT, FAMILIES, greedy, model_of, prompt
from mdi.errors import UsageError
from mdi.kernels import library
from mdi.kernels.slices import Slice
from mdi.model.plain import ModelConfig, spec_of
from mdi.stages.kernel_stage import KernelStage, Resident
from mdi.tensor.shares import Share, Shares, share_out, why_not_shared_out
from tensor_groups import meshes, on_all, shard_weights, stages_of, sums

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")

KNOWN = [f for f in FAMILIES if why_not_shared_out(ModelConfig.from_litgpt(model_of(f).config)) is None]
PARTS = [(3, 2), (1, 3, 2), (2, 0, 1, 1), (1, 2, 1, 1, 1.5), (0, 1)]  # uneven; some nodes have nothing


def rows_of(stages: list[KernelStage], gpt: GPT, ids: list[int], start: int = 0, seq_id: int = 0) -> list[np.ndarray]:
    """What each node ends with, for the tokens of one text from a position on."""
    x = gpt.transformer.wte(torch.tensor(ids))
    rows = (x * gpt.config.n_embd**0.5 if gpt.config.scale_embeddings else x).numpy()
    found = on_all(len(stages), lambda rank: stages[rank](rows, [Slice(seq_id, start, len(ids))]))
    assert len({array.tobytes() for array in found}) == 1, "nodes that end with different rows"
    return found


def next_id(gpt: GPT, rows: np.ndarray) -> int:
    return int(gpt.lm_head(gpt.transformer.ln_f(torch.from_numpy(rows[-1:])))[0].argmax())


def generate(stages: list[KernelStage], gpt: GPT, ids: list[int], n_tokens: int, first: int) -> list[int]:
    """Greedy tokens; the prompt comes in two pieces, of `first` tokens and the rest."""
    rows_of(stages, gpt, ids[:first])
    found = [next_id(gpt, rows_of(stages, gpt, ids[first:], first)[0])]
    while len(found) < n_tokens:
        found.append(next_id(gpt, rows_of(stages, gpt, found[-1:], len(ids) + len(found) - 1)[0]))
    return found


@pytest.mark.parametrize("family", KNOWN)
def test_greedy_tokens_equal_the_whole_model(family: str) -> None:
    gpt, ids = model_of(family), prompt(45, 7)
    parts = PARTS[KNOWN.index(family) % 4]
    wanted = greedy(gpt, ids, 12)
    for uneven in (parts, PARTS[(KNOWN.index(family) + 2) % 5]):
        shares = share_out(ModelConfig.from_litgpt(gpt.config), uneven)
        with meshes(len(uneven)) as found:
            assert generate(stages_of(gpt, shares, sums(found)), gpt, ids, 12, 17) == wanted


def assert_logits_of_the_whole(gpt: GPT, shares: Shares) -> None:
    """Of every position, and not only which token is the best."""
    ids = prompt(30, 11)
    with meshes(shares.n_nodes) as found, torch.no_grad():
        rows = rows_of(stages_of(gpt, shares, sums(found)), gpt, ids)[0]
        logits = gpt.lm_head(gpt.transformer.ln_f(torch.from_numpy(rows)))
        if (cap := gpt.config.final_logit_softcapping) is not None:
            logits = torch.tanh(logits / cap) * cap
        torch.testing.assert_close(logits, gpt(torch.tensor([ids]))[0], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("family", KNOWN)
def test_logits_equal_those_of_the_whole_model(family: str) -> None:
    gpt = model_of(family)
    assert_logits_of_the_whole(gpt, share_out(ModelConfig.from_litgpt(gpt.config), (1, 3, 2)))


@pytest.mark.parametrize("family", ["pythia-14m", "phi-2"])  # these add biases behind both sums
@pytest.mark.parametrize(
    ("heads", "columns"),
    [((0, 0, 4, 6), (0, 30, 30, 64)), ((0, 3, 6, 6), (0, 0, 0, 64)), ((0, 0, 0, 6), (0, 0, 64, 64))],
)
def test_biases_are_added_once_by_a_node_that_has_something(
    family: str, heads: tuple[int, ...], columns: tuple[int, ...]
) -> None:
    gpt = model_of(family)
    assert gpt.config.bias
    assert_logits_of_the_whole(gpt, Shares(heads, columns))


@pytest.mark.parametrize("bounds", [(0, 1, 6), (0, 0, 4, 6), (0, 2, 3, 5, 5, 6)])
def test_any_heads_and_columns(bounds: tuple[int, ...]) -> None:
    """Heads and columns that are shared out in different proportions; groups of two nodes and more that nobody has whole."""
    gpt, ids = model_of("falcon-40b"), prompt(20, 3)  # six heads in two groups
    columns = tuple(64 * i * i // (len(bounds) - 1) ** 2 for i in range(len(bounds)))
    with meshes(len(bounds) - 1) as found:
        stages = stages_of(gpt, Shares(bounds, columns), sums(found))
        assert generate(stages, gpt, ids, 8, 9) == greedy(gpt, ids, 8)


@pytest.mark.parametrize("form", ["bf16", "fp16", "int8", "int4"])
@pytest.mark.parametrize("family", ["Llama-3.1-8B", "phi-2", "Qwen3-30B-A3B", "OLMo-2-1124-7B"])
def test_packed_shares_compute_what_the_whole_does(family: str, form: str) -> None:
    """Weights are the same numbers; bytes of activations have other neighbours in a group, and round otherwise."""
    gpt, ids = model_of(family), prompt(30, 5)
    config = ModelConfig.from_litgpt(gpt.config)
    one = Shares((0, config.n_head), (0, share_out(config, (1,)).columns[-1]))
    parts = [f"block.{i}" for i in range(config.n_layer)]
    weights = Resident(parts, lambda p: shard_weights(gpt, Share(one, 0, config), form, p))
    whole = KernelStage(spec_of(config), 0, config.n_layer, weights)
    whole.prepare(CONTEXT, 64 << 20)
    x = gpt.transformer.wte(torch.tensor(ids))
    wanted = whole((x * config.n_embd**0.5 if config.scale_embeddings else x).numpy(), [Slice(0, 0, len(ids))])
    with meshes(3) as found:
        rows = rows_of(stages_of(gpt, share_out(config, (3, 1, 2)), sums(found), form), gpt, ids)[0]
    error = np.linalg.norm(rows - wanted) / np.linalg.norm(wanted)
    assert error < (0.06 if form in ("int8", "int4") else 1e-4)


def test_rounded_sums_and_caches_stay_close() -> None:
    gpt, ids = model_of("tiny-llama-1.1b"), prompt(30, 5)
    shares = share_out(ModelConfig.from_litgpt(gpt.config), (1, 2))
    results = {}
    for reduce_dtype in ("float32", "fp16", "int8"):
        with meshes(2) as found:
            results[reduce_dtype] = rows_of(stages_of(gpt, shares, sums(found, "exchange", reduce_dtype)), gpt, ids)[0]
    norm = np.linalg.norm(results["float32"])
    assert 0 < np.linalg.norm(results["fp16"] - results["float32"]) / norm < 2e-3
    assert 0 < np.linalg.norm(results["int8"] - results["float32"]) / norm < 0.05


@pytest.mark.parametrize("family", ["Llama-3.1-8B", "falcon-40b"])  # two sums a block, and one
def test_finished_blocks_are_counted(family: str) -> None:
    gpt = model_of(family)
    with meshes(2) as found:
        stages = stages_of(gpt, share_out(ModelConfig.from_litgpt(gpt.config), (1, 1)), sums(found))
        for n_frames in (1, 2):
            rows_of(stages, gpt, [1, 2, 3], 3 * (n_frames - 1))
            assert {stage.n_finished for stage in stages} == {n_frames * gpt.config.n_layer}


def test_caches_hold_the_groups_that_a_node_reads() -> None:
    config = ModelConfig.from_litgpt(model_of("Llama-3.1-8B").config)  # six heads, two groups
    sizes = [Share(Shares((0, 2, 4, 6), (0, 21, 42, 64)), rank, config).of(0).groups for rank in range(3)]
    assert sizes == [(0, 1), (0, 2), (1, 2)]


def test_shares_are_in_proportion_to_what_nodes_can_do() -> None:
    config = ModelConfig.from_litgpt(model_of("Llama-3.1-8B").config)  # six heads, 64 columns, 97 tokens
    assert share_out(config, (1, 3, 2), True) == Shares((0, 1, 4, 6), (0, 11, 43, 64), (0, 16, 64, 97))
    assert share_out(config, (2, 0, 1, 0)).heads == (0, 4, 4, 6, 6)


def test_what_cannot_be_shared_out_is_told() -> None:
    config = ModelConfig.from_litgpt(model_of("deepseek-v3-shape").config)
    with pytest.raises(UsageError):
        share_out(config, (1, 1))
    with pytest.raises(UsageError):
        share_out(ModelConfig.from_litgpt(model_of("phi-2").config), (0, 0))
