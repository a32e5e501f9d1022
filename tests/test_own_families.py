"""Families that litgpt lacks, such as BLOOM, OPT and GLM: the kernels against numpy, and all ways in which a stage is held."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import yaml
from forced import forced, instruction_sets
from safetensors.numpy import save_file

from guessing import Bold, of_two_tokens
from mdi.cancel import Cancel
from mdi.checkpoint.adapters import AdapterName, AdapterSource, adapted_rows
from mdi.checkpoint.chunks import ChunkFile, write_chunks
from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.export import export_hf
from mdi.checkpoint.ggufsource import GgufSource
from mdi.checkpoint.hfconfig import derive_config
from mdi.checkpoint.hffolder import HfFolder
from mdi.checkpoint.packing import Packing, PartWeights
from mdi.checkpoint.parts import stage_parts
from mdi.checkpoint.shapes import interleaved_rows, model_shapes
from mdi.checkpoint.source import LitCheckpoint
from mdi.checkpoint.virtual_adapters import open_adapter
from mdi.checkpoint.weights import WeightSource
from mdi.cli import launch
from mdi.control.client import ControlClient
from mdi.control.messages import ProfileRequest
from mdi.engine.rows import ArrayRows
from mdi.engine.scheduler import Scheduler
from mdi.engine.sequence import SamplingParams
from mdi.engine.starter import StarterEngine
from mdi.errors import CheckpointError
from mdi.families.registry import written
from mdi.host.computing import choose_computing
from mdi.kernels import library
from mdi.kernels.positions import alibi_slopes, rope_tables, score_bias
from mdi.kernels.slices import Slice, with_adapter
from mdi.model.plain import ModelConfig, spec_of
from mdi.model.spec import Alibi, Attention, Rotary
from mdi.net.ring import LoopbackRing
from mdi.spec.options import Requested
from mdi.spec.window import WindowOptions
from mdi.stages.kernel_stage import KernelStage, Resident
from mdi.stages.window import open_window
from mdi.stages.window_budget import RunMemory
from mdi.tensor.shard_blocks import GroupSum
from mdi.tensor.shard_source import ShardSource
from mdi.tensor.shares import Share, share_out
from mdi_training.new_model import load_shape
from references.test_references import generated
from secondaries import cluster_of, entry_of, secondaries
from tensor_groups import meshes, on_all, sums
from tiny_checkpoint import tokenizer

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")

LENGTH = 70  # beyond two pages of caches
FRAMES = (40, 1, 1, 28)
PLAIN = Packing("float32", "float32")
_SIZES = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 96}
_SMALL: dict[str, Any] = {
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": LENGTH,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "bloom": {"model_type": "bloom"},
    "falcon-rw": {
        "model_type": "falcon", "alibi": True, "bias": True, "multi_query": False, "parallel_attn": False,
        "layer_norm_epsilon": 1e-5,
    },
    "gpt2": {"model_type": "gpt2", "n_positions": LENGTH},
    "opt": {"model_type": "opt", "ffn_dim": 80, "max_position_embeddings": LENGTH},
    "opt-behind": {
        "model_type": "opt", "ffn_dim": 80, "max_position_embeddings": LENGTH, "do_layer_norm_before": False,
    },
    "glm": {  # as 4.5 and 4.6
        **_SMALL, "model_type": "glm4_moe", "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5,
        "intermediate_size": 80, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_routed_experts": 7,
        "num_experts_per_tok": 3, "n_shared_experts": 2, "routed_scaling_factor": 2.5,
    },
    "minimax": {
        **_SMALL, "model_type": "minimax_m2", "rotary_dim": 8, "intermediate_size": 32, "num_local_experts": 7,
        "num_experts_per_tok": 3,
    },
    "gpt-oss": {
        "model_type": "gpt_oss", "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 40, "num_local_experts": 11,
        "num_experts_per_tok": 2, "sliding_window": 20, "swiglu_limit": 1.5, "rms_norm_eps": 1e-5, "rope_theta": 150000,
        "max_position_embeddings": LENGTH,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False,
        },
    },
}  # fmt: skip
# Of which only the GGUF file is tried here.
IN_GGUF = {"ernie": {**_SMALL, "model_type": "ernie4_5", "intermediate_size": 80}}
Arrays = dict[str, np.ndarray]


@pytest.fixture(params=FAMILIES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> LitCheckpoint:
    return made(request.param, tmp_path)


def made(family: str, tmp_path: Path, **sizes: Any) -> LitCheckpoint:
    config = derive_config({**_SIZES, **{**FAMILIES, **IN_GGUF}[family], **sizes}, family, Path("config.json"))
    return random_checkpoint(config, tmp_path / family)


def random_checkpoint(config: ModelConfig, folder: Path) -> LitCheckpoint:
    """A new folder with random weights."""
    generator = np.random.default_rng(5)
    state = {}
    for name, shape in model_shapes(config, "").items():
        state[name] = 0.3 * generator.standard_normal(shape, dtype=np.float32)
        is_factor = ("norm" in name or "ln_f" in name) and name.endswith("weight")
        if len(shape) == 1 and (is_factor or name.endswith(("scalar", "scales"))):
            state[name] += 1
    folder.mkdir()
    save_file(state, folder / "lit_model.safetensors")
    (folder / "model_config.yaml").write_text(yaml.safe_dump(config.plain()), encoding="utf-8")
    return LitCheckpoint(folder)


@pytest.mark.parametrize("form", [None, "mxfp4"])
@pytest.mark.parametrize("cache_type", ["float32", "int8"])
def test_texts_are_the_same_with_guesses_under_way(source: LitCheckpoint, form: str | None, cache_type: str) -> None:
    """Greedy and sampled texts, one after the other and at the same time."""
    stage = stage_of(source, cache_type, form and Packing(form, "int8"))
    ids = [int(token) for token in ids_of(source)]
    asked = [
        (ids[:7], of_two_tokens(SamplingParams(60, temperature=0), 5, 6)),
        (ids[:3] * 4, of_two_tokens(SamplingParams(50, temperature=0.3, seed=2, n_logprobs=2), 7, 8)),
        (ids[:40], SamplingParams(28, temperature=0.9, top_k=9, seed=3, presence_penalty=0.4)),
    ]
    results = []
    for speculation in (None, Bold()):
        for n_frames in (1, 5):
            engine = StarterEngine(stage, Scheduler(n_frames), LENGTH, ArrayRows())
            engine.speculation = speculation
            requests = [engine.submit(prompt, params) for prompt, params in asked]
            engine.run(LoopbackRing(n_frames))
            results.append([[event for event in request] for request in requests])
            assert not len(stage.caches)
            assert speculation is None or engine.guesses[1] > 10
    assert all(result == results[0] for result in results)


def ids_of(source: WeightSource) -> np.ndarray:
    return np.random.default_rng(2).integers(0, source.config.vocab_size, LENGTH)


def logits_of(stage: KernelStage, ids: np.ndarray) -> np.ndarray:
    found, start = [], 0
    for n in FRAMES:
        slices = [Slice(3, start, n, n)]
        found.append(stage.head(stage(stage.embed(ids[start : start + n], slices), slices)))
        start += n
    return np.concatenate(found)


def stage_of(source: WeightSource, cache_type: str = "float32", packing: Packing | None = None) -> KernelStage:
    n_layer = source.config.n_layer
    weights = Resident(stage_parts(0, n_layer, starter=True), lambda part: source.weights(part, packing))
    stage = KernelStage(spec_of(source.config), 0, n_layer, weights, cache_type=cache_type)
    stage.prepare(LENGTH)
    return stage


def expected(source: LitCheckpoint, ids: np.ndarray) -> np.ndarray:
    """Logits of the whole text in float64, straight from the definitions."""
    c, kind = source.config, source.model
    if kind in ("glm", "minimax"):
        return expected_of_experts(source, ids)
    w = {name: source.array(name).astype(np.float64) for name in source.specs}
    if kind == "gpt-oss":
        return expected_gpt_oss(c, w, ids)
    positions = np.arange(len(ids))
    mask = np.where(positions[:, None] >= positions, 0.0, -np.inf)
    size, n_head = c.head_size, c.n_head

    def norm(x: np.ndarray, path: str) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + c.norm_eps)
        return x * w[f"{path}.weight"] + w[f"{path}.bias"]

    def linear(x: np.ndarray, path: str) -> np.ndarray:
        return x @ w[f"{path}.weight"].T + w[f"{path}.bias"]

    def attention(x: np.ndarray, path: str) -> np.ndarray:
        q, k, v = linear(x, f"{path}.qkv").reshape(len(ids), 3, n_head, size).transpose(1, 2, 0, 3)
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(size)
        if kind in ("bloom", "falcon-rw"):  # of six heads: four, and two of those of eight
            slopes = np.array([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])
            scores += slopes[:, None, None] * positions / (1 if kind == "bloom" else math.sqrt(size))
        weights = np.exp(scores + mask - (scores + mask).max(-1, keepdims=True))
        mixed = weights / weights.sum(-1, keepdims=True) @ v
        return linear(mixed.transpose(1, 0, 2).reshape(len(ids), -1), f"{path}.proj")

    def mlp(x: np.ndarray, path: str) -> np.ndarray:
        x = linear(x, f"{path}.fc")
        if "opt" in kind:
            x = np.maximum(x, 0)
        elif kind == "falcon-rw":
            x = x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2
        else:
            x = x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
        return linear(x, f"{path}.proj")

    x = w["transformer.wte.weight"][ids]
    if kind == "bloom":
        x = norm(x, "transformer.wte_norm")
    elif kind != "falcon-rw":
        x = x + w["transformer.wpe.weight"][: len(ids)]
    for block in (f"transformer.h.{i}" for i in range(c.n_layer)):
        if kind == "opt-behind":
            x = norm(x + attention(x, f"{block}.attn"), f"{block}.post_attention_norm")
            x = norm(x + mlp(x, f"{block}.mlp"), f"{block}.post_mlp_norm")
        else:
            x = x + attention(norm(x, f"{block}.norm_1"), f"{block}.attn")
            x = x + mlp(norm(x, f"{block}.norm_2"), f"{block}.mlp")
    x = x if kind == "opt-behind" else norm(x, "transformer.ln_f")
    return x @ w["lm_head.weight"].T


def expected_of_experts(source: LitCheckpoint, ids: np.ndarray) -> np.ndarray:
    hf = FAMILIES[source.model]
    w = {name: source.array(name).astype(np.float64) for name in source.specs}
    positions, n_head, n_groups, size = np.arange(len(ids)), 6, 2, 16
    mask = np.where(positions[:, None] >= positions, 0.0, -np.inf)
    angles = positions[:, None] / 1e4 ** (np.arange(0, 8, 2) / 8)  # half of each head is rotated
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def norm(x: np.ndarray, path: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[f"{path}.weight"]

    def rotated(x: np.ndarray) -> np.ndarray:
        a, b, rest = x[..., :4], x[..., 4:8], x[..., 8:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def attention(x: np.ndarray, path: str) -> np.ndarray:
        x = x @ w[f"{path}.qkv.weight"].T + w.get(f"{path}.qkv.bias", 0)
        q, k, v = np.split(x, [n_head * size, (n_head + n_groups) * size], -1)
        if source.model == "minimax":
            q, k = norm(q, f"{path}.norm_q"), norm(k, f"{path}.norm_k")
        q, k, v = (y.reshape(len(ids), -1, size) for y in (q, k, v))
        if source.model == "glm":
            q, k = norm(q, f"{path}.norm_q"), norm(k, f"{path}.norm_k")
        mixed = np.empty((len(ids), n_head, size))
        for h in range(n_head):
            scores = rotated(q)[:, h] @ rotated(k)[:, h // 3].T / math.sqrt(size) + mask
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mixed[:, h] = weights / weights.sum(-1, keepdims=True) @ v[:, h // 3]
        return mixed.reshape(len(ids), -1) @ w[f"{path}.proj.weight"].T

    def mlp(x: np.ndarray, path: str) -> np.ndarray:
        gate = x @ w[f"{path}.fc_1.weight"].T
        return gate / (1 + np.exp(-gate)) * (x @ w[f"{path}.fc_2.weight"].T) @ w[f"{path}.proj.weight"].T

    def experts(x: np.ndarray, path: str) -> np.ndarray:
        score = 1 / (1 + np.exp(-(x @ w[f"{path}.gate.weight"].T)))
        chosen = np.argsort(score + w[f"{path}.gate.e_score_correction_bias"], -1)[:, -3:]
        found = mlp(x, f"{path}.shared_experts") if "n_shared_experts" in hf else np.zeros_like(x)
        for row, of_row in enumerate(chosen):
            for e in of_row:
                weight = score[row, e] / score[row, of_row].sum() * hf.get("routed_scaling_factor", 1)
                found[row] += weight * mlp(x[row], f"{path}.experts.{e}")
        return found

    x = w["transformer.wte.weight"][ids]
    for i in range(3):
        block = f"transformer.h.{i}"
        x = x + attention(norm(x, f"{block}.norm_1"), f"{block}.attn")
        is_dense = i < hf.get("first_k_dense_replace", 0)
        x = x + (mlp if is_dense else experts)(norm(x, f"{block}.norm_2"), f"{block}.mlp")
    return norm(x, "transformer.ln_f") @ w["lm_head.weight"].T


def expected_gpt_oss(c: ModelConfig, w: Arrays, ids: np.ndarray) -> np.ndarray:
    n, size, n_head, n_groups = len(ids), c.head_size, c.n_head, c.n_query_groups
    rotary = spec_of(c).blocks[0].mixer.positions
    assert isinstance(rotary, Rotary)
    cos, sin = (table.astype(np.float64) for table in rope_tables(rotary, n))
    distance = np.arange(n)[:, None] - np.arange(n)

    def norm(x: np.ndarray, path: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c.norm_eps) * w[f"{path}.weight"]

    def linear(x: np.ndarray, path: str) -> np.ndarray:
        return x @ w[f"{path}.weight"].T + w[f"{path}.bias"]

    def turned(x: np.ndarray) -> np.ndarray:
        return x * cos + np.concatenate([-x[..., size // 2 :], x[..., : size // 2]], -1) * sin

    def attention(x: np.ndarray, path: str, window: int) -> np.ndarray:
        heads = linear(x, f"{path}.qkv").reshape(n, n_head + 2 * n_groups, size).transpose(1, 0, 2)
        mixed = []
        for h in range(n_head):
            group = h // (n_head // n_groups)
            scores = turned(heads[h]) @ turned(heads[n_head + group]).T / math.sqrt(size)
            weights = np.where((distance >= 0) & (distance < window), np.exp(scores), 0)
            total = weights.sum(-1, keepdims=True) + np.exp(w[f"{path}.sinks"][h])
            mixed.append(weights / total @ heads[n_head + n_groups + group])
        return linear(np.concatenate(mixed, 1), f"{path}.proj")

    def experts(x: np.ndarray, path: str) -> np.ndarray:
        y = np.zeros_like(x)
        for row, scores in enumerate(linear(x, f"{path}.gate")):
            best = np.argsort(-scores)[: c.n_expert_per_token]
            for e in best:
                share = np.exp(scores[e]) / np.exp(scores[best]).sum()
                gate = np.minimum(linear(x[row], f"{path}.experts.{e}.fc_1"), 1.5)
                up = np.clip(linear(x[row], f"{path}.experts.{e}.fc_2"), -1.5, 1.5)
                y[row] += share * linear((up + 1) * gate / (1 + np.exp(-1.702 * gate)), f"{path}.experts.{e}.proj")
        return y

    x = w["transformer.wte.weight"][ids]
    for i, block in enumerate(f"transformer.h.{i}" for i in range(c.n_layer)):
        x = x + attention(norm(x, f"{block}.norm_1"), f"{block}.attn", n if i % 2 else 20)
        x = x + experts(norm(x, f"{block}.norm_2"), f"{block}.mlp")
    return norm(x, "transformer.ln_f") @ w["lm_head.weight"].T


_ATTENTION = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj")
ADAPTED = {
    "bloom": ("self_attention.query_key_value", "self_attention.dense"), "falcon-rw": ("self_attention.query_key_value",),
    "gpt2": ("attn.c_attn", "attn.c_proj", "mlp.c_fc"), "opt": ("self_attn.q_proj", "self_attn.out_proj", "fc2"),
    "opt-behind": ("self_attn.k_proj", "fc1"), "glm": _ATTENTION, "minimax": _ATTENTION, "gpt-oss": _ATTENTION,
}  # fmt: skip


_POSITIONS = {"PROMPT_TUNING": "adds positions to its embeddings"}
WITHOUT_ROWS = {
    "bloom": {"PROMPT_TUNING": "norms its embeddings"}, "gpt2": _POSITIONS, "opt": _POSITIONS, "opt-behind": _POSITIONS,
    "gpt-oss": {"PREFIX_TUNING": "has attention in windows"},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_with_lora_the_logits_are_those_of_the_merged_weights(family: str, tmp_path: Path) -> None:
    """Learned rows are refused where they have no one form in other programs, or would stand before windows."""
    source, folder, generator = made(family, tmp_path), tmp_path / "lora", np.random.default_rng(6)
    config, layers = source.config, "transformer.h" if family in ("bloom", "falcon-rw", "gpt2") else "model.layers"
    state, tensors = {name: np.array(source.array(name)) for name in source.specs}, Arrays()
    for block in range(config.n_layer):
        for module in ADAPTED[family]:
            pieces, n_out, n_in = adapted_rows(config, family, block, module)
            a, b = (0.3 * generator.standard_normal(shape, dtype=np.float32) for shape in ((2, n_in), (n_out, 2)))
            path = f"base_model.model.{layers}.{block}.{module}"
            tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
            for one in pieces:
                rows = b[interleaved_rows(spec_of(config))] if one.is_interleaved else b
                state[f"transformer.h.{block}.{one.layer}.weight"][one.first : one.first + n_out] += 2 * rows @ a
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    of = AdapterSource([open_adapter(AdapterName("x", folder), 1, config, lambda: None)], lambda part: source)
    weights = Resident(stage_parts(0, config.n_layer, starter=True), source.weights)
    own = {part: of.weights(part) for part in of.part_names()}
    stage = KernelStage(spec_of(config), 0, config.n_layer, weights, adapters=own)
    stage.prepare(LENGTH)
    ids = ids_of(source)
    part = [Slice(with_adapter(1, 0), 0, LENGTH, LENGTH)]
    found = stage.head(stage(stage.embed(ids, part), part))
    (tmp_path / "merged").mkdir()
    save_file(state, tmp_path / "merged" / "lit_model.safetensors")
    shutil.copy(tmp_path / family / "model_config.yaml", tmp_path / "merged")
    wanted, plain = logits_of(stage_of(LitCheckpoint(tmp_path / "merged")), ids), logits_of(stage_of(source), ids)
    size = np.linalg.norm(wanted)
    assert np.linalg.norm(found - wanted) / size < 1e-4 and np.linalg.norm(plain - wanted) / size > 0.05
    for kind, why_not in WITHOUT_ROWS.get(family, {}).items():
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": kind, "num_virtual_tokens": 2}))
        with pytest.raises(CheckpointError, match=f"peft_type {kind}, and {family} {why_not}"):
            open_adapter(AdapterName("x", folder), 1, config, lambda: None)


@pytest.mark.parametrize("force", instruction_sets())
def test_logits_are_those_of_the_definition(source: LitCheckpoint, force: str) -> None:
    ids = ids_of(source)
    with forced(force):
        found = logits_of(stage_of(source), ids)
    assert np.abs(found - expected(source, ids)).max() < 2e-4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tensor", ["mlp.experts.2.fc_1.bias", "mlp.experts.2.fc_2.bias", "attn.sinks"])
@pytest.mark.parametrize("force", instruction_sets())
def test_neither_clamps_nor_sinks_hide_what_is_not_finite(force: str, tensor: str, bad: float, tmp_path: Path) -> None:
    """But a sink of minus infinity is none."""
    source = made("gpt-oss", tmp_path)

    def weights(part: str) -> PartWeights:
        found = source.weights(part)
        if part == "block.2":
            found[f"transformer.h.2.{tensor}"] = np.full_like(found[f"transformer.h.2.{tensor}"], bad)
        return found

    with forced(force):
        stage = KernelStage(spec_of(source.config), 0, 3, Resident(stage_parts(0, 3, starter=True), weights))
        stage.prepare(LENGTH)
        found = np.isfinite(logits_of(stage, ids_of(source))).all(axis=1)
    if tensor == "attn.sinks":
        assert found.all() if bad == -math.inf else not found.any()
    else:
        assert 0 < (~found).sum() < LENGTH  # the rows that go to this expert


OFFICIAL = {  # of GLM, and what MiniMax has instead
    "transformer.wte.weight": "model.embed_tokens.weight", "transformer.ln_f.weight": "model.norm.weight",
    "transformer.h.": "model.layers.", "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm",
    "attn.proj": "self_attn.o_proj", "attn.norm_": "self_attn.", "fc_1": "gate_proj", "fc_2": "up_proj",
    "mlp.proj": "mlp.down_proj", "experts.proj": "experts.down_proj",
}  # fmt: skip
OF_MINIMAX = {
    "mlp.gate.e_score": "block_sparse_moe.e_score", "mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3",
    "proj": "w2",
}  # fmt: skip


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_a_folder_in_official_names_is_the_same_model(source: LitCheckpoint, prefix: str, tmp_path: Path) -> None:
    if source.model not in ("glm", "minimax"):
        return
    written: Arrays = {}
    for name in source.specs:
        array, theirs = source.array(name), re.sub(r"(experts\.\d+\.)proj", r"\1down_proj", name)
        for ours, official in OFFICIAL.items():
            theirs = theirs.replace(ours, official)
        theirs = re.sub(r"self_attn\.([qk])\.", r"self_attn.\1_norm.", theirs)
        if source.model == "minimax" and ".mlp." in theirs:
            for ours, official in OF_MINIMAX.items():
                theirs = theirs.replace(ours, official)
            theirs = theirs.replace("down_w2", "w2")
        theirs = theirs.replace("model.", prefix, 1)
        if ".qkv." in theirs:
            for x, part in zip("qkv", np.split(array, [96, 128]), strict=True):
                written[theirs.replace("attn.qkv", f"self_attn.{x}_proj")] = part
        else:
            written[theirs] = array
    folder = tmp_path / "official"
    folder.mkdir()
    hf: dict[str, Any] = {**_SIZES, **FAMILIES[source.model]}
    if prefix != "model.":
        written["model.visual.blocks.0.weight"] = np.ones(3, dtype=np.float32)
        hf = {"model_type": "of-images", "text_config": hf, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    save_file(written, folder / "model.safetensors")
    found = HfFolder(folder, cache=tmp_path)
    assert found.specs.keys() == source.specs.keys()
    assert all(np.array_equal(found.array(name), source.array(name)) for name in source.specs)
    assert found.config_hash == source.config_hash


OF_EXPERTS = {
    "mlp.experts.fc_1": "ffn_gate_exps",
    "mlp.experts.fc_2": "ffn_up_exps",
    "mlp.experts.proj": "ffn_down_exps",
}
OF_LLAMA_CPP = {
    **OF_EXPERTS, "transformer.wte": "token_embd", "transformer.ln_f": "output_norm", "lm_head": "output",
    "transformer.h.": "blk.", "norm_1": "attn_norm", "attn.norm_q": "attn_q_norm", "attn.norm_k": "attn_k_norm",
    "attn.proj": "attn_output", "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias", "mlp.shared_experts.fc_1": "ffn_gate_shexp",
    "mlp.shared_experts.fc_2": "ffn_up_shexp", "mlp.shared_experts.proj": "ffn_down_shexp", "mlp.fc_1": "ffn_gate",
    "mlp.fc_2": "ffn_up", "mlp.fc": "ffn_up", "mlp.proj": "ffn_down", "transformer.wpe": "position_embd",
}  # fmt: skip


ARCHITECTURES = {"glm": "glm4moe", "minimax": "minimax-m2", "bloom": "bloom", "gpt2": "gpt2", "ernie": "ernie4_5"}


def write_gguf(path: Path, source: LitCheckpoint, **changes: Any) -> Path:
    """As llama.cpp's own converter does, with a block of GLM's that predicts further tokens."""
    c, is_glm = source.config, source.model == "glm"
    is_llama_like = c.norm_class_name == "RMSNorm"
    arch = ARCHITECTURES[source.model]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_string("tokenizer.ggml.model", "none")
    fields: dict[str, Any] = {
        "vocab_size": 96, "context_length": c.block_size, "embedding_length": 48, "block_count": 4 if is_glm else 3,
        "feed_forward_length": c.intermediate_size, "attention.head_count": 6,
        "attention.head_count_kv": c.n_query_groups,
    }  # fmt: skip
    if is_llama_like:
        fields |= {
            "attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": c.rope_n_elem,
            "rope.freq_base": 1e4, "attention.layer_norm_rms_epsilon": 1e-5,
        }  # fmt: skip
    else:
        fields["attention.layer_norm_epsilon"] = 1e-5
    if c.n_expert:
        fields |= {
            "expert_count": 7, "expert_used_count": 3, "expert_gating_func": 2,
            "expert_feed_forward_length": c.moe_intermediate_size or c.intermediate_size,
        }  # fmt: skip
    if is_glm:
        fields |= {
            "leading_dense_block_count": 1, "expert_shared_count": 2, "expert_weights_scale": 2.5,
            "expert_weights_norm": True, "nextn_predict_layers": 1, "expert_group_count": 1, "expert_group_used_count": 1,
        }  # fmt: skip
    for key, value in {**fields, **changes}.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"{arch}.{key}", value)
    written: Arrays = {}
    stacked: dict[str, list[np.ndarray]] = {}
    for name in source.specs:
        array, theirs = source.array(name), re.sub(r"experts\.\d+\.", "experts.", name)
        for ours, official in OF_LLAMA_CPP.items():
            theirs = theirs.replace(ours, official)
        theirs = theirs.replace("norm_2", "post_attention_norm" if is_glm else "ffn_norm")
        if "_exps" in theirs:
            stacked.setdefault(theirs, []).append(array)
        elif ".qkv." in theirs and is_llama_like:
            for x, part in zip("qkv", np.split(array, [96, 128]), strict=True):
                written[theirs.replace("attn.qkv", f"attn_{x}")] = part
        else:
            written[theirs.replace("attn.qkv", "attn_qkv")] = array
    written |= {name: np.stack(arrays) for name, arrays in stacked.items()}
    if is_glm:
        last = {name: array for name, array in written.items() if name.startswith("blk.2.")}
        written |= {name.replace("blk.2.", "blk.3."): array for name, array in last.items()}
        written |= {"blk.3.nextn.eh_proj.weight": np.ones((48, 96), dtype=np.float32)}
        written |= {
            f"blk.3.nextn.{x}.weight": np.ones(48, dtype=np.float32) for x in ("enorm", "hnorm", "shared_head_norm")
        }
    for name, array in written.items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# What llama.cpp says behind the first 30 ids, for the very file: tests/gguf_reference/family_ids.py, with cyllama 0.2.18.
GREEDY = {
    "glm": [2, 84, 20, 37, 62, 10, 44, 2, 87, 53, 2, 87, 54, 68, 12, 10, 2, 83, 37, 20, 60, 86, 92, 87],
    "minimax": [38, 70, 13, 55, 86, 55, 39, 38, 35, 46, 15, 89, 11, 86, 13, 56, 31, 87, 86, 83, 56, 15, 44, 15],
    "bloom": [65, 36, 23, 51, 38, 62, 77, 77, 77, 77, 26, 80, 35, 54, 26, 26, 26, 26, 75, 26, 75, 26, 75, 26],
    "ernie": [21, 27, 13, 31, 27, 30, 85, 37, 39, 45, 35, 3, 90, 47, 11, 11, 11, 37, 22, 40, 3, 78, 2, 17],
    "gpt2": [61, 0, 32, 0, 11, 34, 32, 32, 32, 32, 32, 34, 68, 32, 32, 32, 32, 32, 61, 61, 89, 0, 0, 33],
}


def prompt_of(source: WeightSource) -> list[int]:
    return [*map(int, ids_of(source)[:30])]


def continued(source: WeightSource, prompt: list[int]) -> list[int]:
    """24 greedy ids, from caches."""
    stage, ids = stage_of(source), list(prompt)
    for n in (len(prompt), *[1] * 23):
        slices = [Slice(3, len(ids) - n, n, 1)]
        ids.append(int(stage.head(stage(stage.embed(np.array(ids[-n:]), slices), slices))[-1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", GREEDY)
def test_a_gguf_file_is_the_same_model_and_has_llama_cpps_tokens(name: str, tmp_path: Path) -> None:
    source = made(name, tmp_path)
    found = GgufSource(write_gguf(tmp_path / "m.gguf", source))
    assert continued(found, prompt_of(source)) == GREEDY[name]
    assert found.specs.keys() == source.specs.keys()
    assert all(np.array_equal(found.array(key), source.array(key)) for key in source.specs)
    assert replace(found.config, norm_eps=1e-5, name=name) == source.config
    of_experts = {"expert_gating_func": 1, "expert_count": 6, "nextn_predict_layers": 4}
    for key, value in {"block_count": 5, **(of_experts if source.config.n_expert else {})}.items():
        with pytest.raises(CheckpointError):
            GgufSource(write_gguf(tmp_path / "bad.gguf", source, **{key: value}))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gpt-oss"])
def test_export_and_back(name: str, tmp_path: Path) -> None:
    source = made(name, tmp_path)
    export_hf(source, source.path, tmp_path / name / "out")
    found = HfFolder(tmp_path / name / "out", cache=tmp_path)
    assert found.config_hash == source.config_hash and found.specs == source.specs
    assert all(np.array_equal(found.array(key), source.array(key)) for key in source.specs)


@pytest.mark.parametrize(("cache_type", "tolerance"), [("bf16", 0.3), ("fp16", 0.03), ("int8", 0.6)])
def test_caches_of_fewer_bits_are_near(source: LitCheckpoint, cache_type: str, tolerance: float) -> None:
    ids = ids_of(source)
    of_rows = np.abs(logits_of(stage_of(source, cache_type), ids) - logits_of(stage_of(source), ids)).max(axis=1)
    # A row that another expert gets is far away.
    difference = np.median(of_rows) if source.config.n_expert else of_rows.max()
    assert 0 < difference < tolerance


def test_packed_chunks_and_windows_give_the_same_bits(source: LitCheckpoint, tmp_path: Path) -> None:
    packed, ids = PackedSource(source, Packing("int8", "int8")), ids_of(source)
    (path,) = write_chunks(packed, tmp_path / "chunks", (source.config.n_layer,))
    chunk = ChunkFile(path)
    whole = logits_of(stage_of(chunk), ids)
    assert np.array_equal(whole, logits_of(stage_of(source, packing=Packing("int8", "int8")), ids))
    parts = stage_parts(0, source.config.n_layer, starter=True)
    weights = open_window(
        "starter", WindowOptions(2), parts, lambda part: chunk, Packing("int8", "int8"), tmp_path, RunMemory(0, None, 0),
        Cancel(),
    )  # fmt: skip
    stage = KernelStage(spec_of(source.config), 0, source.config.n_layer, weights)
    try:
        stage.prepare(LENGTH)
        assert np.array_equal(logits_of(stage, ids), whole)
    finally:
        stage.close()


def test_shares_of_a_group_add_up(source: LitCheckpoint) -> None:
    config, ids = source.config, ids_of(source)
    shares = share_out(config, (1.0, 3.0, 0.0, 2.0))
    n_layer, n = config.n_layer, shares.n_nodes
    with meshes(n) as found:
        reduces = sums(found)

        def work(rank: int) -> np.ndarray | None:
            share = Share(shares, rank, config)
            shard = ShardSource(source, share, PLAIN)
            group = GroupSum(share)
            group.join("all", reduces[rank])
            parts = stage_parts(0, n_layer, starter=rank == 0)
            stage = KernelStage(spec_of(config), 0, n_layer, Resident(parts, shard.weights), group=group)
            stage.prepare(LENGTH)
            ends = stage_of(source).ends
            assert ends is not None
            rows, start = [], 0
            for n_rows in FRAMES:
                slices = [Slice(3, start, n_rows, n_rows)]
                rows.append(ends.head(stage(ends.embed(ids[start : start + n_rows], slices), slices)))
                start += n_rows
            return np.concatenate(rows)

        for logits in on_all(n, work):
            assert logits is not None and np.abs(logits - expected(source, ids)).max() < 2e-4


def test_torch_computes_what_the_kernels_do_not(source: LitCheckpoint) -> None:
    found = choose_computing(source.config, Requested(device="cpu", dtype="bfloat16"), source.dtype)
    assert found.packing is None and found.path == "torch: --dtype bfloat16"
    with pytest.raises(CheckpointError) as refused:  # training has litgpt's model
        load_shape(source.path)
    assert refused.value.code == "shape"


@pytest.mark.slow
def test_nodes_without_kernels_have_the_same_tokens(source: LitCheckpoint, tmp_path: Path, in_torch: None) -> None:
    ids = [int(token) for token in ids_of(source)[:20]]
    found = continued(source, ids)
    tokenizer().save(str(source.path / "tokenizer.json"))
    with secondaries(1, tmp_path) as nodes:
        assert generated(cluster_of(nodes), source.path, ids, len(found))[0] == found
        assert ControlClient(entry_of(nodes[0])).profile(ProfileRequest(source.model_id))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "method"),
    [("gpt-oss", "lora"), ("minimax", "prompt"), ("glm", "deep-prompt"), ("bloom", "prefix"), ("opt", "prefix")],
)
def test_a_family_is_fine_tuned_and_computed_as_it_was_learned(
    family: str, method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = made(family, tmp_path, vocab_size=320)
    tokenizer().save(str(source.path / "tokenizer.json"))
    (tmp_path / "texts.jsonl").write_text('{"text": "a b c d e f a b c d e f"}\n' * 8, encoding="utf-8")
    given = ["--ckpt", str(source.path), "--data", str(tmp_path / "texts.jsonl"), "--out", str(tmp_path / "out")]
    own = ["--method", method, "--prompt-length", "3", "--sequence-length", "16", "--device", "cpu", "--epochs", "2"]
    assert launch("finetune", [*given, *own]) == 0
    said = re.findall(r"loss ([\d.]+) in torch.*?, ([\d.]+) in the kernels", capsys.readouterr().out)
    alone, learned = ([float(loss) for loss in losses] for losses in said)
    assert alone[0] == pytest.approx(alone[1], abs=2e-4) and learned[0] == pytest.approx(learned[1], abs=2e-4)
    assert learned[0] < alone[0] if method == "lora" else learned[0] != alone[0]


def test_gpt_oss_goes_to_hugging_faces_form_and_back(tmp_path: Path) -> None:
    source, out = made("gpt-oss", tmp_path), tmp_path / "gpt-oss-again"
    export_hf(source, source.path, out)
    again = HfFolder(out, cache=tmp_path / "cache")
    assert replace(again.config, name="gpt-oss") == source.config
    assert again.specs == source.specs
    for name in source.specs:
        assert np.array_equal(again.array(name), source.array(name)), name
    for change in ({"router_bias": False}, {"rope_interleave": True}, {"embedding_norm": True}):
        with pytest.raises(CheckpointError, match=next(iter(change))):
            written(replace(source.config, **change))


def test_falcons_positions_are_rounded_to_bfloat16() -> None:
    """Numbers of 9 bits lose their last one: 257 becomes 256, and 259 becomes 260."""
    attention = Attention(2, 2, 16, 0.25, positions=Alibi(2, is_rounded=True))
    found = score_bias(attention, 300)
    assert found is not None and found.shape == (2, 320)
    assert found[0, [255, 257, 259, 261]].tolist() == [n * 2.0**-4 / 4 for n in (255, 256, 260, 260)]
    # As transformers writes it; of twelve heads, four have slopes that are no powers of two.
    slopes = torch.from_numpy(alibi_slopes(12)).bfloat16()[:, None]
    expected = (slopes * torch.arange(320)).float().numpy() / 4
    twelve = score_bias(Attention(12, 12, 16, 0.25, positions=Alibi(12, is_rounded=True)), 300)
    assert twelve is not None and np.array_equal(twelve, expected)
