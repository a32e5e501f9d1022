"""Experts that are read when rows have chosen them: the bits of a stage in memory, and what is counted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from windows import FRAMES, LENGTH, apart, chunks, run, same, whole

from mdi.checkpoint.chunks import ChunkFile, write_chunks
from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.hfconfig import derive_config
from mdi.checkpoint.packing import Packing
from mdi.cli import launch
from mdi.errors import CheckpointError, LimitError
from mdi.files import default_cache_dir
from mdi.kernels import library
from mdi.kernels.slices import Slice
from mdi.model.plain import spec_of
from mdi.model.spec import Experts
from mdi.spec.window import WindowOptions
from mdi.stages import expert_slots
from mdi.stages.expert_slots import ExpertSlots
from mdi.stages.window import StoredParts
from mdi.stages.window_budget import MARGIN_BYTES, RunMemory, WindowPlan, choose_window, plan_window
from mdi.stages.window_files import FIRST_EXPERT, Unit, block_units, expert_units
from test_delta_files import SIZES as NEXT
from test_gemma4 import FORMS, SIZES
from test_own_families import FAMILIES, random_checkpoint
from tiny_models import tiny_lit

SRC = Path(__file__).resolve().parents[2] / "src"

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")

# Softmax; the same with biases and clamped units; sigmoids with a correction; with a shared expert behind a dense block; with
# groups; a gate before the shared expert; norms of their own.
_OWN: dict[str, dict[str, Any]] = {
    **{name: {"num_attention_heads": 6, "vocab_size": 96, **FAMILIES[name]} for name in ("gpt-oss", "minimax", "glm")},
    "deepseek": {
        "model_type": "deepseek_v3", "vocab_size": 96, "num_attention_heads": 4, "intermediate_size": 80,
        "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "rope_interleave": True, "num_key_value_heads": 4, "head_dim": 16,
    },
    "qwen3_next": {"model_type": "qwen3_next", **NEXT},
    "gemma4": {**SIZES, **FORMS["experts"]},
}  # fmt: skip
KINDS = ["Mixtral-8x7B-v0.1", "Qwen3-30B-A3B", *_OWN]
_LARGE = {
    "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64,
}  # fmt: skip
_LATENT = {"kv_lora_rank": 256, "q_lora_rank": 256, "v_head_dim": 64}


def chunk_of(kind: str, folder: Path, form: str = "float32", **changes: Any) -> ChunkFile:
    if kind not in _OWN:
        return chunks(folder, kind, form, n_starter=9)[0]
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "max_position_embeddings": LENGTH, **_OWN[kind], **changes}
    config = derive_config({"rms_norm_eps": 1e-5, "hidden_act": "silu", **sizes}, kind, Path("config.json"))
    source = PackedSource(random_checkpoint(config, folder / "model"), Packing(form, form))
    return ChunkFile(write_chunks(source, folder / "model", (config.n_layer,))[0])


@pytest.mark.parametrize("form", ["float32", "int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_a_stage_in_memory(kind: str, form: str, tmp_path: Path) -> None:
    expect_same(chunk_of(kind, tmp_path, form))


@pytest.mark.parametrize("kind", ["gpt-oss", "deepseek", "glm"])
def test_the_same_in_blocks_of_gguf_files(kind: str, tmp_path: Path) -> None:
    expect_same(chunk_of(kind, tmp_path, "q4_k", **_LARGE, **(_LATENT if kind == "deepseek" else {})))


def expect_same(chunk: ChunkFile) -> None:
    n_layer = chunk.config.n_layer
    expected = run(whole(chunk, 0, n_layer))
    n_all = sum(one.mlp.n for one in spec_of(chunk.config).blocks if isinstance(one.mlp, Experts))
    for n_experts, retain in ((2, None), (5, 1), (1000, 2)):
        stage = apart(chunk, 0, n_layer, n_experts, retain)
        try:
            assert same(run(stage), expected), n_experts
            use = stage.weight_use
            assert use.expert_misses <= n_all if n_experts == 1000 else use.expert_misses > n_all
        finally:
            stage.close()


@pytest.mark.parametrize("kind", ["Qwen3-30B-A3B", "deepseek", "qwen3_next"])
def test_three_nodes_give_the_logits_of_one(kind: str, tmp_path: Path) -> None:
    chunk = chunk_of(kind, tmp_path, "int8")
    n_layer = chunk.config.n_layer
    cuts = [0, 1, 2, n_layer]
    reference = whole(chunk, 0, n_layer)
    stages = [apart(chunk, start, stop, 3) for start, stop in zip(cuts, cuts[1:], strict=False)]
    try:
        position = 0
        for n_rows in FRAMES:
            slices = [Slice(i, position, n_rows) for i in range(3)]
            ids = (np.arange(3 * n_rows) * 7 + position) % chunk.config.padded_vocab_size
            expected = reference(reference.embed(ids, slices), slices)
            rows = stages[0].embed(ids, slices)
            for stage in stages:
                rows = stage(rows, slices)
            assert np.array_equal(stages[0].head(rows), reference.head(expected))
            position += n_rows
    finally:
        for stage in stages:
            stage.close()


def test_what_was_used_last_stays(tmp_path: Path) -> None:
    """The same row again chooses the same experts, in every block."""
    chunk = chunk_of("Qwen3-30B-A3B", tmp_path)
    n_layer, n_used = chunk.config.n_layer, 2
    stage = apart(chunk, 0, n_layer, n_layer * n_used)
    try:
        x = stage.embed(np.array([5]))
        for i in range(4):
            stage(x, [Slice(i, 0, 1)])
            use = stage.weight_use
            assert (use.expert_misses, use.expert_hits) == (n_layer * n_used, i * n_layer * n_used)
        read = use.read_bytes
        stage(x, [Slice(9, 0, 1)])
        assert stage.weight_use.expert_hits == 4 * n_layer * n_used
        assert stage.weight_use.read_bytes - read < 4 * n_layer << 16, "other units only"
    finally:
        stage.close()


def test_blocks_keep_their_share_when_a_pass_chooses_more_than_there_are_slots(tmp_path: Path) -> None:
    """All experts are chosen in each pass; half of the slots that this needs keep half of them."""
    chunk = chunk_of("Qwen3-30B-A3B", tmp_path)
    n_layer, n = chunk.config.n_layer, 6
    stage = apart(chunk, 0, n_layer, n_layer * n // 2)
    try:
        x = stage.embed(np.arange(60))
        for i in range(3):
            stage(x, [Slice(i, 0, 60)])
        assert stage.weight_use.expert_hits >= 2 * n_layer
    finally:
        stage.close()


def test_a_disk_that_fails_is_told_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = chunk_of("Mixtral-8x7B-v0.1", tmp_path)
    expected = run(whole(chunk, 0, chunk.config.n_layer))
    stage, read, is_broken = apart(chunk, 0, chunk.config.n_layer, 3), os.preadv, threading.Event()

    def failing(fd: int, buffers: Any, offset: int) -> int:
        if is_broken.is_set() and threading.current_thread().name.startswith("experts"):
            raise OSError(5, "Input/output error")
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    try:
        is_broken.set()
        with pytest.raises(CheckpointError, match=re.escape(str(chunk.path))):
            run(stage)
        is_broken.clear()
        stage.caches.clear()
        assert same(run(stage), expected)
        chunk.path.write_bytes(chunk.path.read_bytes())
        stage.caches.clear()
        with pytest.raises(CheckpointError, match="has changed"):
            run(stage)
    finally:
        stage.close()
    assert not [one for one in threading.enumerate() if one.name.startswith("experts")]


def test_an_error_of_a_frame_that_is_over_is_no_error_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads read. Expert 0 fails, which ends the first frame; then 1, while the next frame waits for 2."""
    chunk = chunk_of("Mixtral-8x7B-v0.1", tmp_path)
    assert chunk.packing is not None
    parts = StoredParts(chunk.packing, tmp_path)
    _, units = expert_units({"block.0": parts.part(chunk, "block.0").matrices})
    begun = [threading.Event() for _ in units]

    def reading(unit: Unit, memory: np.ndarray) -> Iterator[int]:
        expert = unit.piece - FIRST_EXPERT
        begun[expert].set()
        if expert < 3:
            assert begun[expert + 1].wait(60)  # of 3 only behind the error of 1, in the same thread
        if expert < 2:
            raise CheckpointError(f"expert {expert}")
        yield unit.n_bytes

    monkeypatch.setattr(expert_slots, "N_READERS", 2)
    monkeypatch.setattr(expert_slots, "read_unit", reading)
    slots = ExpertSlots(units, 4)
    try:
        with pytest.raises(CheckpointError, match="expert 0"):
            next(slots.ready(0, [0, 1]))
        assert [n for n, _ in slots.ready(0, [2, 3])][-1] == 2
    finally:
        slots.close()


