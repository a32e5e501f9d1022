"""A model's weights in a weight format, layer by layer, so that chunks can be written in it. Nothing is held in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from mdi.checkpoint.encoded import encoded_specs
from mdi.checkpoint.layout import TensorSpec
from mdi.checkpoint.parts import PartInfo, part_of
from mdi.checkpoint.source import LitCheckpoint, WeightSource
from mdi.checkpoint.tensors import as_array
from mdi.model.formats import Encoded, encode
from mdi.model.packed import pack_int8
from mdi.model.quantize import is_quantizable

EMBEDDING, HEAD = "transformer.wte.weight", "lm_head.weight"


class QuantizedSource(WeightSource):
    """Another source with its linear layers, head and embedding in a format.

    Args:
        source: where the plain weights come from.
        blocks, head: the formats; None leaves blocks, or head and embedding, as they are.
        outliers: input columns that are multiplied beside, by the name of the weight; see compress.calibration.
        label: of the outliers, so that hashes which were computed with others are not taken for these.
    """

    def __init__(
        self,
        source: WeightSource,
        blocks: str | None,
        head: str | None,
        outliers: Mapping[str, Sequence[int]],
        label: str,
    ) -> None:
        self._source = source
        self._outliers = outliers
        self._hashes = source.hashes if isinstance(source, LitCheckpoint) else None
        self._form = f"{blocks}-{head}-{label}"
        self._infos: dict[str, PartInfo] = {}
        self._last: tuple[str, Encoded] = ("", {})
        self._small: dict[str, torch.Tensor] = {}
        self.model, self.config_dict = source.model, source.config_dict
        self.config_hash, self.dtype = source.config_hash, source.dtype
        self.quantize, self.quantize_head = blocks, head
        self.specs = {}
        self._owner: dict[str, str] = {}  # name of an encoded tensor -> name of the weight that it comes from
        for name, spec in source.specs.items():
            form = self._format_of(name, spec)
            if form is None:
                self.specs[name] = spec
                continue
            n_outliers = 0 if name == EMBEDDING else len(outliers.get(name, ()))
            for suffix, encoded in encoded_specs(form, spec.shape, n_outliers).items():
                key = name.removesuffix("weight") + suffix
                self.specs[key], self._owner[key] = encoded, name

    def __str__(self) -> str:
        return f"{self._source} in {self.quantize or 'plain weights'}"

    def array(self, name: str) -> np.ndarray:
        return as_array(self._encoded_tensor(name)) if name in self._owner else self._source.array(name)

    def _encoded_tensor(self, name: str) -> torch.Tensor:
        if name in self._small:
            return self._small.pop(name)
        owner = self._owner[name]
        prefix = owner.removesuffix("weight")
        encoded = self._encoded(owner)
        # A file holds wide types first, so that the weight itself is asked for long after its scales: those are kept
        # until then, as they take a hundredth of it, and no weight is encoded more than twice.
        self._small.update({prefix + suffix: t for suffix, t in encoded.items() if suffix != "weight"})
        return self._small.pop(name) if name in self._small else encoded["weight"]

    def part_names(self) -> list[str]:
        return self._source.part_names()

    def known(self, part: str) -> PartInfo | None:
        return self._infos.get(part) or (self._hashes.get(self._form, part) if self._hashes else None)

    def remember(self, info: PartInfo) -> None:
        self._infos[info.name] = info
        if self._hashes:
            self._hashes.put(self._form, info)

    def release(self) -> None:
        self._source.release()

    def _format_of(self, name: str, spec: TensorSpec) -> str | None:
        if name == EMBEDDING:
            # One row of it is read per token: 8 bits are as fast as 4.
            return "int8" if self.quantize_head == "int4" else self.quantize_head
        if not name.endswith(".weight") or len(spec.shape) != 2 or not is_quantizable(name.removesuffix(".weight")):
            return None
        return self.quantize_head if part_of(name) == "head" else self.quantize

    def _encoded(self, name: str) -> Encoded:
        """The tensors of one weight; the last one's are kept, because they are asked for one after the other."""
        if self._last[0] != name:
            self._last = ("", {})
            form = self._format_of(name, self._source.specs[name])
            assert form is not None
            weight = self._source.tensor(name)
            if name == EMBEDDING and form == "int8":
                packed, scale = pack_int8(weight.float())
                self._last = (name, {"weight": packed, "weight_scale": scale})
            else:
                self._last = (name, encode(weight, form, torch.tensor(self._outliers.get(name, ()), dtype=torch.long)))
        return self._last[1]
