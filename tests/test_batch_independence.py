"""Sequences that attend together: the same numbers as alone, whoever stands beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from litgpt.config import Config

from families import config_of, random_gpt
from mdi.kernels.layout import Matrix, pack
from mdi.kernels.weight_formats import is_packable
from mdi.model.plain import ModelConfig, spec_of
from mdi.stages.torch_block import Latents
from mdi.stages.torch_stage import Stage

CPU = torch.device("cpu")
# The MLP's width is a multiple of 32, for torch's silu computes what is left over in another way, wherever it is.
SIZES: dict[str, Any] = dict(
    n_layer=2, n_head=4, n_query_groups=2, n_embd=32, head_size=8, intermediate_size=64, block_size=400, vocab_size=50,
    rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP",
)  # fmt: skip
CONFIG = Config(**SIZES)


def stage_of(config: Config = CONFIG, form: str | None = None, kv_dtype: torch.dtype = torch.float32) -> Stage:
    torch.manual_seed(1)
    stage = Stage(spec_of(ModelConfig.from_litgpt(config)), 0, config.n_layer)
    tensors = {name: torch.randn(t.shape) * 0.3 for name, t in stage.state_dict().items()}
    parts = [f"block.{i}" for i in range(config.n_layer)]

    def of_part(part: str) -> dict[str, torch.Tensor | Matrix | np.ndarray]:
        own = {n: t for n, t in tensors.items() if n.startswith(f"transformer.h.{part[6:]}.")}
        return {n: pack(form, t.numpy()) if form and t.dim() == 2 else t for n, t in own.items()}

    stage.load(parts, of_part, CPU, torch.float32)
    stage.prepare(config.block_size, CPU, kv_dtype)
    return stage


def rows_of(seq_id: int, n: int) -> torch.Tensor:
    return torch.randn(n, CONFIG.n_embd, generator=torch.Generator().manual_seed(seq_id))


def alone(stage: Stage, seq_id: int, prompt: int, n: int) -> torch.Tensor:
    """The rows of a sequence that nobody accompanies: its prompt, then one after the other."""
    stage.caches.clear()
    rows = rows_of(seq_id, prompt + n)
    found = [stage(rows[:prompt], [(seq_id, 0, prompt)])]
    found += [stage(rows[i : i + 1], [(seq_id, i, 1)]) for i in range(prompt, prompt + n)]
    stage.caches.clear()
    return torch.cat(found)


@pytest.mark.parametrize("form", ["fp16", "int8", "int4"])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_the_others_of_a_batch_change_no_bit(form: str, kv_dtype: torch.dtype) -> None:
    stage = stage_of(form=form, kv_dtype=kv_dtype)
    prompts = {
        1: 3,
        2: 60,
        3: 63,
        4: 120,
        5: 250,
        6: 300,
    }  # several numbers of pages, some outgrown on the way, some too large
    n = 12
    expected = {s: alone(stage, s, prompt, n) for s, prompt in prompts.items()}
    own = {s: rows_of(s, prompt + n) for s, prompt in prompts.items()}
    for s, prompt in prompts.items():
        stage(own[s][:prompt], [(s, 0, prompt)])
    order = torch.Generator().manual_seed(7)
    for step in range(n):
        # Members come and go, and stand in another order each time; those that pause catch up alone.
        members = [s for s in prompts if torch.rand(1, generator=order) < 0.7]
        members = [members[i] for i in torch.randperm(len(members), generator=order).tolist()]
        for batch in (members, *([s] for s in prompts if s not in members)):
            if not batch:
                continue
            at = [prompts[s] + step for s in batch]
            rows = torch.stack([own[s][i] for s, i in zip(batch, at, strict=True)])
            found = stage(rows, [(s, i, 1) for s, i in zip(batch, at, strict=True)])
            for s, i, row in zip(batch, at, found, strict=True):
                assert torch.equal(row, expected[s][i]), f"sequence {s} at position {i} beside {batch}"


def test_a_prompt_in_the_frame_stands_beside_the_group() -> None:
    stage = stage_of(form="int8")
    expected = {s: alone(stage, s, 20, 1) for s in (1, 2)}
    new = alone(stage, 3, 33, 0)
    own = {s: rows_of(s, 21) for s in (1, 2)}
    for s in (1, 2):
        stage(own[s][:20], [(s, 0, 20)])
    rows = torch.cat((own[1][20:], rows_of(3, 33), own[2][20:]))
    found = stage(rows, [(1, 20, 1), (3, 0, 33), (2, 20, 1)])
    assert torch.equal(found[0], expected[1][20])
    assert torch.equal(found[-1], expected[2][20])
    assert torch.equal(found[1:-1], new)


def test_a_window_shorter_than_the_pages_is_kept_to() -> None:
    windowed = Config(**SIZES, sliding_window_size=70, sliding_window_indices=[1, 0])
    stage = stage_of(windowed)
    found = alone(stage, 1, 60, 100)
    whole = stage(rows_of(1, 160), [(1, 0, 160)])
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(stage_of(CONFIG)(rows_of(1, 160), [(1, 0, 160)])[-1], whole[-1], atol=1e-3)


def test_going_back_forgets_what_followed() -> None:
    stage = stage_of()
    rows = rows_of(1, 30)
    expected = alone(stage, 1, 10, 1)[10]
    stage(rows[:10], [(1, 0, 10)])
    for i in range(10, 20):
        stage(rows_of(9, 1), [(1, i, 1)])
    assert torch.equal(stage(rows[10:11], [(1, 10, 1)])[0], expected)


def test_what_a_new_page_never_held_is_a_number() -> None:
    """A sequence that left what is no number in its pages spoils nobody who gets them."""
    stage = stage_of()
    expected = alone(stage, 1, 40, 3)
    bad = torch.full((150, CONFIG.n_embd), float("nan"))
    stage(bad, [(2, 0, 150)])
    stage.caches.free(2)
    assert torch.equal(alone(stage, 1, 40, 3), expected)
    assert expected.isfinite().all()


def test_routers_and_latent_products_of_packed_models_do_not_see_how_many_rows_there_are() -> None:
    gpt = random_gpt(config_of("deepseek-v3-shape"), seed=1)
    stage = Stage(spec_of(ModelConfig.from_litgpt(gpt.config)), 1, 2)
    own = {n: t for n, t in gpt.state_dict().items() if n.startswith("transformer.h.1.")}
    packed = {n: pack("int8", t.numpy()) if is_packable(n, t.shape) else t for n, t in own.items()}
    stage.load(["block.1"], lambda part: packed, CPU, torch.float32)
    attn, gate = stage.blocks[0].attn, stage.blocks[0].mlp.gate
    assert isinstance(attn, Latents) and attn.is_tiled and gate.is_tiled
    x = torch.randn(70, gpt.config.n_embd, generator=torch.Generator().manual_seed(1))
    a, b = torch.randn(70, 4, 12).transpose(0, 1), torch.randn(4, 12, 16)
    whole, product = gate(x), attn.multiply(a, b)
    torch.testing.assert_close(product, a @ b)
    for n in (1, 2, 3, 7, 8, 9, 64):
        assert all(torch.equal(p, w[:n]) for p, w in zip(gate(x[:n]), whole, strict=True))
        assert torch.equal(attn.multiply(a[:, :n], b), product[:, :n])
