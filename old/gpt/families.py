"""The two kinds of model, as the nodes of a ring see them: who holds which parts, and which stage is built of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gpt.shape import GPT2_CUTS, NANO_CUTS, config_of
from gpt.stage import FinisherStage, GPTStarterStage, HeadlessStarterStage, WholeTextStage
from gpt.tokens import CharCodec, gpt2_codec
from gpt.turns import WholeTextScheduler
from gpt.weights import GPTSource, GPTWeights, open_gpt2, open_nano
from mdi.cancel import Cancel
from mdi.checkpoint.parts import stage_parts
from mdi.control.messages import InitRequest
from mdi.engine.scheduler import Scheduler
from mdi.errors import ControlError, UsageError
from mdi.model.plain import ModelConfig, spec_of
from mdi.model.spec import ModelSpec
from mdi.spec.extent import Extent
from mdi.stages.model_family import ModelFamily
from mdi.stages.torch_cache import TORCH_TYPES
from mdi.stages.torch_stage import Stage
from mdi.text.texts import TextCodec

LONGEST_TEXT = 1 << 20  # the context slides, so this is only to end somewhere


class WholeTextFamily(ModelFamily):
    """What the two have in common: no caches, one sample per frame, and a text that may outgrow the context."""

    is_placed = False  # the thesis' tables, or an even cut
    system: str
    cuts: dict[tuple[int, int], tuple[int, ...]]
    opened_by: Callable[[Path], GPTSource]

    def open_source(self, path: Path) -> GPTSource:
        return self.opened_by(path)

    def open_weights(
        self, ckpt: Path | None, chunk: Path | None, n_nodes: int, layers: str | None, quantize: str | None,
        will_be_cut: bool,
    ) -> GPTWeights:  # fmt: skip
        if ckpt is None:
            raise UsageError("give the model: --ckpt DIRECTORY")
        return GPTWeights(self.open_source(ckpt), n_nodes, layers, self.cuts)

    def kernel_config(self, config: ModelConfig) -> None:
        """These models compute in torch."""
        return None

    def stage(
        self, config: ModelConfig, blocks: tuple[int, int], has_ends: bool, n_nodes: int, cancel: Cancel
    ) -> Stage:
        config_of(config.plain(), f"this model of {self.system}")  # which checks it
        spec = spec_of(config)
        return self.starter_stage(spec, blocks[1], n_nodes) if has_ends else self.make(spec, *blocks, cancel)

    def starter_stage(self, spec: ModelSpec, stop: int, n_nodes: int) -> GPTStarterStage:
        return GPTStarterStage(spec, stop)

    @property
    def make(self) -> type[WholeTextStage]:
        """Of a secondary's stage."""
        return WholeTextStage

    def stage_bytes(self, config: ModelConfig, blocks: tuple[int, int], extent: Extent) -> int:
        no_blocks = WholeTextStage(spec_of(config), 0, 0)
        return no_blocks.run_bytes(extent.max_length, TORCH_TYPES[extent.kv_dtype])

    def check(self, request: InitRequest) -> None:
        if request.model.config.qkv_bias is None:
            raise ControlError(f"this is a node of {self.system}, but the run is of {request.model.name}", 409)
        super().check(request)

    def max_length(self, spec: ModelSpec) -> int:
        return LONGEST_TEXT

    def scheduler(self, spec: ModelSpec, n_nodes: int) -> Scheduler:
        return WholeTextScheduler(n_nodes, spec.max_length)


class GPT2Family(WholeTextFamily):
    """Two roles: the starter has norm and head, so that all messages are of one size (thesis, section 3.4.1)."""

    system = "GPT-2"
    cuts = GPT2_CUTS
    opened_by = staticmethod(open_gpt2)

    def open_codec(self, directory: Path, prompt_style: str) -> TextCodec:
        return gpt2_codec(directory, _plain(prompt_style))


class NanoFamily(WholeTextFamily):
    """Three roles: the last node is the finisher, which has norm and head and returns logits (thesis, section 3.3.1).

    Args:
        role: of this node; a starter alone does everything.
    """

    system = "NanoGPT"
    cuts = NANO_CUTS
    opened_by = staticmethod(open_nano)

    def __init__(self, role: str = "starter") -> None:
        self._role = role

    def open_codec(self, directory: Path, prompt_style: str) -> TextCodec:
        return CharCodec.from_checkpoint(directory, _plain(prompt_style))

    def starter_stage(self, spec: ModelSpec, stop: int, n_nodes: int) -> GPTStarterStage:
        return GPTStarterStage(spec, stop) if n_nodes == 1 else HeadlessStarterStage(spec, stop)

    def starter_parts(self, stop: int, n_nodes: int) -> list[str]:
        parts = stage_parts(0, stop, starter=True)
        return parts if n_nodes == 1 else parts[:-1]

    def secondary_parts(self, index: int, n_nodes: int, start: int, stop: int) -> list[str]:
        blocks = stage_parts(start, stop, starter=False)
        return [*blocks, "head"] if index == n_nodes - 1 else blocks

    @property
    def make(self) -> type[WholeTextStage]:
        return FinisherStage if self._role == "finisher" else WholeTextStage

    def check(self, request: InitRequest) -> None:
        wanted = "finisher" if request.parts[-1].name == "head" else "intermediate"
        if self._role != wanted:
            raise ControlError(f"this node was started as {self._role}, but the nodes file has it as {wanted}", 409)
        if wanted == "intermediate":
            super().check(request)
        elif request.model.config.qkv_bias is None:
            raise ControlError(f"this is a node of {self.system}, but the run is of {request.model.name}", 409)

    def widest_row(self, spec: ModelSpec) -> int:
        return max(spec.width, spec.n_rows)


def _plain(prompt_style: str) -> str:
    """These models go on from a bare text, unless one asks for a style by name."""
    return "none" if prompt_style == "auto" else prompt_style
