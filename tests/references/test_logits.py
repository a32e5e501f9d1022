"""Folders that transformers 5 wrote give its logits at every position, over one node and over three."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mdi.checkpoint.convert import convert
from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.hffolder import HfFolder
from mdi.checkpoint.packing import Packing, PartWeights
from mdi.checkpoint.parts import stage_parts
from mdi.checkpoint.source import open_source
from mdi.checkpoint.weights import WeightSource
from mdi.errors import CheckpointError
from mdi.kernels import library
from mdi.kernels.layout import Matrix, floats, unpack
from mdi.model.plain import spec_of
from mdi.model.spec import BlockSpec
from mdi.spec.cluster import standalone
from mdi.stages.kernel_stage import KernelStage, Resident
from mdi.stages.torch_stage import StarterStage
from mdi.tensor.shard_source import ShardSource
from mdi.tensor.shares import Share, share_out
from references.test_references import generated
from references.write_logits import CASES, version
from secondaries import cluster_of, secondaries
from tiny_checkpoint import tokenizer

LOGITS = Path(__file__).parents[2] / ".venv-references" / "logits"
TOLERANCE = 2e-4  # of logits up to ten or so: float32 sums of a hundred terms, in another order
FRAMES = (20, 1, 1, 37)  # rows, again and again


def _is_written() -> bool:
    written = LOGITS / "version.txt"
    return written.is_file() and written.read_text(encoding="utf-8") == version()


pytestmark = [
    pytest.mark.skipif(not _is_written(), reason="no models of transformers: make references"),
    pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}"),
]


def folder_of(name: str, tmp_path: Path) -> tuple[Path, list[int], np.ndarray]:
    """A copy of the model's folder with a tokenizer, the ids of the text, and transformers' logits (ids, vocabulary)."""
    folder = tmp_path / "hf" / name
    shutil.copytree(LOGITS / name, folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder, json.loads((folder / "ids.json").read_text(encoding="utf-8")), np.load(folder / "logits.npy")


def stages_of(
    source: WeightSource, bounds: list[int], max_length: int, cache_type: str = "float32"
) -> list[KernelStage]:
    stages = []
    for node, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        parts = stage_parts(start, stop, starter=node == 0)
        stage = KernelStage(spec_of(source.config), start, stop, Resident(parts, source.weights), cache_type=cache_type)
        stage.prepare(max_length)
        stages.append(stage)
    return stages


def thirds(source: WeightSource) -> list[int]:
    """Bounds of three nodes."""
    cuts = spec_of(source.config).allowed_cuts()
    return [0, *cuts[1:3], source.config.n_layer]


def logits_of(stages: list[KernelStage], ids: list[int]) -> np.ndarray:
    """At every position, from frames of several lengths."""
    found, start = [], 0
    while start < len(ids):
        n = min(FRAMES[len(found) % len(FRAMES)], len(ids) - start)
        slices = [(7, start, n, n)]
        x = stages[0].embed(np.array(ids[start : start + n]), slices)
        for stage in stages:
            x = stage(x, slices)
        found.append(stages[0].head(x))
        start += n
    return np.concatenate(found)


def same(found: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE) -> None:
    best = np.sort(expected, axis=1)[:, -2:]
    is_clear = best[:, 1] - best[:, 0] > 2 * tolerance
    assert is_clear.mean() > 0.9
    assert np.abs(found - expected).max() < tolerance
    assert np.array_equal(found.argmax(1)[is_clear], expected.argmax(1)[is_clear])


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder, ids, expected = folder_of(name, tmp_path)
    source = open_source(folder)
    n_layer = source.config.n_layer
    same(logits_of(stages_of(source, [0, n_layer], len(ids)), ids), expected)
    same(logits_of(stages_of(source, thirds(source), len(ids)), ids), expected)
    made = tmp_path / "made"
    made.mkdir()
    convert(folder, target=made, progress=False)
    again = open_source(made)
    assert again.config == source.config
    same(logits_of(stages_of(again, [0, n_layer], len(ids)), ids), expected)


N_TOKENS = 6


@pytest.mark.parametrize("name", CASES)
def test_a_ring_of_three_continues_a_text_as_one_node_and_as_transformers_begins(name: str, tmp_path: Path) -> None:
    folder, ids, expected = folder_of(name, tmp_path)
    prompt = ids[:-N_TOKENS]  # scaling may depend on how long the text becomes
    alone = generated(standalone(), folder, prompt, N_TOKENS)
    row = expected[len(prompt) - 1].astype(np.float64)
    assert alone[0][0] == row.argmax()
    assert alone[1][0] == pytest.approx(row.max() - np.log(np.exp(row - row.max()).sum()) - row.max(), abs=TOLERANCE)
    with secondaries(2, tmp_path) as nodes:
        assert generated(cluster_of(nodes), folder, prompt, N_TOKENS) == alone


@dataclass(frozen=True)
class Without:
    """A model without one of its features: other settings, or other numbers in some tensors, or tensors read otherwise."""

    settings: dict[str, Any] = field(default_factory=dict)
    tensors: str = ""  # that match this
    numbers: Callable[[np.ndarray], np.ndarray] = np.zeros_like
    pieces: dict[str, Any] = field(default_factory=dict)
    block: Callable[[BlockSpec], BlockSpec] = lambda block: block


def _settings(**changes: Any) -> Without:
    return Without(changes)


def _zeros(tensors: str) -> Without:
    return Without(tensors=tensors)


def _ones(tensors: str) -> Without:
    return Without(tensors=tensors, numbers=np.ones_like)


def _positive(numbers: np.ndarray) -> np.ndarray:
    return numbers.clip(min=0)


_ATTENTION_BIASES = {
    "biases of q, k and v": _zeros(r"attn\.qkv\.bias"),
    "the bias behind attention": _zeros(r"attn\.proj\.bias"),
}
_BIASES = {
    **_ATTENTION_BIASES,
    "the bias within MLPs": _zeros(r"mlp\.fc\.bias"),
    "the bias behind MLPs": _zeros(r"mlp\.proj\.bias"),
    "biases of norms": _zeros(r"norm_[12]\.bias"),
    "weights of norms": _ones(r"norm_[12]\.weight"),
    "the last norm's bias": _zeros(r"ln_f\.bias"),
}
_NORMS = {
    "weights of norms before attention": _ones(r"norm_1\.weight"),
    "weights of norms before MLPs": _ones(r"norm_2\.weight"),
    "weights of the last norm": _ones(r"ln_f\.weight"),
}
_ROUTER = {
    "the router's correction": _zeros("e_score_correction_bias"),
    "what is negative of the router's correction": Without(tensors="e_score_correction_bias", numbers=_positive),
    "sigmoids": _settings(sigmoid_router=False),
    "partial rotation": _settings(rotary_percentage=1.0),
    "the base of the rotation": _settings(rope_base=10**9),
}
_NORMS_OF_QK = {
    "norms of q and k": _settings(norm_qk=False),
    "weights of the norm of q": _ones(r"norm_q\.weight"),
    "weights of the norm of k": _ones(r"norm_k\.weight"),
}
_GEMMA4 = {
    **_NORMS,
    "norms of q and k": Without(block=lambda one: replace(one, mixer=replace(one.mixer, qk_norm=None))),
    "weights of the norm of q": _ones(r"norm_q\.weight"),
    "weights of the norm of k": _ones(r"norm_k\.weight"),
    "norms of values": _settings(v_norm=False),
    "weights of norms behind attention": _ones(r"post_attention_norm\.weight"),
    "weights of norms behind MLPs": _ones(r"post_mlp_norm\.weight"),
    "a scale of one": _settings(attention_scores_scalar=None),
    "windows": _settings(sliding_window_size=11),
    "the share of a head that is rotated": _settings(rope_adjustments={"partial_rotary_factor": 1.0}),
    "pairs that are half of the whole head apart": _settings(rope_adjustments={"partial_rotary_factor": 0.5}),
    "the base of blocks without a window": _settings(rope_base=10**4),
    "the base of blocks with a window": _settings(rope_local_base_freq=10**6),
    "the factor of the embedding": _settings(scale_embeddings=False),
    "the cap of logits": _settings(final_logit_softcapping=None),
    "scalars of blocks": _settings(block_scalars=False),
}
_LEARNED = {"learned positions": _zeros(r"wpe\.weight")}
# A case -> what it has.
LEFT_OUT: dict[str, dict[str, Without]] = {
    "gpt-oss": {
        **_ATTENTION_BIASES,
        **_NORMS,
        "sinks": _settings(attention_sinks=False),
        "the router's bias": _zeros(r"mlp\.gate\.bias"),
        "biases of gates": _zeros(r"fc_1\.bias"),
        "biases of what gates let through": _zeros(r"fc_2\.bias"),
        "biases behind experts": _zeros(r"mlp\.experts\.4\.proj\.bias"),
        "the limit": _settings(glu_limit=1e9),
        "the sharper sigmoid": _settings(glu_limit=None),
        "windows": _settings(sliding_window_size=None),
        "windows on every other layer": _settings(sliding_window_indices=[0, 1, 0, 1]),
        "layers without windows": _settings(sliding_window_indices=[1, 1, 1, 1]),
        "YaRN": _settings(rope_adjustments=None),
        "YaRN's factor of attention": _settings(rope_adjustments={"attention_factor": 1.0}),
        "YaRN's ramp without whole numbers": _settings(rope_adjustments={"truncate": True}),
    },
    "glm4-moe": {
        **_ROUTER,
        **_NORMS,
        **_NORMS_OF_QK,
        "biases of q, k and v": _zeros(r"attn\.qkv\.bias"),
        "the shared expert": _settings(n_shared_expert=None),
        "the factor of routed experts": _settings(routed_scaling_factor=1.0),
    },
    "glm4-moe-air": {**_ROUTER, **_NORMS, "the shared expert": _settings(n_shared_expert=None)},
    "glm4v-moe": {
        **_ROUTER,
        **_NORMS,
        "biases of q, k and v": _zeros(r"attn\.qkv\.bias"),
        "the shared expert": _settings(n_shared_expert=None),
        "the factor of routed experts": _settings(routed_scaling_factor=1.0),
    },
    "ernie4_5": {
        **_NORMS,
        "pairs beside each other": _settings(rope_interleave=False),
        "the base": _settings(rope_base=10**4),
    },
    "ernie4_5-biases": {
        **_ATTENTION_BIASES,
        "biases of gates": _zeros(r"fc_1\.bias"),
        "biases of MLPs": _zeros(r"mlp\.proj\.bias"),
    },
    "smollm3": {
        **_NORMS,
        "blocks without positions": _settings(rotary_indices=None),
        "which blocks they are": _settings(rotary_indices=[0, 1, 0, 1, 0]),
        "the base": _settings(rope_base=10**4),
    },
    "smollm3-apart": {**_NORMS, "blocks without positions": _settings(rotary_indices=None)},
    "gemma4-dense": _GEMMA4,
    "gemma4-experts": {
        **_GEMMA4,
        "the router's scale": _ones(r"norm_gate\.weight"),
        "factors of experts": _ones(r"expert_scales"),
        "weights of the norm before experts": _ones(r"norm_experts\.weight"),
        "weights of the norm behind experts": _ones(r"norm_post_experts\.weight"),
        "weights of the norm behind the MLP beside": _ones(r"norm_post_shared\.weight"),
        "the MLP beside experts": _zeros(r"norm_post_shared\.weight"),
        "experts": _zeros(r"norm_post_experts\.weight"),
    },
    "gemma4-shared": {
        **_GEMMA4,
        "keys and values of the last block with a window": Without(
            block=lambda one: replace(one, cache_of=0) if one.cache_of == 2 else one
        ),
        "the row of the table": _zeros(r"inputs\.table"),
        "the projection of the embedding": _zeros(r"inputs\.norm"),
        "weights of the norm of inputs": _ones(r"inputs\.norm"),
        "weights of norms behind inputs": _ones(r"gated\.norm"),
        "inputs": _zeros(r"gated\.norm"),
        "each block's own input": Without(block=lambda one: replace(one, gated=replace(one.gated, column="input.0"))),
    },
    "minimax-m2": {**_ROUTER, **_NORMS, **_NORMS_OF_QK},
    "bloom": {
        **_BIASES,
        "ALiBi": _settings(alibi=None),
        "ALiBi without a scale": _settings(alibi="falcon"),
        "the norm of the embedding": _settings(embedding_norm=False),
        "weights of the norm of the embedding": _ones(r"wte_norm\.weight"),
        "the bias of the norm of the embedding": _zeros(r"wte_norm\.bias"),
        "GELU by tanh": _settings(gelu_approximate="none"),
        "q, k and v head by head": Without(tensors=r"attn\.qkv\.", pieces={"is_interleaved": False}),
    },
    "falcon-rw": {
        **_BIASES,
        "ALiBi": _settings(alibi=None),
        "ALiBi's own scale and rounding": _settings(alibi="bloom"),
        "exact GELU": _settings(gelu_approximate="tanh"),
        "MLP behind attention": _settings(parallel_residual=True),
        "q, k and v head by head": Without(tensors=r"attn\.qkv\.", pieces={"is_interleaved": False}),
    },
    "gpt2": {
        **_BIASES,
        **_LEARNED,
        "GELU by tanh": _settings(gelu_approximate="none"),
        "outputs in columns": Without(tensors=r"attn\.proj\.weight", pieces={"is_transposed": False}),
    },
    "gpt2-relu": {**_BIASES, **_LEARNED, "ReLU": _settings(mlp_class_name="GptNeoxMLP")},
    "opt": {
        **_BIASES,
        **_LEARNED,
        "the first two positions for padding": Without(tensors=r"wpe\.weight", pieces={"rows": (0, 160, 1)}),
        "ReLU": _settings(mlp_class_name="GptNeoxMLP"),
    },
    "opt-norms-behind": {
        "norms behind sums": _settings(norm_after_residual=False),
        "biases of norms behind attention": _zeros(r"post_attention_norm\.bias"),
        "weights of norms behind attention": _ones(r"post_attention_norm\.weight"),
        "biases of norms behind MLPs": _zeros(r"post_mlp_norm\.bias"),
        "weights of norms behind MLPs": _ones(r"post_mlp_norm\.weight"),
    },
    "opt-gelu": {
        **_LEARNED,
        "exact GELU": _settings(mlp_class_name="ReluMLP"),
        "the first two positions for padding": Without(tensors=r"wpe\.weight", pieces={"rows": (0, 160, 1)}),
    },
}


def _without(source: WeightSource, without: Without, n_ids: int) -> list[KernelStage]:
    """One node with the model of a Hugging Face folder, but for one thing."""
    assert isinstance(source, HfFolder)
    settings = dict(without.settings)
    if scaling := settings.get("rope_adjustments"):
        settings["rope_adjustments"] = {**(source.config.rope_adjustments or {}), **scaling}
    config = replace(source.config, **settings)
    for name, pieces in source.tensor_pieces.items():
        if without.pieces and re.search(without.tensors, name):
            changed = tuple(replace(piece, **without.pieces) for piece in pieces)
            assert changed != pieces
            source.tensor_pieces[name] = changed

    def weights(part: str) -> PartWeights:
        found = source.weights(part)
        for key, array in found.items():
            if without.tensors and not without.pieces and re.search(without.tensors, key):
                if isinstance(array, Matrix):
                    found[key] = replace(array, data=without.numbers(array.data))
                    continue
                found[key] = without.numbers(array)
                assert not np.array_equal(found[key], array)
        return found

    n_layer = config.n_layer
    spec = spec_of(config)
    ends = replace(spec.ends, final_norm=spec_of(source.config).ends.final_norm)
    spec = replace(spec, blocks=tuple(map(without.block, spec.blocks)), ends=ends)
    stage = KernelStage(spec, 0, n_layer, Resident(stage_parts(0, n_layer, starter=True), weights))
    stage.prepare(n_ids)
    return [stage]


@pytest.mark.parametrize(("name", "feature"), [(name, feature) for name in LEFT_OUT for feature in LEFT_OUT[name]])
def test_what_a_family_has_matters(name: str, feature: str, tmp_path: Path) -> None:
    folder, ids, expected = folder_of(name, tmp_path)
    found = logits_of(_without(open_source(folder), LEFT_OUT[name][feature], len(ids)), ids)
    differences = np.abs(found - expected).max(axis=1)
    assert (differences > 3 * TOLERANCE).mean() > 0.3  # the two forms of GELU differ by 1e-3


def test_gpt_oss_in_mxfp4_keeps_its_numbers_in_whole_weights_and_in_shares(tmp_path: Path) -> None:
    folder, ids, expected = folder_of("gpt-oss-mxfp4", tmp_path)
    source, packing = open_source(folder), Packing("mxfp4", "int8")
    assert source.native == "mxfp4" and not source.folds_gains
    config, n_experts = source.config, 0
    shares = share_out(config, (1.0, 2.0))
    for name, spec in source.specs.items():
        if ".experts." not in name or not name.endswith(".weight"):
            continue
        n_experts += 1
        whole = floats(source.array(name))
        assert whole.shape == spec.shape
        matrix = source.packed(name, packing)[name]
        assert isinstance(matrix, Matrix) and matrix.format == "mxfp4" and np.array_equal(unpack(matrix), whole)
        pieces = []
        for rank in range(2):
            shard = ShardSource(source, Share(shares, rank, config), packing).shard_of(name)[name]
            assert isinstance(shard, Matrix) and shard.format == "mxfp4"
            pieces.append(unpack(shard)[:, shard.skip :])
        assert np.array_equal(np.concatenate(pieces, axis=1 if name.endswith("proj.weight") else 0), whole)
    assert n_experts == 4 * 6 * 3
    packed = PackedSource(source, packing)
    found = logits_of(stages_of(packed, [0, 4], len(ids)), ids)
    assert np.array_equal(logits_of(stages_of(packed, [0, 1, 3, 4], len(ids)), ids), found)
    in_int8 = logits_of(stages_of(PackedSource(source, Packing("int8", "int8")), [0, 4], len(ids)), ids)
    far, as_far = (np.median(np.abs(logits - expected).max(axis=1)) for logits in (found, in_int8))
    assert far < 1.25 * as_far  # both have activations in 8 bits, which send some rows to other experts


@pytest.mark.parametrize(
    ("tensor", "change", "word"),
    [
        ("mlp.experts.gate_up_proj_blocks", lambda t: t[:, :-2], "gate_up_proj"),
        ("mlp.experts.gate_up_proj_bias", lambda t: t[:-1], "gate_up_proj_bias"),
        ("mlp.experts.down_proj_bias", lambda t: t[:, :-1], "down_proj_bias"),
        ("self_attn.sinks", lambda t: t[:-1], "sinks"),
        ("self_attn.sinks", lambda t: None, "sinks"),
        ("mlp.router.bias", lambda t: None, "mlp.gate.bias"),
        ("mlp.experts.down_proj_scales", lambda t: None, "down_proj_scales"),
    ],
)  # fmt: skip
def test_files_of_gpt_oss_that_do_not_fit_are_refused(
    tensor: str, change: Callable[[torch.Tensor], torch.Tensor | None], word: str, tmp_path: Path
) -> None:
    folder, _, _ = folder_of("gpt-oss-mxfp4", tmp_path)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name in [name for name in tensors if name.endswith(tensor)]:
            changed = change(tensors.pop(name))
            if changed is not None:
                tensors[name] = changed.contiguous()
        save_file(tensors, path)
    if "gate_up_proj_blocks" in tensor:
        for path in folder.glob("*.safetensors"):
            tensors = load_file(path)
            scales = {n: t[:, :-2].contiguous() for n, t in tensors.items() if n.endswith("gate_up_proj_scales")}
            save_file({**tensors, **scales}, path)
    with pytest.raises(CheckpointError, match=word):
        open_source(folder)


@pytest.mark.parametrize(("name", "prefix"), [("bloom", "transformer."), ("gpt2", "transformer."), ("opt", "model.")])
def test_official_names_without_their_prefix_and_in_pickles(name: str, prefix: str, tmp_path: Path) -> None:
    """As the first files on the hub have them, with buffers that follow from the settings."""
    folder, ids, expected = folder_of(name, tmp_path)
    tensors = {key.removeprefix(prefix): tensor for key, tensor in load_file(folder / "model.safetensors").items()}
    assert len(tensors) > 30 and not any(key.startswith(prefix) for key in tensors)
    if name == "gpt2":
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError) as refused:
        open_source(folder)
    assert refused.value.code == "unsafe"
    made = tmp_path / "made"
    made.mkdir()
    convert(folder, target=made, progress=False)
    n_layer = open_source(made).config.n_layer
    same(logits_of(stages_of(open_source(made), [0, n_layer], len(ids)), ids), expected)
    (folder / "pytorch_model.bin").unlink()
    save_file(tensors, folder / "model.safetensors")
    same(logits_of(stages_of(open_source(folder), [0, n_layer], len(ids)), ids), expected)


@pytest.mark.parametrize("name", CASES)
def test_torch_has_the_same_logits(name: str, tmp_path: Path) -> None:
    folder, ids, expected = folder_of(name, tmp_path)
    source = open_source(folder)
    n_layer = source.config.n_layer
    stage = StarterStage(spec_of(source.config), n_layer)
    stage.load(stage_parts(0, n_layer, starter=True), source.tensors, torch.device("cpu"), torch.float32)
    stage.prepare(len(ids), torch.device("cpu"), torch.float32)
    found, start = [], 0
    while start < len(ids):
        n = min(FRAMES[len(found) % len(FRAMES)], len(ids) - start)
        slices = [(0, start, n, n)]
        rows = stage.embed(torch.tensor(ids[start : start + n]), slices)
        found.append(stage.head(stage(rows, slices)).numpy())
        start += n
    same(np.concatenate(found), expected)
