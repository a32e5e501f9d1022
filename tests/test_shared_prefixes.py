"""Prefixes that nodes of groups keep, each its share: texts behind them have the ids that they would have had."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from litgpt.model import GPT

from families import DEEPSEEK_V3, config_of, greedy, model_of, prompt, random_gpt
from loopback import InProcessRing, Text, even_cuts
from mdi.checkpoint.packing import Packing
from mdi.engine.kept_prefixes import KeptFiles
from mdi.engine.memory import CacheMemory, NodeCaches
from mdi.engine.rows import ArrayRows
from mdi.engine.sequence import SamplingParams
from mdi.kernels import library
from mdi.model.plain import ModelConfig
from mdi.net.keys import KeyFile
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import ClusterConfig
from mdi.spec.options import ParallelOptions, StarterOptions
from mdi.stages.kernel_stage import KernelStage
from mdi.tensor.group import Group
from mdi.tensor.joining import LeaderRing, MemberRing
from mdi.tensor.shares import share_out
from secondaries import cluster_of, secondaries
from tensor_groups import meshes, stage_of, sums
from test_delta_files import made
from test_kept_prefixes import all_files, ask, folders_of, kept, owner_folder
from test_kept_prefixes import cluster_key as cluster_key
from test_tensor_runs import lose_after
from tiny_checkpoint import write_checkpoint
from waiting import until

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")

LLAMA = "Llama-3.1-8B"

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
def grouped(gpt: GPT, layout: Layout, files: list[KeptFiles], **kwargs: Any) -> Iterator[InProcessRing]:
    """Its nodes have just begun: nothing is in memory."""
    with ExitStack() as stack:
        made = GroupedRing(gpt, layout, stack, files=files, owner_folder=owner_folder, **kwargs)
        stack.callback(made.close)
        nodes = [NodeCaches(f"node{i}", 1 << 40, tuple(s.caches.classes)) for i, s in enumerate(made.stages)]
        made.engine.memory = CacheMemory(tuple(nodes))
        yield made


def n_nodes(layout: Layout) -> int:
    return sum(map(len, layout))


@contextmanager
def kept_text(
    gpt: GPT, layout: Layout, folders: list[Path], keys: KeyFile | None = None, n: int = 110
) -> Iterator[list[int]]:
    """A text and its answer, which nodes that have ended meanwhile have kept; its next turn went on from their memory."""
    ids = prompt(n, 1)
    with kept(folders, keys=keys) as files, grouped(gpt, layout, files) as made:
        before = [*ids, *ask(made, ids).ids]
        assert before[n:] == greedy(gpt, ids, 12) and made.engine.n_reused == 0
        made.keep()
        assert ask(made, turn := [*before, *prompt(20, 3)]).ids == greedy(gpt, turn, 12)
        assert made.engine.n_reused > 96, "in memory"
    yield before


def check_next_turn(
    gpt: GPT, layout: Layout, folders: list[Path], before: list[int], keys: KeyFile | None = None
) -> int:
    """The next turn over nodes that have just begun; how many of its tokens were not computed."""
    ids = [*before, *prompt(20, 2)]
    with kept(folders, keys=keys) as files, grouped(gpt, layout, files) as made:
        assert ask(made, ids).ids == greedy(gpt, ids, 12)
        return made.engine.n_reused


@functools.cache
def latent_model() -> GPT:
    """With latents that the kernels compute."""
    of_rows = {**DEEPSEEK_V3["latent_attention"], "kv_lora_rank": 64, "qk_rope_head_dim": 32}
    return random_gpt(config_of("deepseek-v3-shape", latent_attention=of_rows))


def llama() -> GPT:
    return model_of(LLAMA)


def with_windows() -> GPT:
    return model_of("Gemma-3-1b-it")


MODELS: list[Callable[[], GPT]] = [llama, with_windows, latent_model]
WHOLE, UNEVEN = ((1, 1),), ((2, 0, 3, 1),)
RINGS = [((1, 1), (1, 2)), ((1,), (1, 1)), ((1, 2), (1,))]


@pytest.mark.parametrize("layout", [WHOLE, UNEVEN, *RINGS], ids=str)
def test_after_a_restart_a_text_goes_on_from_each_nodes_share(layout: Layout, tmp_path: Path) -> None:
    folders = folders_of(tmp_path, n_nodes(layout))
    with kept_text(llama(), layout, folders) as before:
        assert check_next_turn(llama(), layout, folders, before) == 96
        assert all(all_files([folder]) for folder in folders)


@pytest.mark.parametrize("model", [with_windows, latent_model])
def test_windows_and_latent_rows_in_a_ring_of_groups(model: Callable[[], GPT], tmp_path: Path) -> None:
    gpt, layout = model(), ((1, 2), (1, 1))
    with kept_text(gpt, layout, folders_of(tmp_path, 4)) as before:
        assert check_next_turn(gpt, layout, folders_of(tmp_path, 4), before) == 96


@pytest.mark.parametrize("model", MODELS)
def test_nodes_on_one_disk_have_files_of_their_own_where_their_shares_differ(
    model: Callable[[], GPT], tmp_path: Path
) -> None:
    """And a node without heads, whose caches hold nothing, leaves nothing to the others."""
    gpt, folders = model(), [tmp_path / "shared"] * 4
    with kept_text(gpt, UNEVEN, folders) as before:
        n_alone = len(files_of_one(gpt, tmp_path / "alone"))
        # Three nodes have heads: those of the Llama model all groups, the first, and the second. The others have one group.
        n_shares = 4 if model is llama else 2
        assert len(all_files(folders)) == n_shares * n_alone
        assert check_next_turn(gpt, UNEVEN, folders, before) == 96


def files_of_one(gpt: GPT, folder: Path) -> list[Path]:
    """What one node keeps of the same text."""
    with kept_text(gpt, ((1,),), [folder]):
        return all_files([folder])


@pytest.mark.parametrize("parts", [(1, 5), (1, 1, 1), (1,)])
def test_files_of_another_share_are_left_alone(parts: tuple[float, ...], tmp_path: Path) -> None:
    """Though all other things that their names depend on are the same."""
    folders = folders_of(tmp_path, 3)
    with kept_text(llama(), WHOLE, folders[:2]) as before:
        found = all_files(folders)
        assert check_next_turn(llama(), (parts,), folders[: len(parts)], before) == 0
        assert set(found) <= set(all_files(folders))
        assert check_next_turn(llama(), WHOLE, folders[:2], before) == 96


@pytest.mark.parametrize("layout", [WHOLE, ((1,), (1, 1))], ids=str)
def test_a_damaged_file_of_one_node_is_removed_and_all_compute(layout: Layout, tmp_path: Path) -> None:
    folders = folders_of(tmp_path, n_nodes(layout))
    with kept_text(llama(), layout, folders) as before:
        damaged = all_files(folders[-1:])
        for path in damaged:
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert check_next_turn(llama(), layout, folders, before) == 0
        assert not all(path.exists() for path in damaged)


@pytest.mark.parametrize("layout", [WHOLE, ((1,), (1, 1))], ids=str)
@pytest.mark.parametrize(("model", "n"), [(llama, 0), (latent_model, 96)])
def test_a_node_in_place_of_another_gets_what_the_others_have(
    model: Callable[[], GPT], n: int, layout: Layout, tmp_path: Path, cluster_key: KeyFile
) -> None:
    """Latent rows are the same on all nodes of a group. Nobody else has the pages of a share, and the text is computed."""
    gpt, folders = model(), folders_of(tmp_path, n_nodes(layout))
    with kept_text(gpt, layout, folders, cluster_key) as before:
        assert check_next_turn(gpt, layout, [*folders[:-1], tmp_path / "new"], before, cluster_key) == n


# Whole runs


def turn(
    cluster: ClusterConfig, checkpoint: Path, folder: Path, ids: Sequence[int], n_kept: int = 0, **options: Any
) -> tuple[list[int], int]:
    """What a run with this text alone gives, and how many of its tokens were not computed.

    Args:
        n_kept: files that each node has in the end.
    """
    fields: dict[str, Any] = {
        "placement": "even",
        "prompt_style": "none",
        "device": "cpu",
        "dtype": "float32",
        "wait_s": 5,
    }
    fields |= {"ckpt": checkpoint, "cache_dir": folder, "keep_prefixes": 1 << 30}
    given = StarterOptions(**{**fields, **options})
    with Run(GivenNodes(cluster), given, 128) as starter:
        text = Text(starter.engine.submit(ids, SamplingParams(n_tokens=12, temperature=0), owner="a"))
        text.wait()
        homes = [folder, *(folder / f"cache{i}" for i in range(len(cluster.secondaries)))]
        until(lambda: all(len([*(home / "prefixes").rglob("*.kv")]) >= n_kept for home in homes))
        return text.ids, starter.engine.n_reused


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("plain") / "tiny", gpt=model_of(LLAMA), with_end=False)


@pytest.mark.slow
def test_runs_go_on_from_what_groups_have_kept_and_survive_a_lost_member(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt, parallel = model_of(LLAMA), ParallelOptions("tensor", (1.0, 3.0, 2.0))
    first = prompt(70, 1)
    second = [*first, *greedy(gpt, first, 12), *prompt(10, 2)]
    wanted, lost = greedy(gpt, second, 12), list[threading.Event]()

    def on_new_nodes(ids: list[int], parallel: ParallelOptions = parallel, **fields: Any) -> tuple[list[int], int]:
        with secondaries(2, tmp_path) as nodes:
            if fields.pop("is_lost", False):
                lost.append(lose_after(40, nodes[0], monkeypatch))
            return turn(cluster_of(nodes), checkpoint, tmp_path, ids, parallel=parallel, **fields)

    assert on_new_nodes(first, n_kept=5) == (second[70:82], 0)
    assert on_new_nodes(second) == (wanted, 64)
    assert on_new_nodes(second, ParallelOptions("tensor", (1.0, 1.0, 1.0))) == (wanted, 0), "other shares"
    assert on_new_nodes(second, replace(parallel, algorithm="ring")) == (wanted, 0), "other sums"
    found, n_reused = on_new_nodes(second, is_lost=True, fixed=False)
    assert lost[0].is_set() and found == wanted and n_reused == 64
    monkeypatch.undo()
    assert on_new_nodes(second) == (wanted, 64)


def test_states_of_delta_nets_are_kept_by_their_shares(tmp_path: Path) -> None:
    source = made("qwen3_next", tmp_path)
    parallel = ParallelOptions("tensor", (1.0, 1.0))
    ids = [i % 96 for i in prompt(60, 1)]
    with secondaries(1, tmp_path) as nodes:
        answer, _ = turn(cluster_of(nodes), source.path, tmp_path, ids, n_kept=4, parallel=parallel)
        following = [*ids, *answer, 5, 6, 7]
        again = turn(cluster_of(nodes), source.path, tmp_path, following, parallel=parallel)
        anew = turn(cluster_of(nodes), source.path, tmp_path, following, parallel=parallel, keep_prefixes=0)
    assert (again[0], again[1], anew[1]) == (anew[0], 64, 0)
