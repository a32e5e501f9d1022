"""Files of models with gated delta nets as they are published: GGUF of Qwen3-Next, and FP8 with a tensor for each expert."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from llama_cpp_logits import logits_of_llama_cpp
from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.export import export_hf
from mdi.checkpoint.gguf_export import export_gguf
from mdi.checkpoint.ggufsource import GgufSource
from mdi.checkpoint.hfconfig import derive_config
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.source import LitCheckpoint, open_source
from quantized_files import FP8, fp8
from references.test_delta_nets import logits_of, stages_of
from test_own_families import random_checkpoint
from tiny_checkpoint import tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 4, "vocab_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 2.0**-20, "hidden_act": "silu", "full_attention_interval": 4,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "tie_word_embeddings": False, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "norm_topk_prob": True,
    "max_position_embeddings": 128, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
IDS = [int(i) for i in np.random.default_rng(3).integers(0, 96, 90)]


def made(family: str, folder: Path) -> LitCheckpoint:
    config = derive_config({"model_type": family, **SIZES}, family, Path("config.json"))
    source = random_checkpoint(config, folder / family)
    tokenizer().save(str(source.path / "tokenizer.json"))
    return source


ENDS = {
    "lm_head.weight": "output.weight", "transformer.wte.weight": "token_embd.weight",
    "transformer.ln_f.weight": "output_norm.weight",
}  # fmt: skip
PLAIN = {
    "norm_1.weight": "attn_norm.weight", "norm_2.weight": "post_attention_norm.weight", "delta.qkv.weight": "attn_qkv.weight",
    "delta.out_gate.weight": "attn_gate.weight", "delta.conv.weight": "ssm_conv1d.weight", "delta.dt_bias": "ssm_dt.bias",
    "delta.A_log": "ssm_a", "delta.norm.weight": "ssm_norm.weight", "delta.proj.weight": "ssm_out.weight",
    "delta.gates.weight": "ssm_ba.weight", "attn.proj.weight": "attn_output.weight", "attn.norm_q.weight": "attn_q_norm.weight",
    "attn.norm_k.weight": "attn_k_norm.weight", "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.shared_experts.gate.weight": "ffn_gate_inp_shexp.weight", "mlp.shared_experts.fc_1.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.fc_2.weight": "ffn_up_shexp.weight", "mlp.shared_experts.proj.weight": "ffn_down_shexp.weight",
}  # fmt: skip


def next_in_gguf(source: LitCheckpoint) -> dict[str, np.ndarray]:
    """As llama.cpp's converter has the tensors of Qwen3-Next: heads as they are, b and a of each head of keys together."""
    found = {}
    for ours, theirs in ENDS.items():
        found[theirs] = np.array(source.array(ours))
    for i, block in enumerate(source.spec.blocks):
        prefix, own = f"transformer.h.{i}.", f"blk.{i}."
        arrays = {
            key.removeprefix(prefix): np.array(source.array(key)) for key in source.specs if key.startswith(prefix)
        }
        for module, name in (("fc_1", "gate"), ("fc_2", "up"), ("proj", "down")):
            stacked = [arrays.pop(f"mlp.experts.{e}.{module}.weight") for e in range(4)]
            found[f"{own}ffn_{name}_exps.weight"] = np.stack(stacked)
        if "attn.qkv.weight" in arrays:
            q, k, v = np.split(arrays.pop("attn.qkv.weight"), [128, 192])
            gate = arrays.pop("attn.out_gate.weight")
            found[f"{own}attn_q.weight"] = np.stack([q.reshape(4, 32, -1), gate.reshape(4, 32, -1)], 1).reshape(256, -1)
            found |= {f"{own}attn_k.weight": k, f"{own}attn_v.weight": v}
        for name, array in arrays.items():
            if name == "delta.gates.weight":
                array = array.reshape(2, 2, 2, -1).swapaxes(0, 1).reshape(8, -1)
            elif name == "delta.A_log":
                array = -np.exp(array)
            elif name == "delta.conv.weight":
                array = array[:, 0]
            elif name == "mlp.shared_experts.gate.weight":
                array = array[0]
            found[own + PLAIN[name]] = array
        assert block.mlp is not None
    return {
        name: array + 1 if name.endswith("norm.weight") and "ssm" not in name else array
        for name, array in found.items()
    }


def write_next(
    path: Path, source: LitCheckpoint, changes: dict[str, int] | None = None, more: dict[str, np.ndarray] | None = None
) -> Path:
    """One file, with other numbers in some fields, and more tensors."""
    writer, arch = gguf.GGUFWriter(path, "qwen3next"), "qwen3next"
    numbers = {
        "block_count": 4, "embedding_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2,
        "attention.key_length": 32, "attention.value_length": 32, "context_length": 128, "rope.dimension_count": 8,
        "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 64,
        "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 32,
        "feed_forward_length": 80, "full_attention_interval": 4, "vocab_size": 96,
    }  # fmt: skip
    for key, value in {**numbers, **(changes or {})}.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.rope.freq_base", 10000.0)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 2.0**-20)
    writer.add_tokenizer_model("none")
    for name, array in {**next_in_gguf(source), **(more or {})}.items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_files_of_qwen3_next_are_the_same_model(tmp_path: Path) -> None:
    source = made("qwen3_next", tmp_path)
    read = GgufSource(write_next(tmp_path / "next.gguf", source))
    assert spec_without_name(read) == spec_without_name(source)
    for name in source.specs:
        assert np.allclose(read.array(name), source.array(name), rtol=0, atol=1e-6), name
    expected = logits_of(stages_of(source, [0, 4], len(IDS)), IDS)
    assert np.abs(logits_of(stages_of(read, [0, 4], len(IDS)), IDS) - expected).max() < 1e-3 < np.ptp(expected)


