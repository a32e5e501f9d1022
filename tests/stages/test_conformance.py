"""What holds for every stage in a store: a starter's, a secondary's and a group member's, with and without a window."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from mdi.cancel import Cancel, CancelledError
from mdi.checkpoint.chunks import ChunkFile, write_chunks
from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.parts import PartInfo, stage_parts
from mdi.checkpoint.source import LitCheckpoint
from mdi.checkpoint.weights import WeightSource
from mdi.errors import NoMemoryError
from mdi.host.computing import Computing
from mdi.kernels import library
from mdi.kernels.slices import Slice
from mdi.spec.extent import Extent
from mdi.spec.options import WeightMemory
from mdi.spec.window import WindowOptions
from mdi.stages.kernel_stage import KernelStage, Resident
from mdi.stages.model_family import ModelFamily
from mdi.stages.spec import StageSpec
from mdi.stages.store import Claim, HeldStage, StageStore
from mdi.tensor.group import Group, Member
from mdi.tensor.shard_source import ShardSource
from mdi.tensor.shares import share_out
from tensor_groups import meshes, on_all, sums
from tiny_models import tiny_lit
from waiting import DEADLINE_S

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")

LENGTH = 40
FRAMES = (20, 1, 3)
PACKING = Packing("float32", "float32")
KINDS = ["starter", "secondary", "member"]
WINDOWS = [None, WindowOptions(2)]


@dataclass
class FileSupply:
    """Weights in a chunk, or shares of them; counts the parts that were asked for."""

    chunk: ChunkFile
    cache_dir: Path
    on_part: Callable[[], None] = lambda: None
    family = ModelFamily()
    memory = WeightMemory()

    def __post_init__(self) -> None:
        self.asked: list[str] = []

    @contextlib.contextmanager
    def reading(self, spec: StageSpec, cancel: Cancel) -> Iterator[Callable[[str], WeightSource]]:
        shards = None if spec.group is None else ShardSource(self.chunk, spec.group.share(spec.model.config), PACKING)

        def source(part: str) -> WeightSource:
            self.asked.append(part)
            self.on_part()
            return self.chunk if shards is None else shards

        yield source


@pytest.fixture(scope="module")
def chunk(tmp_path_factory: pytest.TempPathFactory) -> ChunkFile:
    folder = tmp_path_factory.mktemp("model")
    path, _ = tiny_lit(folder / "model", "Llama-3.1-8B")
    source = PackedSource(LitCheckpoint(path), PACKING)
    (made,) = write_chunks(source, folder / "model", (source.config.n_layer,))
    return ChunkFile(made)


@pytest.fixture
def supply(chunk: ChunkFile, tmp_path: Path) -> FileSupply:
    return FileSupply(chunk, tmp_path)


def spec_of(chunk: ChunkFile, kind: str, window: WindowOptions | None, rank: int = 0) -> StageSpec:
    config = chunk.config
    group = None
    if kind == "member":
        members = (Member("a", "127.0.0.1", 1), Member("b", "127.0.0.1", 2))
        group = Group(rank, members, share_out(config, (1, 2)), PACKING)
    names = stage_parts(0, config.n_layer, starter=kind == "starter")
    whole = {name: chunk.info(name) for name in names}
    parts = tuple(PartInfo(name, f"{rank if group else ''}{info.sha256}", info.n_bytes) for name, info in whole.items())
    return StageSpec(
        "node", chunk.model_id, (0, config.n_layer), parts, Computing("cpu", "float32", packing=PACKING),
        window, group, 2, Extent(LENGTH, 1, kv_dtype="float32"),
    )  # fmt: skip


def claim(run: str = "a") -> Claim:
    return Claim(run, f"{run}1")


def kernels_of(held: HeldStage) -> KernelStage:
    assert isinstance(held.stage, KernelStage)
    return held.stage


def inputs(n_embd: int) -> list[tuple[np.ndarray, list[Slice]]]:
    generator, found, position = np.random.default_rng(2), [], 0
    for n_rows in FRAMES:
        found.append((generator.standard_normal((n_rows, n_embd), dtype=np.float32), [Slice(0, position, n_rows)]))
        position += n_rows
    return found


def whole(chunk: ChunkFile) -> KernelStage:
    names = stage_parts(0, chunk.config.n_layer, starter=True)
    stage = KernelStage(chunk.spec, 0, chunk.config.n_layer, Resident(names, lambda name: chunk.weights(name)))
    stage.prepare(LENGTH)
    return stage


cases = pytest.mark.parametrize(("kind", "window"), [(kind, window) for kind in KINDS for window in WINDOWS])


@cases
def test_it_computes_what_the_whole_model_does(
    chunk: ChunkFile, supply: FileSupply, kind: str, window: WindowOptions | None
) -> None:
    reference, store = whole(chunk), StageStore()
    n_nodes = 2 if kind == "member" else 1
    held = [
        store.acquire(spec_of(chunk, kind, window, rank), claim(f"{rank}"), supply, Cancel()) for rank in range(n_nodes)
    ]
    stages = [kernels_of(one) for one in held]
    with meshes(n_nodes) if n_nodes > 1 else contextlib.nullcontext() as connected:
        if connected is not None:
            for stage, reduce in zip(stages, sums(connected), strict=True):
                assert stage.group is not None
                stage.group.join("group", reduce)
        for x, slices in inputs(reference.n_embd):
            wanted = reference(x, slices)
            results = on_all(n_nodes, lambda rank, x=x, at=slices: stages[rank](x, at))
            assert all(np.array_equal(results[0], one) for one in results)
            if kind == "member":
                assert np.abs(results[0] - wanted).max() < 1e-4 * np.abs(wanted).max()
            else:
                assert np.array_equal(results[0], wanted)
            if kind == "starter":
                ids = np.array([1, 5, 3])
                assert np.array_equal(stages[0].embed(ids), reference.embed(ids))
                assert np.array_equal(stages[0].head(wanted[-1:]), reference.head(wanted[-1:]))
    store.close()


@cases
def test_it_is_built_once_and_used_again(
    chunk: ChunkFile, supply: FileSupply, kind: str, window: WindowOptions | None
) -> None:
    store, spec = StageStore(), spec_of(chunk, kind, window)
    first = store.acquire(spec, claim(), supply, Cancel())
    stage, n_asked = first.stage, len(supply.asked)
    assert n_asked == len(spec.parts)
    store.release(first, "a1")
    assert store.in_use_bytes("cpu") == 0
    again = store.acquire(spec, claim("b"), supply, Cancel())
    assert again.stage is stage and len(supply.asked) == n_asked
    store.close()
    assert not store.listed and again.stage is None


@cases
def test_one_that_failed_is_given_to_nobody(
    chunk: ChunkFile, supply: FileSupply, kind: str, window: WindowOptions | None
) -> None:
    store, spec = StageStore(), spec_of(chunk, kind, window)
    before = threading.active_count()
    first = store.acquire(spec, claim(), supply, Cancel())
    stage = first.stage
    store.release(first, "a1", is_kept=True, is_failed=True)
    assert not store.listed and first.stage is None and threading.active_count() == before
    assert store.acquire(spec, claim(), supply, Cancel()).stage is not stage
    store.close()


@cases
def test_caches_stay_for_the_next_ring_of_a_run(
    chunk: ChunkFile, supply: FileSupply, kind: str, window: WindowOptions | None
) -> None:
    store, spec = StageStore(), spec_of(chunk, kind, window)
    held = store.acquire(spec, claim(), supply, Cancel())
    caches = kernels_of(held).caches
    assert store.grant(held).limit_bytes > 0
    store.release(held, "a1", is_kept=True)
    again = store.acquire(spec, Claim("a", "a2", keeps_caches=True), supply, Cancel())
    assert again is held and again.has_caches and kernels_of(again).caches is caches
    store.release(again, "a1")
    assert again.use == "USED", "the ring that had it before cannot give it back any more"
    store.close()


@cases
def test_a_build_that_is_not_wanted_any_more_leaves_nothing(
    chunk: ChunkFile, supply: FileSupply, kind: str, window: WindowOptions | None
) -> None:
    store, cancel = StageStore(), Cancel()
    supply.on_part = lambda: cancel.cancel() if len(supply.asked) == 2 else None
    with pytest.raises(CancelledError):
        store.acquire(spec_of(chunk, kind, window), claim(), supply, cancel)
    assert len(supply.asked) == 2 and not store.listed and store.in_use_bytes("cpu") == 0


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_refused_without_memory(chunk: ChunkFile, supply: FileSupply, kind: str) -> None:
    store = StageStore(lambda device: 1000)
    with pytest.raises(NoMemoryError) as caught:
        store.acquire(spec_of(chunk, kind, None), claim(), supply, Cancel())
    assert caught.value.code == "memory" and not supply.asked and not store.listed


@pytest.mark.parametrize("kind", KINDS)
def test_two_that_want_the_same_stage_at_once_share_its_weights(
    chunk: ChunkFile, supply: FileSupply, kind: str
) -> None:
    store, spec, found = StageStore(), spec_of(chunk, kind, None), {}
    is_building, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        is_building.set()
        assert go_on.wait(DEADLINE_S)

    def acquire(run: str) -> None:
        found[run] = store.acquire(spec, claim(run), supply, Cancel())

    supply.on_part = wait
    threads = [threading.Thread(target=acquire, args=(run,)) for run in "ab"]
    threads[0].start()
    assert is_building.wait(DEADLINE_S)
    one = store.in_use_bytes("cpu")
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(supply.asked) == len(spec.parts), "read once"
    a, b = kernels_of(found["a"]), kernels_of(found["b"])
    assert a is not b and a.caches is not b.caches
    assert all(a.weights[part.name] is b.weights[part.name] for part in spec.parts)
    assert store.in_use_bytes("cpu") < 2 * one
    store.close()


def test_parts_that_another_cut_has_are_not_read_again(chunk: ChunkFile, supply: FileSupply) -> None:
    store, spec = StageStore(), spec_of(chunk, "secondary", None)
    store.acquire(spec, claim(), supply, Cancel())
    supply.asked.clear()
    shorter = replace(spec, blocks=(1, spec.blocks[1]), parts=spec.parts[1:])
    store.acquire(shorter, claim("b"), supply, Cancel())
    assert not supply.asked
    store.close()
