"""Texts of models whose blocks read the caches of others, or have states, go on when nodes are lost: by a hot spare, by rows
that are sent again, by computing again, and with other cuts; when a node lies, when memory is short, and over groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_hot_spare import lose, spared

from lying_nodes import LIARS, make_lie
from mdi.checkpoint.hfconfig import derive_config, published_config
from mdi.checkpoint.source import open_source
from mdi.engine.scheduler import AHEAD_POSITIONS
from mdi.engine.sequence import SamplingParams
from mdi.errors import UsageError
from mdi.kernels import library
from mdi.model.caches import PAGE, cache_classes
from mdi.node.secondary import SecondaryNode
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import ClusterConfig, standalone
from mdi.spec.options import ParallelOptions, StarterOptions
from mdi.tensor.shares import share_out
from secondaries import cluster_of, secondaries
from test_gemma4 import FORMS, SIZES
from test_own_families import random_checkpoint
from tiny_checkpoint import tokenizer

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")

N_TOKENS, LENGTH = 24, 200
FAMILIES: dict[str, dict[str, Any]] = {
    # blocks 2 and 3 make keys and values for 4, 5 and 6
    "columns": {**SIZES, **FORMS["shared"]},
    "states": {
        "model_type": "qwen3_5_text", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 6, "vocab_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "full_attention_interval": 3, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4, "tie_word_embeddings": False,
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    stated = {**FAMILIES[request.param], "max_position_embeddings": LENGTH}
    folder = tmp_path_factory.mktemp("special") / request.param
    random_checkpoint(derive_config(stated, request.param, Path("config.json")), folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SecondaryNode]]:
    with secondaries(3, tmp_path_factory.mktemp("nodes")) as found:
        yield found


PROMPTS = [[7 * i % 90 for i in range(70)], [11 * i % 83 for i in range(9)], [7 * i % 90 for i in range(40)]]


def texts_of(
    cluster: ClusterConfig,
    checkpoint: Path,
    at: dict[int, Callable[[], object]] | None = None,
    prompts: list[list[int]] = PROMPTS,
    n_tokens: int = N_TOKENS,
    **changes: Any,
) -> tuple[list[list[int]], Run]:
    """Greedy texts, of which two begin alike; behind so many tokens of the first one, something is done."""
    n = 0

    def note(text: str) -> None:
        nonlocal n
        n += 1
        (at or {}).get(n, lambda: None)()

    options = StarterOptions(
        ckpt=checkpoint, prompt_style="none", device="cpu", placement="even", draft="none", **changes
    )
    with Run(GivenNodes(cluster), options, LENGTH - 70, n_texts=len(prompts)) as run:
        samples = [
            run.submit("", ids, SamplingParams(n_tokens, temperature=0), on_text=None if i else note)
            for i, ids in enumerate(prompts)
        ]
        run.read()
        return [list(sample.token_ids) for sample in samples], run


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> list[list[int]]:
    found = texts_of(standalone(), checkpoint)[0]
    assert all(len(text) == N_TOKENS and len(set(text)) > 3 for text in found)
    return found


@pytest.mark.parametrize("layers", ["2,2,2", "1,3,2", "1,1,4"])
def test_any_cut(checkpoint: Path, nodes: list[SecondaryNode], alone: list[list[int]], layers: str) -> None:
    counts = [int(n) for n in layers.split(",")]
    counts[-1] += "columns" in checkpoint.name  # seven blocks
    found, _ = texts_of(cluster_of(nodes[:2]), checkpoint, layers=",".join(map(str, counts)))
    assert found == alone


@pytest.mark.parametrize(
    ("restored_by", "changes"),
    [
        ("hot spare", {"hot_spare": ("secondary1",)}), ("rows", {}), ("computing", {"replay_memory": 0}),
    ],
)  # fmt: skip
def test_a_lost_node_is_replaced(
    checkpoint: Path, nodes: list[SecondaryNode], alone: list[list[int]], restored_by: str, changes: dict[str, Any]
) -> None:
    found, run = texts_of(spared(nodes), checkpoint, {9: lambda: lose(nodes[1])}, **changes)
    (told,) = run.metrics().recoveries
    assert found == alone
    assert (told["restored_by"] == "hot spare") == (restored_by == "hot spare")


def test_other_nodes_take_the_blocks(checkpoint: Path, nodes: list[SecondaryNode], alone: list[list[int]]) -> None:
    found, run = texts_of(cluster_of(nodes[:2]), checkpoint, {9: lambda: lose(nodes[0])}, wait_s=0)
    assert found == alone and len(run.metrics().recoveries) == 1


def has_states(checkpoint: Path) -> bool:
    return checkpoint.name == "states"


def test_a_liar_is_found(checkpoint: Path, nodes: list[SecondaryNode], alone: list[list[int]], tmp_path: Path) -> None:
    """Its states are computed again from the rows that it got. Blocks that are skipped leave nothing to compare."""
    if not has_states(checkpoint):
        with pytest.raises(UsageError, match="--verify", check=lambda e: e.code == "flags"):
            texts_of(cluster_of(nodes[:2]), checkpoint, verify=1.0)
        return
    honest, run = texts_of(cluster_of(nodes[:2]), checkpoint, verify=1.0)
    assert run.verifier is not None and not run.verifier.found
    assert honest == alone and run.verifier.n_checked >= run.verifier.n_rows > 150
    with secondaries(2, tmp_path) as others:
        make_lie(others[1], LIARS["after many rows"])
        found, run = texts_of(cluster_of(others), checkpoint, verify=1.0)
        assert run.verifier is not None and [one.nodes for one, _ in run.verifier.found] == [("secondary1",)]
    assert found == alone


@pytest.mark.parametrize("is_short", [False, True])
def test_texts_that_give_way_are_computed_again(checkpoint: Path, nodes: list[SecondaryNode], is_short: bool) -> None:
    """Two of three texts are admitted, and cannot grow to their ends beside each other."""
    prompts, n_tokens = [[n * i % 83 for i in range(9)] for n in (11, 17, 29)], 110
    alone, _ = texts_of(standalone(), checkpoint, None, prompts, n_tokens)
    spec, n_pages = open_source(checkpoint).spec, -(-9 // PAGE) + AHEAD_POSITIONS // PAGE
    cuts = [0, 2, 4, spec.n_layer]
    classes = [cache_classes(spec, *cut, "float32")[0] for cut in itertools.pairwise(cuts)]
    needed = max(sum(one.n_bytes(n_pages * PAGE) for one in some) for some in classes)
    layers = ",".join(str(stop - start) for start, stop in itertools.pairwise(cuts))
    memory = {"kv_memory": 2 * needed + PAGE} if is_short else {}
    found, run = texts_of(cluster_of(nodes[:2]), checkpoint, None, prompts, n_tokens, layers=layers, **memory)
    assert found == alone
    assert (run.engine.texts()[2] > 0) == is_short


def test_a_group_has_the_same_texts(
    checkpoint: Path, nodes: list[SecondaryNode], alone: list[list[int]], tmp_path: Path
) -> None:
    """Heads of delta nets are shared out, and their states with them."""
    group = ParallelOptions("tensor", (2.0, 1.0, 1.0))
    if has_states(checkpoint):
        found, run = texts_of(cluster_of(nodes[:2]), checkpoint, parallel=group)
        assert found == alone and run.metrics().to_json()["parallel"] == "tensor"
        return
    with pytest.raises(UsageError, match="^--parallel tensor: "):
        texts_of(cluster_of(nodes[:2]), checkpoint, parallel=group)


GEMMA = {
    "E2B": "rows with columns besides hidden", "E4B": "rows with columns besides hidden",
    "26B-A4B": "experts with norms of their own", "31B": None,
}  # fmt: skip


@pytest.mark.parametrize("name", GEMMA)
def test_which_published_models_groups_have(name: str) -> None:
    config = published_config(f"gemma-4-{name}")
    assert config is not None
    if (reason := GEMMA[name]) is None:
        assert share_out(config, (1.0, 1.0)).heads[-1] == 32
        return
    with pytest.raises(UsageError, match=f"^--parallel tensor: {reason} cannot be shared out: use --parallel ring$"):
        share_out(config, (1.0, 1.0))
