"""Which model, and how its weights are stored: what nodes are told, and what a node's stage is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from mdi.errors import MdiError
from mdi.model.plain import ModelConfig, decode_with_config, spec_of
from mdi.model.spec import ModelSpec
from mdi.spec.decode import FormatText, Meta, Text, Whole, decode

T = TypeVar("T")


@dataclass(frozen=True)
class Formats:
    """The formats of a model's matrices, as messages and records have them.

    Attributes:
        of_all: one entry, (None, a word or a map of mdi.kernels.format_maps), for all rows of all matrices.
    """

    of_all: Annotated[tuple[tuple[Whole | None, FormatText], ...], Meta(min_length=1, max_length=1)]

    @classmethod
    def one(cls, name: str) -> Formats:
        """A word, or a map."""
        return cls(((None, name),))

    @property
    def only(self) -> str:
        """The word, or the map."""
        ((_, name),) = self.of_all
        return name


@dataclass(frozen=True)
class ModelId:
    """A model with its weights.

    Attributes:
        config: its plain form travels; `config_hash` is the hash of that.
        dtype: number type of most weights; of packed ones, their type before.
        formats: that the blocks' weights are packed in (checkpoint.packing); None if they are plain.
        is_rounded: whether they were rounded once, to numbers that they keep (WeightSource.folds_gains).
    """

    name: Text
    config: ModelConfig = field(compare=False, repr=False)
    config_hash: Text
    dtype: Text
    formats: Formats | None = None
    is_rounded: bool = field(default=False, compare=False)

    @property
    def spec(self) -> ModelSpec:
        return spec_of(self.config)

    @property
    def format(self) -> str | None:
        """What the blocks are packed in, a word or a map; None if they are plain."""
        return None if self.formats is None else self.formats.only

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "config": self.config.plain(), "formats": self.formats and vars(self.formats)}


def decode_with_model(type: type[T], data: Any, where: str, error: Callable[[str], MdiError]) -> T:
    """`mdi.spec.decode.decode` of a message with a `model`: a ModelId there, its plain form in the data."""
    given = data.get("model") if isinstance(data, dict) else None
    if not isinstance(given, dict):
        return decode(type, data, where, error)  # which says what is wrong
    model = decode_with_config(ModelId, given, f"{where}.model", error)
    found: Any = decode(type, {**data, "model": {**given, "config": {}}}, where, error)
    replaced: T = dataclasses.replace(found, model=model)
    return replaced
