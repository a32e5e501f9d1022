"""Stages by their description: the same path for a starter's, a secondary's and a group member's, with and without a window."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdi.block_ranges import block_span
from mdi.cancel import Cancel
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.parts import Part
from mdi.checkpoint.weights import WeightSource
from mdi.errors import UsageError
from mdi.host.computing import Computing
from mdi.host.threads import n_threads
from mdi.kernels.blocks import Weights
from mdi.kernels.page_sizes import CHUNK_ROWS
from mdi.kernels.weight_formats import held_bytes
from mdi.spec.cluster import WeightMemory
from mdi.stages.kernel_stage import KernelStage, Resident, run_bytes
from mdi.stages.loading import WeightPlacer, kernel_weights, torch_weights
from mdi.stages.window import open_window
from mdi.stages.window_budget import RunMemory, work_bytes
from mdi.stages.window_options import WindowOptions, window_of
from mdi.tensor.group import Group
from mdi.tensor.group_sum import GroupSum

if TYPE_CHECKING:
    from mdi.stages.model_family import ModelFamily
    from mdi.stages.torch_stage import TorchStage

    AnyStage = KernelStage | TorchStage

PROMPT_ROWS = 256  # of prompts in a frame: every frame costs a pass over the weights, so few of them are to do

_FOLDER = "window"  # in the cache folder, for weights that have to be packed


@dataclass(frozen=True)
class StageSpec:
    """A stage. Two specs with the same `key` have the same stage.

    Attributes:
        name, model: of the node and the model, for messages.
        config: litgpt's Config as a plain dict, or that of another family of models.
        parts: of its weights, in the order in which they are computed; their hashes say which weights are the same.
        stored_dtype, stored_format: of the weights where they come from; the format is None if they are not packed.
        window: None holds all weights in memory.
        group: in which this node has a share of every block; None computes them alone.
        n_nodes: of the ring; max_length: of a sequence; n_sequences: at the same time.
        kv_memory: limit for the caches by hand, in bytes.
    """

    name: str
    model: str
    config_hash: str
    config: Mapping[str, Any] = field(compare=False, repr=False)
    blocks: tuple[int, int]
    parts: tuple[Part, ...]
    computing: Computing
    stored_dtype: str
    stored_format: str | None
    window: WindowOptions | None
    group: Group | None
    n_nodes: int
    max_length: int
    n_sequences: int
    kv_memory: int | None = None

    @property
    def has_ends(self) -> bool:
        """Whether it is a starter's, with the embedding."""
        return any(part.name == "embedding" for part in self.parts)

    @property
    def key(self) -> tuple[Any, ...]:
        share = None if self.group is None else (self.group.rank, self.group.shares, self.group.packing)
        return (
            self.config_hash, self.blocks, self.parts, self.computing.threads or n_threads(),
            replace(self.computing, threads=None), self.stored_format, share, self.window,
            None if self.window is None else (self.max_length, self.n_sequences, self.kv_memory),
        )  # fmt: skip

    @property
    def is_torch(self) -> bool:
        return self.computing.packing is None

    @property
    def packing(self) -> Packing:
        """The form of the weights for the kernels; in a group that of its shards, whatever this node would rather have."""
        packing = self.computing.packing if self.group is None else self.group.packing
        assert packing is not None
        return packing

    @property
    def own_config(self) -> Mapping[str, Any]:
        """Of the blocks as this node has them."""
        return self.config if self.group is None else self.group.share(self.config).shard_config()

    def run_bytes(self, family: ModelFamily) -> int:
        """Memory besides the weights, with the caches of one sequence of full length."""
        if self.is_torch:
            return family.stage_bytes(self.config, self.blocks, self.max_length, self.computing.kv_dtype)
        return run_bytes(self.own_config, *self.blocks, self.computing.kv_dtype, self.max_length)

    def weight_bytes(self, without: Mapping[str, Any]) -> int:
        """Memory of the weights but for those of parts `without`; 0 with a window, which is fitted into the memory."""
        if self.window is not None:
            return 0
        new = [part for part in self.parts if part.name not in without]
        if self.group is not None:  # shares are packed already
            return sum(part.n_bytes for part in new)
        blocks = [part.n_bytes for part in new if part.name.startswith("block.")]
        ends = [part.n_bytes for part in new if not part.name.startswith("block.")]
        computing, stored = self.computing, (self.stored_dtype, self.stored_format)

        def held(parts: list[int], form: str) -> int:
            return held_bytes(parts, stored[0], form, stored[1])

        return held(blocks, computing.format) + held(ends, computing.head_format)

    def __str__(self) -> str:
        return f"embedding, head and {block_span(*self.blocks)}" if self.has_ends else block_span(*self.blocks)


def check_spec(spec: StageSpec) -> None:
    """Raises UsageError for what only the kernels can do."""
    if spec.is_torch and spec.window is not None:
        raise UsageError(f"--window and --memory are for the kernels, which do not compute {spec.computing.why_torch}")
    if spec.is_torch and spec.group is not None:
        raise UsageError("shares of blocks are computed in the kernels, on a CPU: take this node out of the group")


def build_stage(
    spec: StageSpec, source: Callable[[str], WeightSource], loaded: Mapping[str, Weights], family: ModelFamily,
    memory: WeightMemory, cache_dir: Path, cancel: Cancel,
) -> AnyStage:  # fmt: skip
    """A stage with its weights, which is not prepared for a run yet.

    Args:
        source: gives that of each part; called before each part that is not in memory.
        loaded: weights of parts that are in memory already, as the kernels have them.
        memory: how weights in files are read.
        cache_dir: of the node, for weights that must be packed for a window.

    Raises:
        UsageError: kernels and torch cannot do this. LimitError: it does not fit into the memory.
        CheckpointError: the weights cannot be read.
    """
    check_spec(spec)
    computing, names = spec.computing, [part.name for part in spec.parts]
    if spec.is_torch:
        from mdi.stages.torch_stage import TorchStage

        inner = family.stage(spec.config, spec.blocks, spec.has_ends, spec.n_nodes, cancel)
        stage = TorchStage(inner, computing, None if spec.stored_format else spec.stored_dtype)
        stage.load(names, lambda name: torch_weights(source(name), name, computing))
        if computing.compile:
            stage.compile()
        return stage
    weights: Resident | Any
    if spec.window is not None:
        work = work_bytes(
            spec.config if spec.has_ends else spec.own_config, PROMPT_ROWS + spec.n_sequences, spec.n_sequences
        )
        run = RunMemory(spec.run_bytes(family), spec.n_sequences, work, spec.kv_memory)
        folder = cache_dir / _FOLDER
        weights = open_window(spec.name, spec.window, names, source, spec.packing, folder, run, cancel)
    else:
        placer, packing = WeightPlacer(memory), spec.packing
        weights = Resident(
            names, lambda name: loaded.get(name) or kernel_weights(source(name), name, packing, placer, cancel)
        )
    try:
        group = None if spec.group is None else GroupSum(spec.group.share(spec.config))
        return KernelStage(spec.config, *spec.blocks, weights, n_threads(), computing.kv_dtype, group)
    except BaseException:
        weights.close()
        raise


def prompt_rows(memory: WeightMemory, config: Any) -> int:
    """Rows of prompts in a frame at most; of a model that looks back a fixed number of positions, what its caches hold."""
    has_sliding_window = getattr(config, "sliding_window_size", None) is not None
    return CHUNK_ROWS if window_of(memory) is None or has_sliding_window else PROMPT_ROWS
