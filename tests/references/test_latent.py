"""Models with latent attention, as they are published, give transformers' logits at every position, over one node and three."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mdi.checkpoint.convert import convert
from mdi.checkpoint.export import export_hf
from mdi.checkpoint.source import open_source
from mdi.errors import CheckpointError
from mdi.model.plain import ModelConfig, spec_of
from mdi.model.spec import LatentAttention
from mdi.model.tensors import block_tensors
from mdi.spec.cluster import standalone
from references.test_delta_nets import logits_of, stages_of
from references.test_exported import PROGRAM
from references.test_references import generated
from references.write_latent import CASES, version
from secondaries import cluster_of, secondaries
from tiny_checkpoint import tokenizer

FOLDER = Path(__file__).parents[2] / ".venv-references" / "latent"
TOLERANCE = 1e-4  # transformers makes keys and values of all heads, whose sums are in another order


def _is_written() -> bool:
    written = FOLDER / "version.txt"
    return written.is_file() and written.read_text(encoding="utf-8") == version()


pytestmark = pytest.mark.skipif(not _is_written(), reason="no models of transformers: make references")


def folder_of(name: str, tmp_path: Path) -> tuple[Path, list[int], np.ndarray]:
    """A copy of the model's folder with a tokenizer, the ids of the text, and transformers' logits (ids, vocabulary)."""
    folder = tmp_path / "hf" / name
    shutil.copytree(FOLDER / name, folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder, json.loads((folder / "ids.json").read_text(encoding="utf-8")), np.load(folder / "logits.npy")


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder, ids, expected = folder_of(name, tmp_path)
    source = open_source(folder)
    n_layer = source.config.n_layer
    found = logits_of(stages_of(source, [0, n_layer], len(ids)), ids)
    assert np.abs(found - expected).max() < TOLERANCE and np.ptp(expected) > 5
    assert np.array_equal(logits_of(stages_of(source, [0, 1, 2, n_layer], len(ids)), ids), found)
    assert np.abs(logits_of(stages_of(source, [0, n_layer], len(ids)), ids, (1,)) - expected).max() < TOLERANCE
    (made := tmp_path / "made").mkdir()
    convert(folder, target=made, progress=False)
    again = open_source(made)
    assert again.config == source.config
    assert np.array_equal(logits_of(stages_of(again, [0, n_layer], len(ids)), ids), found)


@pytest.mark.parametrize("name", ["glm4-moe-lite", "deepseek-v3", "kimi-k25"])
def test_a_ring_of_three_continues_a_text_as_one_node_and_as_transformers_begins(name: str, tmp_path: Path) -> None:
    folder, ids, expected = folder_of(name, tmp_path)
    alone = generated(standalone(), folder, ids[:80], 6)
    best = np.sort(expected[79])[-2:]
    assert alone[0][0] == expected[79].argmax() and best[1] - best[0] > 2 * TOLERANCE
    with secondaries(2, tmp_path) as nodes:
        assert generated(cluster_of(nodes), folder, ids[:80], 6) == alone


def test_a_position_takes_one_latent_row() -> None:
    config = open_source(FOLDER / "glm4-moe-lite").config
    (stage,) = stages_of(open_source(FOLDER / "glm4-moe-lite"), [0, config.n_layer], 40)
    assert [stage.caches.paged(i).shapes for i in range(config.n_layer)] == [[(1, 20 + 8)]] * config.n_layer


Change = Callable[[np.ndarray], np.ndarray]
Without = dict[str, object] | tuple[str, Change]


def _of_latent(**changes: object) -> Without:
    return {"latent_attention": changes}


# A feature -> settings of a model without it, or its tensors and what becomes of their numbers.
_ALL: dict[str, Without] = {
    "pairs beside each other": {"rope_interleave": False},
    "the base of the rotation": {"rope_base": 10**9},
    "what is rotated": (r"kv_a_proj_with_mqa\.weight", lambda a: np.concatenate([a[:20], 0 * a[20:]])),
    "the norm of latent rows": (r"kv_a_norm\.weight", np.ones_like),
    "which rows of a head are keys": (r"kv_b_proj\.weight", lambda a: np.roll(a, 1, axis=0)),
    "the router's correction": (r"e_score_correction_bias", np.zeros_like),
    "what is negative of the router's correction": (r"e_score_correction_bias", lambda a: a.clip(min=0)),
    "that weights are without the correction": (r"e_score_correction_bias", lambda a: a + 0.5 * np.sign(a)),
    "the factor of routed experts": {"routed_scaling_factor": 1.0},
    "the shared expert": (r"shared_experts\.proj\.weight", np.zeros_like),
    "the first block without experts": (r"h\.0\.mlp\.proj\.weight", np.zeros_like),
    "the number of experts of a row": {"n_expert_per_token": 2},
    "weights of norms": (r"norm_[12]\.weight", np.ones_like),
}
_COMPRESSED: dict[str, Without] = {"the norm of compressed queries": (r"q_a_norm\.weight", np.ones_like)}
_SCALED: dict[str, Without] = {
    "YaRN": {"rope_adjustments": None},
    "the factor of the softmax": {"rope_adjustments": {"mscale_all_dim": None, "attention_factor": 1.0}},
    "the factor of the rotation": {"rope_adjustments": {"attention_factor": 1.3}},
}
LEFT_OUT: dict[str, dict[str, Without]] = {
    "glm4-moe-lite": {
        **_ALL, **_COMPRESSED, "the epsilon of latent rows": _of_latent(norm_eps=1e-2), "sigmoids": {"sigmoid_router": False},
    },
    "deepseek-v3": {
        **_ALL, **_COMPRESSED, **_SCALED,
        "groups of experts": {"n_expert_groups": None, "sigmoid_router": True},
        "how many groups are used": {"n_topk_groups": 3},
        "how many scores a group has": {"n_topk_scores_per_group": 1},
    },
    "moonlight": {"the epsilon of latent rows": _of_latent(norm_eps=1e-2), "queries": (r"q_proj\.weight", np.zeros_like)},
    "kimi-k2": {
        **_SCALED, "a ramp of one step": {"rope_adjustments": {"beta_fast": 32}},
        "the epsilon of latent rows": _of_latent(norm_eps=1e-2),
    },
}  # fmt: skip


def _without(config: ModelConfig, changes: dict[str, object]) -> ModelConfig:
    made = {}
    for key, change in changes.items():
        before = getattr(config, key)
        made[key] = {**before, **change} if isinstance(change, dict) else change
        if isinstance(change, dict):
            made[key] = {name: value for name, value in made[key].items() if value is not None}
    return replace(config, **made)


@pytest.mark.parametrize(("name", "feature"), [(name, feature) for name in LEFT_OUT for feature in LEFT_OUT[name]])
def test_what_these_families_have_matters(name: str, feature: str, tmp_path: Path) -> None:
    folder, ids, expected = folder_of(name, tmp_path)
    source, without = open_source(folder), LEFT_OUT[name][feature]
    config, plain = source.config, source.tensors
    if isinstance(without, dict):
        config = _without(config, without)
        assert config != source.config

    def changed(part: str) -> dict[str, torch.Tensor]:
        found = plain(part)
        for key in found:
            if isinstance(without, tuple) and re.search(without[0], key):
                found[key] = torch.from_numpy(np.ascontiguousarray(without[1](found[key].numpy())))
        if config.sigmoid_router or config.n_expert_groups:
            return found
        return {key: one for key, one in found.items() if "e_score_correction_bias" not in key}

    source.tensors = changed  # type: ignore[method-assign]
    found = logits_of(stages_of(source, [0, config.n_layer], len(ids), config), ids)
    assert (np.abs(found - expected).max(axis=1) > 10 * TOLERANCE).mean() > 0.3


def test_experts_outside_the_groups_are_never_chosen(tmp_path: Path) -> None:
    """Not even where all corrected scores are negative."""
    folder, ids, _ = folder_of("deepseek-v3", tmp_path)
    source, found = open_source(folder), []
    plain = source.tensors

    def less(part: str, by: float) -> dict[str, torch.Tensor]:
        return {key: one - by if "e_score_correction_bias" in key else one for key, one in plain(part).items()}

    for by in (0.0, 3.0):
        source.tensors = lambda part, by=by: less(part, by)  # type: ignore[method-assign,misc]
        found.append(logits_of(stages_of(source, [0, source.config.n_layer], len(ids)), ids))
    assert np.abs(found[0] - found[1]).max() < TOLERANCE  # the same number less for all changes no choice


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"attention_bias": True}, "attention_bias"), ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"scoring_func": "softmax"}, "scoring_func"), ({"topk_method": "greedy"}, "topk_method"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"), ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"model_type": "deepseek_v32"}, "an indexer chooses"), ({"model_type": "glm_moe_dsa"}, "an indexer chooses"),
        ({"topk_group": 9, "n_group": 4}, "of 9 groups"), ({"kv_lora_rank": 0}, "latent_attention"),
        ({"qk_rope_head_dim": 7}, "latent_attention"), ({"rms_norm_eps": "1"}, "norm_eps"),
    ],
)  # fmt: skip
def test_what_nothing_here_computes_is_refused(settings: dict[str, object], reason: str, tmp_path: Path) -> None:
    folder, _, _ = folder_of("deepseek-v3", tmp_path)
    hf = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**hf, **settings}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=reason):
        open_source(folder)


def test_layers_of_glm_that_begin_with_experts_are_refused(tmp_path: Path) -> None:
    folder, _, _ = folder_of("glm4-moe-lite", tmp_path)
    hf = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kinds = ["sparse", "dense", "sparse", "sparse"]
    (folder / "config.json").write_text(json.dumps({**hf, "mlp_layer_types": kinds}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="mlp_layer_types"):
        open_source(folder)


def test_exported_models_have_the_same_logits_in_transformers(tmp_path: Path) -> None:
    outs = []
    for name in CASES:
        export_hf(open_source(folder_of(name, tmp_path)[0]), tmp_path, out := tmp_path / name)
        shutil.copy(FOLDER / name / "ids.json", out)
        outs.append(str(out))
    python = FOLDER.parent / "bin" / "python"
    subprocess.run(
        [str(python), "-c", PROGRAM, *outs], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, timeout=600
    )
    for name in CASES:
        expected = np.load(FOLDER / name / "logits.npy")
        assert np.abs(np.load(tmp_path / name / "found.npy") - expected).max() < TOLERANCE, name
