"""Stages of a node that read their weights through a window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mdi.checkpoint.packing import Packing
from mdi.checkpoint.weights import WeightSource
from mdi.config import WeightMemory
from mdi.errors import UsageError
from mdi.kernels.page_sizes import CHUNK_ROWS
from mdi.machine.computing import Computing
from mdi.window.budget import RunMemory, work_bytes
from mdi.window.opening import AnyStage, open_window
from mdi.window.window_options import WindowOptions, window_of

PROMPT_ROWS = 256  # of prompts in a frame: every frame costs a pass over the weights, so few of them are to do

_FOLDER = "window"  # in the cache folder, for weights that have to be packed


def refuse_torch(options: WindowOptions | None, computing: Computing) -> None:
    """A window is for the kernels. Raises UsageError where torch computes."""
    if options is not None and computing.packing is None:
        raise UsageError(f"--window and --memory are for the kernels, which do not compute {computing.why_torch}")


def with_window(
    stage: AnyStage, name: str, options: WindowOptions, parts: Sequence[str], source: Callable[[str], WeightSource],
    packing: Packing, cache_dir: Path, max_length: int, n_sequences: int, kv_memory: int | None,
    check: Callable[[], None],
) -> AnyStage:  # fmt: skip
    """A stage with its weights; see window.opening.open_window.

    Args:
        cache_dir: of the node.
        max_length: of a sequence; n_sequences: at the same time.
        kv_memory: limit of the caches by hand.
    """
    work = work_bytes(stage.config, PROMPT_ROWS + n_sequences, n_sequences)
    run = RunMemory(stage.run_bytes(max_length), n_sequences, work, kv_memory)
    return open_window(stage, name, options, parts, source, packing, cache_dir / _FOLDER, run, check)


def prompt_rows(memory: WeightMemory, config: Any) -> int:
    """Rows of prompts in a frame at most; of a model that looks back a fixed number of positions, what its caches hold."""
    has_sliding_window = getattr(config, "sliding_window_size", None) is not None
    return CHUNK_ROWS if window_of(memory) is None or has_sliding_window else PROMPT_ROWS
