"""What a placed model leaves of a cluster for another one (LLaMPS' left-over capacity)."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from mdi.errors import UsageError
from mdi.partition.profile import ClusterProfile


def left_over(profile: ClusterProfile, text: str, where: str) -> ClusterProfile:
    """The cluster with the memory that the plan of another model leaves on its nodes.

    A secondary holds both models in one process; each model has a starter of its own, so that node has two.

    Args:
        text: what plan.py --json wrote about that model.
        where: the file that it comes from.

    Raises:
        UsageError: it is not such a plan, or it is for other nodes.
    """
    taken = _taken_bytes(text, where)
    names = [node.name for node in profile.nodes]
    if strangers := sorted(taken.keys() - set(names)):
        raise UsageError(f"{where} has a node {strangers[0]!r}, which is not among {', '.join(names)}")
    nodes = tuple(
        replace(node, memory_bytes=max(0, node.memory_bytes - taken.get(node.name, 0))) for node in profile.nodes
    )
    return replace(profile, nodes=nodes)


def _taken_bytes(text: str, where: str) -> dict[str, int]:
    """All memory of the model by node, without the processes of secondaries."""
    try:
        nodes = json.loads(text)["nodes"]
        return {str(node["name"]): _bytes_of(node["bytes"], is_starter=not i) for i, node in enumerate(nodes)}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(f"{where} is not a plan: give the output of `plan.py --json` for the first model") from None


def _bytes_of(entry: dict[str, Any], is_starter: bool) -> int:
    total, process = entry["total"], entry["process"]
    if type(total) is not int or type(process) is not int or not 0 <= process <= total:
        raise ValueError
    return total if is_starter else total - process