def spec_without_name(source: Any) -> Any:
    return source.spec.blocks, source.spec.ends, source.spec.width


def test_fp8_folders_of_qwen3_5_have_bf16_scales_and_experts_apart(tmp_path: Path) -> None:
    """As the published ones: composite, parts for images beside, no FP8 in norms, routers, gates and convolutions."""
    source, plain, packed = made("qwen3_5_moe_text", tmp_path), tmp_path / "plain", tmp_path / "fp8"
    export_hf(source, source.path, plain)
    random, numbers, stored = np.random.default_rng(4), {}, {}
    tensors = {name: one for path in plain.glob("*.safetensors") for name, one in load_file(path).items()}
    for name, tensor in tensors.items():
        whole = name.replace("model.", "model.language_model.", 1)
        alone = {whole: tensor}
        if name.endswith("gate_up_proj"):
            stem, n = whole.removesuffix("gate_up_proj"), tensor.shape[0]
            halves = [one.chunk(2) for one in tensor]
            alone = {
                f"{stem}{i}.{part}.weight": halves[i][k]
                for i in range(n)
                for k, part in enumerate(("gate_proj", "up_proj"))
            }
        elif name.endswith("experts.down_proj"):
            alone = {f"{whole.removesuffix('down_proj')}{i}.down_proj.weight": one for i, one in enumerate(tensor)}
        for key, one in alone.items():
            is_quantized = key.endswith("_proj.weight") or "in_proj_qkv" in key or "in_proj_z" in key
            if not is_quantized:
                stored[key] = numbers[key] = one.contiguous()
                continue
            own, _ = fp8(random, *one.shape)
            scale = own[".weight_scale_inv"].bfloat16()
            stored |= {key: own[".weight"], f"{key}_scale_inv": scale}
            factors = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[: one.shape[0], : one.shape[1]]
            numbers[key] = own[".weight"].float() * factors
    hf = json.loads((plain / "config.json").read_text())
    settings = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": hf}
    beside = {"model.visual.patch_embed.proj.weight": torch.ones(2, 2), "mtp.fc.weight": torch.ones(2, 2)}
    for folder, own, more in ((packed, stored, {"quantization_config": FP8}), (tmp_path / "same", numbers, {})):
        folder.mkdir()
        save_file({**own, **beside}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**settings, **more}))
        tokenizer().save(str(folder / "tokenizer.json"))
    found, expected = open_source(packed), open_source(tmp_path / "same")
    assert spec_without_name(found) == spec_without_name(expected) and len(stored) > len(numbers)
    for name in expected.specs:
        assert np.array_equal(np.array(found.array(name), np.float32), np.array(expected.array(name), np.float32)), name
    # In the kernels: torch's products depend on where in memory a matrix begins, on some processors.
    logits = [logits_of(stages_of(one, [0, 4], len(IDS), None, "kernels"), IDS[:40]) for one in (found, expected)]
    assert np.array_equal(*logits) and np.ptp(logits[0]) > 1


@pytest.mark.parametrize(("family", "n_heads"), [("qwen3_5_text", 2), ("qwen3_5_moe_text", 2), ("qwen3_next", 4)])
def test_llama_cpp_gives_the_same_logits_of_exported_gguf_files(family: str, n_heads: int, tmp_path: Path) -> None:
    """It knows heads of values that are as large as those of keys; Qwen 3.5 is written where there are as many."""
    n_vocab = tokenizer().get_vocab_size()
    sizes = {
        "model_type": family,
        **SIZES,
        "vocab_size": n_vocab,
        "linear_num_value_heads": n_heads,
        "rms_norm_eps": 1e-6,
    }
    source = random_checkpoint(derive_config(sizes, family, Path("config.json")), tmp_path / family)
    tokenizer().save(str(source.path / "tokenizer.json"))
    (source.path / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    export_gguf(PackedSource(source, Packing("float32", "float32")), source.path, out := tmp_path / "out.gguf")
    file, ids = GgufSource(out), [int(i) for i in np.random.default_rng(3).integers(0, n_vocab, 90)]
    expected = logits_of(stages_of(file, [0, file.config.n_layer], len(ids)), ids)
    found = logits_of_llama_cpp(out, ids, n_vocab)
    assert np.abs(found - expected).max() < 2e-3
    assert np.array_equal(found.argmax(axis=1), expected.argmax(axis=1))
