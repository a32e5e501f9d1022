"""Parts of GGUF files at their own bits are known by the bytes of their tensors, wherever these lie in a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from families import random_gpt
from gguf_files import byte_level_tokens, write_gguf
from mdi.cancel import Cancel
from mdi.checkpoint import weights
from mdi.checkpoint.chunks import find_chunk
from mdi.checkpoint.derived import PackedSource, own_bits
from mdi.checkpoint.gguf import read_gguf
from mdi.checkpoint.ggufsource import GgufSource, gguf_directory
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.parts import PartInfo, part_of
from mdi.checkpoint.source import ChunkFile
from mdi.checkpoint.weights import WeightSource, compute_info
from mdi.cli import launch
from mdi.control.client import ControlClient
from mdi.control.messages import PartSpec
from mdi.errors import ControlError
from mdi.host.computing import choose_computing
from mdi.kernels import library
from mdi.model.tensors import HEAD
from mdi.spec.extent import Extent
from mdi.spec.options import ParallelOptions, Requested
from mdi.stages.spec import StageSpec
from mdi.tensor.group import Group
from mdi.tensor.shard_source import ShardSource
from mdi.tensor.shares import Share, share_out
from secondaries import cluster_of, secondary
from test_mixed_runs import alone, ids
from tiny_checkpoint import tiny_config, tokenizer

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")

KINDS = {
    "attn_q": "Q4_0", "attn_k": "Q5_0", "attn_v": "Q8_0", "attn_output": "Q4_1", "ffn_gate": "Q5_1", "ffn_up": "F16",
    "ffn_down": "Q4_0", "token_embd": "Q8_0",
}  # fmt: skip
# A byte from the end of a tensor that is no scale: another bit there is another number, and never NaN.
HARMLESS = {"F32": 4, "F16": 2}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(n_embd=64, head_size=16, n_head=4, n_query_groups=2, intermediate_size=96)
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    tokens = byte_level_tokens(json.loads(tokenizer().to_str()), **{"tokenizer.ggml.eos_token_id": 0})

    def kind(name: str) -> str:
        return next((kind for word, kind in KINDS.items() if word in name), "Q8_0")

    return write_gguf(path, "Llama-3.1-8B", config, random_gpt(config, 4).state_dict(), kind, tokens=tokens)


@pytest.fixture(scope="module")
def other(file: Path) -> Path:
    """The same tensors in another order, on other boundaries, behind other fields."""
    return rewritten(file, file.with_name("another name.gguf"))


def rewritten(path: Path, to: Path) -> Path:
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(to, str(reader.fields["general.architecture"].contents()))
    writer.add_custom_alignment(256)
    writer.add_string("general.name", "Another")
    writer.add_string("quantize.imatrix.file", "somewhere")
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.")):
            inside = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], inside)
    for tensor in reversed(reader.tensors):
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def damaged(path: Path, tensor: str, to: Path) -> Path:
    """A copy in which one bit of a tensor is another one."""
    found = next(one for one in gguf.GGUFReader(path).tensors if one.name == tensor)
    data = bytearray(path.read_bytes())
    data[found.data_offset + found.n_bytes - HARMLESS.get(found.tensor_type.name, 1)] ^= 1
    to.write_bytes(data)
    return to


def at_own_bits(path: Path) -> PackedSource:
    found = own_bits(GgufSource(path))
    assert found is not None
    return found


def hashes(path: Path) -> dict[str, str]:
    source = at_own_bits(path)
    return {part: source.info(part).sha256 for part in source.part_names()}


def test_what_is_beside_the_tensors_does_not_count(file: Path, other: Path) -> None:
    assert read_gguf(file).tensors.keys() == read_gguf(other).tensors.keys()
    assert list(read_gguf(file).tensors) != list(read_gguf(other).tensors)
    assert file.stat().st_size != other.stat().st_size
    assert GgufSource(file).config_hash == GgufSource(other).config_hash
    assert hashes(file) == hashes(other)


@pytest.mark.slow
def test_each_bit_of_a_tensor_counts(file: Path, tmp_path: Path) -> None:
    """Rows of each type, and floats: one bit is another part, and the others stay."""
    source, before = GgufSource(file), hashes(file)
    owner = {piece.tensor: part_of(name) for name, pieces in source.tensor_pieces.items() for piece in pieces}
    tensors = read_gguf(file).tensors
    assert {tensors[name].type_name for name in owner} == {*KINDS.values(), "F32"} and HEAD in source.specs
    for name, part in owner.items():
        after = hashes(damaged(file, name, tmp_path / "damaged.gguf"))
        assert {one for one in before if before[one] != after[one]} == {part}, name


def test_chunks_of_it_have_the_same_hashes(file: Path, other: Path, tmp_path: Path) -> None:
    """So what was packed from one file is what is sent of another."""
    assert (
        launch("prepare-model", [str(other), "--n-nodes", "1", "--quantize", "own", "--ckpt-folder", str(tmp_path)])
        == 0
    )
    folder = gguf_directory(other, tmp_path)
    chunk = ChunkFile(find_chunk(folder, 1, "starter", at_own_bits(file).packing.blocks))
    assert {part: chunk.info(part).sha256 for part in chunk.part_names()} == hashes(file)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the parts that the starter sends."""
    names: list[str] = []
    send_part = ControlClient.send_part

    def noting(self: ControlClient, part: PartSpec, *args: Any) -> None:
        names.append(part.name)
        send_part(self, part, *args)

    monkeypatch.setattr(ControlClient, "send_part", noting)
    yield names


