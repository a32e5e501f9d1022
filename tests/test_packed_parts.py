"""Packed parts: what kernels read lies in files as it does in memory, on pages, and stands for the checkpoint's weights."""

from __future__ import annotations

import hashlib
import io
import json
import mmap
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from families import FAMILIES
from mdi.checkpoint import chunks
from mdi.checkpoint.chunks import ChunkFile, find_chunk, write_chunks
from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.manifest import METADATA_KEY
from mdi.checkpoint.packing import (
    BIG_BYTES,
    EMBEDDING,
    EMBEDDING_SCALE,
    Packing,
    arrays_of,
    folded,
    int8_rows,
    plain,
)
from mdi.checkpoint.parts import PartInfo
from mdi.checkpoint.records import HashRecord
from mdi.checkpoint.safetensors_layout import PAGE_BYTES, TensorSpec, read_header
from mdi.checkpoint.source import LitCheckpoint
from mdi.checkpoint.store import BlockStore
from mdi.checkpoint.torch_tensors import as_array
from mdi.checkpoint.weights import WeightSource
from mdi.cli import launch
from mdi.errors import CheckpointError
from mdi.kernels import LAYOUT_VERSION
from mdi.kernels.layout import Matrix, pack, unpack
from mdi.kernels.weight_formats import LAYOUTS, ROUNDED, format_within, is_packable
from tiny_checkpoint import write_checkpoint
from tiny_models import State, tiny_lit, tiny_state, write_lit

HEAD = "lm_head.weight"
# Of a weight's largest number in its group; what int4's search does with a few is judged by tests/kernels.
NEAR = {"float32": 0.0, "bf16": 2**-8, "fp16": 2**-11, "int8": 0.006, "int4": 0.16, "mxfp4": 0.26}


@pytest.fixture
def lit(tmp_path: Path) -> tuple[Path, State]:
    return tiny_lit(tmp_path / "model")


def packed(path: Path, form: str, head: str | None = None) -> PackedSource:
    return PackedSource(LitCheckpoint(path), Packing(form, head or form))


def to_pack(source: PackedSource, state: State) -> State:
    """The numbers that are packed: with gains of norms in the weights behind them, where that is done."""
    arrays = {name: as_array(tensor.float()) for name, tensor in state.items()}
    specs = {name: TensorSpec("F32", array.shape) for name, array in arrays.items()}
    return {
        name: torch.from_numpy(folded(name, source.packing, source.spec, arrays.__getitem__, specs)[0][:])
        for name in arrays
    }


def all_plain(source: WeightSource) -> dict[str, np.ndarray]:
    return {name: array for part in source.part_names() for name, array in plain(source.weights(part)).items()}