def plans(folder: Path) -> tuple[StoredParts, Any]:
    chunk = chunk_of("Qwen3-30B-A3B", folder)
    assert chunk.packing is not None
    found = StoredParts(chunk.packing, folder)
    matrices = {part: found.part(chunk, part).matrices for part in chunk.part_names() if part.startswith("block.")}
    head, memory = found.part(chunk, "head").matrices["lm_head.weight"], RunMemory(0, 1, 0)

    def chosen(weights: int, options: WindowOptions | None = None, is_apart: bool = True) -> WindowPlan:
        limit = replace(options or WindowOptions(), memory=MARGIN_BYTES + weights)
        own = expert_units(matrices) if is_apart else None
        return choose_window("starter", limit, block_units(matrices), head, memory, 0, own)

    return found, (chosen, expert_units(matrices), head)


def test_memory_is_for_what_every_pass_reads_and_then_for_experts(tmp_path: Path) -> None:
    found, (chosen, (blocks, experts), head) = plans(tmp_path)
    try:
        others = plan_window(blocks, head, 2, 1).resident_bytes
        each = max(unit.n_bytes for unit in experts)
        plan = chosen(others + 7 * each + 1)
        assert (plan.n_expert_slots, plan.pass_bytes, plan.retain) == (7, 0, 1)
        assert plan.resident_bytes == others + 7 * each and len(plan.experts) == len(experts)
        assert chosen(1 << 40).experts == () and chosen(1 << 40).pass_bytes == 0, "everything fits"
        small = chosen(others + each)
        assert small.n_expert_slots >= 2 and small.pass_bytes > 0
        for options in (WindowOptions(2), WindowOptions(retain=2)):
            assert chosen(1 << 20, options).experts == (), "what is set by hand has whole blocks"
        assert chosen(1 << 20, is_apart=False).experts == ()
        with pytest.raises(LimitError) as error:
            chosen(2 * each)
        assert chosen(error.value.least_bytes - MARGIN_BYTES).resident_bytes <= error.value.least_bytes - MARGIN_BYTES
    finally:
        found.close()


