"""Shares of blocks with a window: the bits of shares that hold all their weights, and whole runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from windows import LENGTH, NO_LIMIT, chunks

from mdi.checkpoint.chunks import ChunkFile
from mdi.checkpoint.parts import stage_parts
from mdi.checkpoint.weights import WeightSource
from mdi.engine.sequence import SamplingParams
from mdi.kernels import library
from mdi.kernels.slices import Slice
from mdi.metrics import RunMetrics
from mdi.model.plain import spec_of
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import ClusterConfig
from mdi.spec.options import ParallelOptions, StarterOptions
from mdi.spec.window import WindowMemory, WindowOptions
from mdi.stages.kernel_stage import KernelStage, Resident
from mdi.stages.window import Windowed, open_window
from mdi.tensor.shard_blocks import GroupSum
from mdi.tensor.shard_source import ShardFile, ShardSource
from mdi.tensor.shares import Share, Shares, share_out
from mdi.tensor.sums import AllReduce
from secondaries import cluster_of, secondaries
from tensor_groups import meshes, on_all, sums
from tiny_checkpoint import encode, reference, write_checkpoint

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")

FRAMES = (20, 1, 3)


def source_of(chunk: ChunkFile, share: Share, folder: Path | None) -> dict[str, WeightSource]:
    """A node's shards of each block: cut out of the chunk, or with a folder from files as a node is sent them."""
    assert chunk.packing is not None
    cut = ShardSource(chunk, share, chunk.packing)
    found: dict[str, WeightSource] = {}
    for part in stage_parts(0, chunk.config.n_layer, starter=False):
        found[part] = cut
        if folder is not None:
            path = folder / f"{part}-{share.rank}"
            path.write_bytes(b"".join(map(bytes, cut.pieces(part))))
            found[part] = ShardFile(path, cut.info(part), share, chunk.config_hash)
    return found


def stage_of(
    chunk: ChunkFile, shares: Shares, rank: int, group: AllReduce, options: WindowOptions | None, folder: Path | None
) -> KernelStage:
    config = chunk.config
    share, n_layer = Share(shares, rank, config), config.n_layer
    sources = source_of(chunk, share, folder)
    if options is None:
        weights: Windowed | Resident = Resident(sources, lambda part: sources[part].weights(part))
    else:
        assert chunk.packing is not None
        place = chunk.path.parent / "spill"
        names = list(sources)
        weights = open_window(f"rank{rank}", options, names, sources.__getitem__, chunk.packing, place, NO_LIMIT)
    stage = KernelStage(spec_of(config), 0, n_layer, weights, group=GroupSum(share))
    stage.prepare(LENGTH)
    assert stage.group is not None
    stage.group.join("group", group)
    return stage


def rows_of(chunk: ChunkFile, shares: Shares, options: WindowOptions | None, folder: Path | None = None) -> list[bytes]:
    """What the first node ends with, frame after frame."""
    generator, found = np.random.default_rng(5), []
    with meshes(shares.n_nodes) as connected:
        groups = sums(connected)
        stages = [stage_of(chunk, shares, rank, groups[rank], options, folder) for rank in range(shares.n_nodes)]
        position = 0
        for n_rows in FRAMES:
            x = generator.standard_normal((n_rows, chunk.config.n_embd), dtype=np.float32)
            slices = [Slice(0, position, n_rows)]
            results = on_all(len(stages), lambda rank, x=x, at=slices: stages[rank](x, at))
            found.append(results[0].tobytes())
            position += n_rows
        for stage in stages:
            stage.close()
            if isinstance(stage.weights, Windowed):
                assert stage.group is not None
                use, plan = stage.weight_use, stage.weights.window.plan
                one_pass = sum(min(r.stop, r.file.n_bytes) - r.start for i in plan.streamed for r in plan.units[i].runs)
                assert use.read_bytes >= len(FRAMES) * one_pass
                if stage.group.share.n_heads:
                    assert one_pass and plan.resident_bytes < sum(unit.n_bytes for unit in plan.units)
    return found


@pytest.mark.parametrize(
    ("family", "form"),
    [("Llama-3.1-8B", "int4"), ("phi-2", "float32"), ("OLMo-2-1124-7B", "bf16"), ("Qwen3-30B-A3B", "int8")],
)
@pytest.mark.parametrize("parts", [(3, 2), (2, 0, 1)])
def test_a_window_gives_the_same_bits(tmp_path: Path, family: str, form: str, parts: tuple[int, ...]) -> None:
    (chunk,) = chunks(tmp_path, family, form, n_starter=9)
    shares = share_out(chunk.config, parts)
    expected = rows_of(chunk, shares, None)
    for options in (WindowOptions(1), WindowOptions(2), WindowOptions(3, 2)):
        assert rows_of(chunk, shares, options) == expected, options
    (tmp_path / "sent").mkdir()
    assert rows_of(chunk, shares, WindowOptions(2), tmp_path / "sent") == expected


def run(
    cluster: ClusterConfig, folder: Path, path: Path, parallel: ParallelOptions
) -> tuple[list[list[int]], RunMetrics]:
    options = StarterOptions(
        ckpt=folder, parallel=parallel, placement="even", prompt_style="none", cache_dir=path, wait_s=5,
        weight_memory=WindowMemory(window=WindowOptions(2)),
    )  # fmt: skip
    starter = Run(GivenNodes(cluster), options, 120, n_texts=len(PROMPTS))
    try:
        starter.open()
        samples = [starter.submit(text, encode(text), SamplingParams(8, temperature=0)) for text in PROMPTS]
        starter.read()
        starter.close()
        return [list(sample.token_ids) for sample in samples], starter.metrics()
    finally:
        starter.close()


PROMPTS = ("The ring", "Who are you?")


@pytest.mark.parametrize(("parts", "is_head_shared"), [(None, False), ((3.0, 1.0, 2.0), True), ((0.0, 1.0), True)])
def test_whole_runs(tmp_path: Path, parts: tuple[float, ...] | None, is_head_shared: bool) -> None:
    folder = write_checkpoint(tmp_path / "tiny")
    with secondaries(len(parts or (1, 1)) - 1, tmp_path) as nodes:
        parallel = ParallelOptions("tensor", parts, is_head_shared=is_head_shared)
        ids, metrics = run(cluster_of(nodes), folder, tmp_path, parallel)
    assert ids == [list(reference(text, 8)) for text in PROMPTS]
    told = metrics.to_json()["nodes"]
    for node in told:
        assert node["reduces"] > 0
        if node["heads"][0] < node["heads"][1]:
            assert node["weights_read_bytes"] > 7 * node["weights_resident_bytes"] > 0
