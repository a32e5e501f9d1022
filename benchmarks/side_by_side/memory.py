"""Memory of the ring's processes beside what they cannot do without."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mdi.kernels.weight_formats import LAYOUTS
from peers.protocol import Case
from random_checkpoint import SHAPES, VOCABULARY, n_weights
from side_by_side.measures import Summary
from side_by_side.scenario import CheckResult, Outcome

PLAIN_BYTES = 2  # of a weight in the checkpoint
_IMPORTS = """
import re, torch, litgpt, cherrypy, requests
print(int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) * 1024)
"""


def import_bytes() -> int:
    """What importing the libraries alone costs a process, at its peak."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _IMPORTS], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def block_bytes(shape: str, n_blocks: int, form: str) -> float:
    """Weights of some blocks."""
    return n_weights(shape)[0] / SHAPES[shape]["n_layer"] * n_blocks * LAYOUTS[form].bits / 8


def cache_bytes(shape: str, n_blocks: int, case: Case, itemsize: int = 4) -> int:
    """Keys and values of all positions of all sequences; the last token of a sequence is never computed."""
    s = SHAPES[shape]
    row = 2 * s["n_query_groups"] * (s["n_embd"] // s["n_head"]) * itemsize
    return case.n_sequences * (case.n_positions - 1) * n_blocks * row


def load_results(outcome: Outcome, system: str, shape: str, case: Case) -> list[CheckResult]:
    """Of a node that holds everything, and has brought it from bf16 into int8: its peak."""
    what = "int8 from a bf16 checkpoint: peak MB beyond weights, caches, one part and imports"
    n_blocks, n_head = SHAPES[shape]["n_layer"], n_weights(shape)[1]
    # The head in int8; of the embedding, a byte each and scales.
    weights = block_bytes(shape, n_blocks, "int8") + n_head * LAYOUTS["int8"].bits / 8 + n_head + 4 * VOCABULARY
    largest_part = PLAIN_BYTES * max(n_head, n_weights(shape)[0] / n_blocks)
    known = weights + largest_part + cache_bytes(shape, n_blocks, case)
    nodes = _nodes(outcome, system)
    return _result(outcome, system, what, [node["peak_rss_bytes"] - known - import_bytes() for node in nodes])


def secondary_results(outcome: Outcome, system: str, shape: str, case: Case) -> list[CheckResult]:
    """Of the secondaries, which have no torch: what they held while they computed."""
    found = outcome.ends.get(system, {}).get("secondaries", [])
    beyond = []
    for one, node in zip(found, _nodes(outcome, system)[1:], strict=False):
        n_blocks = node["layers"][1] - node["layers"][0]
        beyond.append(one["resident_bytes"] - block_bytes(shape, n_blocks, "int8") - cache_bytes(shape, n_blocks, case))
    what = "a secondary without torch: resident MB beyond weights and caches"
    return _result(outcome, system, what, beyond)


def _nodes(outcome: Outcome, system: str) -> Sequence[Mapping[str, Any]]:
    nodes: Sequence[Mapping[str, Any]] = outcome.ends.get(system, {}).get("nodes", [])
    return nodes if all(node["peak_rss_bytes"] for node in nodes) else []


def _result(outcome: Outcome, system: str, what: str, beyond: Sequence[float]) -> list[CheckResult]:
    """Of the node that holds most beyond what it must."""
    if not beyond:
        error = outcome.errors.get(system, "the nodes did not tell")
        return [CheckResult(what, " MB", None, error)]
    return [CheckResult(what, " MB", Summary.of([n / 1e6 for n in beyond]))]
