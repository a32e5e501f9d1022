"""Facts about a model that the nodes of a ring share: which node gets which parts, and how weights become stages.

The family here is that of all models of a ModelConfig. Others derive from it and are given to Run and
SecondaryNode; everything else, from the control plane to the frames, is the same for all families.
Torch is imported only for stages in torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mdi.block_ranges import ADAPTER_PREFIX
from mdi.cancel import Cancel
from mdi.checkpoint.parts import stage_parts
from mdi.checkpoint.source import open_source
from mdi.checkpoint.weights import WeightSource
from mdi.control.messages import InitRequest
from mdi.errors import Code, ControlError
from mdi.model.plain import ModelConfig, spec_of
from mdi.model.spec import ModelSpec
from mdi.spec.extent import Extent
from mdi.stages.starter_weights import StarterWeights
from mdi.tensor.group import group_of

if TYPE_CHECKING:
    from mdi.engine.scheduler import Scheduler
    from mdi.stages.torch_stage import Stage
    from mdi.text.texts import TextCodec


class ModelFamily:
    """Models of a ModelConfig: the starter holds embedding, first blocks, norm and head; each secondary a run of blocks.

    Attributes:
        is_placed: whether nodes can measure themselves with such a model, so that a placement can be computed.
    """

    is_placed = True

    def open_source(self, path: Path) -> WeightSource:
        """A checkpoint or chunk on disk. Raises CheckpointError."""
        return open_source(path)

    def open_weights(
        self, ckpt: Path | None, chunk: Path | None, n_nodes: int, layers: str | None, quantize: str | None,
        will_be_cut: bool,
    ) -> StarterWeights:  # fmt: skip
        """The weights that the starter can load and send, and the cut; see StarterWeights."""
        return StarterWeights(ckpt, chunk, n_nodes, layers, quantize, will_be_cut)

    def open_codec(self, directory: Path, prompt_style: str) -> TextCodec:
        """Raises CheckpointError, UsageError."""
        from mdi.text.texts import TextCodec

        return TextCodec.from_checkpoint(directory, prompt_style)

    def kernel_config(self, config: ModelConfig) -> ModelConfig | None:
        """The same for the kernels; None if this is no model of theirs."""
        return config

    def secondary_parts(self, index: int, n_nodes: int, start: int, stop: int) -> list[str]:
        """Parts that node `index` (from 1 on) of the ring needs, in the order in which they are computed."""
        return stage_parts(start, stop, starter=False)

    def starter_parts(self, stop: int, n_nodes: int) -> list[str]:
        return stage_parts(0, stop, starter=True)

    def parts_of(self, weights: StarterWeights, node: int) -> list[str]:
        """The parts that a node of the ring needs of weights that are cut, in the order in which they are computed."""
        group, n_nodes, (start, stop) = weights.group_of(node), len(weights.blocks), weights.blocks[node]
        if node == 0:
            return weights.with_adapters(self.starter_parts(stop, n_nodes), 0, stop)
        if not weights.groups:
            return weights.with_adapters(self.secondary_parts(node, n_nodes, start, stop), start, stop)
        parts = stage_parts(start, stop, starter=False)
        return parts if group is None or group.shares.vocabulary is None else [*parts, "head"]

    def stage(
        self, config: ModelConfig, blocks: tuple[int, int], has_ends: bool, n_nodes: int, cancel: Cancel
    ) -> Stage:
        """A stage of torch, empty.

        Args:
            has_ends: whether it is the starter's.
            n_nodes: of the ring.
        """
        from mdi.stages.torch_stage import Stage, StarterStage

        return StarterStage(spec_of(config), blocks[1]) if has_ends else Stage(spec_of(config), *blocks, cancel)

    def stage_bytes(self, config: ModelConfig, blocks: tuple[int, int], extent: Extent) -> int:
        """Memory of that stage besides its weights, with the caches of one sequence; computed without building it."""
        from mdi.stages.torch_cache import TORCH_TYPES
        from mdi.stages.torch_stage import module_bytes, run_bytes

        spec = spec_of(config)
        caches = run_bytes(spec, *blocks, extent.max_length, TORCH_TYPES[extent.kv_dtype])
        return caches + module_bytes(spec, *blocks)

    def check(self, request: InitRequest) -> None:
        """Raises ControlError if this secondary cannot play the part that it is given."""
        group = group_of(request.group, request.model.config)
        has_head = group is not None and group.shares.vocabulary is not None
        wanted = [*stage_parts(*request.blocks, starter=False), *(["head"] if has_head else [])]
        if [p.name for p in request.parts if not p.name.startswith(ADAPTER_PREFIX)] != wanted:
            raise ControlError(
                "this node can only hold blocks, but was asked to hold the head as well", 409, code=Code.ROLE
            )

    def widest_row(self, spec: ModelSpec) -> int:
        """Columns that a row on the ring can have."""
        return spec.widest_row

    def max_length(self, spec: ModelSpec) -> int:
        """Tokens that a text may reach, prompt included."""
        return spec.max_length

    def scheduler(self, spec: ModelSpec, n_nodes: int) -> Scheduler | None:
        """The scheduler of frames; None is the engine's own."""
        return None