@pytest.mark.parametrize("form", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_stand_for_the_checkpoint(tmp_path: Path, family: str, form: str) -> None:
    path, state = tiny_lit(tmp_path / "model", family)
    source = packed(path, form)
    seen: dict[str, np.ndarray] = {}
    for file in write_chunks(source, path, (1, source.config.n_layer - 1)):
        chunk = ChunkFile(file)
        assert chunk.packing == Packing(form, form) and chunk.dtype == "float32"
        for part in chunk.part_names():
            chunk.verify_part(part)
            assert chunk.info(part) == source.info(part)
        seen.update(all_plain(chunk))
    assert seen.keys() == state.keys()
    for name, tensor in to_pack(source, state).items():
        found, exact = torch.from_numpy(seen[name].copy()), tensor.float()
        assert found.shape == exact.shape and found.dtype == torch.float32
        is_rounded = is_packable(name, tuple(tensor.shape)) or (name == EMBEDDING and form in ROUNDED)
        limit = (
            NEAR["int8" if name == EMBEDDING else format_within(form, name)] * exact.abs().max() if is_rounded else 0
        )
        assert (found - exact).abs().max() <= limit, name


@pytest.mark.parametrize("form", LAYOUTS)
def test_stored_bytes_are_what_the_kernels_read(tmp_path: Path, form: str) -> None:
    path, state = tiny_lit(tmp_path / "model", n_embd=256, n_head=8, head_size=32, intermediate_size=704)
    numbers = to_pack(packed(path, form), state)
    for file in write_chunks(packed(path, form), path, (2, 3)):
        header, n_big, has_small = read_header(file), 0, False
        first = min(start for start, _ in header.offsets.values())
        assert first % PAGE_BYTES == 0
        for name, (start, stop) in sorted(header.offsets.items(), key=lambda item: item[1]):
            assert start % (PAGE_BYTES if stop - start >= BIG_BYTES else 64) == 0, name
            assert (stop - start) % (PAGE_BYTES if stop - start >= BIG_BYTES else 64) == 0
            has_small = has_small or start % PAGE_BYTES != 0
            n_big += stop - start >= BIG_BYTES
        assert n_big >= 6 and has_small
        chunk = ChunkFile(file)
        for part in chunk.part_names():
            for name, weight in chunk.weights(part).items():
                if isinstance(weight, Matrix):
                    expected = pack(format_within(form, name), numbers[name].numpy())
                    assert weight.format == expected.format and np.array_equal(weight.data, expected.data)
                    assert weight.data.ctypes.data % 64 == 0 and not weight.data.flags.writeable
                    assert isinstance(_owner(weight.data), mmap.mmap), "a copy"


def _owner(array: np.ndarray) -> Any:
    base: Any = array
    while isinstance(base, (np.ndarray, memoryview)):
        base = base.obj if isinstance(base, memoryview) else base.base
    return base


def test_all_weights_of_a_file_share_one_mapping_that_goes_with_them(lit: tuple[Path, State]) -> None:
    path, _ = lit
    chunk = ChunkFile(write_chunks(packed(path, "bf16"), path, (5,))[0])
    first, second = chunk.weights("block.0"), chunk.weights("block.1")
    owners = {id(_owner(array)) for array in (*arrays_of(first), *arrays_of(second))}
    assert len(owners) == 1
    kept = weakref.ref(_owner(arrays_of(first)[0]))
    del first, second
    assert kept() is None


@pytest.mark.parametrize(("stored", "form"), [("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "float32")])
def test_the_own_format_loses_nothing(tmp_path: Path, stored: str, form: str) -> None:
    config, state = tiny_state()
    state = {name: tensor.to(getattr(torch, stored)) for name, tensor in state.items()}
    path = write_lit(tmp_path / "m", config, state)
    assert launch("prepare-model", [str(path), "--n-nodes", "2"]) == 0
    seen: State = {}
    for node in ("starter", "secondary0"):
        chunk = ChunkFile(find_chunk(path, 2, node))
        assert (chunk.manifest.format, chunk.manifest.format_head, chunk.dtype) == (form, form, stored)
        for part in chunk.part_names():
            seen.update(chunk.tensors(part))
    assert all(torch.equal(seen[name], state[name].float()) for name in state)
    table = ChunkFile(find_chunk(path, 2, "starter")).weights("embedding")[EMBEDDING]
    assert isinstance(table, np.ndarray) and table.dtype.itemsize == state[EMBEDDING].element_size()


def test_packing_in_memory_is_what_a_chunk_holds(lit: tuple[Path, State]) -> None:
    path, _ = lit
    packing = Packing("int4", "int8")
    chunk = ChunkFile(write_chunks(PackedSource(LitCheckpoint(path), packing), path, (5,))[0])
    checkpoint = LitCheckpoint(path)
    for part in chunk.part_names():
        stored, made = chunk.weights(part), checkpoint.weights(part, packing)
        assert stored.keys() == made.keys()
        for name, weight in stored.items():
            other = made[name]
            if isinstance(weight, Matrix):
                assert isinstance(other, Matrix)
                assert (weight.format, weight.n_out, weight.n_in) == (other.format, other.n_out, other.n_in)
                assert weight.format == ("int8" if name == HEAD else "int4")
                assert np.array_equal(weight.data, other.data)
            else:
                assert isinstance(other, np.ndarray)
                assert weight.dtype == other.dtype and np.array_equal(weight, other)


def test_weights_can_be_brought_into_another_format(lit: tuple[Path, State]) -> None:
    path, state = lit
    chunk = ChunkFile(write_chunks(packed(path, "float32"), path, (5,))[0])
    for part in ("embedding", "block.2", "head"):
        other = chunk.weights(part, Packing("int8", "int8"))
        expected = LitCheckpoint(path).weights(part, Packing("int8", "int8"))
        assert other.keys() == expected.keys()
        for name, weight in other.items():
            same = expected[name]
            a, b = (w.data if isinstance(w, Matrix) else w for w in (weight, same))
            assert np.array_equal(a, b), name


def test_a_part_that_was_sent_is_read_as_the_chunk_is(lit: tuple[Path, State], tmp_path: Path) -> None:
    path, _ = lit
    source = packed(path, "int8")
    store = BlockStore(tmp_path / "cache")
    for part in ("block.3", "embedding"):
        data = b"".join(source.pieces(part))
        info = source.info(part)
        assert info == PartInfo(part, hashlib.sha256(data).hexdigest(), len(data))
        store.receive(info, 0, io.BytesIO(data).read)
        kept = store.part(info, source.config, source.config_hash)
        assert kept.packing == Packing("int8", "int8") and kept.part_names() == [part]
        for name, weight in kept.weights(part).items():
            expected = LitCheckpoint(path).weights(part, Packing("int8", "int8"))[name]
            a, b = (w.data if isinstance(w, Matrix) else w for w in (weight, expected))
            assert np.array_equal(a, b) and not a.flags.writeable
        offsets = read_header(store.path(info.sha256)).offsets.values()
        assert min(start for start, _ in offsets) == PAGE_BYTES


def test_formats_and_versions_have_hashes_of_their_own(
    lit: tuple[Path, State], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = lit
    shas = {form: packed(path, form).info("block.0").sha256 for form in LAYOUTS}
    assert len(set(shas.values())) == len(LAYOUTS)
    assert packed(path, "int8").known("block.0") is not None
    assert LitCheckpoint(path).known("block.0") is None  # what is kept is of each form
    monkeypatch.setattr("mdi.checkpoint.packing.LAYOUT_VERSION", 99)
    monkeypatch.setattr("mdi.checkpoint.derived.LAYOUT_VERSION", 99)
    assert packed(path, "int8").known("block.0") is None
    assert packed(path, "int8").info("block.0").sha256 not in shas.values()


def test_a_chunk_is_hashed_once(lit: tuple[Path, State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = lit
    file = write_chunks(packed(path, "int8"), path, (5,))[0]
    record = tmp_path / "cache" / "checked.json"
    hashed: list[str] = []
    real = ChunkFile.verify_part
    monkeypatch.setattr(ChunkFile, "verify_part", lambda self, name: (hashed.append(name), real(self, name)))
    names = ChunkFile(file).part_names()
    for expected in (names, []):
        hashed.clear()
        ChunkFile(file).verify(names, HashRecord(record))
        assert sorted(hashed) == sorted(expected)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for _ in range(2):
        with pytest.raises(CheckpointError) as e:
            ChunkFile(file).verify(names, HashRecord(record))
        assert "sha256" in str(e.value) and e.value.code == "weights"


# -- refusals


def _rewrite(path: Path, change: Any, metadata: Any = lambda m: m) -> None:
    told = metadata(dict(read_header(path).metadata))
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, told)


def _manifest(**fields: Any) -> Any:
    def change(metadata: dict[str, str]) -> dict[str, str]:
        return {METADATA_KEY: json.dumps({**json.loads(metadata[METADATA_KEY]), **fields})}

    return change


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"format_version": 1}, "format_version 1, this program reads 2"),
        ({"layout_version": LAYOUT_VERSION + 1}, "layout_version"),
        ({"format": "int3"}, "int3"),
        ({"format": "plain"}, "format_head"),
        ({"format_head": "plain"}, "format_head"),
        ({"format": "int4"}, "transformer.h.0.attn"),
        ({"format": "plain", "format_head": "plain"}, "has the shape"),
    ],
)
def test_a_chunk_of_another_version_or_format_than_it_says(
    lit: tuple[Path, State], fields: dict[str, Any], name: str
) -> None:
    path, _ = lit
    file = write_chunks(packed(path, "int8"), path, (5,))[0]
    _rewrite(file, lambda tensors: None, _manifest(**fields))
    with pytest.raises(CheckpointError) as caught:
        ChunkFile(file)
    assert name in str(caught.value)
    assert "mdi prepare-model" in str(caught.value) or not any("version" in field for field in fields)
    assert "\n" not in str(caught.value)


NAME = "transformer.h.0.attn.proj.weight"


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop(NAME),
        lambda t: t.update({NAME: t[NAME][:-64].clone()}),
        lambda t: t.update({NAME: t[NAME].view(torch.int8).clone()}),
        lambda t: t.update({NAME: t[NAME].reshape(64, -1).clone()}),
        lambda t: t.update({"transformer.h.0.norm_1.weight": torch.ones(16)}),
        lambda t: t.update({"transformer.h.0.norm_1.weight": torch.ones(48, dtype=torch.float64)}),
        lambda t: t.pop(EMBEDDING_SCALE),
        lambda t: t.update({EMBEDDING: t[EMBEDDING].float()}),
        lambda t: t.update({"transformer.h.0.more": torch.ones(16)}),
    ],
)  # fmt: skip
def test_lengths_are_checked_before_they_are_used(lit: tuple[Path, State], change: Any) -> None:
    path, _ = lit
    source = packed(path, "int8")
    file = write_chunks(source, path, (5,))[0]
    _rewrite(file, change)
    with pytest.raises(CheckpointError) as caught:
        ChunkFile(file)
    assert "transformer." in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_kept_part_is_checked_against_the_models_config(lit: tuple[Path, State], tmp_path: Path) -> None:
    path, _ = lit
    source = packed(path, "int8")
    store = BlockStore(tmp_path / "cache")
    data = b"".join(source.pieces("block.3"))
    store.receive(source.info("block.3"), 0, io.BytesIO(data).read)
    other, _ = tiny_lit(tmp_path / "other", intermediate_size=80)
    config = LitCheckpoint(other)
    kept = store.part(source.info("block.3"), config.config, config.config_hash)
    with pytest.raises(CheckpointError) as e:
        kept.weights("block.3")
    assert "h.3.mlp" in str(e.value)
    with pytest.raises(CheckpointError) as e:
        _kept_with(store, data.replace(b'"layout_version":"1"', b'"layout_version":"7"'), source)
    assert "'7'" in str(e.value) and e.value.code == "weights"


