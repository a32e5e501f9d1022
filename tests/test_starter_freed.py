"""What a closed starter held is free at once: nobody waits for the garbage collector."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from mdi.engine.sequence import SamplingParams
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import ClusterConfig, standalone
from mdi.spec.options import StarterOptions
from secondaries import cluster_of, secondaries
from tiny_checkpoint import encode, write_checkpoint


def run(cluster: ClusterConfig, ckpt: Path) -> dict[str, weakref.ref[object]]:
    """A run from its beginning to its end; what it was made of."""
    options = StarterOptions(ckpt=ckpt, prompt_style="none", device="cpu", placement="even")
    with Run(GivenNodes(cluster), options, 40, n_texts=1) as starter:
        starter.submit("The ring", encode("The ring"), SamplingParams(5, temperature=0))
        starter.read()
        parts = {"starter": starter, "engine": starter.engine, "ring": starter.ring, "loop": starter.loop}
        assert starter.ring is not None
        parts["stage"] = starter.ring.stage
        starter.close()
    return {name: weakref.ref(part) for name, part in parts.items() if part is not None}


@pytest.mark.slow
@pytest.mark.parametrize("n_secondaries", [0, 2])
def test_nothing_of_a_closed_starter_is_left(tmp_path: Path, n_secondaries: int) -> None:
    ckpt = write_checkpoint(tmp_path / "tiny")
    with secondaries(n_secondaries, tmp_path) as nodes:
        cluster = cluster_of(nodes) if nodes else standalone()
        run(cluster, ckpt)  # what is made once stays
        gc.collect()
        gc.disable()
        try:
            left = {name: found for name, part in run(cluster, ckpt).items() if (found := part()) is not None}
            holders = {name: [type(one) for one in gc.get_referrers(part)] for name, part in left.items()}
        finally:
            gc.enable()
    assert not holders
