"""Reading checkpoints and chunks, and refusing those that are damaged."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import shutil
import struct
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from litgpt.config import Config
from safetensors.torch import load, load_file, save_file

from families import FAMILIES
from mdi.checkpoint.chunks import ChunkFile, find_chunk, siblings, write_chunks
from mdi.checkpoint.derived import CastSource
from mdi.checkpoint.manifest import METADATA_KEY, config_hash
from mdi.checkpoint.parts import PartInfo, stage_parts
from mdi.checkpoint.source import LitCheckpoint, open_source
from mdi.errors import CheckpointError
from mdi.model.plain import ModelConfig
from tiny_models import State, tiny_lit, tiny_state, write_lit


@pytest.fixture
def lit(tmp_path: Path) -> tuple[Path, State]:
    return tiny_lit(tmp_path / "model")


@pytest.mark.parametrize("safetensors", [False, True])
def test_a_checkpoint(tmp_path: Path, safetensors: bool) -> None:
    config, state = tiny_state()
    path = write_lit(tmp_path / "model", config, state, safetensors=safetensors)
    source = open_source(path)
    assert (source.model, source.dtype) == (config.name, "float32")
    assert source.config_hash == config_hash(ModelConfig.from_litgpt(config))
    assert source.part_names() == stage_parts(0, 5, starter=True)
    seen: State = {}
    for part in source.part_names():
        tensors = source.tensors(part)
        data = b"".join(source.pieces(part))
        assert source.info(part) == PartInfo(part, hashlib.sha256(data).hexdigest(), len(data))
        assert load(data).keys() == tensors.keys()
        seen.update(tensors)
    assert seen.keys() == state.keys()
    assert all(torch.equal(seen[name], state[name]) for name in state)
    with pytest.raises(CheckpointError) as e:
        source.tensors("block.5")
    assert "block.5" in str(e.value)
    source.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_hold_the_checkpoint(tmp_path: Path, family: str) -> None:
    path, state = tiny_lit(tmp_path / "model", family)
    source = LitCheckpoint(path)
    n_layer = source.config.n_layer
    union: State = {}
    for file in write_chunks(source, path, (1, n_layer - 3, 2)):
        chunk = ChunkFile(file)
        for part in chunk.part_names():
            chunk.verify_part(part)
            assert chunk.info(part) == source.info(part)
        union.update(load_file(file))
    assert union.keys() == state.keys()
    assert all(torch.equal(union[name], state[name]) and union[name].dtype == state[name].dtype for name in state)


@pytest.mark.parametrize("counts", [(5,), (0, 5), (2, 2, 1), (0, 1, 1, 1, 1, 1)])
def test_every_number_of_nodes(lit: tuple[Path, State], counts: tuple[int, ...]) -> None:
    path, _ = lit
    files = write_chunks(LitCheckpoint(path), path, counts)
    folder = path / "chunks" / f"{len(counts)}nodes"
    assert sorted(folder.iterdir()) == sorted(files)
    names = ["starter", *(f"secondary{i}" for i in range(len(counts) - 1))]
    assert files == [find_chunk(path, len(counts), name) for name in names]
    assert siblings(files[-1]) == dict(zip(names, files, strict=True))
    assert list(siblings(files[0])) == names
    begin = 0
    for name, count, file in zip(names, counts, files, strict=True):
        manifest = ChunkFile(file).manifest
        assert (manifest.node, manifest.blocks, manifest.n_nodes) == (name, (begin, begin + count), len(counts))
        begin += count


def test_mixed_types_are_aligned(tmp_path: Path) -> None:
    config, state = tiny_state(padded_vocab_size=97)
    state = {name: tensor.bfloat16() if tensor.dim() > 1 else tensor for name, tensor in state.items()}
    source = LitCheckpoint(write_lit(tmp_path / "m", config, state))
    assert source.dtype == "bfloat16"
    for file in write_chunks(source, tmp_path / "m", (2, 3)):
        chunk = ChunkFile(file)
        for part in chunk.part_names():
            chunk.verify_part(part)
            for name, tensor in chunk.tensors(part).items():
                assert tensor.data_ptr() % tensor.element_size() == 0
                assert torch.equal(tensor, state[name])


def test_chunks_that_fit_are_kept(lit: tuple[Path, State]) -> None:
    path, state = lit
    files = write_chunks(LitCheckpoint(path), path, (1, 2, 2))
    first = [file.stat().st_ino for file in files]
    assert write_chunks(LitCheckpoint(path), path, (1, 2, 2)) == files
    assert [file.stat().st_ino for file in files] == first
    write_chunks(LitCheckpoint(path), path, (1, 1, 3))  # the starter's has not changed
    assert [file.stat().st_ino == inode for file, inode in zip(files, first, strict=True)] == [True, False, False]

    state["transformer.h.0.norm_1.weight"] += 1
    write_lit(path, Config.from_file(path / "model_config.yaml"), state)
    write_chunks(LitCheckpoint(path), path, (1, 1, 3))
    assert torch.equal(load_file(files[0])["transformer.h.0.norm_1.weight"], state["transformer.h.0.norm_1.weight"])


def test_a_damaged_chunk_is_written_again(lit: tuple[Path, State]) -> None:
    path, _ = lit
    files = write_chunks(LitCheckpoint(path), path, (2, 3))
    whole = files[1].read_bytes()
    files[1].write_bytes(whole[:-100])
    write_chunks(LitCheckpoint(path), path, (2, 3))
    assert files[1].read_bytes() == whole


def test_cast(lit: tuple[Path, State]) -> None:
    path, state = lit
    source = CastSource(LitCheckpoint(path), "bfloat16")
    files = write_chunks(source, path, (2, 3))
    for file in files:
        chunk = ChunkFile(file)
        assert chunk.dtype == "bfloat16"
        for part in chunk.part_names():
            chunk.verify_part(part)
            assert chunk.info(part) == source.info(part)
            assert all(torch.equal(t, state[name].bfloat16()) for name, t in chunk.tensors(part).items())
    inodes = [file.stat().st_ino for file in files]
    write_chunks(CastSource(LitCheckpoint(path), "bfloat16"), path, (2, 3))
    assert [file.stat().st_ino for file in files] == inodes
    write_chunks(LitCheckpoint(path), path, (2, 3))
    assert ChunkFile(files[0]).dtype == "float32"


def test_hashes_are_remembered(lit: tuple[Path, State], monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = lit
    infos = [LitCheckpoint(path).info(part) for part in stage_parts(0, 5, starter=True)]
    monkeypatch.setattr("mdi.checkpoint.weights.compute_info", _never)
    assert [LitCheckpoint(path).info(info.name) for info in infos] == infos
    os.utime(path / "lit_model.pth", ns=(1, 1))
    with pytest.raises(AssertionError):
        LitCheckpoint(path).info("head")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"parts": 3}', "null"])
def test_a_damaged_cache_of_hashes_is_ignored(lit: tuple[Path, State], text: str) -> None:
    path, _ = lit
    before = LitCheckpoint(path).info("head")
    (path / "parts.json").write_text(text)
    assert LitCheckpoint(path).info("head") == before


def _never(*args: Any) -> None:
    raise AssertionError


# -- tied weights and old names


@pytest.mark.parametrize("missing", ["lm_head.weight", "transformer.wte.weight"])
def test_tied_weights(tmp_path: Path, missing: str) -> None:
    config, state = tiny_state()
    kept = "transformer.wte.weight" if missing == "lm_head.weight" else "lm_head.weight"
    weight = state[kept]
    del state[missing]
    path = write_lit(tmp_path / "m", config, state)
    source = LitCheckpoint(path)
    assert torch.equal(source.tensors("embedding")["transformer.wte.weight"], weight)
    assert torch.equal(source.tensors("head")["lm_head.weight"], weight)
    starter = ChunkFile(write_chunks(source, path, (1, 4))[0])
    assert torch.equal(starter.tensors("head")["lm_head.weight"], weight)


def test_tied_weights_of_one_storage(tmp_path: Path) -> None:
    config, state = tiny_state()
    state["lm_head.weight"] = state["transformer.wte.weight"]
    source = LitCheckpoint(write_lit(tmp_path / "m", config, state))
    assert torch.equal(source.tensors("head")["lm_head.weight"], state["transformer.wte.weight"])


def test_names_of_old_litgpt(tmp_path: Path) -> None:
    from litgpt.model import GPT

    config, state = tiny_state()
    old = {name.replace(".attn.qkv.", ".attn.attn."): tensor for name, tensor in state.items()}
    expected = GPT(config)
    expected.load_state_dict(dict(old))  # litgpt's own way
    source = LitCheckpoint(write_lit(tmp_path / "m", config, old))
    name = "transformer.h.3.attn.qkv.weight"
    assert torch.equal(source.tensors("block.3")[name], expected.state_dict()[name])


# -- refusals


def _change(path: Path, change: Any) -> None:
    state = torch.load(path / "lit_model.pth", weights_only=True)
    change(state)
    torch.save(state, path / "lit_model.pth")


def _reshape(state: State) -> None:
    state["transformer.h.2.norm_1.weight"] = torch.ones(7)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_reshape, "transformer.h.2.norm_1.weight has the shape [7], expected [48]"),
        (lambda s: s.pop("transformer.h.4.attn.proj.weight"), "transformer.h.4.attn.proj.weight"),
        (lambda s: s.update({"transformer.h.5.norm_1.weight": torch.ones(48)}), "transformer.h.5"),
        (lambda s: s.update({"strange": torch.ones(1)}), "strange"),
        (lambda s: s.update({"step": 3}), "'step'"),
        (lambda s: s.clear(), "lit_model.pth"),
    ],
)
def test_a_checkpoint_of_another_shape(lit: tuple[Path, State], change: Any, name: str) -> None:
    path, _ = lit
    _change(path, change)
    with pytest.raises(CheckpointError) as e:
        LitCheckpoint(path)
    assert name in str(e.value)


@pytest.mark.parametrize("keep", [0, 3, 1000, -5000, -10])
@pytest.mark.parametrize("name", ["lit_model.pth", "lit_model.safetensors"])
def test_a_checkpoint_cut_short(tmp_path: Path, keep: int, name: str) -> None:
    config, state = tiny_state()
    path = write_lit(tmp_path / "m", config, state, safetensors=name.endswith("safetensors"))
    data = (path / name).read_bytes()
    (path / name).write_bytes(data[:keep])
    with pytest.raises(CheckpointError) as caught:
        LitCheckpoint(path)
    assert name in str(caught.value) and caught.value.code == "weights"
    assert "\n" not in str(caught.value)


def _entries(path: Path) -> dict[str, range]:
    """Where the contents of each file in a zip file are."""
    found = {}
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for entry in archive.infolist():
            file.seek(entry.header_offset + 26)
            n_name, n_extra = struct.unpack("<HH", file.read(4))
            start = entry.header_offset + 30 + n_name + n_extra
            found[entry.filename.partition("/")[2]] = range(start, start + entry.file_size)
    return found


def _flip(path: Path, place: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 16]))


def _read_all(path: Path) -> State:
    source = LitCheckpoint(path)
    return {name: tensor.clone() for part in source.part_names() for name, tensor in source.tensors(part).items()}


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_flipped_bit_of_a_checkpoint_is_found(tmp_path: Path, is_nested: bool) -> None:
    """In the first, a middle and the last byte of each file in it that torch.save wrote and torch.load reads."""
    config, state = tiny_state()
    path = write_lit(tmp_path / "m", config, state, safetensors=False)
    weights = path / "lit_model.pth"
    if is_nested:  # as litgpt's pretraining does, with tensors besides that are not read
        torch.save({"optimizer": {"a": torch.ones(7), "b": torch.ones(9)}, "model": state}, weights)
    entries = {name: where for name, where in _entries(weights).items() if name.startswith("data") and where}
    assert len(entries) > len(state)
    assert _read_all(path).keys() == state.keys()
    unread = {"data/0", "data/1"} if is_nested else set()
    for name, where in entries.items():
        for place in {where[0], where[len(where) // 2], where[-1]}:
            _flip(weights, place)
            if name in unread:
                _read_all(path)
            else:
                with pytest.raises(CheckpointError) as e:
                    _read_all(path)
                assert "lit_model.pth" in str(e.value)
            _flip(weights, place)
    assert all(torch.equal(tensor, state[name]) for name, tensor in _read_all(path).items())


def test_a_bit_that_flips_anywhere_is_found_or_changes_nothing(lit: tuple[Path, State]) -> None:
    path, state = lit
    weights = path / "lit_model.pth"
    n_bytes, last = weights.stat().st_size, max(where.stop for where in _entries(weights).values())
    draw, n_found = random.Random(3), 0
    for i in range(120):
        place = draw.randrange(*((0, last) if i % 2 else (last, n_bytes)))  # half of them in the directory at the end
        _flip(weights, place)
        try:
            found = _read_all(path)
            assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state), place
        except CheckpointError:
            n_found += 1
        _flip(weights, place)
    assert n_found > 40


def test_a_flipped_bit_is_found_by_the_kernels_and_before_a_chunk_is_written(lit: tuple[Path, State]) -> None:
    path, _ = lit
    source = LitCheckpoint(path)
    where = _entries(path / "lit_model.pth")["data/3"]
    _flip(path / "lit_model.pth", where[5])
    damaged = []
    for part in source.part_names():
        for read in (source.weights, lambda part: list(source.pieces(part)), source.info):
            try:
                read(part)
            except CheckpointError:
                damaged.append(part)
    assert len(damaged) == 3 and len(set(damaged)) == 1, "the other parts can be used"


def test_a_checkpoint_without_checksums_can_be_read(lit: tuple[Path, State]) -> None:
    """torch.save leaves them out if a program asks for that, and did not write zip files before version 1.6."""
    path, state = lit
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, path / "lit_model.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    assert _read_all(path).keys() == state.keys()
    torch.save(state, path / "lit_model.pth", _use_new_zipfile_serialization=False)
    assert _read_all(path).keys() == state.keys()


class _Evil:
    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return Path.touch, (self.witness,)


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_code_in_a_checkpoint_is_not_run(lit: tuple[Path, State], tmp_path: Path, how: str) -> None:
    path, state = lit
    witness = tmp_path / "run"
    evil: Any = {**state, "lm_head.weight": _Evil(witness)}
    if how == "torch":
        torch.save(evil, path / "lit_model.pth")
    else:
        (path / "lit_model.pth").write_bytes(pickle.dumps({"a": _Evil(witness)}))
    with pytest.raises(CheckpointError) as e:
        LitCheckpoint(path)
    assert "lit_model.pth" in str(e.value) and e.value.code == "weights"
    assert not witness.exists()


def test_reading_a_file_takes_back_no_filter_that_another_thread_sets_meanwhile(
    lit: tuple[Path, State], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `requests` does while it is imported: without it, a warning about SOCKS stood among the lines of a run."""
    read = torch.load

    def read_beside(*args: Any, **options: Any) -> Any:
        warnings.filterwarnings("ignore", message="of another thread")
        return read(*args, **options)

    monkeypatch.setattr(torch, "load", read_beside)
    LitCheckpoint(lit[0])
    warnings.warn("of another thread", UserWarning, stacklevel=1)  # is an error without the filter


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("", "model_config.yaml"),
        ("a: [", "model_config.yaml"),
        ("no_such_setting: 3", "no_such_setting"),
        ("n_layer: many", "n_layer: "),
        ("n_layer: 0", "n_layer: "),
        ("norm_eps: 1e-5", "norm_eps: "),  # YAML reads that as a string
        ("n_embd: 31", "model_config.yaml"),
        ("mlp_class_name: Nothing", "model"),
    ],
)
def test_a_config_that_makes_no_model(lit: tuple[Path, State], text: str, name: str) -> None:
    path, _ = lit
    (path / "model_config.yaml").write_text(text)
    with pytest.raises(CheckpointError) as e:
        LitCheckpoint(path)
    assert name in str(e.value)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as e:
        open_source(tmp_path / "no" / "where" / "model_starter.safetensors")
    assert f"{tmp_path})" in str(e.value)
    with pytest.raises(CheckpointError) as e:
        LitCheckpoint(tmp_path / "nowhere")
    assert str(tmp_path) in str(e.value)
    with pytest.raises(CheckpointError) as e:
        open_source(tmp_path)
    assert str(tmp_path) in str(e.value)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError) as e:
        open_source(tmp_path)
    assert f"{tmp_path} has config.json, but no weights" in str(e.value)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError) as e:
        open_source(tmp_path)
    assert e.value.code == "unsafe"


