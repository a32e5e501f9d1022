"""Secondary nodes inside this process, each with a thread that does its work, and the cluster that they make."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from mdi.engine.sequence import SamplingParams
from mdi.kernels import library
from mdi.node.secondary import SecondaryNode
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import ClusterConfig, NodeConfig
from mdi.spec.options import Requested, StarterOptions
from tiny_checkpoint import encode

library.load()  # in a new cache folder the first node would compile, and say so, instead of what a test expects


@contextlib.contextmanager
def secondary(index: int, cache_dir: Path, **options: Any) -> Iterator[SecondaryNode]:
    """One that waits for its starter on free ports of loopback."""
    config = NodeConfig(f"secondary{index}", "127.0.0.1", 0, 0)
    options = {"device": "cpu", **options}
    asked = Requested(**{f.name: options.pop(f.name) for f in fields(Requested) if f.name in options})
    node = SecondaryNode(config, options.pop("weights", None), cache_dir, asked, **options)
    thread = threading.Thread(target=node.run, name=f"secondary{index}")
    try:
        node.open()
        thread.start()
        yield node
    finally:
        node.close()
        if thread.ident is not None:
            thread.join(60)
            assert not thread.is_alive()


@contextlib.contextmanager
def secondaries(n: int, folder: Path, **options: Any) -> Iterator[list[SecondaryNode]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(secondary(i, folder / f"cache{i}", **options)) for i in range(n)]


def text_of(cluster: ClusterConfig, checkpoint: Path, n_tokens: int = 6, **options: Any) -> list[int]:
    """The ids of a greedy text, by a run from its beginning to its end.

    With `layers`, by one that does not say how many texts it will have: its nodes keep no other stages beside it.
    """
    is_placed = "layers" not in options
    fields = {"ckpt": checkpoint, "prompt_style": "none", "device": "cpu", **options}
    if is_placed:
        fields.setdefault("placement", "even")
    with Run(GivenNodes(cluster), StarterOptions(**fields), 60, n_texts=1 if is_placed else None) as starter:
        sample = starter.submit("The ring", encode("The ring"), SamplingParams(n_tokens, temperature=0))
        starter.read()
        starter.close()
    return list(sample.token_ids)


def close_ports(node: SecondaryNode) -> None:
    """As if its process had ended: nobody can reach it any more."""
    for ports in (node.control, node.listener):
        assert ports is not None
        ports.close()
    node.control = node.listener = None


def entry_of(node: SecondaryNode, **changes: Any) -> NodeConfig:
    """A node as the starter's nodes file describes it."""
    fields = {"name": node.config.name, "addr": "127.0.0.1", "port": node.control_port, "port_in": node.ring_port}
    return NodeConfig(**{**fields, **changes})


def cluster_of(nodes: list[SecondaryNode], **changes: Any) -> ClusterConfig:
    """A starter and these nodes; `changes` of the fields of their entries."""
    return ClusterConfig(NodeConfig("starter", "127.0.0.1", 0, 0), tuple(entry_of(node, **changes) for node in nodes))
