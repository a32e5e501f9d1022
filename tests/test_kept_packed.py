"""Parts that came plain are packed once: the next start maps what the first one wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mdi.checkpoint.derived as derived
import mdi.checkpoint.kept_packed as kept_packed
from mdi.cancel import Cancel
from mdi.checkpoint.derived import PackedSource, packed_form
from mdi.checkpoint.kept_packed import DISK_LEFT_BYTES, FILE, KeptPacked, MadeSource
from mdi.checkpoint.packing import Packing, PartWeights, arrays_of
from mdi.checkpoint.part_users import PartUser, read_users
from mdi.checkpoint.parts import PartInfo
from mdi.checkpoint.source import LitCheckpoint, open_source
from mdi.checkpoint.store import BlockStore
from mdi.checkpoint.weights import WeightSource
from mdi.errors import CheckpointError
from mdi.kernels import library
from mdi.kernels.format_maps import map_of
from mdi.model.tensors import EMBEDDING, FINAL_NORM, HEAD
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import ClusterConfig
from mdi.spec.options import StarterOptions
from secondaries import cluster_of, secondary
from test_node import generate
from tiny_checkpoint import reference, write_checkpoint
from tiny_models import tiny_state, write_lit

INT4 = Packing("int4", "int4")
PART = "block.1"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(autouse=True)
def small_parts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_packed, "LEAST_BYTES", 0)


@pytest.fixture
def source(checkpoint: Path) -> Iterator[WeightSource]:
    found = open_source(checkpoint)
    yield found
    found.close()


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Parts that are packed."""
    made: list[str] = []
    pieces = PackedSource.pieces

    def counted(self: PackedSource, part: str) -> Any:
        made.append(part)
        return pieces(self, part)

    monkeypatch.setattr(PackedSource, "pieces", counted)
    return made


def started(folder: Path, source: WeightSource, packing: Packing = INT4, limit: int | None = None) -> WeightSource:
    """What a process that has just begun reads the part from."""
    store = BlockStore(folder, limit)
    return KeptPacked(store).part(source, source.info(PART), packing, set(), Cancel())


def is_equal(a: PartWeights, b: PartWeights) -> bool:
    names = sorted(a)
    pairs = zip(arrays_of({n: a[n] for n in names}), arrays_of({n: b[n] for n in names}), strict=True)
    return names == sorted(b) and all(np.array_equal(x.reshape(-1), y.reshape(-1)) for x, y in pairs)


@pytest.mark.parametrize("most", [1 << 40, 1000])
def test_much_is_announced_once_before_it_is_written(
    most: int, tmp_path: Path, source: WeightSource, packings: list[str], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(kept_packed, "TOLD_BYTES", most)
    caplog.set_level("INFO", "mdi")
    store = BlockStore(tmp_path / "kept", None)
    kept = KeptPacked(store, lambda: 2000 if not packings else pytest.fail("asked while it is written"))
    for part in (PART, "block.2"):
        kept.part(source, source.info(part), INT4, set(), Cancel())
    told = [one.getMessage() for one in caplog.records if one.levelname == "INFO"]
    assert len(told) == (most == 1000) and all(str(tmp_path) in one for one in told) and len(packings) == 2


def test_the_second_start_maps_what_the_first_one_packed(
    tmp_path: Path, source: WeightSource, packings: list[str]
) -> None:
    expected = source.weights(PART, INT4)
    for _ in range(2):
        found = started(tmp_path, source).weights(PART, INT4)
        assert is_equal(found, expected)
        assert not any(array.flags.writeable for array in arrays_of(found)), "it lies in its file"
    assert packings == [PART]
    started(tmp_path, source, Packing("int8", "int8"))
    assert packings == [PART] * 2 and not list(tmp_path.glob("*.packed*"))


def test_it_is_what_would_have_been_sent_packed(tmp_path: Path, source: WeightSource) -> None:
    """So weights that are stored packed later on are here already."""
    info = PackedSource(source, INT4).info(PART)
    started(tmp_path, source)
    assert BlockStore(tmp_path).parts() == (info.sha256,)
    assert BlockStore(tmp_path).path(info.sha256).stat().st_size == info.n_bytes


@pytest.mark.parametrize("damage", ["a bit", "cut", "gone", "list", "words", "version"])
def test_one_that_is_damaged_or_of_another_version_is_made_again(
    tmp_path: Path, source: WeightSource, packings: list[str], monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    started(tmp_path, source)
    (path,) = tmp_path.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    if damage == "a bit":
        data[-100] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-64])
    elif damage == "gone":
        path.unlink()
    elif damage == "version":
        monkeypatch.setattr(kept_packed, "LAYOUT_VERSION", "another")
    else:
        (tmp_path / FILE).write_text("[1" if damage == "list" else '{"a": ["../x", 3], "b": 7}')
    assert is_equal(started(tmp_path, source).weights(PART, INT4), source.weights(PART, INT4))
    assert packings == [PART] * 2
    started(tmp_path, source)
    assert packings == [PART] * 2