def _kept_with(store: BlockStore, data: bytes, source: WeightSource) -> None:
    info = PartInfo("block.3", hashlib.sha256(data).hexdigest(), len(data))
    store.receive(info, 0, io.BytesIO(data).read)
    store.part(info, source.config, source.config_hash)


# -- the pieces


def test_int8_rows_have_a_scale_each() -> None:
    table = np.random.default_rng(0).normal(size=(1500, 24)).astype(np.float32)
    table[3] = 0
    q, scale = int8_rows(table)
    assert q.dtype == np.int8 and scale.dtype == np.float32 and scale.shape == (1500,)
    assert np.abs(q).max(axis=1)[[0, 1, 2]].tolist() == [127] * 3 and not q[3].any()
    assert (np.abs(q * scale[:, None] - table) <= 0.501 * scale[:, None]).all()


def test_a_matrix_that_is_stored_in_more_types_than_kernels_know(tmp_path: Path) -> None:
    config, state = tiny_state()
    state = {name: tensor.double() for name, tensor in state.items()}
    path = write_lit(tmp_path / "m", config, state, safetensors=True)
    chunk = ChunkFile(write_chunks(packed(path, "float32"), path, (5,))[0])
    found = all_plain(chunk)
    assert all(np.array_equal(found[name], state[name].float().numpy()) for name in state)
    eighth = TensorSpec("F8_E4M3", (16, 16))
    with pytest.raises(CheckpointError) as e:
        Packing("int8", "int8").pack("transformer.h.0.attn.proj.weight", np.zeros((16, 16), np.uint8), eighth)
    assert "--dtype bfloat16" in str(e.value)