# -- chunks that are not good


@pytest.fixture
def chunk(lit: tuple[Path, State]) -> Path:
    path, _ = lit
    return write_chunks(LitCheckpoint(path), path, (1, 2, 2))[2]


def test_a_pth_name_finds_the_safetensors(chunk: Path) -> None:
    assert open_source(chunk.with_suffix(".pth")).path == chunk  # type: ignore[attr-defined]


def test_an_old_pth_chunk_is_refused_unread(chunk: Path) -> None:
    old = chunk.parent / "model_secondary9.pth"
    old.write_bytes(b"whatever")
    with pytest.raises(CheckpointError) as e:
        open_source(old)
    assert f"mdi prepare-model {chunk.parents[2]} --n-nodes 3" in str(e.value)


def test_a_chunk_without_manifest(chunk: Path) -> None:
    save_file(load_file(chunk), chunk)
    with pytest.raises(CheckpointError) as e:
        open_source(chunk)
    assert "manifest" in str(e.value) and "--n-nodes 3" in str(e.value)
    copied = chunk.parents[3] / "alone.safetensors"
    shutil.copy(chunk, copied)
    with pytest.raises(CheckpointError) as e:
        open_source(copied)
    assert "mdi prepare-model MODEL --n-nodes N" in str(e.value)


