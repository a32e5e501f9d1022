"""The user's choices for a starter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mdi.config import WeightMemory
from mdi.control.requested import Requested
from mdi.net.wire import SILENCE_S
from mdi.replay_memory import REPLAY_BYTES


@dataclass(frozen=True)
class ParallelOptions:
    """How several nodes compute one model.

    Attributes:
        mode: "ring": each node has blocks of its own; "tensor": all have a share of every block; "auto": whichever
            is faster, or groups of near nodes.
        parts: of each node, what its share is proportional to; None: equal shares, or what nodes measure of themselves.
        algorithm, reduce_dtype: see tensor.allreduce and tensor.numbers.
        is_head_shared: whether the nodes share the head; else the starter has it.
    """

    mode: str = "ring"
    parts: tuple[float, ...] | None = None
    algorithm: str = "auto"
    reduce_dtype: str = "float32"
    is_head_shared: bool = False


@dataclass(frozen=True)
class StarterOptions(Requested):
    """See the flags of starter.py, and Requested.

    `placement` None is the default one, unless chunks that lie there have been cut already; `cache_dir` is where this node
    keeps what it measured of itself; `n_spans` is how much every node records of what it does (mdi.tracing), 0 nothing;
    `fixed` ends the run when a node is lost; `silence_s` is how long a node may be unheard of before it counts as lost;
    `replay_memory` is for rows that were sent, from which a node that takes another's place has its caches again;
    `cache_share` is the part of each node's free memory that caches may take.
    """

    ckpt: Path | None = None
    chunk: Path | None = None
    layers: str | None = None
    placement: str | None = None
    prefer_memory: float | None = None
    cache_dir: Path | None = None
    sequence_length: int | None = None
    prompt_style: str = "auto"
    wait_s: float = 30.0
    weight_memory: WeightMemory = WeightMemory()
    kv_memory: int | None = None
    n_frames: int | None = None
    n_spans: int = 0
    fixed: bool = False
    silence_s: float = SILENCE_S
    parallel: ParallelOptions = ParallelOptions()
    replay_memory: int = REPLAY_BYTES
    cache_share: float = 1.0

    @property
    def replay_bytes(self) -> int:
        """What each node keeps of the rows that it has sent."""
        return 0 if self.fixed else self.replay_memory
