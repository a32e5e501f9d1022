"""GGUF files give the logits that transformers computes with what it reads from them itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caches import own_cache
from gguf_files import write_gguf
from mdi.checkpoint.source import open_source
from references.test_logits import logits_of, pytestmark, same, stages_of
from tiny_models import tiny_state

__all__ = ["pytestmark"]
PROGRAM = """
import json, sys, numpy, torch, transformers
for folder in sys.argv[1:]:
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file="m.gguf", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading.values()), loading
    ids = json.load(open(folder + "/ids.json"))
    with torch.no_grad():
        numpy.save(folder + "/found.npy", model(torch.tensor([ids]), use_cache=False).logits[0].numpy())
"""
SIZES: dict[str, Any] = {"n_embd": 96, "head_size": 16, "intermediate_size": 128}
# Directory -> family, type of the matrices, and changes: transformers does not read scaled positions from such a file, and
# scales scores of Gemma by the root of 256.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama-3.1-8B", "F32", {"rope_adjustments": None}),
    "llama-mxfp4": ("Llama-3.1-8B", "MXFP4", {"rope_adjustments": None}),
    "qwen2": ("Qwen2.5-0.5B", "F32", {}),
    "gemma2": ("Gemma-2-9b", "F32", {"head_size": 256}),
    "gemma3": ("Gemma-3-1b-it", "F32", {"head_size": 256, "rope_adjustments": {"factor": 1.0}}),
}
N_IDS = 50


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory, transformers: Callable[..., str]) -> Path:
    """A folder for each file, with transformers' logits: all from one process, which takes long to begin."""
    folder = tmp_path_factory.mktemp("gguf")
    for name, (family, matrices, changes) in CASES.items():
        config, state = tiny_state(family, **{**SIZES, **changes})
        if family.startswith("Gemma"):
            state["lm_head.weight"] = state["transformer.wte.weight"].clone()
        write_gguf(folder / name / "m.gguf", family, config, state, matrices)
        ids = np.random.default_rng(1).integers(0, config.padded_vocab_size, N_IDS)
        (folder / name / "ids.json").write_text(json.dumps(ids.tolist()))
    transformers(PROGRAM, *(folder / name for name in CASES))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_gguf_file_has_the_same_logits_in_transformers(
    name: str, computed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MDI_CACHE_DIR", own_cache(tmp_path / "cache"))
    source = open_source(computed / name / "m.gguf")
    ids, expected = json.loads((computed / name / "ids.json").read_text()), np.load(computed / name / "found.npy")
    same(logits_of(stages_of(source, [0, source.config.n_layer], len(ids)), ids), expected)
