"""Hugging Face folders with quantized weights: the numbers that they stand for, packed as they are, or refused."""

from __future__ import annotations

import contextlib
import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from caches import own_cache
from families import prompt
from gguf_files import write_gguf
from mdi.checkpoint.chunks import ChunkFile, PartFile
from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.hffolder import HfFolder
from mdi.checkpoint.packing import Packing, plain
from mdi.checkpoint.quantized import Decoded, decoded
from mdi.checkpoint.source import open_source
from mdi.checkpoint.weightfile import SafetensorsFile
from mdi.checkpoint.weights import WeightSource
from mdi.cli import launch
from mdi.errors import CheckpointError
from mdi.kernels.layout import Matrix, empty, pack_halves, unpack
from mdi.kernels.weight_formats import weight_format
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import standalone
from mdi.spec.options import StarterOptions
from mdi.tensor.shard_source import ShardSource
from mdi.tensor.shares import Share, share_out
from quantized_files import FP8, FP8_ROWS, INT4, MXFP4, Made, fp8, fp8_rows, int4, mxfp4, quantized_folder
from secondaries import cluster_of, secondaries
from test_hffolder import generated
from tiny_models import State, hf_config, hf_state, tiny_state, write_hf, write_lit

SIZES: dict[str, Any] = {"n_embd": 192, "n_head": 6, "head_size": 32, "intermediate_size": 288, "n_layer": 4}
Edit = Callable[[State], Any]


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def is_mlp(name: str) -> bool:
    return ".mlp." in name