@pytest.mark.parametrize("n_rows", [1, 16])
def test_the_plan_knows_how_often_experts_are_in_memory(n_rows: int) -> None:
    """Experts that are chosen about equally often: the rate of `ExpertSlots` is that of the plan, also if a pass chooses more
    experts than there are slots."""
    n_blocks, n, n_used, n_slots = 12, 64, 4, 192
    experts = ExpertSlots(
        [Unit(f"block.{b}", FIRST_EXPERT + e, ()) for b in range(n_blocks) for e in range(n)], n_slots
    )
    generator, n_chosen = np.random.default_rng(1), 0

    def one_pass() -> None:
        nonlocal n_chosen
        for block in range(n_blocks):
            chosen = sorted({int(e) for _ in range(n_rows) for e in generator.permutation(n)[:n_used]})
            n_chosen += len(chosen)
            for _ in experts.ready(block, chosen):
                pass

    try:
        for _ in range(8):  # until the slots are full
            one_pass()
        before = experts.use
        for _ in range(30):
            one_pass()
        hits, misses = (experts.use[i] - before[i] for i in (3, 4))
        assert experts.use.expert_hits + experts.use.expert_misses == n_chosen
        assert hits / (hits + misses) == pytest.approx(n_slots / (n_blocks * n), abs=0.05)
    finally:
        experts.close()