@pytest.mark.parametrize("is_made", [True, False])
def test_another_run_does_not_remove_it_before_it_is_loaded(
    tmp_path: Path, source: WeightSource, monkeypatch: pytest.MonkeyPatch, is_made: bool
) -> None:
    if not is_made:
        started(tmp_path, source)
    keep: set[str] = set()
    store, limit = BlockStore(tmp_path, 1 << 30), 1 << 30
    opened = store.part

    def part(*args: Any) -> Any:
        found = opened(*args)
        with pytest.raises(CheckpointError):
            store.free_space(limit, set())
        return found

    monkeypatch.setattr(store, "part", part)
    with store.in_use(keep):
        found = KeptPacked(store).part(source, source.info(PART), INT4, keep, Cancel())
        assert is_equal(found.weights(PART, INT4), source.weights(PART, INT4))
    assert store.free_space(limit, set()) > 0


def test_where_there_is_no_space_nothing_is_kept(
    tmp_path: Path, source: WeightSource, packings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    n_bytes = PackedSource(source, INT4).n_bytes(PART)
    assert started(tmp_path, source, limit=n_bytes - 1) is source
    with monkeypatch.context() as patch:
        patch.setattr(BlockStore, "free_bytes", lambda self: n_bytes + DISK_LEFT_BYTES - 1)
        assert started(tmp_path, source) is source
    (tmp_path / "a file").touch()
    assert started(tmp_path / "a file", source) is source
    assert packings in ([], [PART]) and not list(tmp_path.glob("*.safetensors"))
    assert started(tmp_path, source, limit=n_bytes) is not source


def test_parts_that_are_packed_already_stay_as_they_are(tmp_path: Path, source: WeightSource) -> None:
    packed = PackedSource(source, INT4)
    info = PartInfo(PART, "0" * 64, packed.n_bytes(PART))
    assert KeptPacked(BlockStore(tmp_path)).part(packed, info, INT4, set(), Cancel()) is packed


Q4_K = Packing("q4_k", "q4_k")


def with_rows_of_256(folder: Path, gains: float = 1.0, is_tied: bool = False) -> LitCheckpoint:
    config, state = tiny_state(n_embd=256, head_size=32, n_head=8, n_query_groups=2, intermediate_size=256, n_layer=1)
    generator = torch.Generator().manual_seed(1)
    state[FINAL_NORM] = 1 + gains * torch.rand(256, generator=generator)
    if is_tied:
        state[HEAD] = state[EMBEDDING]
    return LitCheckpoint(write_lit(folder, config, state))


def test_what_is_searched_depends_on_the_version_of_the_search(
    tmp_path: Path, source: WeightSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def names(packing: Packing) -> tuple[str, str]:
        return packed_form(source, packing), kept_packed.key_of(source, source.info(PART), packing)

    now = [names(packing) for packing in (Q4_K, INT4)]
    for module in (derived, kept_packed):
        monkeypatch.setattr(module, "SEARCH_VERSION", 999)
    for old, new, is_same in zip(now, [names(packing) for packing in (Q4_K, INT4)], (False, True), strict=True):
        assert [one == other for one, other in zip(old, new, strict=True)] == [is_same] * 2


def test_an_embedding_that_is_the_head_is_weighed_by_the_norm_before_it(tmp_path: Path) -> None:
    form = map_of({EMBEDDING: "q4_k", HEAD: "q4_k"})
    for i, gains in enumerate((1.0, 50.0)):
        source = with_rows_of_256(tmp_path / str(i), gains, is_tied=True)
        assert source.same_as(HEAD) == EMBEDDING
        packing = Packing(form, form).tied(source.tied_type)
        kept = KeptPacked(BlockStore(tmp_path / "store"))
        found = kept.part(source, source.info("head"), packing, set(), Cancel())
        assert is_equal(found.weights("head"), PackedSource(source, packing).weights("head"))
        assert kept.part(source, source.info("embedding"), packing, set(), Cancel()) is source, (
            "it has no file of its own"
        )
    assert len(BlockStore(tmp_path / "store").parts()) == 2


def test_a_made_part_that_was_removed_is_made_again(
    tmp_path: Path, packings: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kept_packed, "TOLD_BYTES", 1)
    caplog.set_level("INFO", "mdi")
    source, folder = with_rows_of_256(tmp_path / "lit"), tmp_path / "store"
    made = MadeSource(source, Q4_K, folder, source.path)
    first = {name: np.array(data) for name, data in zip("abcdefgh", arrays_of(made.weights("block.0")), strict=False)}
    assert "are kept in" in caplog.text
    made.release()
    for path in folder.glob("*.safetensors"):
        path.unlink()
    again = arrays_of(made.weights("block.0"))
    assert packings == ["block.0"] * 2 and len(BlockStore(folder).parts()) == 1
    assert all(np.array_equal(one, other) for one, other in zip(first.values(), again, strict=False))


@pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")
def test_starter_and_secondary_pack_at_their_first_start_alone(
    tmp_path: Path, checkpoint: Path, packings: list[str]
) -> None:
    def ids(cluster: ClusterConfig) -> list[int]:
        options = StarterOptions(ckpt=checkpoint, layers="2,3", cache_dir=tmp_path / "starter")
        return generate(Run(GivenNodes(cluster), options, 60))

    for _ in range(2):
        with secondary(0, tmp_path / "cache") as node:
            assert ids(cluster_of([node])) == list(reference("The ring", 6))
    assert sorted(packings) == ["block.0", "block.1", "block.2", "block.3", "block.4", "embedding", "head"]
    for folder, path in ((tmp_path / "starter", str(checkpoint.resolve())), (tmp_path / "cache", "")):
        assert read_users(folder) == {sha: {PartUser("tiny-random", path)} for sha in BlockStore(folder).parts()}
        assert not list(folder.glob("use-*"))
