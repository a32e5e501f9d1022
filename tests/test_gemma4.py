"""Gemma 4: heads of two sizes, keys and values that several blocks read, rows with inputs of blocks, and rows that skip blocks.

Numbers are compared with transformers' in tests/references. Here are all ways in which a stage is held and cut, without it.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from forced import forced, instruction_sets
from safetensors.numpy import load_file, save_file

from guessing import Bold, of_two_tokens
from mdi.cancel import Cancel
from mdi.checkpoint.adapters import AdapterName, AdapterSource, adapted_rows
from mdi.checkpoint.chunks import ChunkFile, write_chunks
from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.export import export_hf
from mdi.checkpoint.ggufsource import GgufSource
from mdi.checkpoint.hfconfig import derive_config, published_config
from mdi.checkpoint.hffolder import HfFolder
from mdi.checkpoint.packing import Packing, plain
from mdi.checkpoint.parts import stage_parts
from mdi.checkpoint.source import LitCheckpoint
from mdi.checkpoint.virtual_adapters import open_adapter
from mdi.checkpoint.weights import WeightSource
from mdi.control.client import ControlClient
from mdi.control.messages import ProfileRequest
from mdi.engine.rows import ArrayRows
from mdi.engine.scheduler import Scheduler
from mdi.engine.sequence import SamplingParams
from mdi.engine.starter import StarterEngine
from mdi.errors import CheckpointError, UsageError
from mdi.kernels import library
from mdi.kernels.layout import Matrix
from mdi.kernels.slices import Slice, with_adapter
from mdi.model.caches import cache_classes
from mdi.model.plain import ModelConfig, spec_of
from mdi.model.tensors import EMBEDDING, HEAD
from mdi.net.ring import LoopbackRing
from mdi.placement.model import model_shape
from mdi.spec.cluster import standalone
from mdi.spec.window import WindowOptions
from mdi.stages import torch_packed, torch_stage
from mdi.stages.calibration import mean_squares
from mdi.stages.kernel_stage import KernelStage, Resident
from mdi.stages.torch_packed import DeviceLayers
from mdi.stages.torch_stage import StarterStage
from mdi.stages.window import open_window
from mdi.stages.window_budget import RunMemory
from mdi.tensor.shard_blocks import GroupSum
from mdi.tensor.shard_source import ShardSource
from mdi.tensor.shares import Share, share_out
from references.test_references import generated
from secondaries import cluster_of, entry_of, secondaries
from tensor_groups import meshes, on_all, sums
from test_own_families import (
    FRAMES,
    LENGTH,
    PLAIN,
    ids_of,
    logits_of,
    random_checkpoint,
    stage_of,
)
from tiny_checkpoint import tokenizer

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")

NEAR, FAR = "sliding_attention", "full_attention"
SIZES: dict[str, Any] = {
    "model_type": "gemma4_text", "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "vocab_size": 96,
    "vocab_size_per_layer_input": 96, "num_key_value_heads": 2, "head_dim": 12, "global_head_dim": 32, "sliding_window": 20,
    "max_position_embeddings": LENGTH, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 9.0,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "dense": {
        "num_hidden_layers": 4, "layer_types": [NEAR, FAR] * 2, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    },
    "experts": {
        "num_hidden_layers": 3, "layer_types": [NEAR, FAR, FAR], "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "enable_moe_block": True, "num_experts": 7, "top_k_experts": 3, "moe_intermediate_size": 24,
    },
    "shared": {
        "num_hidden_layers": 7, "layer_types": [NEAR, FAR, NEAR, FAR, NEAR, NEAR, FAR], "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True, "hidden_size_per_layer_input": 16,
    },
}  # fmt: skip


def config_of(form: str) -> ModelConfig:
    return derive_config({**SIZES, **FORMS[form]}, f"gemma4-{form}", Path("config.json"))


def made(form: str, folder: Path) -> LitCheckpoint:
    return random_checkpoint(config_of(form), folder / form)


@pytest.fixture(params=FORMS)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> LitCheckpoint:
    return made(request.param, tmp_path)


def stages_of(source: WeightSource, bounds: list[int]) -> list[KernelStage]:
    found = []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        parts = stage_parts(start, stop, starter=start == 0)
        found.append(KernelStage(spec_of(source.config), start, stop, Resident(parts, source.weights)))
        found[-1].prepare(LENGTH)
    return found


def frames_of(stages: list[KernelStage], ids: np.ndarray, slices: list[Slice]) -> np.ndarray:
    """The rows behind all stages of one frame; ids are those of the whole text."""
    x = stages[0].embed(np.concatenate([ids[one.start : one.start + one.n_rows] for one in slices]), slices)
    for stage in stages:
        assert x.shape[1] == stage.row_in.width
        x = stage(x, slices)
        assert x.shape[1] == stage.row_out.width
    return x


def test_the_kernels_compute_what_torch_does(source: LitCheckpoint) -> None:
    ids, stage = ids_of(source), whole_stage(source)
    slices = [Slice(0, 0, LENGTH, LENGTH)]
    expected = stage.head(stage(stage.embed(torch.from_numpy(ids), slices), slices)).numpy()
    found = {}
    for force in instruction_sets():
        with forced(force):
            found[force] = logits_of(stage_of(source), ids)
            assert np.abs(found[force] - expected).max() < 2e-4
    vectors = [one for force, one in found.items() if force != "plain"]
    assert all(np.array_equal(one, vectors[0]) for one in vectors)


def test_cuts_and_frames_change_no_bit(source: LitCheckpoint) -> None:
    """One row of each of three texts at a time, and whole prompts; on one node and on three."""
    ids, spec = ids_of(source), spec_of(source.config)
    whole = stages_of(source, [0, spec.n_layer])
    expected = frames_of(whole, ids, [Slice(1, 0, LENGTH, LENGTH)])
    assert spec.allowed_cuts() == [*range(spec.n_layer + 1)]
    cut = stages_of(source, [0, 1, 2, spec.n_layer])
    pieces = stages_of(source, [*range(spec.n_layer + 1)])
    for stages in (whole, cut, pieces):
        for start, stop in ((0, 31), (31, 50)):
            found = frames_of(stages, ids, [Slice(i, start, stop - start, stop - start) for i in (4, 5, 6)])
            assert np.array_equal(found, np.tile(expected[start:stop], (3, 1)))
        for at in range(50, LENGTH):
            found = frames_of(stages, ids, [Slice(i, at, 1, 1) for i in (4, 5, 6)])
            assert np.array_equal(found, np.tile(expected[at], (3, 1)))


@pytest.mark.parametrize("is_torch", [False, True])
def test_rows_that_give_no_logits_skip_blocks_that_read_other_caches(tmp_path: Path, is_torch: bool) -> None:
    source = made("shared", tmp_path)
    ids, spec = ids_of(source), spec_of(source.config)
    assert spec.skipped_from == 4
    stage: Any = stage_of(source)
    if is_torch:
        stage = whole_stage(source)

    def rows(slices: list[Slice]) -> np.ndarray:
        own = np.concatenate([ids[one.start : one.start + one.n_rows] for one in slices])
        return np.asarray(stage(stage.embed(torch.from_numpy(own) if is_torch else own, slices), slices))

    expected = rows([Slice(9, 0, LENGTH, LENGTH)])
    tolerance = 1e-4 if is_torch else 0  # products of torch depend on the number of rows
    rows([Slice(1, 0, 40, 0)])
    found = rows([Slice(1, 40, 5, 0), Slice(2, 0, 30, 1), Slice(3, 0, 4, 4)])
    assert np.abs(found[34] - expected[29]).max() <= tolerance and np.abs(found[35:] - expected[:4]).max() <= tolerance
    assert np.abs(found[:34] - np.concatenate([expected[40:45], expected[:29]])).max() > 0.1, "these are not computed"
    found = rows([Slice(1, 45, 25, 2), Slice(2, 30, 1, 1)])
    assert np.abs(found[[23, 24, 25]] - expected[[68, 69, 30]]).max() <= tolerance
    found = rows([Slice(1, 60, 5, 5)])  # guesses that were wrong: the text goes back
    assert np.abs(found - expected[60:65]).max() <= tolerance


def whole_stage(source: WeightSource, packing: Packing | None = None) -> StarterStage:
    """In torch."""
    n_layer = source.config.n_layer
    stage = StarterStage(spec_of(source.config), n_layer)

    def weights(part: str) -> Any:
        return source.tensors(part) if packing is None else source.weights(part, packing)

    stage.load(stage_parts(0, n_layer, starter=True), weights, torch.device("cpu"), torch.float32)
    stage.prepare(LENGTH, torch.device("cpu"), torch.float32)
    return stage


def test_a_text_says_what_inputs_count(source: LitCheckpoint) -> None:
    """Blocks that read the caches of others, and columns, are computed with these."""
    windows = [ids_of(source)[:30].tolist(), ids_of(source)[30:50].tolist()]
    means, seen = mean_squares(source, windows), {}
    stage = whole_stage(source)
    for name, module in stage.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, given, name=f"{name}.weight": seen.setdefault(name, []).append(given[0])
            )
    for i, window in enumerate(windows):
        slices = [Slice(i, 0, len(window), len(window))]
        stage.head(stage(stage.embed(torch.tensor(window), slices), slices))
    assert means.keys() == seen.keys()
    for name, rows in seen.items():
        assert np.allclose(means[name], torch.cat(rows).square().mean(dim=0).numpy(), rtol=1e-3)


@pytest.mark.parametrize("is_device", [False, True])
def test_packed_weights_in_torch_are_what_they_stand_for(
    is_device: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, packing = made("shared", tmp_path), Packing("int8", "int8")
    ids, slices = torch.from_numpy(ids_of(source)), [Slice(0, 0, LENGTH, LENGTH)]
    if is_device:
        monkeypatch.setattr(torch_stage, "layers_for", DeviceLayers)
    else:
        monkeypatch.setattr(torch_packed, "load", lambda: None)  # kernels round activations

    def columns(stage: StarterStage) -> torch.Tensor:
        return stage(stage.embed(ids, slices), slices)

    found = columns(whole_stage(source, packing))
    monkeypatch.setattr(source, "tensors", lambda part: unpacked(source.weights(part, packing)))
    torch.testing.assert_close(found, columns(whole_stage(source)), atol=1e-4, rtol=1e-4)


def unpacked(weights: Any) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array.copy()) for name, array in plain(dict(weights)).items()}


def test_packed_chunks_and_windows_give_the_same_bits(source: LitCheckpoint, tmp_path: Path) -> None:
    form = Packing("int8", "int8")
    packed, ids, n_layer = PackedSource(source, form), ids_of(source), source.config.n_layer
    (path,) = write_chunks(packed, tmp_path / "chunks", (n_layer,))
    chunk = ChunkFile(path)
    whole = logits_of(stage_of(chunk), ids)
    assert np.array_equal(whole, logits_of(stage_of(source, packing=form), ids))
    far = np.abs(whole - logits_of(stage_of(source), ids)).max(axis=1)
    assert 0 < np.median(far) < 0.5
    parts = stage_parts(0, n_layer, starter=True)
    weights = open_window(
        "starter", WindowOptions(2), parts, lambda part: chunk, form, tmp_path, RunMemory(0, None, 0), Cancel()
    )
    stage = KernelStage(spec_of(source.config), 0, n_layer, weights)
    try:
        kept = [one for one in weights["embedding"].values() if isinstance(one, Matrix)]
        assert all(one is weights["embedding"]["transformer.inputs.proj.weight"] for one in kept), "it is read once"
        small = sum(array.nbytes for part in parts for array in weights[part].values() if isinstance(array, np.ndarray))
        in_memory = small + sum(one.data.nbytes for one in kept)
        assert weights.n_bytes == weights.window.plan.resident_bytes + in_memory
        stage.prepare(LENGTH)
        assert np.array_equal(logits_of(stage, ids), whole)
        found = stage(stage.embed(ids, [Slice(8, 0, LENGTH, 3)]), [Slice(8, 0, LENGTH, 3)])
        assert np.array_equal(stage.head(found[-3:]), whole[-3:])
    finally:
        stage.close()


@pytest.mark.parametrize("cache_type", ["float32", "int8"])
def test_texts_are_the_same_with_guesses_under_way(source: LitCheckpoint, cache_type: str) -> None:
    stage = stage_of(source, cache_type)
    ids = [int(token) for token in ids_of(source)]
    asked = [
        (ids[:7], of_two_tokens(SamplingParams(60, temperature=0), 5, 6)),
        (ids[:40], SamplingParams(28, temperature=0.9, top_k=9, seed=3)),
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
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("form", ["dense", "shared"])
def test_with_lora_the_logits_are_those_of_the_merged_weights(form: str, tmp_path: Path) -> None:
    """Blocks have only the modules of which they make queries, keys and values."""
    source, folder, generator = made(form, tmp_path), tmp_path / "lora", np.random.default_rng(6)
    config, n_missing = source.config, 0
    state, tensors = {name: np.array(source.array(name)) for name in source.specs}, {}
    for block in range(config.n_layer):
        for module in (*(f"self_attn.{x}_proj" for x in "qkvo"), "mlp.gate_proj", "mlp.down_proj"):
            pieces, n_out, n_in = adapted_rows(config, form, block, module)
            n_missing += not pieces
            if pieces:
                a, b = (0.3 * generator.standard_normal(shape, dtype=np.float32) for shape in ((2, n_in), (n_out, 2)))
                path = f"base_model.model.model.layers.{block}.{module}"
                tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
                (one,) = pieces
                state[f"transformer.h.{block}.{one.layer}.weight"][one.first : one.first + n_out] += 2 * b @ a
    assert n_missing == {"dense": 2, "shared": 6}[form]
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    of = AdapterSource([open_adapter(AdapterName("x", folder), 1, config, lambda: None)], lambda part: source)
    weights = Resident(stage_parts(0, config.n_layer, starter=True), source.weights)
    own = {part: of.weights(part) for part in of.part_names()}
    stage = KernelStage(spec_of(config), 0, config.n_layer, weights, adapters=own)
    stage.prepare(LENGTH)
    ids, part = ids_of(source), [Slice(with_adapter(1, 0), 0, LENGTH, LENGTH)]
    found = stage.head(stage(stage.embed(ids, part), part))
    save_file(state, source.path / "lit_model.safetensors")
    wanted = logits_of(stage_of(LitCheckpoint(source.path)), ids)
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 1e-4


@pytest.mark.slow
def test_a_ring_of_three_has_the_tokens_of_one_node(source: LitCheckpoint, tmp_path: Path) -> None:
    tokenizer().save(str(source.path / "tokenizer.json"))
    prompt = [int(token) for token in ids_of(source)[:50]]
    alone = generated(standalone(), source.path, prompt, 12)
    with secondaries(2, tmp_path) as nodes:
        assert generated(cluster_of(nodes), source.path, prompt, 12) == alone
        for node in nodes:
            assert ControlClient(entry_of(node)).profile(ProfileRequest(source.model_id))


def test_shares_of_a_group_add_up(tmp_path: Path) -> None:
    source = made("dense", tmp_path)
    config, ids = source.config, ids_of(source)
    shares = share_out(config, (1.0, 3.0, 0.0))
    with meshes(shares.n_nodes) as found:
        reduces = sums(found)

        def work(rank: int) -> np.ndarray:
            share = Share(shares, rank, config)
            group = GroupSum(share)
            group.join("all", reduces[rank])
            parts = stage_parts(0, config.n_layer, starter=rank == 0)
            weights = Resident(parts, ShardSource(source, share, PLAIN).weights)
            stage = KernelStage(spec_of(config), 0, config.n_layer, weights, group=group)
            stage.prepare(LENGTH)
            ends, rows, start = stage_of(source).ends, [], 0
            assert ends is not None
            for n in FRAMES:
                slices = [Slice(3, start, n, n)]
                rows.append(ends.head(stage(ends.embed(ids[start : start + n], slices), slices)))
                start += n
            return np.concatenate(rows)

        expected = logits_of(stage_of(source), ids)
        assert all(np.abs(one - expected).max() < 2e-4 for one in on_all(shares.n_nodes, work))


# Names as llama.cpp's converter writes them, by those of transformers.
_GGUF = {
    "input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight", "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight", "layer_scalar": "layer_output_scale.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight", "router.proj.weight": "ffn_gate_inp.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight", "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight", "post_per_layer_input_norm.weight": "post_norm.weight",
    "router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight", "experts.down_proj": "ffn_down_exps.weight",
    **{f"mlp.{one}_proj.weight": f"ffn_{one}.weight" for one in ("gate", "up", "down")},
    **{f"self_attn.{one}_proj.weight": f"attn_{one}.weight" for one in "qkv"},
    **{f"self_attn.{one}_norm.weight": f"attn_{one}_norm.weight" for one in "qk"},
    "self_attn.o_proj.weight": "attn_output.weight", "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight", "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}  # fmt: skip


def write_gguf(path: Path, exported: Path, form: str, **changes: Any) -> Path:
    """Of a folder that was exported, with one matrix as embedding and head."""
    hf = {**SIZES, **FORMS[form]}
    layers, n_shared = hf["layer_types"], hf.get("num_kv_shared_layers", 0)
    far = hf.get("num_global_key_value_heads", 2)
    is_wide = [i >= len(layers) - n_shared for i in range(len(layers))]
    fields: dict[str, Any] = {
        "vocab_size": 96, "context_length": LENGTH, "embedding_length": 48, "block_count": len(layers),
        "feed_forward_length": [80 * (1 + one) for one in is_wide], "attention.head_count": 4,
        "attention.head_count_kv": [2 if one == NEAR else far for one in layers], "attention.sliding_window": 20,
        "attention.sliding_window_pattern": [one == NEAR for one in layers], "attention.shared_kv_layers": n_shared,
        "attention.key_length": 32, "attention.value_length": 32, "attention.key_length_swa": 12,
        "attention.value_length_swa": 12, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4, "rope.dimension_count": 32, "rope.dimension_count_swa": 12,
        "final_logit_softcapping": 9.0, "embedding_length_per_layer_input": hf["hidden_size_per_layer_input"],
    }  # fmt: skip
    if "num_experts" in hf:
        fields |= {"expert_count": 7, "expert_used_count": 3, "expert_feed_forward_length": 24}
    writer = gguf.GGUFWriter(path, "gemma4")
    writer.add_string("tokenizer.ggml.model", "none")
    for key, value in {**fields, **changes}.items():
        add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}[type(value)]
        add(f"gemma4.{key}", value)
    for shard in sorted(exported.glob("*.safetensors")):
        for name, array in load_file(shard).items():
            block, _, rest = name.removeprefix("model.layers.").partition(".")
            found = _GGUF[name] if name in _GGUF else f"blk.{block}.{_GGUF[rest]}"
            writer.add_tensor(found, np.ascontiguousarray(array))
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * 4 + [1e30] * 12, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tied(form: str, folder: Path) -> LitCheckpoint:
    """With one matrix as embedding and head."""
    source = made(form, folder)
    state = load_file(source.path / "lit_model.safetensors")
    save_file({**state, HEAD: state[EMBEDDING]}, source.path / "lit_model.safetensors")
    return LitCheckpoint(source.path)


# The best id at each position as llama.cpp computes it, for the very file, with caches in float32 (llama-cpp-python 0.3.36).
BEST = {
    "dense": [
        80,
        25,
        10,
        28,
        39,
        78,
        43,
        8,
        32,
        57,
        78,
        69,
        95,
        18,
        84,
        5,
        53,
        26,
        19,
        63,
        29,
        53,
        24,
        14,
        71,
        41,
        23,
        64,
        90,
        40,
        21,
        60,
        89,
        92,
        83,
        65,
        36,
        37,
        3,
        17,
        31,
        33,
        55,
        49,
        66,
        85,
        84,
        74,
        93,
        30,
        87,
        88,
        21,
        45,
        54,
        66,
        67,
        10,
        45,
        10,
        91,
        19,
        43,
        84,
        50,
        65,
        47,
        81,
        57,
        61,
    ],
    "experts": [
        80,
        25,
        10,
        28,
        39,
        78,
        43,
        8,
        32,
        57,
        78,
        69,
        95,
        18,
        84,
        5,
        53,
        26,
        19,
        63,
        29,
        53,
        24,
        14,
        42,
        41,
        65,
        64,
        90,
        40,
        21,
        60,
        89,
        92,
        83,
        65,
        36,
        37,
        3,
        17,
        31,
        33,
        55,
        49,
        66,
        85,
        84,
        74,
        93,
        30,
        87,
        88,
        21,
        45,
        54,
        66,
        67,
        10,
        45,
        10,
        91,
        19,
        43,
        84,
        11,
        7,
        47,
        81,
        57,
        61,
    ],
    "shared": [
        6,
        61,
        10,
        66,
        39,
        78,
        43,
        1,
        36,
        90,
        86,
        80,
        95,
        67,
        84,
        7,
        53,
        66,
        6,
        7,
        29,
        53,
        24,
        51,
        71,
        51,
        92,
        1,
        93,
        94,
        30,
        60,
        52,
        92,
        39,
        66,
        36,
        37,
        54,
        1,
        31,
        33,
        55,
        74,
        66,
        1,
        0,
        74,
        93,
        29,
        5,
        12,
        77,
        45,
        36,
        66,
        36,
        10,
        63,
        10,
        91,
        24,
        44,
        1,
        50,
        65,
        47,
        1,
        90,
        61,
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_export_and_gguf_are_the_same_model_with_llama_cpps_tokens(form: str, tmp_path: Path) -> None:
    source, out = tied(form, tmp_path), tmp_path / "out"
    export_hf(source, source.path, out)
    exported, found = HfFolder(out, cache=tmp_path), GgufSource(write_gguf(tmp_path / "m.gguf", out, form))
    assert exported.config_hash == source.config_hash
    assert replace(found.config, norm_eps=1e-6, name=source.config.name) == source.config
    for one in (exported, found):
        assert one.specs.keys() == source.specs.keys()
        assert all(np.array_equal(one.array(name), source.array(name)) for name in source.specs)
    assert logits_of(stage_of(found), ids_of(source)).argmax(axis=1).tolist() == BEST[form]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"feed_forward_length": [80, 90, 80, 80]}, "feed_forward_length"),
        ({"attention.head_count_kv": [2, 1, 1, 1]}, "head_count_kv"),
        ({"attention.head_count_kv": [2, 1, 2]}, "3 numbers for 4 blocks"),
        ({"attention.key_length_swa": 16}, "do not fit"),
    ],
)
def test_gguf_files_of_other_models_are_refused(changes: dict[str, Any], word: str, tmp_path: Path) -> None:
    source = tied("dense", tmp_path)
    export_hf(source, source.path, tmp_path / "out")
    with pytest.raises(CheckpointError, match=word):
        GgufSource(write_gguf(tmp_path / "m.gguf", tmp_path / "out", "dense", **changes))


@pytest.mark.parametrize(("form", "what"), [("experts", "experts"), ("shared", "rows")])
def test_what_cannot_be_shared_out_is_refused(form: str, what: str) -> None:
    with pytest.raises(UsageError, match=f"^--parallel tensor: {what} "):
        share_out(config_of(form), (1.0, 1.0))


def test_only_blocks_with_caches_of_their_own_are_counted() -> None:
    config = config_of("shared")
    spec = spec_of(config)
    assert [one.cache_of for one in spec.blocks] == [None] * 4 + [2, 2, 3]
    assert [one.mixer.made for one in spec.blocks[2:5]] == [(4, 2, 2)] * 2 + [(4, 0, 0)]  # type: ignore[union-attr]
    assert [one.dense.width for one in spec.blocks] == [80] * 4 + [160] * 3
    counted = [block.cache.n_bytes(64) > 0 for block in model_shape(config, "float32", "float32").blocks]
    assert counted == [True] * 4 + [False] * 3
    classes, places = cache_classes(spec, 0, 7, "float32")
    assert len(classes) == 2 and places == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 1), (0, 1), (1, 1)]


@pytest.mark.parametrize(
    ("name", "skipped", "producers", "columns"),
    [("E2B", 15, (14, 13), (512, 1024)), ("E4B", 24, (23, 22), (1024, 2048))],
)
def test_small_models_read_the_caches_of_two_blocks(
    name: str, skipped: int, producers: tuple[int, int], columns: tuple[int, int]
) -> None:
    config = published_config(f"gemma-4-{name}")
    assert config is not None
    spec = spec_of(config)
    n, cut = spec.n_layer, producers[1]
    assert spec.allowed_cuts() == [*range(n + 1)] and spec.skipped_from == skipped
    assert (spec.blocks[-1].cache_of, spec.blocks[-2].cache_of) == producers
    inputs = [spec.width + 256 * (n - at) for at in range(n + 1)]
    assert spec.row_at(cut).width == inputs[cut] and spec.row_at(cut + 1).width == inputs[cut + 1] + columns[0]
    assert [spec.row_at(at).width - inputs[at] for at in (skipped, n - 1, n)] == [sum(columns), columns[1], 0]
    assert spec.row_at(n - 1).columns[-1].name == f"cache.{producers[0]}"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 90}, "vocab_size_per_layer_input"),
        ({"per_layer_config": {"1": {"head_dim": 32}}}, "per_layer_config"),
        ({"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 16}}}, "per_layer_config"),
        ({"per_layer_config": {"1": {"sliding_window": 3}, "3": {"sliding_window": 3}}}, "per_layer_config"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}}, "yarn"),
        ({"rope_parameters": {"full_attention": {"factor": 2.0}}}, "proportional"),
        ({"num_kv_shared_layers": 3}, "n_shared|keys and values|last 3"),
    ],
)
def test_what_nothing_computes_is_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(CheckpointError, match=word) as refused:
        derive_config({**SIZES, **FORMS["dense"], **changes}, "my-model", Path("config.json"))
    assert "\n" not in str(refused.value)


def test_the_last_block_has_no_window_and_newer_files_say_heads_by_block() -> None:
    config = config_of("dense")
    said = {**SIZES, **FORMS["dense"], "layer_types": [NEAR, FAR, NEAR, NEAR]}
    assert derive_config(said, config.name, Path("config.json")) == config
    of_blocks = {str(i): {"head_dim": 32, "num_key_value_heads": 1} for i in (1, 3)}
    newer = {**said, "global_head_dim": None, "num_global_key_value_heads": None, "per_layer_config": of_blocks}
    assert derive_config(newer, config.name, Path("config.json")) == config
    assert math.isclose(spec_of(config).blocks[0].mixer.scale, 1.0)
