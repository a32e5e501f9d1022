"""Models that were exported give the same logits in transformers, which reads them in an environment of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mdi.checkpoint.export import export_hf
from mdi.checkpoint.source import open_source
from references.test_logits import LOGITS, TOLERANCE, folder_of, pytestmark

__all__ = ["pytestmark"]
PROGRAM = """
import json, sys, numpy, torch, transformers
for out in sys.argv[1:]:
    attention = "sdpa" if "falcon" in out else "eager"  # Falcon's eager form adds what ALiBi gives twice
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, attn_implementation=attention, output_loading_info=True
    )
    behind = f"model.layers.{model.config.num_hidden_layers}."  # what predicts further tokens, which transformers leaves out
    loading["unexpected_keys"] = [key for key in loading["unexpected_keys"] if not key.startswith(behind)]
    assert not any(loading.values()), loading
    ids = json.load(open(out + "/ids.json"))
    with torch.no_grad():
        numpy.save(out + "/found.npy", model(torch.tensor([ids]), use_cache=False).logits[0].numpy())
"""
EXPORTED = (
    "glm4-moe", "glm4-moe-air", "glm4v-moe", "minimax-m2", "minimax-m2-fp8", "gpt-oss", "gpt-oss-mxfp4", "bloom",
    "bloom-eight-heads", "falcon-rw", "falcon-alibi-one-group", "falcon-biases", "gpt2", "gpt2-relu", "opt",
    "opt-norms-behind", "opt-gelu", "ernie4_5", "ernie4_5-biases", "smollm3", "smollm3-apart", "gemma4-dense",
    "gemma4-experts", "gemma4-shared", "gemma4-shared-one-width",
)  # fmt: skip


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory, transformers: Callable[..., str]) -> Path:
    """A folder for each exported model, with transformers' logits: all from one process, which takes long to begin."""
    folder = tmp_path_factory.mktemp("exported")
    for name in EXPORTED:
        export_hf(open_source(folder_of(name, folder)[0]), folder, folder / name)
        shutil.copy(LOGITS / name / "ids.json", folder / name)
    transformers(PROGRAM, *(folder / name for name in EXPORTED))
    return folder


@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_model_has_the_same_logits_in_transformers(name: str, computed: Path) -> None:
    expected = np.load(LOGITS / name / "logits.npy")
    assert np.abs(np.load(computed / name / "found.npy") - expected).max() < TOLERANCE
