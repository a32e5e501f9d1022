"""Weights that a format cannot hold, or that are no numbers, are refused by the tensor's name instead of being changed."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from gguf_files import write_gguf
from mdi.checkpoint.chunks import ChunkFile, write_chunks
from mdi.checkpoint.convert import convert
from mdi.checkpoint.derived import CastSource, PackedSource
from mdi.checkpoint.ggufsource import GgufSource
from mdi.checkpoint.packing import EMBEDDING_SCALE, Packing, plain
from mdi.checkpoint.source import LitCheckpoint
from mdi.cli import launch
from mdi.errors import CheckpointError
from mdi.host.computing import Computing, choose_computing
from mdi.kernels.layout import MOST, bf16_from_float32, largest_of, pack, unpack
from mdi.kernels.weight_formats import LAYOUTS
from mdi.spec.options import Requested
from mdi.stages.building import torch_weights
from tiny_checkpoint import tiny_gpt, write_checkpoint
from tiny_models import hf_config, hf_state, tiny_state, write_hf

FC_1 = "transformer.h.3.mlp.fc_1.weight"
NOT_FINITE = [float("nan"), float("inf"), -float("inf")]


def checkpoint(folder: Path, tensor: str, value: float, dtype: torch.dtype = torch.float32) -> LitCheckpoint:
    """The tiny model, with one number of one tensor changed."""
    write_checkpoint(folder)
    state = {name: t.to(dtype).clone() for name, t in tiny_gpt().state_dict().items()}
    state[tensor].view(-1)[-5] = value
    torch.save(state, folder / "lit_model.pth")
    return LitCheckpoint(folder)


def weight(n_out: int = 300) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((n_out, 70)).astype(np.float32)


@pytest.mark.parametrize("bad", NOT_FINITE)
@pytest.mark.parametrize("form", LAYOUTS)
def test_packing_refuses_numbers_that_are_not_finite(form: str, bad: float) -> None:
    w = weight()
    w[280, 69] = bad
    for stored in (w, w.astype(np.float16), bf16_from_float32(w)):
        for clips in (False, True):
            with pytest.raises(CheckpointError) as refused:
                pack(form, stored, "blocks.7", clips)
            assert refused.value.code == "weights" and "blocks.7" in str(refused.value)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "form, wider", [("bf16", "float32"), ("fp16", "bf16"), ("int8", "bf16"), ("int4", "int8"), ("mxfp4", "bf16")]
)
def test_packing_refuses_numbers_beyond_the_format_and_names_one_that_holds_them(
    form: str, wider: str, sign: int
) -> None:
    w = weight()
    w[3, 7] = sign * np.float32(MOST[form])
    kept = unpack(pack(form, w))
    assert np.isfinite(kept).all() and abs(kept[3, 7] / w[3, 7] - 1) < 0.01
    w[3, 7] = np.nextafter(w[3, 7], np.float32(sign * np.inf))
    w[290, 2] = sign * min(1.001 * MOST[form], 3.4e38)  # the largest one of the tensor is told, not that of a piece
    with pytest.raises(CheckpointError) as refused:
        pack(form, w, "blocks.7")
    assert all(word in str(refused.value) for word in ("blocks.7", f"{abs(w[290, 2]):.5g}", f"choose {wider}"))
    most = np.float32(MOST[form])
    assert pack(form, w, clips=True).data.tobytes() == pack(form, np.clip(w, -most, most)).data.tobytes()
    assert np.array_equal(unpack(pack("float32", w)), w)


def test_a_clipped_weight_costs_its_neighbours_nothing_but_their_scale() -> None:
    """A number that was too large to be squared once made a whole group of int4 zero."""
    w = weight()
    w[3, 7] = 1e30
    back = unpack(pack("int4", w, clips=True))
    assert abs(back[3, 7] / MOST["int4"] - 1) < 0.01 and np.array_equal(back[4], unpack(pack("int4", w[4:5]))[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", LAYOUTS)
def test_a_checkpoint_with_such_a_number_is_refused_by_the_tensors_name(
    tmp_path: Path, form: str, dtype: torch.dtype
) -> None:
    for tensor in (FC_1, "lm_head.weight", "transformer.h.2.norm_1.weight"):
        source = checkpoint(tmp_path / tensor, tensor, float("nan"), dtype)
        packing = Packing(form, form, clips=True)
        with pytest.raises(CheckpointError) as e:
            for part in source.part_names():
                source.weights(part, packing)
        assert tensor in str(e.value)
        with pytest.raises(CheckpointError) as e:
            write_chunks(PackedSource(source, packing), tmp_path / tensor, (2, 3))
        assert tensor in str(e.value)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_an_embedding_with_such_a_number_is_refused(tmp_path: Path, form: str) -> None:
    source = checkpoint(tmp_path, "transformer.wte.weight", float("inf"))
    with pytest.raises(CheckpointError) as e:
        source.weights("embedding", Packing(form, form))
    assert "transformer.wte.weight" in str(e.value)


def test_embeddings_of_any_finite_size_are_held(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, "transformer.wte.weight", 3e38)
    packed = source.weights("embedding", Packing("int8", "int8"))
    assert np.isfinite(plain(packed)["transformer.wte.weight"]).all() and EMBEDDING_SCALE in packed


def test_a_packed_file_is_read_whatever_it_holds(tmp_path: Path) -> None:
    """It is not packed again: earlier versions clipped what is refused today, and it is finite."""
    source = checkpoint(tmp_path, FC_1, 1e5)
    chunk = write_chunks(PackedSource(source, Packing("fp16", "fp16", clips=True)), tmp_path, (2, 3))[1]
    found = plain(ChunkFile(chunk).weights("block.3"))[FC_1]
    assert found.reshape(-1)[-5] == 65504


@pytest.mark.parametrize("clips", [False, True])
def test_the_request_reaches_packing(tmp_path: Path, clips: bool) -> None:
    source = checkpoint(tmp_path, FC_1, -1e5)
    asked = Requested(quantize="fp16", allow_clipping=clips)
    computing = choose_computing(None, asked, "float32")  # torch, which packs here, too
    assert computing.allow_clipping == clips
    in_kernels = choose_computing(source.config, asked, "float32").packing
    if clips:
        assert in_kernels is None or in_kernels.clips
        assert plain({FC_1: torch_weights(source, "block.3", computing)[FC_1]})[FC_1].min() == -65504  # type: ignore[dict-item]
        return
    with pytest.raises(CheckpointError) as e:
        torch_weights(source, "block.3", computing)
    assert FC_1 in str(e.value)


def test_torch_in_half_precision_refuses_what_it_cannot_hold(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, FC_1, -1e5, torch.bfloat16)
    for dtype in ("float32", "bfloat16"):
        torch_weights(source, "block.3", Computing("cpu", dtype))
    with pytest.raises(CheckpointError) as e:
        torch_weights(source, "block.3", Computing("cpu", "float16"))
    assert FC_1 in str(e.value) and "bfloat16" in str(e.value)
    clipped = torch_weights(source, "block.3", Computing("cpu", "float16", allow_clipping=True))[FC_1]
    assert isinstance(clipped, torch.Tensor) and torch.isfinite(clipped.half()).all()


def test_casting_refuses_what_the_type_cannot_hold(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, FC_1, 1e5)
    assert np.isfinite(largest_of(CastSource(source, "bfloat16").array(FC_1)))
    with pytest.raises(CheckpointError) as e:
        CastSource(source, "float16").array(FC_1)
    assert FC_1 in str(e.value) and "bfloat16" in str(e.value)
    clipped = CastSource(source, "float16", clips=True).array(FC_1)
    assert clipped.dtype == np.float16 and largest_of(clipped) == 65504


def test_converting_refuses_what_the_type_cannot_hold(tmp_path: Path) -> None:
    config, state = tiny_state()
    state[FC_1][5, 5] = 1e5
    weights = hf_state(config, state)
    directory = write_hf(tmp_path / "m", hf_config("Llama-3.1-8B", config), weights)
    with pytest.raises(CheckpointError) as e:
        convert(directory, dtype="float16", progress=False)
    assert FC_1 in str(e.value) and "bfloat16" in str(e.value)
    assert not (directory / "lit_model.pth").exists()
    convert(directory, dtype="float16", progress=False, clips=True)
    assert LitCheckpoint(directory).array(FC_1)[5, 5] == 65504


def test_prepare_model_clips_only_if_it_may(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(tmp_path / "m", FC_1, 1e7)
    command = [str(tmp_path / "m"), "--n-nodes", "1", "--quantize", "int8"]
    assert launch("prepare-model", command) == 1
    assert FC_1 in capsys.readouterr().err
    assert launch("prepare-model", [*command, "--allow-clipping"]) == 0


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_a_gguf_file_with_a_scale_that_is_not_finite_is_refused(tmp_path: Path, kind: str, form: str) -> None:
    config, state = tiny_state("Llama-3.1-8B", n_embd=96, head_size=16, intermediate_size=128)
    path = write_gguf(tmp_path / "m.gguf", "Llama-3.1-8B", config, state, kind)
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.3.ffn_gate.weight")
    data = bytearray(path.read_bytes())
    data[tensor.data_offset : tensor.data_offset + 2] = b"\x00\x7e"  # the first scale: NaN
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as e:
        GgufSource(path).weights("block.3", Packing(form, form))
    assert any(name in str(e.value) for name in ("blk.3.ffn_gate.weight", "mlp.fc_1.weight"))


def started(folder: Path, *flags: str) -> int:
    run = ["--prompt", "Who are you?", "--n-tokens", "4", "--temperature", "0", "--json"]
    return launch("sample", ["--ckpt", str(folder), *flags, *run])


@pytest.mark.parametrize("flags", [(), ("--quantize", "int8"), ("--quantize", "int4")])
def test_a_run_with_damaged_weights_does_not_begin(
    tmp_path: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path / "m", FC_1, float("nan"))
    assert started(tmp_path / "m", *flags) == 1
    assert FC_1 in capsys.readouterr().err


@pytest.mark.parametrize("flags", [(), ("--dtype", "bfloat16")])  # in the kernels, and in torch
def test_logits_that_are_not_finite_end_the_run(
    tmp_path: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and rows are finite; their products are not."""
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "m")
    state = {name: t.clone() for name, t in tiny_gpt().state_dict().items()}
    state["lm_head.weight"][7] = 3e38
    torch.save(state, tmp_path / "m" / "lit_model.pth")
    assert started(tmp_path / "m", *flags) == 1
    assert "logits" in capsys.readouterr().err
