"""What a stage is: the description from which it is built, and what cannot be built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mdi.block_ranges import ADAPTER_PREFIX, block_span
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.parts import Part, PartInfo
from mdi.checkpoint.shapes import packed_bytes
from mdi.host.computing import Computing
from mdi.host.device import load_torch
from mdi.host.threads import n_threads
from mdi.kernels.weight_formats import held_bytes
from mdi.model.spec import ModelSpec
from mdi.spec.arithmetic import Arithmetic
from mdi.spec.combinations import GRADIENTS, TOGETHER, TORCH, WINDOW, refuse
from mdi.spec.extent import Extent
from mdi.spec.model_id import Formats, ModelId
from mdi.spec.window import WindowOptions
from mdi.stages.kernel_stage import run_bytes
from mdi.stages.model_family import ModelFamily
from mdi.stages.window_budget import absorbed_bytes
from mdi.tensor.group import Group


@dataclass(frozen=True)
class StageSpec:
    """A stage. Two specs with the same `key` have the same stage.

    Attributes:
        name: of the node, for messages.
        parts: of its weights, in the order in which they are computed; their hashes say which weights are the same.
        window: None holds all weights in memory.
        group: in which this node has a share of every block; None computes them alone.
        n_nodes: of the ring; extent: of the run on this node.
        kv_memory: limit for the caches by hand, in bytes.
        n_rows: of a text in a frame, at most: its newest token, and guesses.
        beside: bytes that the process will take besides, for a small model that guesses.
    """

    name: str
    model: ModelId
    blocks: tuple[int, int]
    parts: tuple[Part, ...]
    computing: Computing
    window: WindowOptions | None
    group: Group | None
    n_nodes: int
    extent: Extent
    kv_memory: int | None = None
    n_rows: int = 1
    beside: int = 0

    @property
    def has_ends(self) -> bool:
        """Whether it is a starter's, with the embedding."""
        return any(part.name == "embedding" for part in self.parts)

    @property
    def key(self) -> tuple[Any, ...]:
        share = None if self.group is None else (self.group.rank, self.group.shares, self.group.packing)
        return (
            self.model.config_hash, self.blocks, self.parts, self.computing.threads or n_threads(),
            self.computing.key, self.extent.kv_dtype, self.model.formats, share, self.window,
            None if self.window is None else (
                self.extent.max_length, self.extent.n_sequences, self.kv_memory, self.n_rows, self.beside
            ),
        )  # fmt: skip

    @property
    def adapter_parts(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.parts if part.name.startswith(ADAPTER_PREFIX))

    @property
    def adapter_bytes(self) -> int:
        """Memory of adapters, whose numbers stay as they are."""
        return sum(part.n_bytes for part in self.parts if part.name.startswith(ADAPTER_PREFIX))

    @property
    def is_torch(self) -> bool:
        return self.computing.packing is None

    @property
    def keeps_packed(self) -> bool:
        """Whether what is packed for it is kept on disk; with a limit of memory it is packed with more care (stages.window)."""
        return not self.is_torch and (self.window is None or self.window.memory is None)

    @property
    def packing(self) -> Packing:
        """The form of the weights for the kernels; in a group that of its shards, whatever this node would rather have."""
        packing = self.computing.packing if self.group is None else self.group.packing
        assert packing is not None
        return packing

    @property
    def arithmetic(self) -> Arithmetic:
        found, group = self.computing.arithmetic(self.extent.kv_dtype), self.group
        if group is None:
            return found
        share = group.rank, group.shares.heads, group.shares.columns
        return replace(found, formats=Formats.one(group.packing.blocks), share=share)

    @property
    def own_spec(self) -> ModelSpec:
        """The model with its blocks as this node has them."""
        return self.model.spec if self.group is None else self.group.share(self.model.config).spec

    def run_bytes(self, family: ModelFamily) -> int:
        """Memory besides the weights, with the caches of one sequence of full length."""
        if self.is_torch:
            return family.stage_bytes(self.model.config, self.blocks, self.extent)
        return run_bytes(self.own_spec, *self.blocks, self.extent)

    def weight_bytes(self, without: Mapping[str, Any]) -> int:
        """Memory of the weights but for those of parts `without`; 0 with a window, which is fitted into the memory.

        What the kernels absorb is there beside the weights, and each stage has its own.
        """
        if self.window is not None:
            return 0  # adapters are part of what is fitted
        absorbed = 0 if self.is_torch else absorbed_bytes(self.own_spec.blocks[slice(*self.blocks)])
        new = [part for part in self._with_own_table() if part.name not in without]
        if self.group is not None:  # shares are packed already
            return sum(part.n_bytes for part in new) + absorbed
        blocks = [part for part in new if part.name.startswith("block.")]
        ends = [part for part in new if not part.name.startswith(("block.", ADAPTER_PREFIX))]
        computing, model = self.computing, self.model

        def held(parts: list[Part], form: str) -> int:
            if self.is_torch or form == model.format:
                return held_bytes([part.n_bytes for part in parts], model.dtype, form, model.format)
            return packed_bytes(model.config, model.name, [part.name for part in parts], form)

        return held(blocks, computing.format) + held(ends, computing.head_format) + self.adapter_bytes + absorbed

    def _with_own_table(self) -> list[Part]:
        """The parts; where the head stands for the embedding in a file, that counts as the head: torch and groups hold both."""
        sizes = {part.name: part.n_bytes for part in self.parts}
        head = sizes.get("head", 0)
        is_left_out = sizes.get("embedding", head) < head / 8  # a table has 8 bits at least, and a head 32 at most
        if not (is_left_out and (self.is_torch or self.group is not None)):
            return list(self.parts)
        return [
            PartInfo(part.name, part.sha256, head if part.name == "embedding" else part.n_bytes) for part in self.parts
        ]

    def __str__(self) -> str:
        return f"embedding, head and {block_span(*self.blocks)}" if self.has_ends else block_span(*self.blocks)


def _facts(spec: StageSpec) -> dict[str, str]:
    """What combinations of options depend on, with the words for it."""
    where = f"{spec.name} computes"
    facts = {
        TORCH: f"{where} {spec.computing.why_torch or 'in torch'}" if spec.is_torch else "",
        WINDOW: f"{where} with its weights in a window (--window, --memory)" if spec.window is not None else "",
        TOGETHER: f"{where} in a group that shares blocks" if spec.group is not None else "",
        "--adapter": "--adapter" if spec.adapter_parts else "",
    }
    return {fact: words for fact, words in facts.items() if words}


def check_spec(spec: StageSpec) -> None:
    """Raises UsageError for what only the kernels can do."""
    refuse(_facts(spec))


def check_gradients(spec: StageSpec) -> None:
    """Raises UsageError if no gradients go through the blocks of this stage, or torch, which computes them, is not here."""
    refuse({**_facts(spec), GRADIENTS: GRADIENTS}, GRADIENTS)
    load_torch(f"{spec.name}: computing gradients")
