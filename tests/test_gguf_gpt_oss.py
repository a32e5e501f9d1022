"""gpt-oss from GGUF files: the numbers of the checkpoint that they were written from, and its tokenizer's own ways."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer

from gguf_files import byte_level_tokens
from mdi.checkpoint.ggufsource import GgufSource
from mdi.checkpoint.gguftokenizer import write_tokenizer
from mdi.checkpoint.hfconfig import derive_config
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.shapes import model_shapes
from mdi.errors import CheckpointError
from mdi.kernels import library
from mdi.kernels.layout import Matrix, unpack
from mdi.text.texts import TextCodec
from test_harmony import MARKS, TEMPLATE, tokenizer
from test_own_families import continued

HF: dict[str, Any] = {
    "model_type": "gpt_oss", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 96, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 20,
    "rms_norm_eps": 2.0**-17, "rope_theta": 150000, "vocab_size": 96, "max_position_embeddings": 128,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False,
    },
}  # fmt: skip
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_LAYER = {
    "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm", "attn.proj": "self_attn.o_proj",
    "mlp.gate": "mlp.router",
}  # fmt: skip


def random_state() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The settings, and weights of which those of experts are numbers of MXFP4."""
    config = derive_config(HF, "my-model", Path("config.json"))
    random, state = np.random.default_rng(3), {}
    for name, shape in model_shapes(config, "").items():
        if ".experts." in name and name.endswith(".weight"):
            scales = 2.0 ** random.integers(-5, -2, (shape[0], shape[1] // 32, 1))
            codes = random.integers(0, 16, (shape[0], shape[1] // 32, 32))
            codes[..., 0] = 7  # the scale follows from the largest number
            state[name] = (E2M1[codes] * scales).reshape(shape).astype(np.float32)
        else:
            state[name] = random.standard_normal(shape, dtype=np.float32)
    return config, state


def write(path: Path, state: dict[str, np.ndarray], experts: Kind = Kind.MXFP4, **changes: Any) -> Path:
    """As llama.cpp's converter writes it: names by the gguf package's table, gate and up apart."""
    writer = gguf.GGUFWriter(path, "gpt-oss")
    writer.add_name("my-model")
    writer.add_vocab_size(HF["vocab_size"])
    writer.add_context_length(HF["max_position_embeddings"])
    writer.add_embedding_length(HF["hidden_size"])
    writer.add_block_count(HF["num_hidden_layers"])
    writer.add_feed_forward_length(HF["intermediate_size"])
    writer.add_expert_feed_forward_length(HF["intermediate_size"])
    writer.add_head_count(HF["num_attention_heads"])
    writer.add_head_count_kv(HF["num_key_value_heads"])
    writer.add_key_length(HF["head_dim"])
    writer.add_value_length(HF["head_dim"])
    writer.add_rope_freq_base(changes.get("theta", float(HF["rope_theta"])))
    writer.add_layer_norm_rms_eps(HF["rms_norm_eps"])
    writer.add_expert_count(HF["num_local_experts"])
    writer.add_expert_used_count(HF["num_experts_per_tok"])
    writer.add_sliding_window(HF["sliding_window"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(HF["rope_scaling"]["factor"])
    writer.add_rope_scaling_orig_ctx_len(HF["rope_scaling"]["original_max_position_embeddings"])
    writer.add_string("tokenizer.ggml.model", "none")
    for name, array in arrays(state, changes.get("left_out", "")).items():
        kind = experts if array.ndim == 3 else Kind.F32
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def arrays(state: dict[str, np.ndarray], left_out: str) -> dict[str, np.ndarray]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, HF["num_hidden_layers"])
    found, stacked = {}, {}
    top = {"transformer.wte": "model.embed_tokens", "transformer.ln_f": "model.norm", "lm_head": "lm_head"}
    for name, array in state.items():
        stem, ending = name.rsplit(".", 1)
        if stem in top:
            found[f"{top[stem]}.{ending}"] = array
            continue
        match = re.fullmatch(r"transformer\.h\.(\d+)\.(.*)", stem)
        assert match is not None
        layer, part = f"model.layers.{match[1]}", match[2]
        if part == "attn.qkv":
            for which, rows in zip("qkv", np.split(array, [96, 128]), strict=True):
                found[f"{layer}.self_attn.{which}_proj.{ending}"] = rows
        elif expert := re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)", part):
            theirs = {"fc_1": "gate_proj", "fc_2": "up_proj", "proj": "down_proj"}[expert[2]]
            stacked.setdefault(f"{layer}.mlp.experts.{theirs}.{ending}", []).append(array)
        else:
            found[f"{layer}.self_attn.sinks" if ending == "sinks" else f"{layer}.{_LAYER[part]}.{ending}"] = array
    found |= {name: np.stack(parts) for name, parts in stacked.items()}
    made = {}
    for name, array in found.items():
        theirs = names.get_name(name, (".weight", ".bias"))
        assert theirs is not None, name
        made[theirs if theirs.endswith((".weight", ".bias")) else f"{theirs}.weight"] = array
    return {name: array for name, array in made.items() if not left_out or left_out not in name}


def test_settings_and_numbers_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    config, state = random_state()
    source = GgufSource(write(tmp_path / "m.gguf", state))
    found = source.config.plain()
    factor = found["rope_adjustments"].pop("attention_factor")
    assert factor == pytest.approx(0.1 * np.log(4) + 1)
    assert found["rope_adjustments"] == {
        key: value for key, value in config.plain()["rope_adjustments"].items() if key not in ("beta_fast", "beta_slow")
    }
    assert {**found, "rope_adjustments": None} == {**config.plain(), "rope_adjustments": None}
    assert source.native == "mxfp4" and not source.folds_gains
    for name, array in state.items():
        stored = source.array(name)
        numbers = (stored.astype(np.uint32) << 16).view(np.float32) if stored.dtype == np.uint16 else stored
        assert np.array_equal(numbers, array), name
        if ".experts." in name and name.endswith(".weight"):
            matrix = source.packed(name, Packing("mxfp4", "int8"))[name]
            assert isinstance(matrix, Matrix) and matrix.format == "mxfp4" and np.array_equal(unpack(matrix), array)


PROMPT = [*map(int, np.random.default_rng(2).integers(0, HF["vocab_size"], 30))]
# What llama.cpp says behind them (tests/gguf_reference/family_ids.py, with cyllama 0.2.18).
GREEDY = [48, 40, 13, 35, 21, 43, 43, 61, 35, 66, 48, 17, 61, 62, 5, 66, 66, 27, 66, 66, 66, 26, 75, 16]


def write_whole(path: Path) -> Path:
    """With experts in F32, for llama.cpp rounds what it multiplies MXFP4 with. At this base YaRN's bounds are whole numbers, to
    which llama.cpp rounds them: 0, and just below 2."""
    state = {name: 0.3 * array if array.ndim > 1 else array for name, array in random_state()[1].items()}
    return write(path, state, Kind.F32, theta=(16 / np.pi) ** 4 * (1 + 3e-6))


@pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")
def test_greedy_ids_are_those_of_llama_cpp(tmp_path: Path) -> None:
    assert continued(GgufSource(write_whole(tmp_path / "m.gguf")), PROMPT) == GREEDY


@pytest.mark.parametrize("tensor", ["attn_sinks", "ffn_gate_inp.bias", "ffn_up_exps.bias", "post_attention_norm"])
def test_a_tensor_that_is_missing_is_named(tensor: str, tmp_path: Path) -> None:
    _, state = random_state()
    with pytest.raises(CheckpointError, match=tensor):
        GgufSource(write(tmp_path / "m.gguf", state, left_out=tensor))


def test_biases_of_fewer_experts_are_refused(tmp_path: Path) -> None:
    _, state = random_state()
    fewer = {name: array for name, array in state.items() if ".experts.4." not in name or name.endswith("weight")}
    with pytest.raises(CheckpointError, match="exps.bias"):
        GgufSource(write(tmp_path / "m.gguf", fewer))


def test_the_end_of_a_part_of_an_answer_is_not_the_end_of_the_answer(tmp_path: Path) -> None:
    fields = byte_level_tokens(json.loads(tokenizer().to_str()), "gpt-4o")
    fields |= {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": MARKS.index("<|end|>")}
    fields["tokenizer.chat_template"] = TEMPLATE
    write_tokenizer(fields, tmp_path, tmp_path / "m.gguf")
    codec = TextCodec.from_checkpoint(tmp_path, "auto", config_name="my-model")
    assert codec.eos_ids == {MARKS.index("<|return|>"), MARKS.index("<|call|>")} and codec.form.special
    codec.close()


CUT = {
    "HelloWorld's 12345 ÀB": ["Hello", "World's", " ", "123", "45", " ÀB"],
    "a//\n\n b\t\tc": ["a", "//\n\n", " b", "\t", "\tc"],
    "don't DON'T": ["don't", " DON'T"],
}


@pytest.mark.parametrize("text", CUT)
def test_words_are_cut_as_by_o200k(text: str, tmp_path: Path) -> None:
    write_tokenizer(byte_level_tokens(json.loads(tokenizer().to_str()), "gpt-4o"), tmp_path, tmp_path / "m.gguf")
    pieces = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:stop] for _, (start, stop) in pieces] == CUT[text]