def _rewrite(chunk: Path, tensors: State) -> None:
    save_file(tensors, chunk, metadata={METADATA_KEY: ChunkFile(chunk).manifest.to_json()})


def test_a_chunk_numbered_from_zero(chunk: Path) -> None:
    tensors = {name.replace(".h.3.", ".h.0.").replace(".h.4.", ".h.1."): t for name, t in load_file(chunk).items()}
    _rewrite(chunk, tensors)
    with pytest.raises(CheckpointError) as e:
        open_source(chunk)
    assert "blocks 3-4" in str(e.value) and "mdi prepare-model" in str(e.value)


def test_a_chunk_that_is_not_what_it_says(chunk: Path) -> None:
    good = load_file(chunk)
    _rewrite(chunk, {name: t for name, t in good.items() if name != "transformer.h.3.norm_1.weight"})
    with pytest.raises(CheckpointError) as e:
        open_source(chunk)
    assert "transformer.h.3.norm_1.weight" in str(e.value)


def test_a_chunk_of_another_dtype_than_it_says(chunk: Path) -> None:
    _rewrite(chunk, {name: tensor.half() for name, tensor in load_file(chunk).items()})
    with pytest.raises(CheckpointError) as e:
        open_source(chunk)
    assert "manifest" in str(e.value)