GROUP = ParallelOptions("tensor", is_head_shared=True)


@pytest.mark.slow
@pytest.mark.parametrize("form, parallel", [("own", ParallelOptions()), ("own", GROUP), ("int8", ParallelOptions())])
def test_a_node_with_such_a_file_needs_nothing(
    form: str, parallel: ParallelOptions, file: Path, other: Path, tmp_path: Path, sent: list[str]
) -> None:
    folder = gguf_directory(file, tmp_path / "store")
    wanted = ids(alone(), folder, tmp_path / "alone", quantize=form)
    with secondary(0, tmp_path / "0", weights=GgufSource(other)) as own, secondary(1, tmp_path / "1") as empty:
        found = ids(cluster_of([own]), folder, tmp_path, quantize=form, parallel=parallel)
        assert not sent and (found == wanted or parallel == GROUP)  # whose sums over nodes round rows anew
        again = ids(cluster_of([empty]), folder, tmp_path, quantize=form, parallel=parallel)
        assert sent and again == found


def test_a_damaged_block_of_such_a_file_is_sent(file: Path, tmp_path: Path, sent: list[str]) -> None:
    folder = gguf_directory(file, tmp_path / "store")
    wanted = ids(alone(), folder, tmp_path / "alone", quantize="own")
    n_layer = GgufSource(file).spec.n_layer
    own = GgufSource(damaged(file, f"blk.{n_layer - 1}.ffn_up.weight", tmp_path / "damaged.gguf"))
    with secondary(0, tmp_path / "0", weights=own) as node:
        assert ids(cluster_of([node]), folder, tmp_path, quantize="own") == wanted
    assert sent == [f"block.{n_layer - 1}"]


def test_a_node_sends_its_own_bits_to_another(file: Path, other: Path, tmp_path: Path, sent: list[str]) -> None:
    """Blocks that move come from the node that has them in its file."""
    folder = gguf_directory(file, tmp_path / "store")
    weights = GgufSource(other)
    with secondary(0, tmp_path / "0", weights=weights) as own, secondary(1, tmp_path / "1") as empty:
        parts = at_own_bits(file)
        info = parts.info("block.1")
        part = PartSpec(info.name, info.sha256, info.n_bytes)
        ids(cluster_of([own, empty]), folder, tmp_path, quantize="own")
        assert b"".join(own.weights.pieces(part)) == b"".join(parts.pieces("block.1"))


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_part_is_hashed_only_in_the_form_of_its_length(
    is_plain: bool, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = GgufSource(rewritten(file, tmp_path / "new.gguf"))  # whose hashes nobody knows
    source = GgufSource(file) if is_plain else at_own_bits(file)
    info = source.info("block.1")
    hashed: list[tuple[str, str]] = []

    def noting(of: WeightSource, part: str) -> PartInfo:
        hashed.append((of.form, part))
        return compute_info(of, part)

    with secondary(0, tmp_path / "0", weights=other) as own:
        monkeypatch.setattr(weights, "compute_info", noting)
        found = b"".join(own.weights.pieces(PartSpec(info.name, info.sha256, info.n_bytes)))
        with pytest.raises(ControlError, match="does not have block.1"):
            own.weights.pieces(PartSpec(info.name, info.sha256, info.n_bytes + 1))
    assert found == b"".join(source.pieces("block.1"))
    assert set(hashed) == {(source.form, "block.1")}


def test_shards_are_of_the_source_that_is_asked_for(file: Path, other: Path, tmp_path: Path) -> None:
    """Two runs of a group in one form: the file at its own bits does not have it, and its plain numbers do."""
    config, packing = GgufSource(file).config, Packing("float32", "float32")
    shares = share_out(config, (1, 1))
    computing = choose_computing(config, Requested(device="cpu", quantize="float32"), "float32", None)
    part = ShardSource(GgufSource(file), Share(shares, 0, config), packing).info("block.1")
    group = Group(0, (), shares, packing)
    with secondary(0, tmp_path / "0", weights=GgufSource(other)) as node:
        for source, is_here in ((at_own_bits(file), False), (GgufSource(file), True), (at_own_bits(file), False)):
            spec = StageSpec("0", source.model_id, (1, 2), (part,), computing, None, group, 1, Extent())
            assert (not node.weights.missing(spec, (), Cancel())) == is_here
