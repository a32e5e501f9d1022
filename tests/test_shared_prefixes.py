"""Prefixes that nodes of groups keep, each its share: texts behind them have the ids that they would have had."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from litgpt.model import GPT

from families import CONTEXT, greedy, model_of, prompt
from loopback import InProcessRing, even_cuts
from mdi.checkpoint.packing import Packing
from mdi.engine.kept_prefixes import KeptFiles
from mdi.engine.memory import CacheMemory, NodeCaches
from mdi.engine.rows import ArrayRows
from mdi.kernels import library
from mdi.model.plain import ModelConfig
from mdi.net.keys import KeyFile
from mdi.stages.kernel_stage import KernelStage
from mdi.tensor.group import Group
from mdi.tensor.joining import LeaderRing, MemberRing
from mdi.tensor.shares import Shares, share_out
from tensor_groups import meshes, stage_of, sums
from test_kept_prefixes import all_files, ask, folders_of, kept, owner_folder
from test_kept_prefixes import cluster_key as cluster_key

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")

LLAMA, GEMMA, LATENT = "Llama-3.1-8B", "Gemma-3-1b-it", "deepseek-v3-shape"

Layout = Sequence[Sequence[float]]  # of each stage of a ring, its nodes' parts


class GroupedRing(InProcessRing):
    """A ring whose stages are groups, or nodes that are alone."""

    def __init__(self, gpt: GPT, layout: Layout, stack: ExitStack, **kwargs: Any) -> None:
        config = ModelConfig.from_litgpt(gpt.config)
        bounds = (0, *even_cuts(config.n_layer, len(layout)), config.n_layer)
        stages, self._groups = list[KernelStage](), list[Group | None]()
        for parts, start, stop in zip(layout, bounds, bounds[1:], strict=False):
            shares = share_out(config, parts)
            found = sums(stack.enter_context(meshes(len(parts)))) if len(parts) > 1 else [None]
            for rank, one in enumerate(found):
                stages.append(stage_of(gpt, shares, rank, one, start, stop, has_ends=not stages))
                is_last, packing = rank == len(parts) - 1, Packing("float32", "float32")
                self._groups.append(None if one is None else Group(rank, (), shares, packing, is_last=is_last))
        self._is_whole = len(layout) == 1
        super().__init__(gpt, len(stages), stages=stages, rows=ArrayRows(), **kwargs)

    def seen(self, index: int) -> Any:
        ring, group, stage = super().seen(index), self._groups[index], self.stages[index]
        if group is None:
            return ring
        return MemberRing(ring, stage, group, self._is_whole) if index else LeaderRing(ring, stage, self._is_whole)


@contextmanager
def grouped(family: str, layout: Layout, files: list[KeptFiles], **kwargs: Any) -> Iterator[InProcessRing]:
    """Its nodes have just begun: nothing is in memory."""
    with ExitStack() as stack:
        made = GroupedRing(model_of(family), layout, stack, files=files, owner_folder=owner_folder, **kwargs)
        stack.callback(made.close)
        nodes = [NodeCaches(f"node{i}", 1 << 40, tuple(s.caches.classes)) for i, s in enumerate(made.stages)]
        made.engine.memory = CacheMemory(tuple(nodes))
        yield made


def n_nodes(layout: Layout) -> int:
    return sum(map(len, layout))


@contextmanager
def kept_text(
    family: str, layout: Layout, folders: list[Path], keys: KeyFile | None = None, n: int = 110
) -> Iterator[list[int]]:
    """A text and its answer, which nodes that have ended meanwhile have kept; its next turn went on from their memory."""
    gpt, ids = model_of(family), prompt(n, 1)
    with kept(folders, keys=keys) as files, grouped(family, layout, files) as made:
        before = [*ids, *ask(made, ids).ids]
        assert before[n:] == greedy(gpt, ids, 12) and made.engine.n_reused == 0
        made.keep()
        assert ask(made, turn := [*before, *prompt(20, 3)]).ids == greedy(gpt, turn, 12)
        assert made.engine.n_reused > 96, "in memory"
    yield before


def check_next_turn(
    family: str, layout: Layout, folders: list[Path], before: list[int], keys: KeyFile | None = None
) -> int:
    """The next turn over nodes that have just begun; how many of its tokens were not computed."""
    ids = [*before, *prompt(20, 2)]
    with kept(folders, keys=keys) as files, grouped(family, layout, files) as made:
        assert ask(made, ids).ids == greedy(model_of(family), ids, 12)
        return made.engine.n_reused


WHOLE, UNEVEN = ((1, 1),), ((2, 0, 3, 1),)
RINGS = [((1, 1), (1, 2)), ((1,), (1, 1)), ((1, 2), (1,))]


@pytest.mark.parametrize("layout", [WHOLE, UNEVEN, *RINGS], ids=str)
def test_after_a_restart_a_text_goes_on_from_each_nodes_share(layout: Layout, tmp_path: Path) -> None:
    folders = folders_of(tmp_path, n_nodes(layout))
    with kept_text(LLAMA, layout, folders) as before:
        assert check_next_turn(LLAMA, layout, folders, before) == 96
        assert all(all_files([folder]) for folder in folders)


@pytest.mark.parametrize("family", [GEMMA, LATENT])
def test_windows_and_latent_rows_in_a_ring_of_groups(family: str, tmp_path: Path) -> None:
    layout = ((1, 2), (1, 1))
    with kept_text(family, layout, folders_of(tmp_path, 4)) as before:
        assert check_next_turn(family, layout, folders_of(tmp_path, 4), before) == 96