def test_a_flipped_bit_is_found(chunk: Path) -> None:
    data = bytearray(chunk.read_bytes())
    data[-1] ^= 1
    chunk.write_bytes(data)
    source = open_source(chunk)
    assert isinstance(source, ChunkFile)
    source.verify_part("block.3")
    with pytest.raises(CheckpointError) as e:
        source.verify_part("block.4")
    assert "block.4" in str(e.value) and "sha256" in str(e.value)


@pytest.mark.parametrize("change", [lambda d: d[:-1], lambda d: d + b"x", lambda d: d[:50], lambda d: b""])
def test_a_chunk_of_another_length(chunk: Path, change: Any) -> None:
    chunk.write_bytes(change(chunk.read_bytes()))
    with pytest.raises(CheckpointError) as e:
        open_source(chunk)
    assert chunk.name in str(e.value)


# -- disks


def test_a_disk_that_is_too_small(lit: tuple[Path, State], monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = lit
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError) as e:
        write_chunks(LitCheckpoint(path), path, (2, 3))
    assert e.value.code == "disk"
    assert not (path / "chunks").exists()


def test_breaking_off_leaves_nothing_half_written(lit: tuple[Path, State]) -> None:
    path, _ = lit

    def stop(done: int, total: int) -> None:
        assert 0 < done <= total
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_chunks(LitCheckpoint(path), path, (2, 3), stop)
    left = list((path / "chunks" / "2nodes").iterdir())
    assert all(file.suffix == ".safetensors" for file in left)
    for file in left:
        ChunkFile(file)
