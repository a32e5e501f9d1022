"""NanoGPT's nodes file: `starter`, `intermediate[]` (may be empty) and `finisher`; each entry as in src/settings_distr."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mdi.errors import Code, UsageError
from mdi.spec.cluster import ClusterConfig, NodeConfig, node_of, read_json, refuse_shared_ports


def load_nano_cluster(path: str | Path) -> ClusterConfig:
    """The ring of a nodes file; a starter alone is a ring of one. Raises UsageError naming file and field."""
    nodes = read_json(path).get("nodes")
    where = f"{path}: nodes"
    if not isinstance(nodes, dict) or "starter" not in nodes:
        raise UsageError(f"{where}: expected an object with starter, intermediate and finisher", code=Code.NODES)
    if unknown := nodes.keys() - {"starter", "intermediate", "finisher"}:
        raise UsageError(
            f"{where}: {sorted(unknown)[0]!r} is no role of NanoGPT: starter, intermediate, finisher", code=Code.ROLE
        )
    listed = nodes.get("intermediate", [])
    if not isinstance(listed, list):
        raise UsageError(f"{where}.intermediate: expected a list of nodes (it may be empty)", code=Code.NODES)
    others = [node_of(entry, f"intermediate{i}", f"{where}.intermediate[{i}]") for i, entry in enumerate(listed)]
    if "finisher" in nodes:
        others.append(node_of(nodes["finisher"], "finisher", f"{where}.finisher"))
    elif others:
        raise UsageError(f"{where}: the finisher is missing; only a starter alone goes without", code=Code.MISSING)
    cluster = ClusterConfig(node_of(nodes["starter"], "starter", f"{where}.starter"), tuple(others))
    refuse_shared_ports(cluster, str(path))
    return cluster


def load_nano_node(path: str | Path, role: str, index: int | None) -> NodeConfig:
    """The entry of one intermediate node (`index` where there are several) or of the finisher."""
    name = role if role == "finisher" else f"{role}{index or 0}"
    found = {node.name: node for node in load_nano_cluster(path).secondaries}
    if name not in found:
        raise UsageError(f"{path} has no {name}; it has {', '.join(found) or 'a starter alone'}")
    return found[name]


def arrange(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The nodes file of these nodes, starter first."""
    nodes: dict[str, Any] = {"starter": entries[0], "intermediate": entries[1:-1]}
    if len(entries) > 1:
        nodes["finisher"] = entries[-1]
    return {"nodes": nodes}
