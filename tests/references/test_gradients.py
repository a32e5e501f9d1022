"""What fine-tuning learns from: gradients through the nodes' blocks are those of peft, in an environment of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mdi.checkpoint.source import open_source
from mdi.checkpoint.virtual_adapters import EMBEDDINGS
from mdi.model.plain import spec_of
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import standalone
from mdi.spec.options import StarterOptions
from mdi_training.examples import Example
from mdi_training.frozen_head import FrozenHead
from mdi_training.ring_training import TunedModel
from mdi_training.tuned_tensors import TuningKind, new_tensors
from references.test_logits import folder_of, pytestmark

__all__ = ["pytestmark"]
PROGRAM = """
import json, sys, warnings, numpy, peft, torch, transformers
warnings.filterwarnings("ignore")
for folder in sys.argv[1:]:
    attention = "sdpa" if "falcon" in folder else "eager"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder + "/model", dtype=torch.float32, attn_implementation=attention
    )
    adapted = peft.PeftModel.from_pretrained(model, folder + "/learned").eval()
    learned = {n: p.requires_grad_() for n, p in adapted.named_parameters() if "lora_" in n or "prompt_encoder" in n}
    ids = torch.tensor([json.load(open(folder + "/model/ids.json"))])
    weight = torch.from_numpy(numpy.load(folder + "/weight.npy"))
    logits = adapted(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, -len(weight):]
    (logits * weight).sum().backward()
    numpy.savez(folder + "/found.npz", **{name: p.grad.numpy() for name, p in learned.items()})
"""
LORA = TuningKind("lora", rank=3, alpha=5, targets=("query", "key", "value", "projection"))
ALL = TuningKind("lora", rank=3, alpha=5, targets=("query", "value", "mlp"))
PROMPT, PREFIX = TuningKind("prompt", length=5), TuningKind("prefix", length=5)
CASES: dict[str, tuple[str, TuningKind]] = {
    f"{name}-{kind.method}": (name, kind)
    for kind, names in (
        (ALL, ("bloom", "falcon-rw", "gpt2", "opt", "opt-norms-behind")),
        (LORA, ("glm4-moe", "minimax-m2", "gpt-oss", "yarn")),
        (PROMPT, ("glm4-moe", "minimax-m2", "gpt-oss")),
        (PREFIX, ("bloom", "gpt2", "opt", "glm4-moe", "minimax-m2")),
    )
    for name in names
}


def learned(name: str, kind: TuningKind, folder: Path) -> dict[str, np.ndarray]:
    """Gradients of all that is learned, by peft's names; what was learned so far, in the folder."""
    model, ids, _ = folder_of(name, folder)
    model.rename(folder / "model")
    source = open_source(folder / "model")
    tuned = new_tensors(kind, source.config, 1, lambda part: source)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in tuned.named.values():
            parameter.normal_(0, 0.3, generator=generator)
    tuned.write(folder / "learned", str(folder / "model"), None)
    head = FrozenHead(
        spec_of(source.config), {name: np.asarray(source.array(name)) for name in source.part_specs("head")}
    )
    options = StarterOptions(ckpt=folder / "model", prompt_style="none", device="cpu", dtype="float32")
    with Run(GivenNodes(standalone()), options, len(ids) + 8, n_texts=1) as run:
        one = TunedModel(run, tuned, head)
        logits = head(one([Example(tuple(ids), 0, (0,) * len(ids))], one.learned()))
        weight = torch.randn(logits.shape, generator=generator)
        (logits * weight).sum().backward()
    np.save(folder / "weight.npy", weight.numpy())
    found = {name: parameter.grad.numpy() for name, parameter in tuned.named.items() if parameter.grad is not None}
    if kind.method == "lora":
        return {name.replace(".weight", ".default.weight"): gradient for name, gradient in found.items()}
    whole = found[EMBEDDINGS] if kind is PROMPT else np.concatenate(list(found.values()), axis=1)
    return {"prompt_encoder.default.embedding.weight": whole}


@pytest.fixture(scope="module")
def gradients(
    tmp_path_factory: pytest.TempPathFactory, transformers: Callable[..., str]
) -> dict[str, tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Of each case: ours, and peft's."""
    folder = tmp_path_factory.mktemp("gradients")
    ours = {}
    for case, (name, kind) in CASES.items():
        (folder / case).mkdir()
        ours[case] = learned(name, kind, folder / case)
    transformers(PROGRAM, *(folder / case for case in CASES))
    return {case: (own, dict(np.load(folder / case / "found.npz"))) for case, own in ours.items()}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_peft(
    case: str, gradients: dict[str, tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]
) -> None:
    found, expected = gradients[case]
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        size = np.linalg.norm(gradient)
        assert size > 0 and np.linalg.norm(found[name] - gradient) < 1e-4 * size, name
