"""Sums by torch.distributed: Gloo, over loopback. NCCL needs GPUs, and is not tried."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import mdi.node.group_member
from cluster_keys import key_file
from mdi.errors import RingError, UsageError
from mdi.kernels import library
from mdi.spec.options import ParallelOptions
from mdi.tensor.torch_sums import TorchSums
from secondaries import cluster_of, secondaries
from tensor_groups import meshes, on_all
from test_tensor_runs import PROMPTS, checkpoint, run  # noqa: F401
from tiny_checkpoint import reference

HERE = ["127.0.0.1"] * 3


@pytest.mark.parametrize("is_spread", [False, True], ids=["as it is", "broadcast"])
def test_all_nodes_have_the_same_bits(is_spread: bool) -> None:
    """Also where nodes that do not agree have the first one's sum sent to all."""
    parts = [np.random.default_rng(rank).standard_normal((3, 333), dtype=np.float32) for rank in range(3)]
    with meshes(3) as found:

        def work(rank: int) -> np.ndarray:
            sums, x = TorchSums(found[rank], HERE, "gloo"), parts[rank].copy()
            sums.is_spread = sums.is_spread or is_spread
            sums.reduce(x)
            return x

        first, *others = on_all(3, work)
        assert [mesh.tally.n_sums for mesh in found] == [1, 1, 1]
    assert all(other.tobytes() == first.tobytes() for other in others)
    np.testing.assert_allclose(first, np.sum(parts, axis=0), rtol=1e-4, atol=1e-5)


def test_a_node_that_ends_ends_the_sum() -> None:
    with meshes(2) as found:

        def work(rank: int) -> str:
            sums = TorchSums(found[rank], HERE, "gloo")
            if rank == 1:
                return "left"
            with pytest.raises(RingError) as failure:
                sums.reduce(np.ones((1, 8), dtype=np.float32))
            return failure.value.code

        assert on_all(2, work) == [RingError.code, "left"]


def test_nccl_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with meshes(2) as found, pytest.raises(UsageError):
        TorchSums(found[0], HERE, "nccl")


needs_kernels = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")


@needs_kernels
def test_texts_are_those_of_the_whole_model(checkpoint: Path, tmp_path: Path) -> None:  # noqa: F811
    with secondaries(1, tmp_path) as nodes:
        ids, _ = run(cluster_of(nodes), checkpoint, tmp_path, ParallelOptions("tensor", algorithm="gloo"))
    assert ids == [list(reference(PROMPTS[0], 8))]


@needs_kernels
def test_what_cannot_be_is_told(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    gloo = ParallelOptions("tensor", algorithm="gloo")
    keys = key_file(tmp_path / "cluster.key")
    with secondaries(1, tmp_path) as nodes:
        cluster = cluster_of(nodes)
        with pytest.raises(UsageError):
            run(replace(cluster, keys=keys), checkpoint, tmp_path, gloo)
        with pytest.raises(UsageError):
            run(cluster, checkpoint, tmp_path, replace(gloo, reduce_dtype="int8"))
        monkeypatch.setattr(mdi.node.group_member, "has_torch", lambda: False)
        with pytest.raises(UsageError):
            run(cluster, checkpoint, tmp_path, gloo)
