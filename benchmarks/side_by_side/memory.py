"""A secondary's peak memory beside what it cannot do without."""

from __future__ import annotations

import subprocess
import sys

from peers.protocol import Case
from random_checkpoint import SHAPES, n_weights
from side_by_side.measures import Summary
from side_by_side.scenario import CheckResult, Outcome

ALLOWED_MB = 100.0
_IMPORTS = """
import re, torch, litgpt, cherrypy
print(int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) * 1024)
"""


def import_bytes() -> int:
    """What importing the libraries alone costs a process, at its peak."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _IMPORTS], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def block_bytes(shape: str, n_blocks: int, bytes_per_weight: float) -> float:
    """Weights of some blocks."""
    return n_weights(shape)[0] / SHAPES[shape]["n_layer"] * n_blocks * bytes_per_weight


def cache_bytes(shape: str, n_blocks: int, case: Case, itemsize: int = 4) -> int:
    """Keys and values of all positions of all sequences; the last token of a sequence is never computed."""
    s = SHAPES[shape]
    row = 2 * s["n_query_groups"] * (s["n_embd"] // s["n_head"]) * itemsize
    return case.n_sequences * (case.n_positions - 1) * n_blocks * row


def memory_results(outcome: Outcome, system: str, shape: str, case: Case) -> list[CheckResult]:
    """Megabytes beyond weights, caches and imports, of the secondary that holds most."""
    what = f"int8: MB beyond weights, caches and imports, {case.n_sequences} sequences"
    nodes = outcome.ends.get(system, {}).get("nodes", [])[1:]
    if not nodes or not all(node["peak_rss_bytes"] for node in nodes):
        error = outcome.errors.get(system, "the secondaries did not tell")
        return [CheckResult(what, ALLOWED_MB, False, " MB", None, "not measured", error)]
    imports = import_bytes()
    beyond = []
    for node in nodes:
        n_blocks = node["layers"][1] - node["layers"][0]
        known = block_bytes(shape, n_blocks, 1.0) + cache_bytes(shape, n_blocks, case) + imports
        beyond.append((node["peak_rss_bytes"] - known) / 1e6)
    reached = "yes" if max(beyond) <= ALLOWED_MB else "no"
    return [CheckResult(what, ALLOWED_MB, False, " MB", Summary.of(beyond), reached)]
