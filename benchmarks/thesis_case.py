"""One run of the thesis' evaluation: a model over some nodes, each a process with one thread, on a host of its own.

The hosts are joined by Gigabit Ethernet (slow_hosts.py), or all nodes are on this one.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thesis_numbers import BY_KEY

if TYPE_CHECKING:
    from mdi.run.local import LocalRing
    from slow_hosts import Hosts


@dataclass(frozen=True)
class Case:
    """What is run.

    Attributes:
        key: of the model.
        ckpt: folder of its weights.
        n_tokens: per sample.
        is_greedy: the most probable tokens of one text, to compare ids; else sampled texts, as many as the thesis had.
        is_loopback: all nodes on this host.
    """

    key: str
    ckpt: str
    n_nodes: int
    n_tokens: int
    is_greedy: bool = False
    is_loopback: bool = False


def run_case(case: Case) -> dict[str, Any]:
    """The run, in this process, whose memory is that of the starter, and the children that it starts."""
    from gpt.families import GPT2Family, NanoFamily
    from gpt.rings import GPT2Ring, NanoRing
    from mdi.engine.sequence import SamplingParams
    from mdi.host.threads import choose_threads
    from mdi.metrics import tokens_over_time
    from mdi.run.local import LocalRing
    from mdi.run.nodes import GivenNodes
    from mdi.run.run import Run
    from mdi.spec.options import StarterOptions
    from mdi.stages.model_family import ModelFamily

    model = BY_KEY[case.key]
    families: dict[str, tuple[type[LocalRing], ModelFamily]] = {
        "nanogpt": (NanoRing, NanoFamily()),
        "gpt2": (GPT2Ring, GPT2Family()),
        "llama": (LocalRing, ModelFamily()),
    }
    make_ring, family = families[model.system]
    choose_threads(1)
    ckpt = Path(case.ckpt)
    layers = ",".join(map(str, model.cuts[case.n_nodes]))
    params = SamplingParams(n_tokens=case.n_tokens, temperature=0.0 if case.is_greedy else 0.8, top_k=200)
    with ExitStack() as stack:
        if not case.is_loopback and case.n_nodes > 1:
            from slow_hosts import GIGABIT, SlowHosts

            hosts = SlowHosts(case.n_nodes, *GIGABIT)
            stack.callback(hosts.close)
            hosts.enter(0)
            make_ring = on_hosts(make_ring, hosts)
        ring = stack.enter_context(make_ring(case.n_nodes, None, 1, ckpt, False, False))
        options = StarterOptions(ckpt=ckpt, device="cpu", layers=layers, wait_s=120, draft="none", **model.numbers)
        node = Run(GivenNodes(ring.cluster, look=ring.check), options, case.n_tokens + 1, family=lambda: family)
        try:
            node.open()
            for i in range(1 if case.is_greedy else model.n_samples(case.n_nodes)):
                node.submit("", [i], params)
            node.read()
            node.close()
            measured = node.metrics()
        finally:
            node.close()
    return {
        "n_tokens": measured.n_tokens,
        "n_samples": len(measured.samples),
        "ids": [list(sample.token_ids) for sample in measured.samples],
        "texts": [sample.text for sample in measured.samples],
        "points": tokens_over_time(measured.samples),
        "nodes": [found.to_json() for found in measured.nodes],
    }


def on_hosts(ring: type[LocalRing], hosts: Hosts) -> type[LocalRing]:
    """The same ring with each node on a host; this process is on that of the starter."""

    class OnHosts(ring):  # type: ignore[misc,valid-type]
        def arrange(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
            placed = [{**entry, "addr": hosts.address(i)} for i, entry in enumerate(entries)]
            found: dict[str, Any] = super().arrange(placed)
            return found

        def command(self, path: Path, index: int) -> list[str]:
            return hosts.command(
                index + 1, *super().command(path, index), "--insecure"
            )  # as the thesis, which had no keys

    return OnHosts


def reference_ids(ckpt: Path, n_tokens: int) -> list[int]:
    """What the whole model of a NanoGPT says without any ring, greedily, after the token that a greedy case begins with."""
    import torch

    from gpt.model import PositionGPT, greedy
    from gpt.weights import open_nano, read_nano_config

    source = open_nano(ckpt)
    config = read_nano_config(ckpt / "model_config.yaml")
    model = PositionGPT(config).eval()
    model.load_state_dict({name: source.tensor(name).float() for name in source.specs})
    torch.set_num_threads(1)
    with torch.inference_mode():
        return greedy(model, [0], n_tokens)
