"""A server whose nodes, or some of them, compute every block together: the same texts, and models beside each other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from own_server import right, run, server

from mdi.kernels import library
from mdi.node.secondary import SecondaryNode
from mdi.spec.options import ParallelOptions
from mdi.stages.group_part import share_metrics

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")


@pytest.mark.parametrize(
    "options",
    [{"parallel": ParallelOptions("tensor", is_head_shared=True)}, {"group": "b"}],
    ids=["all nodes", "a group"],
)
def test_two_models_whose_blocks_are_shared_out(
    options: dict[str, Any], folder: Path, nodes: list[SecondaryNode]
) -> None:
    async def scenario() -> None:
        async with server(folder, nodes, wait_s=5, **options) as made:
            asked = ("one", "two", "one", "two")
            found = await asyncio.gather(*(made.write(name, 20) for name in asked))
            assert found == [right(name, 20) for name in asked]
            assert made.serving == {"one", "two"}
            stages = [slot.stage for node in nodes for slot in node.stages.listed]
            assert len(stages) == 4 and all(share_metrics(stage) is not None for stage in stages), (
                "shares, and no whole blocks"
            )

    run(scenario())
