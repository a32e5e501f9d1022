"""Greedy ids of two published files equal transformers' in float32, whichever nodes compute them, and if one is lost."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from mdi.checkpoint.ggufsource import gguf_directory
from mdi.engine.sequence import SamplingParams
from mdi.errors import Code
from mdi.kernels import library
from mdi.metrics import RunMetrics
from mdi.net.hello import Fault
from mdi.node.secondary import SecondaryNode
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import ClusterConfig, standalone
from mdi.spec.options import ParallelOptions, StarterOptions
from mdi.spec.window import WindowMemory, WindowOptions
from mdi.text.texts import TextCodec
from real.answers import expected, published
from real.cases import N_TOKENS, prompts
from real.published import MODELS, TEXT
from secondaries import close_ports, cluster_of, secondaries

pytestmark = [
    pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}"),
    pytest.mark.timeout(600),
]

LEAD = 1e-3  # the least by which transformers' best logit leads: float32 sums of thousands of terms differ by less
LOST_AFTER = 30  # pieces of text: about five tokens of each


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What nodes keep: each model's parts are sent to them once."""
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(name: str, folder: Path) -> Path:
    return gguf_directory(published(f"models/{name}.gguf"), folder)


@pytest.fixture(scope="module")
def right(name: str, checkpoint: Path) -> dict[str, Any]:
    """prompt -> its ids, those behind it until the text ends, and by how much each led."""
    ends = TextCodec.from_checkpoint(checkpoint, "none").eos_ids
    found: dict[str, Any] = expected(name)["greedy"]
    return {key: {**one, "ids": list(takewhile(lambda i: i not in ends, one["ids"]))} for key, one in found.items()}


def texts_of(
    cluster: ClusterConfig,
    checkpoint: Path,
    right: dict[str, Any],
    at: Callable[[], object] | None = None,
    **options: Any,
) -> tuple[dict[str, list[int]], RunMetrics]:
    """The ids behind each prompt; something is done when they have begun."""
    n = 0

    def show(text: str) -> None:
        nonlocal n
        n += 1
        if n == LOST_AFTER and at is not None:
            at()

    fields = {"prompt_style": "none", "device": "cpu", "dtype": "float32", "placement": "even", **options}
    length = max(len(one["prompt"]) for one in right.values()) + N_TOKENS
    sampling = SamplingParams(N_TOKENS, temperature=0)
    with Run(GivenNodes(cluster), StarterOptions(ckpt=checkpoint, **fields), length, n_texts=len(right)) as run:
        samples = {key: run.submit("", one["prompt"], sampling, on_text=show) for key, one in right.items()}
        run.read()
        run.close()
        return {key: list(sample.token_ids) for key, sample in samples.items()}, run.metrics()


def check(found: dict[str, list[int]], right: dict[str, Any]) -> None:
    for key, one in right.items():
        for i, (ours, theirs) in enumerate(zip(found[key], one["ids"], strict=False)):
            assert ours == theirs, (
                f"{key}: another id after {i} tokens, where the best one led by {one['leads'][i]:.4f}"
            )
        assert found[key] == one["ids"]


def test_prompts_are_clear_and_cut_as_by_transformers(checkpoint: Path, right: dict[str, Any]) -> None:
    codec = TextCodec.from_checkpoint(checkpoint, "none")
    for key, text in prompts(published(TEXT).read_text(encoding="utf-8")).items():
        assert codec.encode(text) == right[key]["prompt"], key
    assert len(right["long"]["prompt"]) > 512, "longer than a sliding window of Gemma"
    assert min(min(one["leads"]) for one in right.values()) > LEAD


@pytest.mark.parametrize("n_nodes", [1, 2, 3])
def test_a_ring(checkpoint: Path, right: dict[str, Any], folder: Path, n_nodes: int) -> None:
    with secondaries(n_nodes - 1, folder) as nodes:
        found, metrics = texts_of(cluster_of(nodes) if nodes else standalone(), checkpoint, right)
    check(found, right)
    assert len(metrics.to_json()["nodes"]) == n_nodes


def test_a_tensor_group(checkpoint: Path, right: dict[str, Any], folder: Path) -> None:
    with secondaries(1, folder) as nodes:
        found, metrics = texts_of(cluster_of(nodes), checkpoint, right, parallel=ParallelOptions("tensor"))
    check(found, right)
    assert metrics.to_json()["parallel"] == "tensor"


def test_a_window_over_the_weights(checkpoint: Path, right: dict[str, Any]) -> None:
    """With --window and not --memory: what this process has already depends on the tests before this one."""
    few = WindowMemory(window=WindowOptions(2))
    found, metrics = texts_of(standalone(), checkpoint, right, weight_memory=few)
    check(found, right)
    (node,) = metrics.to_json()["nodes"]
    assert node["weights_read_bytes"] > 2 * node["weights_resident_bytes"]


@pytest.mark.parametrize("replay_memory", [0, 64 << 20], ids=["tokens", "replay"])
def test_a_node_is_lost(checkpoint: Path, right: dict[str, Any], folder: Path, replay_memory: int) -> None:
    def lose(node: SecondaryNode) -> None:
        job, name = node.runs.latest, node.config.name
        assert job is not None and job.ring is not None
        close_ports(node)
        job.ring.fail(Fault(name, "its process has ended", name, Code.LOST))

    with secondaries(2, folder) as nodes:
        found, metrics = texts_of(
            cluster_of(nodes), checkpoint, right, lambda: lose(nodes[0]), replay_memory=replay_memory
        )
    check(found, right)
    assert [one["node"] for one in metrics.recoveries] == ["secondary0"]
