"""Blocks that predict further tokens: they are kept beside a model in whatever form it comes and goes, and change nothing."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mdi.checkpoint.convert import convert, make_ready
from mdi.checkpoint.derived import CastSource, PackedSource
from mdi.checkpoint.export import export_hf
from mdi.checkpoint.folder import PREDICTING_FILE, is_lit_dir, is_readable_hf, weight_files
from mdi.checkpoint.gguf_export import export_gguf
from mdi.checkpoint.ggufsource import GgufSource
from mdi.checkpoint.hfconfig import derive_config
from mdi.checkpoint.hffolder import HfFolder
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.source import LitCheckpoint, open_source
from mdi.checkpoint.weights import WeightSource
from mdi.model.plain import spec_of
from test_delta_files import made, next_in_gguf, write_next
from test_own_families import random_checkpoint
from tiny_checkpoint import tokenizer

W, N_VOCAB = 64, 96
_ALL: dict[str, Any] = {
    "hidden_size": W, "intermediate_size": 80, "num_hidden_layers": 4, "vocab_size": N_VOCAB, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
    "moe_intermediate_size": 32, "num_experts_per_tok": 2, "max_position_embeddings": 128,
}  # fmt: skip
_QWEN: dict[str, Any] = {
    **_ALL, "full_attention_interval": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "num_experts": 4, "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
_SHARED: dict[str, Any] = {
    **_ALL, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    **_SHARED, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "n_group": 2, "topk_group": 1,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _QWEN, "qwen3_5_moe_text": _QWEN, "qwen3_next": _QWEN, "glm4_moe": {**_SHARED, "use_qk_norm": True},
    "deepseek_v3": _LATENT,
}  # fmt: skip
APART = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")  # theirs are named mtp.*
COMPOSITE = ("qwen3_5_text", "qwen3_5_moe_text")
SAME_ENDS = {"eh_proj.weight": (W, 2 * W), "enorm.weight": (W,), "hnorm.weight": (W,), "shared_head.norm.weight": (W,)}
OWN_ENDS = {"embed_tokens.weight": (N_VOCAB, W), "shared_head.head.weight": (N_VOCAB, W)}
APART_ENDS = {
    "fc.weight": (W, 2 * W), "pre_fc_norm_embedding.weight": (W,), "pre_fc_norm_hidden.weight": (W,), "norm.weight": (W,),
}  # fmt: skip


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for path in folder.glob("*.safetensors") for name, one in load_file(path).items()}


def published(
    family: str, folder: Path, n: int = 1, n_vocab: int = N_VOCAB, **changes: int
) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """A model without such blocks and the same model with n of them, in the form of their publishers; and their tensors."""
    sizes = {"model_type": family, **CASES[family], "vocab_size": n_vocab, **changes}
    config = derive_config(sizes, family, Path("config.json"))
    made, plain, whole = random_checkpoint(config, folder / "made"), folder / "plain", folder / "whole"
    export_hf(made, made.path, plain)
    tensors, hf = read(plain), json.loads((plain / "config.json").read_text())
    generator, more = torch.Generator().manual_seed(5), {}
    last = "model.layers.3."  # the only block with attention of the first three families
    for i in range(n):
        start = f"mtp.layers.{i}." if family in APART else f"model.layers.{4 + i}."
        more |= {start + name.removeprefix(last): one for name, one in tensors.items() if name.startswith(last)}
        if family not in APART:
            ends = SAME_ENDS | (OWN_ENDS if family == "deepseek_v3" else {})
            ends = {name: (n_vocab if shape[0] == N_VOCAB else shape[0], *shape[1:]) for name, shape in ends.items()}
            more |= {start + name: torch.empty(shape) for name, shape in ends.items()}
    if family in APART:
        more |= {f"mtp.{name}": torch.empty(shape) for name, shape in APART_ENDS.items()}
        hf["mtp_num_hidden_layers"] = n
    else:
        hf["num_nextn_predict_layers"] = n
    more = {name: torch.randn(one.shape, generator=generator) for name, one in more.items()}
    whole.mkdir()
    beside = {}
    if family in COMPOSITE:
        tensors = {name.replace("model.", "model.language_model.", 1): one for name, one in tensors.items()}
        beside = {"model.visual.patch_embed.proj.weight": torch.ones(2, 2)}
        hf = {"model_type": family.removesuffix("_text"), "text_config": hf, "vision_config": {"depth": 1}}
    save_file(tensors | more | beside, whole / "model.safetensors")
    (whole / "config.json").write_text(json.dumps(hf))
    for directory in (plain, whole):
        tokenizer().save(str(directory / "tokenizer.json"))
    return plain, whole, more


def numbers(source: WeightSource | None) -> dict[str, np.ndarray]:
    assert source is not None and source.part_names() == [f"block.{i}" for i in range(source.spec.n_layer)]
    return {name: source.tensor(name).float().numpy() for name in source.specs}


def is_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("family", "n"), [*((family, 1) for family in CASES), ("deepseek_v3", 2), ("qwen3_next", 2)])
def test_they_are_converted_and_exported_again_and_change_nothing_else(family: str, n: int, tmp_path: Path) -> None:
    plain, whole, more = published(family, tmp_path, n)
    without, source, target = HfFolder(plain), HfFolder(whole), tmp_path / "converted"
    make_ready(target, whole)
    converted = open_source(convert(whole, progress=False, target=target))
    assert isinstance(converted, LitCheckpoint) and without.predicting() is None
    for one in (source, converted):
        assert (one.config_hash, one.spec.n_layer, one.specs) == (without.config_hash, 4, without.specs)
        assert one.part_names() == without.part_names()
        assert [one.info(part) for part in one.part_names()] == [without.info(part) for part in without.part_names()]
    kept = source.predicting()
    assert kept is not None and kept.spec.n_layer == n
    assert is_same(numbers(converted.predicting()), numbers(kept))
    # what computes them will read them as any block
    spec = spec_of(kept.config)
    assert set(spec.blocks) == {without.spec.blocks[3]}

    for i, one in enumerate((source, converted, CastSource(converted, "bfloat16"))):
        out = tmp_path / f"out{i}"
        export_hf(one, target, out)
        again = read(out)
        expected = {**read(plain), **more}
        assert again.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(again[name], tensor if i < 2 else tensor.bfloat16()), name
    assert is_same(numbers(HfFolder(tmp_path / "out1").predicting()), numbers(kept))


def test_folders_that_were_converted_without_them_stay_valid(tmp_path: Path) -> None:
    _, whole, _ = published("glm4_moe", tmp_path)
    convert(whole, progress=False)  # beside the originals, of which it is none
    assert is_lit_dir(whole) and [file.name for file in weight_files(whole)] == ["model.safetensors"]
    assert LitCheckpoint(whole).predicting() is not None
    (whole / "model.safetensors").rename(whole / "model-00001-of-00001.safetensors")
    assert [file.name for file in weight_files(whole)] == ["model-00001-of-00001.safetensors"]
    (whole / PREDICTING_FILE).unlink()
    again = LitCheckpoint(whole)
    assert again.predicting() is None and again.spec.n_layer == 4


CANNOT: dict[str, tuple[str, dict[str, torch.Tensor]]] = {  # what is said, by the tensors that are gone, and new ones
    "lacks the tensor transformer.h.0.mtp.proj.weight": ("model.layers.4.eh_proj.weight", {}),
    "nothing is known of model.layers.4.other.weight": ("-", {"model.layers.4.other.weight": torch.ones(2)}),
    "mtp.norm_token.weight has the shape [3], expected [64]": ("-", {"model.layers.4.enorm.weight": torch.ones(3)}),
    "there is no model.layers.4": ("model.layers.4.", {"mtp.fc.weight": torch.ones(2, 2)}),
}


def test_what_cannot_be_kept_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, whole, _ = published("deepseek_v3", tmp_path)
    tensors = read(whole)
    for said, (gone, new) in CANNOT.items():
        left = {name: one for name, one in tensors.items() if not name.startswith(gone)}
        save_file({**left, **new}, whole / "model.safetensors")
        caplog.clear()
        with caplog.at_level(logging.WARNING, "mdi"):
            assert HfFolder(whole).predicting() is None
        assert [said in line for line in caplog.messages] == [True], caplog.messages


def test_what_a_conversion_left_of_them_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in (PREDICTING_FILE, f"{PREDICTING_FILE}.17.part"):  # as `mdi.files.replacing` names it
        (tmp_path / name).write_bytes(b"")
        assert not is_readable_hf(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert is_readable_hf(tmp_path)


def test_a_damaged_file_beside_converted_weights_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, whole, _ = published("glm4_moe", tmp_path)
    convert(whole, progress=False)
    for damaged in (b"no tensors", (whole / PREDICTING_FILE).read_bytes().replace(b"mtp.proj", b"mtp.prOj")):
        (whole / PREDICTING_FILE).write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "mdi"):
            assert LitCheckpoint(whole).predicting() is None
        assert ["multi-token prediction" in line for line in caplog.messages] == [True]


def test_a_file_cannot_ask_for_more_of_them_than_a_model_may_have(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, whole, _ = published("qwen3_next", tmp_path)
    tensors = read(whole)
    said = {"999999": "n_layer: expected a whole number from 0 to 1024, found 1000000"}
    said |= {number: f"nothing is known of mtp.layers.{number}.x" for number in ("1000000", "9" * 5000, "\u0661")}
    for number, reason in said.items():
        save_file({**tensors, f"mtp.layers.{number}.x": torch.ones(2)}, whole / "model.safetensors")
        caplog.clear()
        with caplog.at_level(logging.WARNING, "mdi"):
            assert HfFolder(whole).predicting() is None
        assert [reason in line for line in caplog.messages] == [True], caplog.messages

    (other := tmp_path / "other").mkdir()
    _, whole, _ = published("glm4_moe", other)
    hf = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({**hf, "num_nextn_predict_layers": 10**30}))
    found = HfFolder(whole).predicting()  # as many as there are
    assert found is not None and found.spec.n_layer == 1


def test_tensors_of_gguf_files_with_absurd_numbers_are_of_no_block(tmp_path: Path) -> None:
    """Python reads no number of so many digits."""
    source = made("qwen3_next", tmp_path)
    more = {f"blk.{'9' * 5000}.x": np.ones(2, np.float32)}
    assert GgufSource(write_next(tmp_path / "a.gguf", source, more=more)).predicting() is None


def test_gguf_files_have_them_behind_the_last_block(tmp_path: Path) -> None:
    """llama.cpp's converter adds one to their norms, as to others of this family."""
    source, random = made("qwen3_next", tmp_path), np.random.default_rng(6)
    more = {
        name.replace("blk.3.", "blk.4."): array for name, array in next_in_gguf(source).items() if name.startswith("blk.3.")
    }  # fmt: skip
    own = {"eh_proj": (W, 2 * W), "enorm": (W,), "hnorm": (W,), "shared_head_norm": (W,)}
    nextn = {name: random.standard_normal(shape, dtype=np.float32) for name, shape in own.items()}
    more |= {f"blk.4.nextn.{name}.weight": array for name, array in nextn.items()}
    changes = {"block_count": 5, "nextn_predict_layers": 1}
    file = GgufSource(write_next(tmp_path / "whole.gguf", source, changes, more))
    without = GgufSource(write_next(tmp_path / "plain.gguf", source))
    assert (file.config_hash, file.specs) == (without.config_hash, without.specs) and without.predicting() is None
    assert [file.info(part) for part in file.part_names()] == [without.info(part) for part in without.part_names()]
    found = numbers(file.predicting())
    ours = {"proj": "eh_proj", "norm_token": "enorm", "norm_hidden": "hnorm", "norm": "shared_head_norm"}
    expected = {f"transformer.h.0.mtp.{name}.weight": nextn[theirs] - ("norm" in name) for name, theirs in ours.items()}
    last = "transformer.h.3."
    expected |= {name.replace(last, "transformer.h.0."): source.array(name) for name in source.specs if last in name}
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.allclose(found[name], array, rtol=0, atol=1e-6), name


@pytest.mark.parametrize(("family", "n"), [("deepseek_v3", 1), ("deepseek_v3", 2), ("qwen3_5_moe_text", 1)])
def test_they_are_written_into_gguf_files(family: str, n: int, tmp_path: Path) -> None:
    of = {"linear_num_value_heads": 2} if family in APART else {}
    plain, whole, _ = published(family, tmp_path, n, tokenizer().get_vocab_size(), **of)
    source, without = HfFolder(whole), HfFolder(plain)
    files = [tmp_path / "whole.gguf", tmp_path / "plain.gguf"]
    for one, file in zip((source, without), files, strict=True):
        export_gguf(PackedSource(one, Packing("float32", "float32")), one.path, file)
    again, other = map(GgufSource, files)
    found, kept = numbers(again.predicting()), numbers(source.predicting())
    assert found.keys() == kept.keys() and other.predicting() is None
    assert all(np.allclose(found[name], kept[name], rtol=0, atol=1e-6) for name in kept), "norms have one more there"
    assert (again.config_hash, again.specs) == (other.config_hash, other.specs)
    assert [again.info(part) for part in again.part_names()] == [other.info(part) for part in other.part_names()]
