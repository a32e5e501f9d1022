"""Models with latent attention, as they are published, give transformers' logits at every position, over one node and three."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forced import forced, instruction_sets
from safetensors.torch import load_file

from llama_cpp_logits import logits_of_llama_cpp
from mdi.checkpoint.chunks import ChunkFile, write_chunks
from mdi.checkpoint.convert import convert
from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.export import export_hf
from mdi.checkpoint.gguf import read_gguf
from mdi.checkpoint.gguf_export import export_gguf
from mdi.checkpoint.ggufsource import GgufSource
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.parts import stage_parts
from mdi.checkpoint.source import open_source
from mdi.errors import CheckpointError
from mdi.kernels import library
from mdi.kernels.blocks import why_not_in_kernels
from mdi.model.plain import ModelConfig, spec_of
from mdi.spec.cluster import standalone
from mdi.spec.window import WindowOptions
from mdi.stages.kernel_stage import KernelStage, Resident
from mdi.stages.window import open_window
from mdi.stages.window_budget import RunMemory
from mdi.tensor.shard_blocks import GroupSum
from mdi.tensor.shard_source import ShardSource
from mdi.tensor.shares import Share, share_out
from references import test_logits as kernels
from references.test_delta_nets import logits_of, rows_of, stages_of
from references.test_exported import PROGRAM
from references.test_references import generated
from references.write_latent import CASES, version
from secondaries import cluster_of, secondaries
from tensor_groups import meshes, on_all, sums
from tiny_checkpoint import tokenizer

FOLDER = Path(__file__).parents[2] / ".venv-references" / "latent"
TOLERANCE = 1e-4  # transformers makes keys and values of all heads, whose sums are in another order


def _is_written() -> bool:
    written = FOLDER / "version.txt"
    return written.is_file() and written.read_text(encoding="utf-8") == version()


needs_kernels = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")
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
    assert all(np.array_equal(np.array(again.array(key)), np.array(source.array(key))) for key in source.specs)
    # Torch's products depend on where in memory a matrix begins, on some processors.
    assert np.abs(logits_of(stages_of(again, [0, n_layer], len(ids)), ids) - found).max() < TOLERANCE


@pytest.mark.parametrize("name", CASES)
@needs_kernels
def test_kernels_give_the_same_logits_with_the_same_bits_over_any_cut(name: str, tmp_path: Path) -> None:
    folder, ids, expected = folder_of(name, tmp_path)
    source = open_source(folder)
    n_layer = source.config.n_layer
    assert why_not_in_kernels(source.config) is None
    found = kernels.logits_of(kernels.stages_of(source, [0, n_layer], len(ids)), ids)
    assert np.abs(found - expected).max() < TOLERANCE
    assert np.array_equal(kernels.logits_of(kernels.stages_of(source, [0, 1, 2, n_layer], len(ids)), ids), found)
    stage = kernels.stages_of(source, [0, n_layer], len(ids))[0]
    rows = [stage.head(stage(stage.embed(np.array([one]), [(0, i, 1)]), [(0, i, 1)])) for i, one in enumerate(ids)]
    assert np.array_equal(np.concatenate(rows), found)  # one row at a time, whose bits are those of rows of prompts


@pytest.mark.parametrize("cache_type", ["float32", "bf16", "fp16", "int8"])
@needs_kernels
def test_all_instruction_sets_give_the_same_bits(cache_type: str) -> None:
    """But for the plain one, which rounds products before it adds them."""
    source, found = open_source(FOLDER / "deepseek-v3"), {}
    for name in instruction_sets():
        with forced(name):
            (stage,) = kernels.stages_of(source, [0, 4], 90, cache_type)
            found[name] = kernels.logits_of([stage], json.loads((FOLDER / "deepseek-v3" / "ids.json").read_text()))
    assert len({one.tobytes() for name, one in found.items() if name != "plain"}) <= 1
    best = next(iter(found.values()))
    close = {"float32": 1e-4, "bf16": 0.3, "fp16": 0.05, "int8": 0.3}[cache_type]
    assert np.median(np.abs(found["plain"] - best).max(axis=1)) < close, "a rounded row may choose other experts"


@pytest.mark.parametrize(("cache_type", "most"), [("bf16", 0.3), ("fp16", 0.05), ("int8", 0.3)])
@needs_kernels
def test_latent_rows_in_fewer_bits_stay_close(cache_type: str, most: float) -> None:
    folder = FOLDER / "kimi-k2"
    source, ids, expected = (
        open_source(folder),
        json.loads((folder / "ids.json").read_text()),
        np.load(folder / "logits.npy"),
    )
    found = kernels.logits_of(kernels.stages_of(source, [0, 1, 3], len(ids), cache_type), ids)
    assert 1e-5 < np.median(np.abs(found - expected).max(axis=1)) < most


@pytest.mark.parametrize("name", ["deepseek-v3-fp8", "moonlight"])
@pytest.mark.parametrize(("form", "least"), [("bf16", 0.999), ("int8", 0.95), ("int4", 0.5), ("mxfp4", 0.3)])
@needs_kernels
def test_weights_in_fewer_bits_give_the_same_over_any_cut(form: str, least: float, name: str) -> None:
    folder = FOLDER / name
    source, ids, expected = (
        open_source(folder),
        json.loads((folder / "ids.json").read_text()),
        np.load(folder / "logits.npy"),
    )
    n_layer = source.config.n_layer
    packed = PackedSource(source, Packing(form, form if form == "bf16" else "int8"))
    found = kernels.logits_of(kernels.stages_of(packed, [0, n_layer], len(ids)), ids)
    assert np.array_equal(kernels.logits_of(kernels.stages_of(packed, [0, 1, 2, n_layer], len(ids)), ids), found)
    if (name, form) == ("moonlight", "bf16"):
        least = 0.995  # it has one block more
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > least  # rounding sends some rows to other experts


@pytest.mark.parametrize("name", ["glm4-moe-lite", "deepseek-v3", "moonlight"])
@pytest.mark.parametrize("parts", [(3, 2), (1, 0, 2, 1)])
@needs_kernels
def test_nodes_that_share_all_blocks_give_the_same_logits(name: str, parts: tuple[int, ...], tmp_path: Path) -> None:
    folder, ids, expected = folder_of(name, tmp_path)
    source, spec = open_source(folder), spec_of(open_source(folder).config)
    (alone,) = kernels.stages_of(source, [0, spec.n_layer], len(ids))
    shares = share_out(source.config, parts)
    places = [GroupSum(Share(shares, rank, source.config)) for rank in range(len(parts))]
    stages = []
    for place in places:
        own = ShardSource(source, place.share, Packing("float32", "float32"))
        blocks = [f"block.{i}" for i in range(spec.n_layer)]
        stages.append(KernelStage(spec, 0, spec.n_layer, Resident(blocks, own.weights), group=place))
        stages[-1].prepare(len(ids))
    with meshes(len(parts)) as found:
        for place, all_reduce in zip(places, sums(found), strict=True):
            place.join("all", all_reduce)
        for start, end in ((0, 40), (40, 41), (41, len(ids))):
            slices = [(0, start, end - start)]
            x = alone.embed(np.array(ids[start:end]), slices)
            rows = on_all(len(parts), lambda rank, x=x, own=slices: stages[rank](x.copy(), own))  # type: ignore[misc]
            assert all(np.array_equal(one, rows[0]) for one in rows)
            assert np.abs(alone.head(rows[0]) - expected[start:end]).max() < TOLERANCE
    kept = [stage.caches.export(0, 0, len(ids)).blocks for stage, part in zip(stages, parts, strict=True) if part]
    for blocks in kept:  # each node that has heads keeps the same latent rows
        assert all(np.array_equal(blocks[i].arrays[0], kept[0][i].arrays[0]) for i in range(spec.n_layer))


@pytest.mark.parametrize("cache_type", ["float32", "int8"])
@needs_kernels
def test_caches_go_to_another_node_and_from_kernels_to_torch(cache_type: str) -> None:
    folder = FOLDER / "deepseek-v3"
    source, ids = open_source(folder), json.loads((folder / "ids.json").read_text())
    here, there = (kernels.stages_of(source, [0, 4], len(ids), cache_type)[0] for _ in range(2))
    first, rest = [(0, 0, 50)], [(0, 50, 40)]
    here(here.embed(np.array(ids[:50]), first), first)
    kept = here.caches.export(0, 0, 50)
    expected = here.head(here(here.embed(np.array(ids[50:]), rest), rest))
    there.caches.fill(0, kept)
    assert np.array_equal(there.head(there(there.embed(np.array(ids[50:]), rest), rest)), expected)
    if cache_type == "float32":
        (in_torch,) = stages_of(source, [0, 4], len(ids))
        in_torch.caches.fill(0, kept)
        assert np.abs(rows_of([in_torch], ids[50:], 50) - expected).max() < TOLERANCE


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
    assert [stage.caches.paged(i).shapes for i in range(config.n_layer)] == [[(1, 32 + 16)]] * config.n_layer


Change = Callable[[np.ndarray], np.ndarray]
Without = dict[str, object] | tuple[str, Change]


def _of_latent(**changes: object) -> Without:
    return {"latent_attention": changes}


# A feature -> settings of a model without it, or its tensors and what becomes of their numbers.
_ALL: dict[str, Without] = {
    "pairs beside each other": {"rope_interleave": False},
    "the base of the rotation": {"rope_base": 10**9},
    "what is rotated": (r"kv_a_proj_with_mqa\.weight", lambda a: np.concatenate([a[:32], 0 * a[32:]])),
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


GGUF_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp", "model.norm": "output_norm",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp", "model.embed_tokens": "token_embd", "lm_head": "output",
}  # fmt: skip


def gguf_tensors(tensors: dict[str, torch.Tensor], hf: dict[str, Any], is_old: bool) -> dict[str, np.ndarray]:
    """As llama.cpp's converter writes them; in old files keys and values of heads are in one matrix."""
    found: dict[str, np.ndarray] = {}
    stacked: dict[str, dict[int, np.ndarray]] = {}
    for key, tensor in tensors.items():
        array, match = tensor.numpy(), re.fullmatch(r"model\.layers\.(\d+)\.(.+)", key)
        if match is not None and int(match[1]) >= hf["num_hidden_layers"]:
            continue
        path, name = ("", key) if match is None else (f"blk.{match[1]}.", match[2])
        expert = re.fullmatch(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if expert:
            stacked.setdefault(f"{path}ffn_{expert[2]}_exps.weight", {})[int(expert[1])] = array
        elif name == "mlp.gate.e_score_correction_bias":
            found[f"{path}exp_probs_b.bias"] = array
        elif "kv_b_proj" in name and not is_old:
            heads = array.reshape(hf["num_attention_heads"], -1, array.shape[1])
            found[f"{path}attn_k_b.weight"] = heads[:, : hf["qk_nope_head_dim"]].transpose(0, 2, 1)
            found[f"{path}attn_v_b.weight"] = heads[:, hf["qk_nope_head_dim"] :]
        else:
            found[f"{path}{GGUF_NAMES[name.removesuffix('.weight')]}.weight"] = array
    return {**found, **{name: np.stack([one[i] for i in range(len(one))]) for name, one in stacked.items()}}


def write_gguf(folder: Path, path: Path, is_old: bool = False) -> Path:
    import gguf

    hf = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads, nope, rope = hf["num_attention_heads"], hf["qk_nope_head_dim"], hf["qk_rope_head_dim"]
    sizes = {
        "attention.head_count_kv": 1, "attention.key_length": hf["kv_lora_rank"] + rope,
        "attention.value_length": hf["kv_lora_rank"], "attention.key_length_mla": nope + rope,
        "attention.value_length_mla": hf["v_head_dim"],
    }  # fmt: skip
    if is_old:
        sizes = {
            "attention.head_count_kv": heads, "attention.key_length": nope + rope, "attention.value_length": hf["v_head_dim"],
        }  # fmt: skip
    numbers = {
        **sizes, "block_count": hf["num_hidden_layers"], "embedding_length": hf["hidden_size"],
        "feed_forward_length": hf["intermediate_size"], "attention.head_count": heads,
        "context_length": hf["max_position_embeddings"], "rope.dimension_count": rope,
        "attention.kv_lora_rank": hf["kv_lora_rank"], "attention.q_lora_rank": hf["q_lora_rank"],
        "leading_dense_block_count": hf["first_k_dense_replace"], "vocab_size": hf["vocab_size"],
        "expert_feed_forward_length": hf["moe_intermediate_size"], "expert_count": hf["n_routed_experts"],
        "expert_used_count": hf["num_experts_per_tok"], "expert_shared_count": hf["n_shared_experts"],
        "expert_gating_func": 2, "expert_group_count": hf["n_group"], "expert_group_used_count": hf["topk_group"],
    }  # fmt: skip
    floats = {
        "attention.layer_norm_rms_epsilon": hf["rms_norm_eps"], "rope.freq_base": hf["rope_theta"],
        "expert_weights_scale": hf["routed_scaling_factor"],
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, arch := "deepseek2")
    if scaling := hf.get("rope_scaling"):
        writer.add_string(f"{arch}.rope.scaling.type", "yarn")
        numbers["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
        floats |= {
            "rope.scaling.factor": scaling["factor"],
            "rope.scaling.yarn_log_multiplier": 0.1 * scaling["mscale_all_dim"],
        }
        floats |= {f"rope.scaling.yarn_{beta}": scaling[beta] for beta in ("beta_fast", "beta_slow")}
    for key, number in numbers.items():
        if number is not None:
            writer.add_uint32(f"{arch}.{key}", number)
    for key, number in floats.items():
        writer.add_float32(f"{arch}.{key}", number)
    writer.add_bool(f"{arch}.expert_weights_norm", True)
    writer.add_string("tokenizer.ggml.model", "none")
    for name, array in gguf_tensors(load_file(folder / "model.safetensors"), hf, is_old).items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("name", "is_old"), [("glm4-moe-lite", False), ("kimi-k2", False), ("kimi-k2", True), ("moonlight", False)]
)
def test_gguf_files_give_the_same_logits(name: str, is_old: bool, tmp_path: Path) -> None:
    folder, ids, expected = folder_of(name, tmp_path)
    source = GgufSource(write_gguf(folder, tmp_path / "model.gguf", is_old))
    found = logits_of(stages_of(source, [0, source.config.n_layer], len(ids)), ids)
    assert np.abs(found - expected).max() < TOLERANCE
    assert np.array_equal(
        source.array("transformer.h.1.attn.kv_b_proj.weight"), source.rows("transformer.h.1.attn.kv_b_proj.weight")[:]
    )


@pytest.mark.parametrize("name", ["glm4-moe-lite", "kimi-k2", "moonlight"])
def test_exported_gguf_files_have_the_tensors_of_llama_cpps_converter_and_give_the_same_logits(
    name: str, tmp_path: Path
) -> None:
    folder, ids, expected = folder_of(name, tmp_path)
    export_gguf(PackedSource(open_source(folder), Packing("float32", "float32")), folder, out := tmp_path / "out.gguf")
    found, wanted = (read_gguf(path) for path in (out, write_gguf(folder, tmp_path / "model.gguf")))
    n_layer = wanted.fields[
        "deepseek2.block_count"
    ]  # behind it are blocks that predict further tokens, if there are any
    n_more = found.fields.get("deepseek2.nextn_predict_layers", 0)
    more = tuple(f"blk.{n_layer + i}." for i in range(n_more))
    shapes = [{name: tensor.shape for name, tensor in one.tensors.items()} for one in (found, wanted)]
    assert {name: shape for name, shape in shapes[0].items() if not name.startswith(more)} == shapes[1]
    assert found.fields["deepseek2.block_count"] == n_layer + n_more
    own = {
        key: value
        for key, value in wanted.fields.items()
        if key.startswith("deepseek2.") and "vocab_size" not in key and "block_count" not in key
    }
    own.pop("deepseek2.context_length")  # which YaRN makes longer here
    for key, value in own.items():
        assert found.fields[key] == pytest.approx(value), key
    source = GgufSource(out)
    logits = logits_of(stages_of(source, [0, source.config.n_layer], len(ids)), ids)
    assert np.abs(logits - expected).max() < TOLERANCE


@pytest.mark.parametrize("name", ["glm4-moe-lite", "deepseek-v3"])
def test_llama_cpp_gives_the_same_logits_of_exported_gguf_files(name: str, tmp_path: Path) -> None:
    """With the epsilon of latent rows that it has for all norms, and the factor of YaRN that it knows."""
    folder, ids, _ = folder_of(name, tmp_path)
    hf = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"rms_norm_eps": 1e-6}
    if name == "deepseek-v3":
        assert hf["n_group"] > hf["topk_group"] > 1
        hf["rope_scaling"]["mscale_all_dim"] = hf["rope_scaling"]["mscale"] = 1.0
    (folder / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    source = open_source(folder)
    expected = logits_of(stages_of(source, [0, source.config.n_layer], len(ids)), ids)
    export_gguf(PackedSource(source, Packing("float32", "float32")), folder, out := tmp_path / "out.gguf")
    found = logits_of_llama_cpp(out, ids, expected.shape[1])
    assert np.abs(found - expected).max() < 10 * TOLERANCE
    assert np.array_equal(found.argmax(axis=1), expected.argmax(axis=1))


def test_cosines_with_a_factor_are_not_exported(tmp_path: Path) -> None:
    """llama.cpp knows a factor of the softmax only: here it is another one than that of cosines and sines."""
    folder, *_ = folder_of("deepseek-v3", tmp_path)
    with pytest.raises(CheckpointError, match="rope_adjustments"):
        export_gguf(PackedSource(open_source(folder), Packing("float32", "float32")), folder, tmp_path / "out.gguf")


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


def test_exported_models_have_the_same_logits_in_transformers(tmp_path: Path, transformers: Callable[..., str]) -> None:
    outs = []
    for name in CASES:
        export_hf(open_source(folder_of(name, tmp_path)[0]), tmp_path, out := tmp_path / name)
        shutil.copy(FOLDER / name / "ids.json", out)
        outs.append(str(out))
    transformers(PROGRAM, *outs)
    for name in CASES:
        expected = np.load(FOLDER / name / "logits.npy")
        assert np.abs(np.load(tmp_path / name / "found.npy") - expected).max() < TOLERANCE, name


@needs_kernels
def test_a_window_over_the_weights_gives_the_same_bits(tmp_path: Path) -> None:
    source, ids = PackedSource(open_source(FOLDER / "deepseek-v3"), Packing("int8", "int8")), list(range(1, 91))
    chunk, parts = ChunkFile(write_chunks(source, tmp_path, (4,))[0]), stage_parts(0, 4, starter=True)
    run = RunMemory(0, None, 0)
    weights = open_window("starter", WindowOptions(2, 2), parts, lambda _: chunk, source.packing, tmp_path, run, None)
    stage = KernelStage(spec_of(source.config), 0, 4, weights)
    stage.prepare(len(ids))
    try:
        found = kernels.logits_of([stage], ids)
    finally:
        stage.close()
    assert np.array_equal(found, kernels.logits_of(kernels.stages_of(source, [0, 4], len(ids)), ids))
