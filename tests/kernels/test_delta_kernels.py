"""Models with gated delta nets in the kernels: all ways in which a stage is held, cut and shared, against torch.

Numbers are compared with transformers' in tests/references/test_delta_nets.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forced import forced, instruction_sets
from safetensors.numpy import save_file

from guessing import Bold, of_two_tokens
from mdi.cancel import Cancel
from mdi.checkpoint.adapters import AdapterName, AdapterSource, adapted_rows
from mdi.checkpoint.hfconfig import derive_config
from mdi.checkpoint.packing import Packing, plain
from mdi.checkpoint.parts import stage_parts
from mdi.checkpoint.source import LitCheckpoint
from mdi.checkpoint.virtual_adapters import open_adapter
from mdi.checkpoint.weights import WeightSource
from mdi.engine.rows import ArrayRows
from mdi.engine.scheduler import Scheduler
from mdi.engine.sequence import SamplingParams
from mdi.engine.starter import StarterEngine
from mdi.errors import CheckpointError, UsageError
from mdi.kernels import library
from mdi.kernels.slices import Slice, with_adapter
from mdi.kernels.states import StateStore
from mdi.model.caches import State
from mdi.model.plain import spec_of
from mdi.model.spec import DeltaNet
from mdi.net.ring import LoopbackRing
from mdi.spec.window import WindowMemory, WindowOptions
from mdi.stages.building import prompt_rows
from mdi.stages.kernel_stage import KernelStage, Resident
from mdi.stages.plain_blocks import PlainBlocks
from mdi.stages.torch_stage import StarterStage
from mdi.stages.window import open_window
from mdi.stages.window_budget import RunMemory
from mdi.tensor.shard_blocks import GroupSum
from mdi.tensor.shard_source import ShardSource
from mdi.tensor.shares import Share, share_out
from tensor_groups import meshes, on_all, sums
from test_own_families import FRAMES, LENGTH, PLAIN, ids_of, logits_of, random_checkpoint, stage_of

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")

_SIZES: dict[str, Any] = {
    "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 96,
    "max_position_embeddings": LENGTH, "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4,
    "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "hidden_act": "silu",
}  # fmt: skip
_EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "qwen3_5_text", "intermediate_size": 80},
    "experts": {"model_type": "qwen3_5_moe_text", **_EXPERTS},
    "by keys": {"model_type": "qwen3_next", **_EXPERTS},
}
TOLERANCE = 2e-4


def made(form: str, folder: Path, **changes: Any) -> LitCheckpoint:
    config = derive_config({**_SIZES, **FORMS[form], **changes}, f"delta-{form}".replace(" ", "-"), Path("config.json"))
    return random_checkpoint(config, folder / form)


@pytest.fixture(params=["dense", "experts"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> LitCheckpoint:
    return made(request.param, tmp_path)


def in_torch(source: WeightSource, ids: np.ndarray, packing: Packing | None = None) -> np.ndarray:
    """Logits of one frame, of what packed weights stand for."""
    n_layer = source.config.n_layer
    stage, slices = StarterStage(spec_of(source.config), n_layer), [Slice(0, 0, LENGTH, LENGTH)]

    def weights(part: str) -> Any:
        found = source.tensors(part) if packing is None else plain(dict(source.weights(part, packing)))
        return {name: one if packing is None else torch.from_numpy(one.copy()) for name, one in found.items()}

    stage.load(stage_parts(0, n_layer, starter=True), weights, torch.device("cpu"), torch.float32)
    stage.prepare(LENGTH, torch.device("cpu"), torch.float32)
    found: np.ndarray = stage.head(stage(stage.embed(torch.from_numpy(ids), slices), slices)).numpy()
    return found


def test_the_kernels_compute_what_torch_does(source: LitCheckpoint) -> None:
    ids, found = ids_of(source), {}
    expected = in_torch(source, ids)
    for force in instruction_sets():
        with forced(force):
            found[force] = logits_of(stage_of(source), ids)
            assert np.abs(found[force] - expected).max() < TOLERANCE
    vectors = [one for force, one in found.items() if force != "plain"]
    assert all(np.array_equal(one, vectors[0]) for one in vectors)


def test_heads_of_keys_in_turn_are_those_of_torch(tmp_path: Path) -> None:
    """As GGUF files have them."""
    source = made("dense", tmp_path, linear_value_heads_in_turn=True)
    ids = ids_of(source)
    assert np.abs(logits_of(stage_of(source), ids) - in_torch(source, ids)).max() < TOLERANCE
    with pytest.raises(UsageError, match="^--parallel tensor: keys of delta nets .*--parallel ring"):
        share_out(source.config, (1.0, 1.0))


def test_what_comes_in_one_frame_changes_no_bit(source: LitCheckpoint) -> None:
    """One row of each of three texts at a time, whole prompts, and rows that are taken back."""
    ids, stage = ids_of(source), stage_of(source)

    def rows(slices: list[Slice]) -> np.ndarray:
        own = np.concatenate([ids[one.start : one.start + one.n_rows] for one in slices])
        return stage(stage.embed(own, slices), slices)

    expected = rows([Slice(9, 0, LENGTH, LENGTH)])
    for start, stop in ((0, 31), (31, 50)):
        found = rows([Slice(i, start, stop - start, stop - start) for i in (4, 5, 6)])
        assert np.array_equal(found, np.tile(expected[start:stop], (3, 1)))
    for at in range(50, LENGTH):
        rows([Slice(5, at, min(3, LENGTH - at), 1)])
        found = rows([Slice(i, at, 1, 1) for i in (4, 5, 6)])
        assert np.array_equal(found, np.tile(expected[at], (3, 1)))


@pytest.mark.parametrize(("form", "most"), [("fp16", 1e-4), ("int8", 0.3), ("int8;delta.qkv=int4", 0.3)])
def test_packed_weights_are_near_what_they_stand_for(source: LitCheckpoint, form: str, most: float) -> None:
    """Before 8 and 4 bits, activations are rounded, too, and a row's experts may be others then."""
    packing, ids = Packing(form, "fp16"), ids_of(source)
    found, expected = logits_of(stage_of(source, packing=packing), ids), in_torch(source, ids, packing)
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < most


