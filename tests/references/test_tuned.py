"""What was learned over a ring loads in peft, which gives the same logits; in an environment of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mdi.checkpoint.adapters import AdapterName, AdapterSource
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.source import open_source
from mdi.checkpoint.virtual_adapters import open_adapter
from mdi.checkpoint.weights import WeightSource
from mdi.kernels.slices import Slice, with_adapter
from mdi.model.plain import spec_of
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import standalone
from mdi.spec.options import StarterOptions
from mdi.stages.kernel_stage import KernelStage, Resident
from mdi_training.examples import Example
from mdi_training.frozen_head import FrozenHead
from mdi_training.ring_training import TunedModel
from mdi_training.tuned_tensors import SCORE, TuningKind, new_tensors, read_tensors
from references.test_adapter_logits import ADAPTERS, pytestmark
from tiny_checkpoint import tokenizer

__all__ = ["pytestmark"]
# peft 0.21 looks for a parameter that transformers takes since 5.24 without naming it.
PROGRAM = """
import inspect, json, os, sys, numpy, peft, torch, transformers

def name_caches(forward):
    *others, more = inspect.signature(forward).parameters.values()
    named = inspect.Parameter("past_key_values", inspect.Parameter.KEYWORD_ONLY, default=None)
    forward.__signature__ = inspect.Signature([*others, named, more])

name_caches(transformers.LlamaForCausalLM.forward)
name_caches(transformers.LlamaForSequenceClassification.forward)
model_folder, *folders = sys.argv[1:]
ids = torch.tensor([json.load(open(model_folder + "/ids.json"))])
for folder in folders:
    has_classes = folder.endswith("classes")
    kind = transformers.AutoModelForSequenceClassification if has_classes else transformers.AutoModelForCausalLM
    more = {"num_labels": 3, "pad_token_id": 319} if has_classes else {}
    model = kind.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager", **more).eval()
    adapted = peft.PeftModel.from_pretrained(model, folder).eval()
    with torch.no_grad():
        logits = adapted(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
    numpy.save(folder + "/found.npy", logits.numpy())
"""
KINDS = {
    "lora": TuningKind("lora", rank=5, alpha=7),
    "lora-all": TuningKind("lora", rank=2, alpha=9, targets=("query", "key", "value", "projection", "mlp")),
    "prompt": TuningKind("prompt", length=6),
    "prefix": TuningKind("prefix", length=6),
    "lora-classes": TuningKind("lora", labels=("a", "b", "c")),
    "prompt-classes": TuningKind("prompt", length=4, labels=("a", "b", "c")),
    "prefix-classes": TuningKind("prefix", length=4, labels=("a", "b", "c")),
}


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory, transformers: Callable[..., str]) -> Path:
    """A folder for each kind, drawn by chance and written, with peft's logits."""
    folder = tmp_path_factory.mktemp("tuned")
    shutil.copytree(ADAPTERS / "model", folder / "model")
    shutil.copy(ADAPTERS / "ids.json", folder / "model")
    tokenizer().save(str(folder / "model" / "tokenizer.json"))
    source, generator = open_source(folder / "model"), torch.Generator().manual_seed(5)
    for name, kind in KINDS.items():
        tuned = new_tensors(kind, source.config, 1, lambda part: source)
        with torch.no_grad():
            for parameter in tuned.named.values():
                parameter.normal_(0, 0.3, generator=generator)
        tuned.write(folder / name, str(folder / "model"), None)
    transformers(PROGRAM, *(folder / name for name in ("model", *KINDS)))
    return folder


def test_logits_are_those_of_peft(computed: Path) -> None:
    ids = json.loads((computed / "model" / "ids.json").read_text(encoding="utf-8"))
    options = StarterOptions(ckpt=computed / "model", prompt_style="none", device="cpu", dtype="float32")
    model = computed / "model"
    source = open_source(model)
    head = FrozenHead(
        spec_of(source.config), {name: np.asarray(source.array(name)) for name in source.part_specs("head")}
    )
    alone = Example(tuple(ids), 0, (0,) * len(ids))
    with Run(GivenNodes(standalone()), options, len(ids) + 8, n_texts=1) as run, torch.no_grad():
        plain = head(
            TunedModel(run, new_tensors(KINDS["lora"], source.config, 1, lambda part: source), head)([alone], None)
        )
        for name, kind in KINDS.items():
            tuned = read_tensors(computed / name, source.config, lambda part: source)
            assert tuned.kind == kind
            one = TunedModel(run, tuned, head)
            rows = one([alone], one.learned())
            found = one.classes(rows[-1:], tuned.named[SCORE])[0] if kind.labels else head(rows)
            expected = torch.from_numpy(np.load(computed / name / "found.npy"))
            assert kind.labels or float((found - plain).abs().max()) > 0.5, f"{name} changes nothing"
            expected = expected if kind.labels else expected[-len(found) :]  # peft gives rows of the prompt, too
            assert float((found - expected).abs().max()) < 2e-4 * max(1, float(expected.abs().max())), name
            if not kind.labels:
                kernels = torch.from_numpy(logits_in_kernels(source, computed / name, ids))
                assert float((kernels - expected).abs().max()) < 2e-4 * max(1, float(expected.abs().max())), name


def logits_in_kernels(source: WeightSource, folder: Path, ids: list[int]) -> np.ndarray:
    """Of the rows of a text, as `--adapter` computes them."""
    adapter = open_adapter(AdapterName("x", folder), 1, source.config, lambda: None)
    of, n_blocks = AdapterSource([adapter], lambda part: source), source.config.n_layer
    weights = Resident(source.part_names(), lambda part: source.weights(part, Packing("float32", "float32")))
    stage = KernelStage(
        spec_of(source.config), 0, n_blocks, weights, adapters={p: of.weights(p) for p in of.part_names()}
    )
    stage.prepare(160)
    whole = np.array(ids[:1] * adapter.n_virtual + ids)
    part = [Slice(with_adapter(1, 1), 0, len(whole))]
    logits: np.ndarray = stage.head(stage(stage.embed(whole, part), part)[adapter.n_virtual :])
    return logits
