"""Whole runs in which all nodes compute every block together: the same tokens as litgpt's own model, and what is reported."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mdi.checkpoint.shapes
import mdi.checkpoint.weights
from cluster_keys import key_file
from mdi.checkpoint.chunks import PartFile, write_chunks
from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.parts import part_of
from mdi.checkpoint.source import open_source
from mdi.control.messages import ToldGroup
from mdi.engine.sequence import SamplingParams
from mdi.errors import ControlError, MdiError, RingError, UsageError
from mdi.kernels import library
from mdi.kernels.layout import Matrix, unpack
from mdi.metrics import RunMetrics
from mdi.node.secondary import SecondaryNode
from mdi.run.nodes import GivenNodes
from mdi.run.report import format_report
from mdi.run.run import Run
from mdi.spec.cluster import ClusterConfig
from mdi.spec.decode import decode
from mdi.spec.options import ParallelOptions, StarterOptions
from mdi.stages.kernel_stage import KernelStage
from mdi.tensor.group import Group, group_of
from mdi.tensor.mesh import Mesh
from mdi.tensor.shard_source import ShardFile, ShardSource
from mdi.tensor.shares import Share, share_out
from secondaries import close_ports, cluster_of, entry_of, secondaries
from tiny_checkpoint import encode, reference, write_checkpoint

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")

PROMPTS = ("The ring", "Who are you?", "Every node keeps a cache for each sequence. " * 4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("plain") / "tiny")


def run(
    cluster: ClusterConfig, checkpoint: Path, folder: Path, parallel: ParallelOptions, n_tokens: int = 8,
    prompts: tuple[str, ...] = PROMPTS[:1], **options: Any,
) -> tuple[list[list[int]], RunMetrics]:  # fmt: skip
    """The ids of all texts, and what was measured."""
    fields = {
        "placement": "even",
        "prompt_style": "none",
        "device": "cpu",
        "dtype": "float32",
        "cache_dir": folder,
        "wait_s": 5,
    }
    starter = Run(
        GivenNodes(cluster),
        StarterOptions(ckpt=checkpoint, parallel=parallel, **{**fields, **options}),
        120,
        n_texts=len(prompts),
    )
    try:
        starter.open()
        samples = [starter.submit(text, encode(text), SamplingParams(n_tokens, temperature=0)) for text in prompts]
        starter.read()
        starter.close()
        return [list(sample.token_ids) for sample in samples], starter.metrics()
    finally:
        starter.close()


@pytest.mark.parametrize(
    "n_nodes, parts, is_head_shared",
    [(2, None, False), (3, (3.0, 1.0, 2.0), True), (4, (0.0, 2.0, 1.0, 1.0), True), (7, None, False)],  # of 5 blocks
)
def test_texts_are_those_of_the_whole_model(
    n_nodes: int, parts: tuple[float, ...] | None, is_head_shared: bool, checkpoint: Path, tmp_path: Path
) -> None:
    parallel = ParallelOptions("tensor", parts, is_head_shared=is_head_shared)
    with secondaries(n_nodes - 1, tmp_path) as nodes:
        ids, metrics = run(cluster_of(nodes), checkpoint, tmp_path, parallel, prompts=PROMPTS)
    assert ids == [list(reference(text, 8)) for text in PROMPTS]
    told = metrics.to_json()
    assert told["parallel"] == "tensor"
    heads = {node["name"]: node["heads"] for node in told["nodes"]}
    heads = [heads[name] for name in ("starter", *(f"secondary{i}" for i in range(n_nodes - 1)))]  # as they are listed
    assert [first for first, _ in heads] == [0, *(end for _, end in heads[:-1])] and heads[-1][1] == 6
    assert len({node["reduces"] for node in told["nodes"]}) == 1 and told["nodes"][0]["reduces"] > 0
    assert all(0 < node["reduce_median_s"] <= node["reduce_s"] for node in told["nodes"])
    whole = sum(node["weights_resident_bytes"] for node in told["nodes"])
    assert all(0 < node["weights_resident_bytes"] < whole for node in told["nodes"])
    if parts is None:  # the same share of all blocks, and embedding and head besides
        assert told["nodes"][0]["weights_resident_bytes"] > told["nodes"][1]["weights_resident_bytes"]


def test_a_run_with_a_key_and_rounded_sums(checkpoint: Path, tmp_path: Path) -> None:
    keys = key_file(tmp_path / "cluster.key")
    with secondaries(1, tmp_path, keys=keys) as nodes:
        cluster = replace(cluster_of(nodes), keys=keys)
        ids, _ = run(cluster, checkpoint, tmp_path, ParallelOptions("tensor", algorithm="star"))
        assert ids == [list(reference(PROMPTS[0], 8))]
        rounded, _ = run(cluster, checkpoint, tmp_path, ParallelOptions("tensor", reduce_dtype="fp16"))
        assert len(rounded[0]) == 8


def test_weights_come_from_chunks_of_any_cut_and_stay(checkpoint: Path, tmp_path: Path) -> None:
    """Shards are cut out of packed chunks; a second run finds them in the store."""
    folder = write_checkpoint(tmp_path / "tiny")
    source = open_source(folder)
    write_chunks(PackedSource(source, Packing("int8", "int8")), folder, (5,))
    source.close()
    with secondaries(2, tmp_path) as nodes:
        texts = [
            run(cluster_of(nodes), folder, tmp_path, ParallelOptions("tensor", (1.0, 2.0, 1.0)), quantize="int8")[0]
            for _ in range(2)
        ]
        n_parts = [len(node.store.parts()) for node in nodes]
    assert texts[0] == texts[1] and len(texts[0][0]) == 8
    assert n_parts == [5, 5]


def test_auto_takes_shares_for_few_texts(checkpoint: Path, tmp_path: Path) -> None:
    with secondaries(1, tmp_path) as nodes:
        for prompts, expected in ((PROMPTS[:1], "tensor"), (PROMPTS, "ring")):
            ids, metrics = run(cluster_of(nodes), checkpoint, tmp_path, ParallelOptions("auto"), prompts=prompts)
            assert metrics.to_json()["parallel"] == expected
            assert ids == [list(reference(text, 8)) for text in prompts]


@pytest.mark.slow
def test_shares_by_what_nodes_measure(checkpoint: Path, tmp_path: Path) -> None:
    with secondaries(1, tmp_path) as nodes:
        ids, _ = run(cluster_of(nodes), checkpoint, tmp_path, ParallelOptions("tensor"), placement=None)
    assert ids == [list(reference(PROMPTS[0], 8))]


def test_a_node_that_fails_ends_the_run_with_its_name(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward: Callable[..., np.ndarray] = KernelStage.__call__
    n_frames = threading.local()

    def failing(self: KernelStage, *args: Any) -> np.ndarray:
        n_frames.n = getattr(n_frames, "n", 0) + 1
        if threading.current_thread().name == "secondary1" and n_frames.n == 3:
            raise ArithmeticError("a broken board")
        return forward(self, *args)

    monkeypatch.setattr(KernelStage, "__call__", failing)
    with secondaries(2, tmp_path) as nodes, pytest.raises(MdiError) as failure:
        run(cluster_of(nodes), checkpoint, tmp_path, ParallelOptions("tensor"), fixed=True)
    assert getattr(failure.value, "node", "") == "secondary1"


def lose_after(n_sums: int, node: SecondaryNode, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let the first secondary be gone after so many sums; set when it is."""
    forward: Callable[..., np.ndarray] = KernelStage.__call__
    lost = threading.Event()

    def losing(self: KernelStage, *args: Any) -> np.ndarray:
        is_first = threading.current_thread().name == "secondary0"
        if is_first and self.group is not None and self.group.tally.n_sums > n_sums and not lost.is_set():
            lost.set()
            close_ports(node)
            raise RingError("the connections of a process that ended")
        return forward(self, *args)

    monkeypatch.setattr(KernelStage, "__call__", losing)
    return lost


