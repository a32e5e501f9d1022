"""Both earlier kinds over one, two and three nodes, against the model on one device; nodes that do not fit are refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from gpt_models import CONTEXT, gpt2_of_reference, tiny_nano, write_gpt2, write_nano

from gpt.families import GPT2Family, NanoFamily, WholeTextFamily
from gpt.model import PositionGPT, greedy
from gpt.nodes_file import arrange, load_nano_cluster
from gpt.stage import WholeTextStage
from gpt.weights import open_gpt2
from mdi.engine.sequence import SamplingParams
from mdi.errors import EngineError, MdiError, UsageError
from mdi.model.plain import ModelConfig, spec_of
from mdi.node.secondary import SecondaryNode
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import ClusterConfig, NodeConfig
from mdi.spec.options import Requested, StarterOptions

DEADLINE_S = 60.0
GREEDY = SamplingParams(n_tokens=40, temperature=0, top_k=None)


@contextmanager
def running(node: SecondaryNode) -> Iterator[SecondaryNode]:
    node.open()
    thread = threading.Thread(target=node.run, name=node.config.name)
    thread.start()
    try:
        yield node
    finally:
        node.close()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


@contextmanager
def cluster_of(families: list[tuple[str, WholeTextFamily]], folder: Path) -> Iterator[ClusterConfig]:
    """Nodes of these names and kinds that wait for a starter."""
    with ExitStack() as stack:
        entries = []
        for name, family in families:
            node = SecondaryNode(
                NodeConfig(name, "127.0.0.1", 0, 0),
                None,
                folder / f"cache-{name}",
                Requested(device="cpu"),
                family=family,
            )
            stack.enter_context(running(node))
            entries.append(NodeConfig(name, "127.0.0.1", node.control_port, node.ring_port))
        yield ClusterConfig(NodeConfig("starter", "127.0.0.1", 0, 0), tuple(entries))


def generated(
    cluster: ClusterConfig, family: WholeTextFamily, ckpt: Path, prompts: list[list[int]], layers: str | None = None
) -> list[list[int]]:
    node = Run(
        GivenNodes(cluster),
        StarterOptions(ckpt=ckpt, device="cpu", layers=layers),
        max(map(len, prompts)) + GREEDY.n_tokens,
        family=lambda: family,
    )
    try:
        node.open()
        samples = [node.submit("", prompt, GREEDY) for prompt in prompts]
        node.read()
        node.close()
        assert node.metrics().n_nodes == cluster.n_nodes
        return [sample.token_ids for sample in samples]
    finally:
        node.close()


def nano_roles(n_nodes: int) -> list[tuple[str, WholeTextFamily]]:
    between = [(f"intermediate{i}", NanoFamily("intermediate")) for i in range(n_nodes - 2)]
    return [*between, *([("finisher", NanoFamily("finisher"))] if n_nodes > 1 else [])]


@pytest.mark.parametrize("n_nodes", [1, 2, 3])
def test_nanogpt_over_nodes_is_the_model(n_nodes: int, tmp_path: Path) -> None:
    """Texts that outgrow the context, from prompts of a length of one to beyond it."""
    model = tiny_nano()
    ckpt = write_nano(tmp_path / "nano", model)
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 7, CONTEXT + 3][:n_nodes]
    prompts = [torch.randint(0, model.config.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    expected = [greedy(model, prompt, GREEDY.n_tokens) for prompt in prompts]
    assert len(set(map(tuple, expected))) == n_nodes and all(len(set(ids)) > 5 for ids in expected), "too dull"
    with cluster_of(nano_roles(n_nodes), tmp_path) as cluster:
        assert generated(cluster, NanoFamily(), ckpt, prompts) == expected


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PositionGPT]:
    ckpt = write_gpt2(tmp_path_factory.mktemp("gpt2") / "reference")
    source = open_gpt2(ckpt)
    model = PositionGPT(gpt2_of_reference()).eval()
    model.load_state_dict({name: source.tensor(name) for name in source.specs})
    source.close()
    return ckpt, model


@pytest.mark.parametrize(
    ("n_nodes", "n_samples", "layers"), [(1, 2, None), (2, 5, None), (3, 2, None), (3, 7, "0,4,1")]
)
def test_gpt2_over_nodes_is_the_model(
    n_nodes: int, n_samples: int, layers: str | None, gpt2: tuple[Path, PositionGPT], tmp_path: Path
) -> None:
    """More samples than nodes, and fewer; texts that outgrow the context of 48."""
    ckpt, model = gpt2
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 96, (1 + 6 * i,), generator=generator).tolist() for i in range(n_samples)]
    expected = [greedy(model, prompt, GREEDY.n_tokens) for prompt in prompts]
    assert len(set(map(tuple, expected))) == n_samples and all(len(set(ids)) > 5 for ids in expected), "too dull"
    expected = [ids[: ids.index(96)] if 96 in ids else ids for ids in expected]  # which ends a text
    secondaries: list[tuple[str, WholeTextFamily]] = [(f"secondary{i}", GPT2Family()) for i in range(n_nodes - 1)]
    with cluster_of(secondaries, tmp_path) as cluster:
        assert generated(cluster, GPT2Family(), ckpt, prompts, layers) == expected


def test_a_role_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    ckpt = write_nano(tmp_path / "nano", tiny_nano())
    roles = [("intermediate0", NanoFamily("finisher")), ("finisher", NanoFamily("finisher"))]
    with (
        cluster_of(roles, tmp_path) as cluster,
        pytest.raises(MdiError, match="finisher.*intermediate"),
    ):
        generated(cluster, NanoFamily(), ckpt, [[1]])


def test_a_node_of_todays_system_computes_blocks_of_an_earlier_model(
    gpt2: tuple[Path, PositionGPT], tmp_path: Path
) -> None:
    """Each frame brings the whole text again, so it does not matter that this node keeps caches."""
    ckpt, model = gpt2
    with cluster_of([("secondary0", None)], tmp_path) as cluster:  # type: ignore[list-item]
        assert generated(cluster, GPT2Family(), ckpt, [[1, 2]]) == [greedy(model, [1, 2], GREEDY.n_tokens)]


def test_a_stage_wants_whole_texts() -> None:
    stage = WholeTextStage(spec_of(ModelConfig.from_litgpt(gpt2_of_reference())), 0, 2)
    with pytest.raises(EngineError) as caught:
        stage(torch.zeros(1, 32), [(0, 5, 1)])
    assert caught.value.code == "length"


def entry(port: int) -> dict[str, Any]:
    return {"addr": "127.0.0.1", "communication": {"port": port}, "inference": {"port_in": port + 1}}


def test_nodes_file_of_three_roles(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(json.dumps(arrange([entry(1000), entry(1010), entry(1020), entry(1030)])))
    names = [node.name for node in load_nano_cluster(path).nodes]
    assert names == ["starter", "intermediate0", "intermediate1", "finisher"]
    path.write_text(json.dumps(arrange([entry(1000)])))
    assert load_nano_cluster(path).n_nodes == 1


@pytest.mark.parametrize(
    ("nodes", "code"),
    [
        ({"starter": entry(1), "secondary": []}, "role"),
        ({"starter": entry(1), "intermediate": [entry(5)]}, "missing"),
        ({"starter": entry(1), "intermediate": entry(5), "finisher": entry(9)}, "nodes"),
        ({"finisher": entry(1)}, "nodes"),
        ({"starter": entry(1), "finisher": entry(1)}, "usage"),
        ({"starter": entry(1), "finisher": {}}, "usage"),
    ],
)
def test_a_nodes_file_that_makes_no_sense_is_refused(tmp_path: Path, nodes: dict[str, Any], code: str) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(json.dumps({"nodes": nodes}))
    with pytest.raises(UsageError) as caught:
        load_nano_cluster(path)
    assert caught.value.code == code
