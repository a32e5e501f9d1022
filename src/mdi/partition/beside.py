"""What a placed model leaves of a cluster for another one (LLaMPS' left-over capacity)."""

from __future__ import annotations

import json
import math
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
        plan = json.loads(text)
        groups = {group["name"]: (group["members"], group["parts"]) for group in plan.get("groups", [])}
        found = {}
        for i, node in enumerate(plan["nodes"]):
            names, parts = groups.get(node["name"], ([node["name"]], [1.0]))
            for k, (name, part) in enumerate(zip(names, parts, strict=True)):
                found[str(name)] = _bytes_of(node["bytes"], part, is_starter=i == k == 0)
        return found
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"{where} is not a plan: give the output of `plan.py --json` for the first model") from None


def _bytes_of(entry: dict[str, Any], part: float, is_starter: bool) -> int:
    """`part` is a node's of a group, else 1; a starter counts for all, as a plan does not say what embedding and head take."""
    total, process = entry["total"], entry["process"]
    if type(total) is not int or type(process) is not int or not 0 <= process <= total or not 0 <= part <= 1:
        raise ValueError
    return total if is_starter else math.ceil(part * (total - process))
