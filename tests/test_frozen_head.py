"""The model's own head in fine-tuning: losses and gradients are those of torch, computed at once or from what was kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from families import config_of, random_gpt
from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.packing import FOLDED_FORMATS, Packing
from mdi.checkpoint.source import LitCheckpoint
from mdi.errors import CheckpointError
from mdi.model.plain import ModelConfig, spec_of
from mdi_training import frozen_head
from mdi_training.frozen_head import FrozenHead
from tiny_checkpoint import write_checkpoint

FAMILIES = [
    "Llama-3.1-8B",
    "Gemma-2-9b",
    "pythia-14m",
    "phi-2",
]  # gains; a cap and gains of 1 + w; shifts; a head with a bias
N, WIDTH = 11, 5


def head_of(family: str, monkeypatch: pytest.MonkeyPatch) -> tuple[FrozenHead, torch.nn.Module, torch.nn.Module]:
    """The head, and litgpt's norm and head, in float64."""
    monkeypatch.setattr(frozen_head, "CHUNK_ROWS", 4)
    monkeypatch.setattr(frozen_head, "KEPT_ROWS", 3)
    gpt = random_gpt(config_of(family, padded_vocab_size=96, vocab_size=96), 3)
    with torch.no_grad():
        for weight in [*gpt.lm_head.parameters(), *gpt.transformer.ln_f.parameters()]:
            weight.add_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    names = {"transformer.ln_f": gpt.transformer.ln_f, "lm_head": gpt.lm_head}
    weights = {
        f"{of}.{name}": t.detach().numpy() for of, module in names.items() for name, t in module.named_parameters()
    }
    head = FrozenHead(spec_of(ModelConfig.from_litgpt(gpt.config)), weights)
    head.weight = head.weight.double()
    head.bias = None if head.bias is None else head.bias.double()
    return head, gpt.transformer.ln_f.double(), gpt.lm_head.double()


def rows(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference(head: FrozenHead, norm: torch.nn.Module, linear: torch.nn.Module, y: torch.Tensor) -> torch.Tensor:
    logits = linear(norm(y).double())
    return logits if head.cap is None else head.cap * torch.tanh(logits / head.cap)


def alike(found: Any, expected: Any, most: float = 1e-5) -> None:
    assert float((found - expected).norm() / expected.norm()) < most


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_those_of_torch(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head, norm, linear = head_of(family, monkeypatch)
    y, targets = rows(N, head.weight.size(1), seed=2).requires_grad_(), torch.arange(N) % 7
    logits = reference(head, norm, linear, y)
    loss = functional.cross_entropy(logits, targets, reduction="sum")
    (expected,) = torch.autograd.grad(loss / 3, y)
    alike(head(y.detach()), logits.detach())
    found = head.loss(y, targets)
    alike(found.loss.detach(), loss.detach())
    alike(torch.autograd.grad(found.loss / 3, y)[0], expected)
    best = logits.argmax(dim=1)
    with torch.no_grad():
        assert head.loss(y, torch.cat([best[:5], best[5:] - 1])).n_right == 5


@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.startswith("Gemma-2")])
def test_from_logits_that_were_kept_they_are_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head, norm, linear = head_of(family, monkeypatch)
    n_embd = head.weight.size(1)
    x, targets = rows(N, n_embd, seed=2), torch.arange(N) % 7
    state, out = rows(N, WIDTH, seed=3).requires_grad_(), rows(n_embd, WIDTH, seed=4).requires_grad_()
    loss = functional.cross_entropy(reference(head, norm, linear, x + state @ out.T), targets, reduction="sum")
    expected = torch.autograd.grad(loss, [state, out])
    exact = reference(head, norm, linear, x).log_softmax(dim=1).detach()
    stored = torch.from_numpy(head.kept(x))
    alike(stored, exact, 1e-3)
    for kept, most in ((exact, 1e-5), (stored, 2e-3)):
        own = out.detach().clone().requires_grad_()
        projected = (head.weight @ own.detach()).requires_grad_()
        found = head.loss_of_kept(x, x + state @ own.T, kept, state, projected, targets)
        alike(found.loss.detach(), loss.detach(), most)
        (dstate,) = torch.autograd.grad(found.loss, state, retain_graph=True)
        alike(dstate, expected[0], most)
        found.loss.backward()
        assert projected.grad is not None and own.grad is not None
        alike(own.grad + head.weight.T @ projected.grad, expected[1], most)


@pytest.mark.parametrize("form", ["bf16", "int8", "int4", "mxfp4"])
@pytest.mark.parametrize("family", ["Llama-3.1-8B", "Gemma-2-9b", "pythia-14m"])
def test_classes_read_the_same_rows_in_every_format(family: str, form: str, tmp_path: Path) -> None:
    """Some have the norm's gains in the head."""
    source = LitCheckpoint(write_checkpoint(tmp_path, gpt=random_gpt(config_of(family), 3)))
    y = rows(N, source.config.n_embd, seed=2).float()
    expected = FrozenHead.of(source, Packing("float32", "float32"), has_classes=True).normed(y)
    assert torch.equal(FrozenHead.of(source, Packing("float32", form), has_classes=True).normed(y), expected)
    if form in FOLDED_FORMATS and family != "pythia-14m":
        packed = PackedSource(source, Packing("float32", form))
        with pytest.raises(CheckpointError, check=lambda e: e.code == "adapter"):
            FrozenHead.of(packed, packed.packing, has_classes=True)
        assert torch.isfinite(FrozenHead.of(packed, packed.packing, has_classes=False)(y)).all()