def test_routers_and_latent_projections_stay_as_they_are() -> None:
    for path, shape, expected in (
        ("transformer.h.0.mlp.gate.weight", (8, 64), False),
        ("transformer.h.0.attn.kv_b_proj.weight", (64, 64), False),
        ("transformer.h.0.mlp.experts.3.proj.weight", (64, 32), True),
        ("transformer.h.0.norm_1.weight", (64,), False),
        ("transformer.h.0.attn.qkv.bias", (64,), False),
        (EMBEDDING, (64, 64), False),
        (HEAD, (64, 64), True),
    ):
        assert is_packable(path, shape) == expected, path


def test_unpacking_gives_back_what_was_packed() -> None:
    weight = np.random.default_rng(1).normal(size=(33, 70)).astype(np.float32)
    assert np.array_equal(plain({"a.weight": pack("float32", weight)})["a.weight"], weight)
    assert np.array_equal(plain({"a.weight": pack("int4", weight)})["a.weight"], unpack(pack("int4", weight)))


def test_packing_lets_go_of_the_file_by_what_it_reads_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed tensor is up to eight times smaller than the one that is read for it, whose pages count as ours."""
    source = LitCheckpoint(write_checkpoint(tmp_path / "tiny"))
    largest = max(spec.n_bytes for spec in source.specs.values())
    monkeypatch.setattr(chunks, "RELEASE_BYTES", 2 * largest)
    held, read = [0], source.file.array

    def array(name: str, rows: slice | None = None) -> np.ndarray:
        found = read(name, rows)
        held[-1] += found.nbytes
        return found

    monkeypatch.setattr(source.file, "array", array)
    monkeypatch.setattr(source, "release", lambda: held.append(0))
    write_chunks(PackedSource(source, Packing("int4", "int4")), tmp_path / "out", (5,))
    assert sum(held) >= sum(spec.n_bytes for spec in source.specs.values())
    assert max(held) <= 4 * largest  # the limit, the one tensor that passes it, and one more that goes with it