def reset_in_sums(numbers: frozenset[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Break a connection of the first secondary in these of its sums, after its own part was sent; those that were broken.

    Where the kernels sum, it breaks before the next frame, or before the rest of one."""
    swap: Callable[..., dict[int, memoryview]] = Mesh.swap
    lent: Callable[..., contextlib.AbstractContextManager[Any]] = Mesh.lent
    broken: list[int] = []

    def reset(mesh: Mesh) -> None:
        with contextlib.suppress(OSError):
            mesh.peer(0 if len(broken) % 2 else mesh.size - 1 - (mesh.rank == mesh.size - 1)).sock.shutdown(
                socket.SHUT_RDWR
            )

    def breaking(self: Mesh, sends: Any, receives: Any) -> dict[int, memoryview]:
        is_first = threading.current_thread().name == "secondary0" and self.tally.n_sums in numbers
        if is_first and self.tally.n_sums not in broken:
            broken.append(self.tally.n_sums)
            swap(self, sends, [])
            reset(self)
            return swap(self, [], receives)
        return swap(self, sends, receives)

    @contextlib.contextmanager
    def breaking_lent(self: Mesh, n_bytes: int) -> Iterator[Any]:
        with lent(self, n_bytes) as found:
            is_first = threading.current_thread().name == "secondary0"
            due = [n for n in sorted(numbers - set(broken)) if n <= self.tally.n_sums][:1]
            if is_first and due:
                broken.extend(due)
                reset(self)
            yield found

    monkeypatch.setattr(Mesh, "swap", breaking)
    monkeypatch.setattr(Mesh, "lent", breaking_lent)
    return broken


@pytest.mark.parametrize("has_key", [False, True], ids=["plain", "sealed"])
def test_a_reset_connection_of_a_group_costs_no_recovery(
    has_key: bool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = key_file(tmp_path / "cluster.key") if has_key else None
    numbers = frozenset((3, 40, 41, 80, 120))
    with secondaries(2, tmp_path, keys=keys) as nodes:
        broken = reset_in_sums(numbers, monkeypatch)
        ids, metrics = run(
            replace(cluster_of(nodes), keys=keys), checkpoint, tmp_path,
            ParallelOptions("tensor", algorithm="exchange"), n_tokens=24, fixed=False,
        )  # fmt: skip
    assert set(broken) == numbers and ids == [list(reference(PROMPTS[0], 24))]
    assert metrics.to_json()["recoveries"] == [] and metrics.n_nodes == 3


@pytest.mark.slow
@pytest.mark.parametrize("n_secondaries", [1, 3])
def test_texts_go_on_when_a_node_is_lost(
    n_secondaries: int, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are left get other shares, one node alone all of it, and compute the texts' caches again."""
    with secondaries(n_secondaries, tmp_path) as nodes:
        lost = lose_after(40, nodes[0], monkeypatch)
        ids, metrics = run(cluster_of(nodes), checkpoint, tmp_path, ParallelOptions("tensor"), n_tokens=24, fixed=False)
    assert lost.is_set() and ids == [list(reference(PROMPTS[0], 24))]
    assert metrics.n_nodes == n_secondaries
    (recovery,) = metrics.to_json()["recoveries"]
    first = metrics.samples[0].may_differ_from
    assert recovery["may_differ"] == [{"sample": 0, "token": first}] and first == 5, "each frame has 10 sums"
    assert f"sample 0 may differ from an undisturbed run from its token {first} on" in format_report(metrics)


@pytest.mark.slow
def test_a_spare_gets_just_the_shares_of_the_lost_node(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In int8, where other shares give other numbers: the text is that of an undisturbed run, to the last token."""
    options: dict[str, Any] = {"n_tokens": 60, "quantize": "int8", "fixed": False}
    parallel = ParallelOptions("tensor", (2.0, 3.0, 1.0))
    with secondaries(3, tmp_path) as nodes:
        spare = entry_of(nodes[2], is_spare=True)
        cluster = replace(cluster_of(nodes[:2]), spares=(spare,))
        wanted, before = run(cluster, checkpoint, tmp_path, parallel, **options)
        lost = lose_after(150, nodes[0], monkeypatch)
        ids, after = run(cluster, checkpoint, tmp_path, parallel, **options)
    assert lost.is_set() and ids == wanted
    (recovery,) = after.to_json()["recoveries"]
    assert recovery["node"] == "secondary0" and "secondary2" in recovery["replaced_by"]
    assert recovery["may_differ"] == [] and after.samples[0].may_differ_from is None
    heads = [{node.name: node.share.heads for node in one.nodes if node.share is not None} for one in (before, after)]
    assert heads[1].pop("secondary2") == heads[0].pop("secondary0") and heads[0] == heads[1]


@pytest.mark.slow
def test_a_node_that_was_started_again_leaves_all_shares_as_they_are(checkpoint: Path, tmp_path: Path) -> None:
    """Its new number gives it another place in the ring, and not another rank in the sums."""
    parallel = ParallelOptions("tensor", (2.0, 3.0, 1.0, 1.0))
    options = StarterOptions(ckpt=checkpoint, parallel=parallel, placement="even", prompt_style="none")
    with secondaries(3, tmp_path) as nodes, Run(GivenNodes(cluster_of(nodes)), options, 120, n_texts=1) as starter:
        sharing, weights = starter.model.sharing, starter.model.weights
        assert sharing is not None
        found = []
        for order in itertools.permutations(("a", "b", "c")):
            processes = dict(zip((f"secondary{i}" for i in range(3)), order, strict=True))
            cluster, blocks, of_nodes = sharing(cluster_of(nodes), processes)
            weights.take_blocks(blocks, of_nodes)
            names = [node.name for node in cluster.nodes]
            assert names == ["starter", *sorted(processes, key=lambda name: processes[name])]
            found.append({name: weights.share_of(index) for index, name in enumerate(names)})
            groups = [weights.group_of(index) for index in range(4)]
            assert [group.is_last for group in groups if group is not None] == [False, False, False, True]
        assert all(one == found[0] for one in found)


def test_what_does_not_fit_is_told_before_anything_is_loaded(checkpoint: Path, tmp_path: Path) -> None:
    with secondaries(1, tmp_path) as nodes, pytest.raises(UsageError):
        run(cluster_of(nodes), checkpoint, tmp_path, ParallelOptions("tensor", (1.0, 1.0, 1.0)))


@pytest.mark.parametrize("form", ["bf16", "int8", "int4", "mxfp4"])
def test_shards_of_a_checkpoint_and_of_its_chunks_are_the_same(form: str, checkpoint: Path, tmp_path: Path) -> None:
    """Plain weights are cut before they are packed, chunks after; files give back what was written."""
    source = open_source(checkpoint)
    config, packing = source.config, Packing(form, form)
    for rank in range(3):
        share = Share(share_out(config, (3, 1, 2), is_head_shared=True), rank, config)
        from_plain, from_packed = (ShardSource(one, share, packing) for one in (source, PackedSource(source, packing)))
        for part in ("block.0", "head"):
            assert from_plain.info(part) == from_packed.info(part)
            path = tmp_path / f"{part}-{rank}.safetensors"
            path.write_bytes(b"".join(bytes(piece) for piece in from_plain.pieces(part)))
            file = ShardFile(path, from_plain.info(part), share, source.config_hash)
            assert PartFile(path, from_plain.info(part), config, source.config_hash).packing == packing
            for name, weight in file.weights(part).items():
                expected = from_packed.weights(part)[name]
                if isinstance(weight, Matrix):
                    assert isinstance(expected, Matrix) and weight.skip == expected.skip
                    np.testing.assert_array_equal(unpack(weight), unpack(expected))
                else:
                    np.testing.assert_array_equal(weight, expected)
    source.close()


def test_a_shard_does_not_look_through_the_whole_model_for_each_tensor(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With thousands of experts that would take minutes."""
    looks = []
    with contextlib.closing(open_source(checkpoint)) as source:
        packing = Packing("int8", "int8")
        packed = PackedSource(source, packing)
        shard = ShardSource(packed, Share(share_out(source.config, (1, 1)), 0, source.config), packing)
        for module in (mdi.checkpoint.weights, mdi.checkpoint.shapes):
            monkeypatch.setattr(module, "part_of", lambda name: looks.append(name) or part_of(name))
        found = shard.weights("block.0")
    assert len(found) > 5 and not looks


@pytest.mark.parametrize("change", [
    {"rank": 7}, {"heads": [0, 3]}, {"heads": [0, 4, 3]}, {"columns": [0, 1, 10**9]}, {"packing": ["int3", "int8"]},
    {"members": "all"}, {"algorithm": "guess"}, {"reduce_dtype": None}, {"vocabulary": [0, 1, 2]},
    {"n_here": [1]}, {"is_last": 1},
])  # fmt: skip
def test_a_group_that_cannot_be_is_refused(change: dict[str, Any], checkpoint: Path) -> None:
    config = open_source(checkpoint).config
    shares = share_out(config, (1, 1))
    good = {
        "rank": 1, "members": [["starter", "127.0.0.1", 1], ["secondary0", "127.0.0.1", 2]], "heads": list(shares.heads),
        "columns": list(shares.columns), "vocabulary": None, "packing": ["int8", "int8"], "algorithm": "auto",
        "reduce_dtype": "float32", "n_here": [2, 2], "name": "a", "is_last": True,
    }  # fmt: skip

    def read(told: dict[str, Any]) -> Group | None:
        return group_of(decode(ToldGroup, told, "request.group", lambda message: ControlError(message, 400)), config)

    assert read(good) is not None and group_of(None, config) is None
    with pytest.raises(ControlError):
        read({**good, **change})