def test_windows_give_the_same_bits(source: LitCheckpoint, tmp_path: Path) -> None:
    form, ids, n_layer = Packing("int8", "int8"), ids_of(source), source.config.n_layer
    whole, parts = logits_of(stage_of(source, packing=form), ids), stage_parts(0, n_layer, starter=True)
    weights = open_window(
        "starter", WindowOptions(2), parts, lambda part: source, form, tmp_path, RunMemory(0, None, 0), Cancel()
    )
    stage = KernelStage(spec_of(source.config), 0, n_layer, weights)
    try:
        stage.prepare(LENGTH)
        assert np.array_equal(logits_of(stage, ids), whole)
    finally:
        stage.close()


def test_texts_are_the_same_with_guesses_under_way(source: LitCheckpoint) -> None:
    stage = stage_of(source)
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


@pytest.mark.parametrize("parts", [(1.0, 1.0), (1.0, 3.0, 0.0)])
def test_shares_of_a_group_add_up(source: LitCheckpoint, parts: tuple[float, ...]) -> None:
    """Values stay with their keys; gates with their heads."""
    config, ids = source.config, ids_of(source)
    shares = share_out(config, parts)
    with meshes(shares.n_nodes) as found:
        reduces = sums(found)

        def work(rank: int) -> np.ndarray:
            share = Share(shares, rank, config)
            group = GroupSum(share)
            group.join("all", reduces[rank])
            names = stage_parts(0, config.n_layer, starter=rank == 0)
            weights = Resident(names, ShardSource(source, share, PLAIN).weights)
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
        assert all(np.abs(one - expected).max() < TOLERANCE for one in on_all(shares.n_nodes, work))


MODULES = {
    "dense": (
        *(f"self_attn.{x}_proj" for x in "qkvo"), "mlp.gate_proj",
        *(f"linear_attn.{x}" for x in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")),
    ),
    "by keys": (*(f"linear_attn.{x}" for x in ("in_proj_qkvz", "in_proj_ba", "out_proj")), "self_attn.q_proj"),
}  # fmt: skip


@pytest.mark.parametrize("form", MODULES)
def test_with_lora_the_logits_are_those_of_the_merged_weights(form: str, tmp_path: Path) -> None:
    source, folder, generator = made(form, tmp_path), tmp_path / "lora", np.random.default_rng(6)
    config, tensors = source.config, {}
    spec, state = spec_of(config), {name: np.array(source.array(name)) for name in source.specs}
    found_in = set()
    for block in range(config.n_layer):
        for module in MODULES[form]:
            pieces, n_out, n_in = adapted_rows(config, form, block, module)
            if pieces:
                a, b = (0.2 * generator.standard_normal(shape, dtype=np.float32) for shape in ((2, n_in), (n_out, 2)))
                path = f"base_model.model.model.layers.{block}.{module}"
                tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
                found_in.add(module)
            for one in pieces:
                rows = b[one.numbers(spec)]
                state[f"transformer.h.{block}.{one.layer}.weight"][one.first : one.first + len(rows)] += 2 * rows @ a
    assert found_in == set(MODULES[form])
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    of = AdapterSource([open_adapter(AdapterName("x", folder), 1, config, lambda: None)], lambda part: source)
    weights = Resident(stage_parts(0, config.n_layer, starter=True), source.weights)
    own = {part: of.weights(part) for part in of.part_names()}
    stage = KernelStage(spec, 0, config.n_layer, weights, adapters=own)
    stage.prepare(LENGTH)
    ids, part = ids_of(source), [Slice(with_adapter(1, 0), 0, LENGTH, LENGTH)]
    found, plain_rows = stage.head(stage(stage.embed(ids, part), part)), logits_of(stage_of(source), ids)
    save_file(state, source.path / "lit_model.safetensors")
    wanted = logits_of(stage_of(LitCheckpoint(source.path)), ids)
    size = np.linalg.norm(wanted)
    assert np.linalg.norm(found - wanted) / size < 1e-4 < 0.05 < np.linalg.norm(plain_rows - wanted) / size
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 2}))
    with pytest.raises(CheckpointError, match="gated delta nets", check=lambda e: e.code == "adapter"):
        open_adapter(AdapterName("x", folder), 1, config, lambda: None)


