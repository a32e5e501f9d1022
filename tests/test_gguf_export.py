"""prepare_model --export gguf: what was written is read again as the same model, with equal bytes and the same ids."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from families import random_gpt
from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.gguf import read_gguf
from mdi.checkpoint.gguf_export import export_gguf
from mdi.checkpoint.ggufsource import GgufSource, gguf_directory
from mdi.checkpoint.gguftokenizer import tokenizer_fields, write_tokenizer
from mdi.checkpoint.hfconfig import published_config
from mdi.checkpoint.mixtures import meant
from mdi.checkpoint.packing import Packing, flat_numbers
from mdi.checkpoint.shapes import model_shapes
from mdi.checkpoint.source import LitCheckpoint
from mdi.cli import launch
from mdi.errors import CheckpointError, UsageError
from mdi.families.gguf import fields_of
from mdi.families.registry import written_in_gguf
from mdi.kernels import library
from mdi.model.plain import ModelConfig
from mdi.model.tensors import EMBEDDING, FINAL_NORM, HEAD
from test_made_mixtures import alone, ids
from tiny_checkpoint import encode, tiny_config, write_checkpoint
from tiny_checkpoint import plain as listed
from tiny_models import HF_KINDS, tiny_state, write_lit

KINDS = ("llama", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma")
FAMILIES = [name for name, (kind, _) in HF_KINDS.items() if kind in KINDS]


def packed(source: Any, form: str) -> PackedSource:
    form = meant(form, source.config)
    return PackedSource(source, Packing(form, form))


def is_same(one: Any, other: Any) -> bool:
    """Of settings: numbers that are not whole have single precision in files."""
    return one == other or (isinstance(one, float) and np.float32(one) == np.float32(other))


def checkpoint(folder: Path, **changes: Any) -> Path:
    sizes = {"n_embd": 256, "head_size": 32, "n_head": 8, "n_query_groups": 2, "intermediate_size": 192, "n_layer": 3}
    return write_checkpoint(folder, gpt=random_gpt(tiny_config(**{**sizes, **changes}), 4), with_end=False)


@pytest.mark.parametrize("form", ["q4_k", "q6_k", "fp16", "float32"])
def test_there_and_back(form: str, tmp_path: Path) -> None:
    source = LitCheckpoint(checkpoint(tmp_path / "tiny"))
    first = packed(source, form)
    export_gguf(first, source.path, tmp_path / "out.gguf")
    again = GgufSource(tmp_path / "out.gguf")
    not_compared = ("name", "hf_config", "vocab_size", "padding_multiple")
    for key, value in vars(source.config).items():
        if key not in not_compared and key != "rope_adjustments":
            assert is_same(value, vars(again.config)[key]), key
    assert again.config.rope_adjustments == source.config.rope_adjustments
    second = PackedSource(again, Packing(again.own_formats or form, again.own_formats or form))
    for part in first.part_names():
        one, two = first.weights(part), second.weights(part)
        assert one.keys() == two.keys()
        for name, weight in one.items():
            assert np.array_equal(flat_numbers(weight), flat_numbers(two[name])), name


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    config, state = tiny_state(family, vocab_size=320, padded_vocab_size=320)
    if family.startswith("Gemma"):
        state["lm_head.weight"] = state["transformer.wte.weight"]
    source = LitCheckpoint(write_lit(tmp_path / "lit", config, state))
    export_gguf(packed(source, "float32"), source.path, tmp_path / "out.gguf")
    again = GgufSource(tmp_path / "out.gguf")
    for name in source.specs:
        rounds = family.startswith("Gemma") and ("norm" in name or name == FINAL_NORM)  # files have the one added
        same = np.allclose if rounds else np.array_equal
        assert same(again.array(name), source.array(name)), name


@pytest.mark.parametrize("is_stated", [True, False])
def test_mistral_with_a_window_is_not_written_as_another_architecture(is_stated: bool, tmp_path: Path) -> None:
    config, state = tiny_state("Mistral-7B-v0.1", vocab_size=320, padded_vocab_size=320)
    source = LitCheckpoint(write_lit(tmp_path / "lit", config, state))
    if is_stated:
        (source.path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    with pytest.raises(CheckpointError, match="a GGUF file has no such settings .*window"):
        export_gguf(packed(source, "float32"), source.path, tmp_path / "out.gguf")


def test_phi_3_has_one_tensor_of_queries_keys_and_values(tmp_path: Path) -> None:
    config, state = tiny_state("Phi-3-mini-4k-instruct", vocab_size=320, padded_vocab_size=320)
    source = LitCheckpoint(write_lit(tmp_path / "lit", config, state))
    (source.path / "config.json").write_text(json.dumps({"model_type": "phi3"}))
    export_gguf(packed(source, "float32"), source.path, tmp_path / "out.gguf")
    tensors, again = read_gguf(tmp_path / "out.gguf").tensors, GgufSource(tmp_path / "out.gguf")
    assert "blk.0.attn_qkv.weight" in tensors and "blk.0.attn_q.weight" not in tensors
    assert all(np.array_equal(again.array(name), source.array(name)) for name in source.specs)


@pytest.mark.parametrize("model", ["bigscience/bloom-560m", "openai-community/gpt2"])
def test_others_with_one_tensor_of_queries_keys_and_values(model: str) -> None:
    config = published_config(model)
    found = written_in_gguf(config, model_shapes(config, model))
    assert found.fields["general.architecture"] in model
    tensors = {piece.tensor for pieces in found.pieces.values() for piece in pieces}
    assert {"blk.0.attn_qkv.weight", "blk.0.attn_qkv.bias"} <= tensors and "blk.0.attn_q.weight" not in tensors


def test_the_settings_of_deepseek_v3() -> None:
    """Its epsilon is that of its latent rows, also in single precision."""
    config = replace(published_config("deepseek-ai/DeepSeek-V3"), n_layer=4)
    found = written_in_gguf(config, model_shapes(config, "DeepSeek-V3"))
    names = ("expert_group_count", "expert_group_used_count", "attention.key_length", "leading_dense_block_count")
    assert [found.fields[f"deepseek2.{name}"] for name in names] == [8, 4, 576, 3]


def test_numbers_of_deepseek_v3_that_are_0() -> None:
    """llama.cpp needs the fields, and tensors of shared experts."""
    config = replace(published_config("deepseek-ai/DeepSeek-V3"), n_layer=4)
    sparse = replace(config, first_k_dense_replace=0)
    assert written_in_gguf(sparse, model_shapes(sparse, "V3")).fields["deepseek2.leading_dense_block_count"] == 0
    alone = replace(config, n_shared_expert=None)
    with pytest.raises(CheckpointError, match="has shared experts, and this model has none"):
        written_in_gguf(alone, model_shapes(alone, "V3"))


def test_fields_that_are_floats_there_are_written_as_such() -> None:
    """A config may have whole numbers in them."""
    config = ModelConfig.of(listed(asdict(tiny_config())))
    whole = replace(config, rope_local_base_freq=10000, attention_logit_softcapping=50, final_logit_softcapping=30)
    found = fields_of(whole)
    names = ("rope.freq_base_swa", "attn_logit_softcapping", "final_logit_softcapping")
    assert [(found[name], type(found[name])) for name in names] == [(10000.0, float), (50.0, float), (30.0, float)]


def test_the_command_and_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoint(tmp_path / "tiny")
    flags = [str(folder), "--export", "gguf", "--quantize", "q4_k", "--out", str(tmp_path / "out")]
    assert launch("prepare-model", flags) == 0
    path = tmp_path / "out" / "tiny-random.gguf"
    assert str(path) in capsys.readouterr().out and list(path.parent.iterdir()) == [path]
    kinds = {name: tensor.type_name for name, tensor in read_gguf(path).tensors.items()}
    assert kinds["output.weight"] == kinds["token_embd.weight"] == "Q6_K" and kinds["blk.0.attn_q.weight"] == "Q4_K"
    assert kinds["blk.2.attn_v.weight"] == "Q6_K" and kinds["blk.0.ffn_down.weight"] == "Q5_0"
    assert kinds["blk.2.ffn_down.weight"] == "Q8_0" and kinds["blk.0.attn_norm.weight"] == "F32"
    made = gguf_directory(path, tmp_path / "store")
    text = "The ring closes. 12 nodes, <|end|>\n"
    assert Tokenizer.from_file(str(made / "tokenizer.json")).encode(text).ids == encode(text)
    if library.load() is not None:
        here = ids(alone(), folder, tmp_path / "cache", quantize="q4_k")
        assert ids(alone(), made, tmp_path / "cache", quantize="own") == here
    capsys.readouterr()
    assert launch("prepare-model", flags) == 2
    assert f"error: {tmp_path / 'out'} " in capsys.readouterr().err


def test_a_head_that_is_the_embedding_is_written_once(tmp_path: Path) -> None:
    config, state = tiny_state("Llama-3.1-8B", vocab_size=320, padded_vocab_size=320)
    state["lm_head.weight"] = state["transformer.wte.weight"]
    source = LitCheckpoint(write_lit(tmp_path / "lit", config, state))
    assert source.same_as(HEAD) == EMBEDDING
    export_gguf(packed(source, "q6_k"), source.path, tmp_path / "out.gguf")
    tensors = read_gguf(tmp_path / "out.gguf").tensors
    assert "output.weight" not in tensors
    assert GgufSource(tmp_path / "out.gguf").same_as(HEAD) == EMBEDDING


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoint(tmp_path / "tiny")
    source = LitCheckpoint(folder)
    with pytest.raises(UsageError, match="int8 is no type of GGUF files"):
        export_gguf(packed(source, "int8"), folder, tmp_path / "out.gguf")
    (tmp_path / "there.gguf").touch()
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / "there.gguf"))):
        export_gguf(packed(source, "q4_k"), folder, tmp_path / "there.gguf")
    other = LitCheckpoint(checkpoint(tmp_path / "other", rotary_percentage=0.5))
    with pytest.raises(CheckpointError, match="tiny-random: rope_adjustments"):
        export_gguf(packed(other, "q4_k"), folder, tmp_path / "out.gguf")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=re.escape(f"{folder} has no tokenizer.json")):
        export_gguf(packed(source, "q4_k"), folder, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists() and not list(tmp_path.glob("*.part"))


def test_fields_of_tokenizers_come_back(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "tiny")
    fields = tokenizer_fields(folder, 400)
    assert len(fields["tokenizer.ggml.tokens"]) == 400 and fields["tokenizer.ggml.token_type"][-1] == 5
    (tmp_path / "again").mkdir()
    write_tokenizer(fields, tmp_path / "again", tmp_path)
    assert {k: v for k, v in tokenizer_fields(tmp_path / "again", 400).items() if "token_type" not in k} == {
        k: v for k, v in fields.items() if "token_type" not in k
    }


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, {"add_bos_token": False}),
        ({"add_bos_token": True}, {"add_bos_token": False}),
        ({"bos_token": "<|end|>", "add_bos_token": None}, {"add_bos_token": False, "bos_token_id": 0}),
        ({"bos_token": "<|end|>", "add_bos_token": True}, {"add_bos_token": True, "bos_token_id": 0}),
        ({"unk_token": {"content": "<|end|>"}}, {"add_bos_token": False, "unknown_token_id": 0}),
    ],
)
def test_how_a_text_begins_is_always_said(settings: dict[str, Any], wanted: dict[str, Any], tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "tiny")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    found = {name.rpartition(".")[2]: value for name, value in tokenizer_fields(folder, 400).items()}
    names = ("add_bos_token", "bos_token_id", "unknown_token_id")
    assert {name: found[name] for name in names if name in found} == wanted
