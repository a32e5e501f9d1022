"""Two and three rows of a large plain layer are computed as four, where that is faster."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from families import config_of
from mdi.model import few_rows
from mdi.model.few_rows import PaddedLinear, pad_few_rows, rows_to_pad
from mdi.model.stage import StarterStage
from tiny_models import random_gpt

BOTH = frozenset({2, 3})


def clock(seconds: dict[int, float]) -> Callable[[Callable[[], object]], float]:
    """Times by the number of rows that a call gives back."""

    def measure(call: Callable[[], object]) -> float:
        result = call()
        assert isinstance(result, torch.Tensor)
        return seconds[result.size(0)]

    return measure


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({2: 5.0, 3: 7.6, 4: 4.7}, {3}),  # 2048 to 5632, AMD EPYC
        ({2: 1.5, 3: 1.5, 4: 3.1}, set()),  # the same, Intel Xeon
        ({2: 5.7, 3: 9.1, 4: 4.0}, {2, 3}),
        ({2: 1.0, 3: 1.05, 4: 1.0}, set()),  # noise
    ],
)
def test_rows_are_padded_only_where_that_is_faster(seconds: dict[int, float], expected: set[int]) -> None:
    assert rows_to_pad(nn.Linear(8, 4), clock(seconds)) == expected


@pytest.mark.parametrize("bias", [True, False])
def test_few_rows_give_what_they_give_among_four(bias: bool) -> None:
    linear = nn.Linear(1024, 1024, bias=bias).requires_grad_(False)
    padded = PaddedLinear.of(linear, BOTH)
    x = torch.randn(4, 1024)
    whole = F.linear(x, linear.weight, linear.bias)
    for n in (2, 3):
        assert torch.equal(padded(x[:n]), whole[:n])
        assert torch.equal(padded(x[None, :n]), whole[None, :n]), "litgpt's blocks have a batch dimension"
    for n in (1, 4):
        assert torch.equal(padded(x[:n]), linear(x[:n]))
    assert padded(x[:0]).shape == (0, 1024)
    assert dict(padded.named_parameters()).keys() == dict(linear.named_parameters()).keys()


def test_a_stage_pads_its_large_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    gpt = random_gpt(config_of("Llama-3.1-8B"), seed=3)
    monkeypatch.setattr(few_rows, "LARGE", gpt.lm_head.weight.numel())
    monkeypatch.setattr(few_rows, "rows_to_pad", lambda linear: BOTH)
    stage = StarterStage(gpt.config, gpt.config.n_layer)
    tensors = gpt.state_dict()

    def of(part: str) -> dict[str, torch.Tensor]:
        prefix = {"embedding": "transformer.wte.", "head": ("lm_head.", "transformer.ln_f.")}.get(part)
        return {n: t for n, t in tensors.items() if n.startswith(prefix or f"transformer.h.{part[6:]}.")}

    blocks = [f"block.{i}" for i in range(gpt.config.n_layer)]
    stage.load(["embedding", *blocks, "head"], of, torch.device("cpu"), torch.float32)
    assert isinstance(stage.lm_head, PaddedLinear)
    small = [m for m in stage.modules() if isinstance(m, nn.Linear) and m.weight.numel() < few_rows.LARGE]
    assert small and not any(isinstance(m, PaddedLinear) for m in small)
    x = torch.randn(3, gpt.config.n_embd)
    torch.testing.assert_close(stage.head(x), gpt.lm_head(gpt.transformer.ln_f(x)))


def test_what_is_no_large_plain_layer_stays() -> None:
    half = nn.Sequential(nn.Linear(1024, 1024, dtype=torch.bfloat16), nn.Linear(16, 16))
    pad_few_rows(half)
    assert all(type(module) is nn.Linear for module in half)
