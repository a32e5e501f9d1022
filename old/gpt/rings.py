"""Whole rings on this machine: the other nodes as child processes, started by the launchers of their roles."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from gpt.nodes_file import arrange, load_nano_cluster
from mdi.run.local import LocalRing
from mdi.spec.cluster import ClusterConfig

OLD = Path(__file__).resolve().parents[1]


class GPT2Ring(LocalRing):
    def command(self, path: Path, index: int) -> list[str]:
        return [sys.executable, str(OLD / "GPT2" / "secondary.py"), "--nodes-config", str(path), str(index)]


class NanoRing(LocalRing):
    def load(self, path: Path) -> ClusterConfig:
        return load_nano_cluster(path)

    def arrange(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        return arrange(entries)

    def command(self, path: Path, index: int) -> list[str]:
        node = self.cluster.secondaries[index].name
        role, place = ("finisher", []) if node == "finisher" else ("intermediate", [str(index)])
        return [sys.executable, str(OLD / "nanoGPT" / f"{role}.py"), "--nodes-config", str(path), *place]