def test_a_run_with_little_memory_has_the_same_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MDI_CACHE_DIR", str(tmp_path / "cache"))
    sizes = {"n_embd": 256, "moe_intermediate_size": 256, "n_expert": 16, "n_expert_per_token": 2, "n_layer": 4}
    folder, _ = tiny_lit(tmp_path / "m", "Qwen3-30B-A3B", vocab_size=512, padded_vocab_size=512, **sizes)
    assert launch("prepare-model", [str(folder), "--n-nodes", "1", "--quantize", "float32"]) == 0

    def sampled(*flags: str) -> Any:
        capsys.readouterr()
        prompts = ["--prompt", "The ring", "--prompt", "Who are you?", "--prompt-style", "none", "--n-tokens", "8"]
        how = ["--ckpt", str(folder), "--quantize", "float32", "--temperature", "0", "--json"]
        launch("sample", [*prompts, *how, *flags])
        return json.loads(capsys.readouterr().out)

    expected = sampled()
    failed = sampled("--memory", "1M")["error"]
    told = re.search(r"--memory (\d+)M", failed)
    assert told is not None, failed
    found = sampled("--memory", f"{int(told[1]) + 16}M")
    assert [one["token_ids"] for one in found["samples"]] == [one["token_ids"] for one in expected["samples"]]
    (node,) = found["nodes"]
    assert node["expert_misses"] > 0 and node["expert_hits"] > 0 and node["weights_read_bytes"] > 0
    assert expected["nodes"][0]["expert_misses"] == 0


@pytest.mark.slow
def test_a_ring_of_three_with_little_memory_has_the_same_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three processes, each with room for some of its experts."""
    (cache := tmp_path / "cache").mkdir()
    (cache / "kernels").symlink_to(default_cache_dir() / "kernels")  # processes would compile them again
    monkeypatch.setenv("MDI_CACHE_DIR", str(cache))
    sizes = {"n_embd": 256, "moe_intermediate_size": 512, "n_expert": 16, "n_expert_per_token": 2, "n_layer": 6}
    folder, _ = tiny_lit(tmp_path / "m", "Qwen3-30B-A3B", vocab_size=512, padded_vocab_size=512, **sizes)
    pickled = folder / "lit_model.pth"  # which every node would load torch for
    weights = {name: tensor.clone() for name, tensor in torch.load(pickled, weights_only=True).items()}
    save_file(weights, folder / "lit_model.safetensors")
    pickled.unlink()
    assert launch("prepare-model", [str(folder), "--n-nodes", "3", "--quantize", "float32"]) == 0
    prompts = ["--prompt", "The ring", "--prompt", "Who are you?", "--prompt-style", "none", "--n-tokens", "8"]
    how = [*prompts, "--ckpt", str(folder), "--quantize", "float32", "--temperature", "0", "--json"]

    def ring(memory: str) -> Any:
        program = [sys.executable, str(SRC / "local_ring.py"), "--nodes", "3", "--memory", memory, *how]
        return json.loads(subprocess.run(program, capture_output=True, check=False).stdout)

    capsys.readouterr()
    assert launch("sample", how) == 0
    expected = json.loads(capsys.readouterr().out)
    told = re.search(r"--memory (\d+)M", failed := ring("1M")["error"])
    assert told is not None, failed
    found = ring(f"{int(told[1]) + 16}M")
    assert [one["token_ids"] for one in found["samples"]] == [one["token_ids"] for one in expected["samples"]]
    assert len(found["nodes"]) == 3 and all(node["expert_misses"] > 0 for node in found["nodes"])
    assert found["nodes"][0]["expert_misses"] > 2 * 16, "each of them was read once"