@pytest.mark.parametrize("module", MODULES["dense"])
def test_with_heads_in_turn_lora_on_delta_nets_is_refused(module: str, tmp_path: Path) -> None:
    config = made("dense", tmp_path, linear_value_heads_in_turn=True).config
    is_delta, folder = module.startswith("linear"), tmp_path / "lora"
    folder.mkdir()
    block = 0 if is_delta else 1
    _, n_out, n_in = adapted_rows(config, "", block, module)
    path = f"base_model.model.model.layers.{block}.{module}"
    tensors = {f"{path}.lora_A.weight": np.ones((2, n_in), "f"), f"{path}.lora_B.weight": np.ones((n_out, 2), "f")}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    if is_delta:
        with pytest.raises(CheckpointError, match="block 0, whose heads", check=lambda e: e.code == "adapter"):
            open_adapter(AdapterName("x", folder), 1, config, lambda: None)
    else:
        open_adapter(AdapterName("x", folder), 1, config, lambda: None)


def test_frames_under_a_window_of_weights_have_as_many_rows_as_are_counted_for_states(tmp_path: Path) -> None:
    """A cache limit that a text fits into by the count holds the frames that it comes in."""
    spec = spec_of(made("dense", tmp_path).config)
    rows = prompt_rows(WindowMemory(), spec)
    of = next(
        State(m.n_head, m.k_size, m.v_size, m.n_channels, m.n_taps)
        for m in (block.mixer for block in spec.blocks)
        if isinstance(m, DeltaNet)
    )
    length = 512
    store = StateStore(of, 3, of.of_blocks(3, "float32").n_bytes(length))
    entry = store.begin()
    for start in range(0, length, rows):
        store.grow(entry, start, min(rows, length - start))


def test_rows_of_a_module_are_those_of_its_layer(tmp_path: Path) -> None:
    """A module with queries and their gates, head by head, as names of files give them."""
    config = made("dense", tmp_path).config
    queries, gates = adapted_rows(config, "", 1, "self_attn.q_proj")[0]
    spec = spec_of(config)
    assert (queries.layer, gates.layer) == ("attn.qkv", "attn.out_gate")
    assert queries.numbers(spec).tolist() == [head * 64 + i for head in range(6) for i in range(32)]
    assert gates.numbers(spec).tolist() == [head * 64 + 32 + i for head in range(6) for i in range(32)]


def test_gradients_are_those_of_small_changes(tmp_path: Path) -> None:
    """Of whole texts, in torch; what blocks give is what the kernels give."""
    source, generator = made("dense", tmp_path), np.random.default_rng(1)
    blocks = PlainBlocks(spec_of(source.config), lambda block: source.weights(f"block.{block}"))
    x, change, weight = (generator.standard_normal((2, 9, 48), dtype=np.float32) for _ in range(3))
    found = blocks.forward(x, 0, 4)
    rows = stage_of(source)(x.reshape(18, 48), [Slice(i, 0, 9, 9) for i in (1, 2)])
    assert np.linalg.norm(found.reshape(18, 48) - rows) / np.linalg.norm(rows) < 1e-5
    gradient, _ = blocks.backward(x, weight, 0, 4)
    step = np.float32(1e-3)
    changed = [
        float((blocks.forward(x + sign * change, 0, 4).astype(np.float64) * weight).sum()) for sign in (step, -step)
    ]
    assert (changed[0] - changed[1]) / (2 * step) == pytest.approx(float((gradient * change).sum()), rel=2e-2)
