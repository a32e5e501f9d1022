"""Several runs whose nodes compute blocks together, on the same nodes at the same time: none locks the other up."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mdi.checkpoint.source import open_source
from mdi.kernels import library
from mdi.node.secondary import SecondaryNode
from mdi.spec.cluster import ClusterConfig, NodeConfig
from mdi.spec.options import ParallelOptions
from mdi.tensor.group import in_common_order, stages_of
from secondaries import cluster_of, entry_of, secondary
from test_tensor_runs import PROMPTS, checkpoint, run  # noqa: F401
from tiny_checkpoint import reference

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")

DEADLINE_S = 60.0


def listed(nodes: Sequence[SecondaryNode], group: str | None = None) -> ClusterConfig:
    """The nodes in this order, as another starter's nodes file may have them."""
    entries = (entry_of(node, name=f"secondary{i}", group=group) for i, node in enumerate(nodes))
    return replace(cluster_of([]), secondaries=tuple(entries))


@pytest.mark.parametrize(
    "modes, group",
    [(("tensor", "tensor"), None), (("ring", "ring"), "b"), (("tensor", "ring"), None)],
    ids=["all nodes", "a group behind the starter", "beside a ring of nodes alone"],
)
def test_two_runs_on_the_same_nodes(
    modes: tuple[str, str], group: str | None, checkpoint: Path, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    """Each starter lists the nodes in another order."""
    found: dict[int, list[list[int]]] = {}
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(contextlib.closing(open_source(checkpoint))) for _ in range(2)]
        nodes = [
            stack.enter_context(secondary(i, tmp_path / f"cache{i}", weights=source))
            for i, source in enumerate(sources)
        ]

        def generate(i: int) -> None:
            cluster = listed(nodes[:: -1 if i else 1], group)
            parallel = ParallelOptions(modes[i])
            found[i], _ = run(cluster, checkpoint, tmp_path / f"starter{i}", parallel, n_tokens=40, prompts=PROMPTS[:2])

        threads = [threading.Thread(target=generate, args=(i,), name=f"run{i}", daemon=True) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "the runs wait for each other"
    expected = [list(reference(text, 40)) for text in PROMPTS[:2]]
    assert found == {0: expected, 1: expected}


def test_nodes_of_a_group_have_one_order_whatever_the_files_say() -> None:
    def node(name: str) -> NodeConfig:
        return NodeConfig(name, name, 1, 2)

    one = ClusterConfig(node("starter"), (node("secondary0"), node("secondary1"), node("secondary2")))
    stages = stages_of({"starter": "a", "secondary0": "a", "secondary1": "a", "secondary2": None})
    processes = {"secondary0": "9", "secondary1": "3", "secondary2": "1"}
    names = [node.name for node in in_common_order(one, stages, processes).nodes]
    assert names == ["starter", "secondary1", "secondary0", "secondary2"], "stages stay, groups are sorted"