KINDS: dict[str, tuple[Callable[..., Made], dict[str, Any], Callable[[str], bool]]] = {
    "fp8": (fp8, FP8, is_linear),
    "fp8-rows": (fp8_rows, FP8_ROWS, is_linear),
    "mxfp4": (mxfp4, MXFP4, is_mlp),
    "int4": (int4, INT4, is_linear),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MDI_CACHE_DIR", own_cache(tmp_path / "cache"))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def folders(tmp_path: Path, kind: str, **sizes: Any) -> tuple[Path, Path]:
    make, settings, is_quantized = KINDS[kind]
    return quantized_folder(tmp_path, make, settings, is_quantized, **{**SIZES, **sizes})


def one(tmp_path: Path, tensors: State, settings: dict[str, Any]) -> Any:
    """The decoded tensor that these stand for."""
    path = tmp_path / "one.safetensors"
    save_file({f"x{ending}": tensor for ending, tensor in tensors.items()}, path)
    file = SafetensorsFile(path)
    return decoded(tmp_path, dict.fromkeys(file.specs, file), settings)["x.weight"]


def carried(form: str, found: Decoded) -> Matrix:
    assert found.has_halves
    n_out, n_in = found.specs["x.weight"].shape
    return pack_halves(empty(form, n_out, n_in), found.halves)


@pytest.mark.parametrize("shape", [(576, 192), (192, 576), (2880, 192), (192, 2880), (128, 256), (5, 130)])
def test_the_last_blocks_of_fp8_may_be_short(tmp_path: Path, shape: tuple[int, int]) -> None:
    tensors, numbers = fp8(np.random.default_rng(1), *shape)
    assert np.array_equal(one(tmp_path, tensors, FP8).array("x.weight"), numbers)
    of_rows, other = fp8_rows(np.random.default_rng(1), *shape)
    assert np.array_equal(one(tmp_path, of_rows, FP8_ROWS).array("x.weight"), other)
    halved = {**tensors, ".weight_scale_inv": tensors[".weight_scale_inv"].bfloat16()}  # some checkpoints' scales
    exact = halved[".weight_scale_inv"].float().numpy() / tensors[".weight_scale_inv"].numpy()
    factors = exact.repeat(128, 0).repeat(128, 1)[: shape[0], : shape[1]]
    found = one(tmp_path, halved, FP8).array("x.weight")
    np.testing.assert_allclose(found, numbers * factors, rtol=1e-6)


@pytest.mark.parametrize("shape", [(576, 192), (192, 2880), (33, 96)])
def test_half_bytes_decode_to_their_numbers_and_are_packed_as_they_are(tmp_path: Path, shape: tuple[int, int]) -> None:
    for form, make, settings in (("mxfp4", mxfp4, MXFP4), ("int4", int4, INT4)):
        tensors, numbers = make(np.random.default_rng(2), *shape)
        found = one(tmp_path, tensors, settings)
        stored = found.array("x.weight")
        plain_numbers = (stored.astype(np.uint32) << 16).view(np.float32) if form == "mxfp4" else stored
        assert np.array_equal(plain_numbers, numbers)
        assert np.array_equal(unpack(carried(form, found)), numbers)


@pytest.mark.parametrize("group", [32, 64, 96])
def test_larger_groups_of_int4_repeat_their_scale(tmp_path: Path, group: int) -> None:
    tensors, numbers = int4(np.random.default_rng(3), 40, 192, group)
    settings = json.loads(json.dumps(INT4))
    settings["config_groups"]["group_0"]["weights"]["group_size"] = group
    assert np.array_equal(unpack(carried("int4", one(tmp_path, tensors, settings))), numbers)


def test_scales_that_half_precision_does_not_hold_are_not_carried_over(tmp_path: Path) -> None:
    tensors, numbers = int4(np.random.default_rng(3), 40, 192, scale=1e-6)
    found = one(tmp_path, tensors, INT4)
    assert not found.has_halves and np.array_equal(found.array("x.weight"), numbers)


@pytest.mark.slow
def test_a_folder_is_the_model_of_its_numbers(tmp_path: Path, kind: str) -> None:
    """Read, packed, and run over one node and three: as the same weights in float32."""
    folder, same = folders(tmp_path, kind)
    source, expected = open_source(folder), open_source(same)
    assert isinstance(source, HfFolder) and source.native == (None if kind.startswith("fp8") else kind)
    for part in source.part_names():
        tensors = expected.tensors(part)
        for name, tensor in source.tensors(part).items():
            assert torch.equal(tensor.float(), tensors[name]), name
    ids = prompt(20, 3)
    tokens = generated(standalone(), same, ids)
    assert generated(standalone(), folder, ids) == tokens
    with secondaries(2, tmp_path) as nodes:
        assert generated(cluster_of(nodes), folder, ids) == tokens


@pytest.mark.parametrize("form", ["mxfp4", "int4"])
def test_a_format_is_carried_over(tmp_path: Path, form: str) -> None:
    folder, same = folders(tmp_path, form)
    source, expected = open_source(folder), open_source(same)
    packing = Packing(form, "int8")
    shares = share_out(source.config, (1, 2), is_head_shared=True)
    for name, tensor in expected.tensors("block.1").items():
        if packing.format_of(name, tuple(tensor.shape)) != form:
            continue
        (weight,) = source.packed(name, packing).values()
        assert isinstance(weight, Matrix) and weight.format == form
        assert np.array_equal(unpack(weight), tensor.numpy()), name
        for rank in range(2):  # shards are cut out of what is carried over
            shards = (
                ShardSource(s, Share(shares, rank, source.config), packing)
                for s in (source, PackedSource(source, packing))
            )
            first, second = (s.shard_of(name)[name] for s in shards)
            assert isinstance(first, Matrix) and isinstance(second, Matrix)
            assert np.array_equal(first.data, second.data) and first.skip == second.skip
    tokens = [generated_in(form, one_folder) for one_folder in (folder, same)]
    assert form == "int4" or tokens[0] == tokens[1], "mxfp4 finds its own numbers again"


def generated_in(form: str, folder: Path) -> list[int]:
    options = StarterOptions(ckpt=folder, prompt_style="none", device="cpu", quantize=form, quantize_head="float32")
    from mdi.engine.sequence import SamplingParams

    with Run(GivenNodes(standalone()), options, 30, n_texts=1) as starter:
        sample = starter.submit("", prompt(20, 3), SamplingParams(8, temperature=0))
        starter.read()
        starter.close()
    return sample.token_ids


def test_experts_that_lie_in_one_tensor(tmp_path: Path) -> None:
    sizes = {**SIZES, "n_layer": 2, "intermediate_size": 96}
    folder, same = quantized_folder(
        tmp_path, mxfp4, MXFP4, lambda name: ".experts." in name, "Mixtral-8x7B-v0.1", **sizes
    )
    weights = load_file(folder / "model.safetensors")
    stacked: dict[str, list[torch.Tensor]] = {}
    for name in sorted(weights):
        if match := re.fullmatch(r"(.*experts)\.\d+(\.w\d)\.weight(_blocks|_scales)", name):
            stacked.setdefault("".join(match.groups()), []).append(weights.pop(name))
    assert len(stacked) == 12
    save_file(
        {**weights, **{name: torch.stack(tensors) for name, tensors in stacked.items()}}, folder / "model.safetensors"
    )
    source, expected = open_source(folder), open_source(same)
    for name, tensor in expected.tensors("block.1").items():
        if ".experts." in name:
            (weight,) = source.packed(name, Packing("mxfp4", "int8")).values()
            assert isinstance(weight, Matrix) and np.array_equal(unpack(weight), tensor.numpy()), name
    ids = prompt(20, 3)
    assert generated(standalone(), folder, ids) == generated(standalone(), same, ids)


def test_auto_takes_mxfp4_and_another_format_says_that_it_rounds_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = folders(tmp_path, "mxfp4")

    def choose(form: str) -> str:
        caplog.clear()
        options = StarterOptions(ckpt=folder, prompt_style="none", device="cpu", quantize=form, quantize_head=form)
        with contextlib.closing(Run(GivenNodes(standalone()), options, 20, n_texts=1)) as starter:
            starter.open()
            packing = starter.model.computing.packing
            assert packing is not None
            return packing.blocks

    assert choose("auto") == "mxfp4" and "second time" not in caplog.text
    assert choose("int4") == "int4" and "second time" in caplog.text and "--quantize mxfp4" in caplog.text
    assert choose("mxfp4") == "mxfp4" and "second time" not in caplog.text


def test_prepare_model_packs_it_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, same = folders(tmp_path, "mxfp4")
    before = sorted(folder.iterdir())
    out = tmp_path / "out"
    assert launch("prepare-model", [str(folder), "--n-nodes", "1", "--quantize", "mxfp4", "--out", str(out)]) == 0
    assert sorted(folder.iterdir()) == before
    (chunk,) = out.glob("chunks/**/*.safetensors")
    name = "transformer.h.1.mlp.proj.weight"
    assert np.array_equal(plain(ChunkFile(chunk).weights("block.1"))[name], open_source(same).array(name))
    assert launch("prepare-model", [str(folder), "--n-nodes", "1", "--quantize", "int4", "--out", str(out)]) == 0
    assert "second time" in capfd.readouterr().err


@pytest.mark.slow
def test_packing_never_has_the_whole_model_in_memory(tmp_path: Path, kind: str) -> None:
    folder, _ = folders(tmp_path, kind, n_layer=16)
    source = PackedSource(open_source(folder), Packing("int8" if kind.startswith("fp8") else kind, "int8"))
    whole = sum(
        4 * np.prod(shape) for part in source.part_names() for shape in open_source(folder).shapes(part).values()
    )
    tracemalloc.start()
    try:
        n_bytes = sum(len(piece) for part in source.part_names() for piece in source.pieces(part))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert n_bytes > whole / 9 and peak < whole / 8


def taken_to_load(source: WeightSource, part: str, packing: Packing) -> int:
    """Bytes that are allocated for a while, besides the packed part."""
    source.weights(part, packing)  # what is made once
    tracemalloc.start()
    try:
        weights = source.weights(part, packing)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert weights
    return peak - held


@pytest.mark.parametrize("form", ["fp16", "int8", "int4", "mxfp4"])
def test_loading_takes_what_plans_count(tmp_path: Path, kind: str, form: str) -> None:
    """A few rows of the widest tensor, and not all of one in plain numbers."""
    folder, _ = folders(tmp_path, kind, n_layer=1, n_embd=512, head_size=64, n_head=8, intermediate_size=1024)
    taken = taken_to_load(open_source(folder), "block.0", Packing(form, form))
    assert 0.05 < taken / weight_format(form).load_bytes(1024) < 1


@pytest.mark.parametrize("part", ["head", "embedding"])
@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("stored", ["litgpt", "safetensors", "hf", "part", "int8", "gguf"])
def test_a_head_is_never_whole_in_plain_numbers(tmp_path: Path, stored: str, form: str, part: str) -> None:
    """Gains of the norm are multiplied into it; in the embedding each row has a scale."""
    config, state = tiny_state(n_layer=1, n_embd=128, n_head=4, head_size=32, vocab_size=9000, padded_vocab_size=9000)
    source: WeightSource
    if stored == "gguf":
        source = open_source(write_gguf(tmp_path / "m.gguf", "Llama-3.1-8B", config, state, "Q8_0"))
    elif stored == "hf":
        source = open_source(write_hf(tmp_path / "hf", hf_config("Llama-3.1-8B", config), hf_state(config, state)))
    else:
        source = open_source(write_lit(tmp_path / "m", config, state, safetensors=stored == "safetensors"))
    if stored in ("part", "int8"):
        packed = PackedSource(source, Packing("int8", "int8")) if stored == "int8" else source
        path = tmp_path / part
        path.write_bytes(b"".join(packed.pieces(part)))
        source = PartFile(path, packed.info(part), source.config, source.config_hash)
    most = weight_format(form).load_bytes(128)
    assert most < 4 * 128 * 9000 / 10
    if (stored, form) != ("int8", "int8"):
        assert most / 10 < taken_to_load(source, part, Packing(form, form)) < most


def damaged(folder: Path, edit: Edit) -> Path:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors")
    return folder


def put(tensor: torch.Tensor, value: int | float) -> None:
    """Change the last number."""
    bits = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
    bits.view(-1)[-1] = value


UP = "model.layers.2.mlp.up_proj"


@pytest.mark.parametrize(
    "kind, tensor, value",
    [
        ("fp8", f"{UP}.weight", 0x7F),
        ("fp8", f"{UP}.weight", 0xFF),
        ("fp8", f"{UP}.weight_scale_inv", float("nan")),
        ("fp8", f"{UP}.weight_scale_inv", float("inf")),
        ("mxfp4", f"{UP}.weight_scales", 255),
        ("mxfp4", f"{UP}.weight_scales", 253),
        ("int4", f"{UP}.weight_scale", float("inf")),
    ],
)
def test_what_is_no_number_is_refused_by_the_tensors_name(tmp_path: Path, kind: str, tensor: str, value: float) -> None:
    folder, _ = folders(tmp_path, kind)
    source = open_source(damaged(folder, lambda weights: put(weights[tensor], value)))
    for form in ("float32", "int8", "int4" if kind == "fp8" else kind):
        with pytest.raises(CheckpointError) as e:
            source.weights("block.2", Packing(form, "int8"))
        assert tensor in str(e.value) and "not finite" in str(e.value)
    source.weights("block.1", Packing("int8", "int8"))


@pytest.mark.parametrize(
    "kind, edit, name",
    [
        ("fp8", lambda w: w.pop(f"{UP}.weight"), f"{UP}.weight"),
        ("fp8", lambda w: w.pop(f"{UP}.weight_scale_inv"), f"{UP}.weight"),
        ("fp8", lambda w: w.update({f"{UP}.weight_scale_inv": torch.ones(2, 2)}), f"{UP}.weight_scale_inv"),
        ("fp8", lambda w: w.update({f"{UP}.weight": torch.ones(288, 192)}), f"{UP}.weight"),
        ("mxfp4", lambda w: w.pop(f"{UP}.weight_scales"), f"{UP}.weight_scales"),
        ("mxfp4", lambda w: w.pop(f"{UP}.weight_blocks"), "mlp.up_proj"),
        (
            "mxfp4",
            lambda w: w.update({f"{UP}.weight_scales": torch.ones(288, 7, dtype=torch.uint8)}),
            f"{UP}.weight_blocks",
        ),
        ("mxfp4", lambda w: w.update({f"{UP}.weight_scales": torch.ones(())}), f"{UP}.weight_blocks"),
        ("int4", lambda w: w.pop(f"{UP}.weight_shape"), f"{UP}.weight_shape"),
        ("int4", lambda w: w.update({f"{UP}.weight_shape": torch.tensor([288, 200])}), f"{UP}.weight_packed"),
        ("int4", lambda w: w.update({f"{UP}.weight_scale": torch.ones(288, 3)}), f"{UP}.weight_scale"),
        ("int4", lambda w: w.update({f"{UP}.weight_scale": torch.ones(0)}), f"{UP}.weight_scale"),
        ("int4", lambda w: w.update({f"{UP}.weight_zero_point": torch.ones(1)}), "zero_point"),
    ],
)
def test_tensors_that_do_not_fit_together_are_one_line(tmp_path: Path, kind: str, edit: Edit, name: str) -> None:
    folder, _ = folders(tmp_path, kind)
    damaged(folder, edit)
    with pytest.raises(CheckpointError) as e:
        open_source(folder)
    assert name in str(e.value) and "\n" not in str(e.value) and str(folder) in str(e.value)


@pytest.mark.parametrize(
    "kind, changes, word",
    [
        ("fp8", {"quant_method": "awq"}, "'awq'"),
        ("fp8", {"quant_method": None}, "null"),
        ("fp8", {"weight_block_size": None}, "weight_block_size"),
        ("fp8", {"weight_block_size": [0, 128]}, "weight_block_size"),
        ("fp8", {"fmt": "e5m2"}, "fmt"),
        ("fp8", {"activation_scheme": "static"}, "activation_scheme"),
        ("fp8-rows", {"strategy": "tensor"}, "strategy"),
        ("fp8-rows", {"num_bits": 4}, "num_bits"),
        ("fp8-rows", {"type": "int"}, "type"),
        ("fp8-rows", {"dynamic": True}, "dynamic"),
        ("int4", {"format": "int-quantized"}, "format"),
        ("int4", {"config_groups": {}}, "config_groups"),
        ("int4", {"num_bits": 8}, "num_bits"),
        ("int4", {"symmetric": False}, "symmetric"),
        ("int4", {"actorder": "group"}, "actorder"),
        ("int4", {"strategy": "block"}, "strategy"),
    ],
)
def test_other_ways_to_quantize_are_refused(tmp_path: Path, kind: str, changes: dict[str, Any], word: str) -> None:
    folder, _ = folders(tmp_path, kind)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    settings = config["quantization_config"]
    for key, value in changes.items():
        of_weights = settings["config_groups"]["group_0"]["weights"] if "config_groups" in settings else {}
        (of_weights if key in of_weights else settings)[key] = value
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as e:
        open_source(folder)
    assert word in str(e.value) and "\n" not in str(e.value) and str(folder) in str(e.value)
