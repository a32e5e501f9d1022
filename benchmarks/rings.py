"""What benchmarks begin on this machine: runs in this process, and commands of the program as processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import on_path

if TYPE_CHECKING:
    from mdi.run.run import Run


@contextlib.contextmanager
def opened(
    ckpt: Path, length: int, n_texts: int | None = None, n_nodes: int = 1, taps: tuple[int, ...] = (), **fields: Any
) -> Iterator[Run]:
    """A run of the starter in this process; other nodes are processes.

    Args:
        fields: of the options, beside those that all benchmarks have.
    """
    from mdi.run.local import LocalRing
    from mdi.run.nodes import GivenNodes, OwnProcesses
    from mdi.run.run import Run
    from mdi.spec.cluster import standalone
    from mdi.spec.options import StarterOptions

    options = StarterOptions(ckpt=ckpt, **{"prompt_style": "none", "device": "cpu", "draft": "none", **fields})
    nodes = GivenNodes(standalone()) if n_nodes == 1 else OwnProcesses(
        lambda: LocalRing(n_nodes, None, options.threads, ckpt, False, False), lambda ring: ring.cluster
    )  # fmt: skip
    with nodes, Run(nodes, options, length, n_texts=n_texts, taps=taps) as run:
        yield run


def packed(form: str) -> dict[str, str]:
    """Options of weights in a format, with the head."""
    return {"quantize": form, "quantize_head": form}


def alone(*call: Any) -> Any:
    """A function's result, from a process of its own: its memory is counted by itself, and nodes pin theirs to a core."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(*call).result()


def asked(
    command: str, *words: object, inside: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], str]:
    """What a command prints with --json, and what it says beside.

    Args:
        inside: words before the command, such as those of a group of memory.

    Raises:
        SystemExit: it failed.
    """
    argv = [*inside, sys.executable, "-m", "mdi.cli", command, *map(str, words), "--json"]
    own = {**os.environ, "PYTHONPATH": str(on_path.ROOT / "src"), **(environment or {})}
    done = subprocess.run(argv, env=own, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"mdi {command} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout), done.stderr


def after_first(found: Mapping[str, Any]) -> tuple[float, float]:
    """Seconds to the last first token of a run's texts, and tokens per second of all texts from then on."""
    samples = found["samples"]
    first_s = max(sample["ttft_s"] for sample in samples)
    n_tokens = sum(len(sample["token_ids"]) for sample in samples)
    return first_s, (n_tokens - len(samples)) / (n_tokens / found["tokens_per_s"] - first_s)
