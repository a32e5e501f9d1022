"""Adapters with rows that stand before those of a text, from folders in PEFT's form; and which class a folder needs.

The tensor prompt_embeddings has the rows of a prompt (n, n_embd), or for each row the keys and values of all blocks,
(n, blocks * 2 * query groups * head_size): those of block 0, keys first, then those of block 1. Deep prompts, which PEFT does
not have, are in a form of `mdi finetune`: the rows of a prompt and, for the blocks behind the first one,
transformer.h.<i>.prompt (n, n_embd). What a folder is checked for is said in `mdi.checkpoint.adapters`, what nodes get in
`mdi.checkpoint.virtual_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from mdi.checkpoint.adapters import Adapter, AdapterName, LowRankAdapter, read_settings
from mdi.checkpoint.safetensors_layout import TensorSpec
from mdi.checkpoint.virtual_rows import (
    MOST_VIRTUAL,
    PREFIX_KEY,
    PREFIX_VALUE,
    PROMPT_TENSOR,
    row_widths,
    stored_name,
    why_no_rows,
)
from mdi.errors import CheckpointError, Code
from mdi.model.plain import ModelConfig, spec_of

EMBEDDINGS = "prompt_embeddings"
PROMPT_TYPE, DEEP_TYPE, PREFIX_TYPE = "PROMPT_TUNING", "MDI_DEEP_PROMPT", "PREFIX_TUNING"  # as a folder says peft_type


def open_adapter(named: AdapterName, number: int, config: ModelConfig, base: Callable[[], str | None]) -> Adapter:
    """The adapter in a folder. Arguments and errors as of `Adapter`."""
    told = read_settings(named)
    kind = _CLASSES.get(str(told.get("peft_type")))
    if kind is None:
        known = ", ".join(_CLASSES)
        raise CheckpointError(
            f"adapter {named.name}: {named.folder} has peft_type {str(told.get('peft_type'))[:100]!r}; only {known} are served",
            code=Code.ADAPTER,
        )  # fmt: skip
    return kind(named, number, config, told, base)


class VirtualAdapter(Adapter):
    """A prompt, deep prompts or a prefix."""

    def _checked(self) -> list[Any]:
        told, path = self._told, self._settings_path
        self._kind, n = told["peft_type"], told.get("num_virtual_tokens")
        self._is_prefix = self._kind == PREFIX_TYPE
        self._spec = spec = spec_of(self._config)
        if (why_not := why_no_rows(self._is_prefix, spec)) is not None:
            raise self._refused(f"peft_type {self._kind}, and {spec.name} {why_not}")
        if type(n) is not int or not 1 <= n <= MOST_VIRTUAL:
            raise self._refused(f"num_virtual_tokens {str(n)[:100]} in {path}; 1 to {MOST_VIRTUAL} are served")
        if told.get("task_type") not in (None, "CAUSAL_LM"):
            raise self._refused(f"task_type {str(told['task_type'])[:100]} in {path}; only CAUSAL_LM writes texts")
        if told.get("num_transformer_submodules") not in (None, 1):
            raise self._refused(f"rows for an encoder and a decoder in {path}, which are not served")
        self._check_plain(["modules_to_save"])
        self.n_virtual = n
        width, n_blocks = spec.width, spec.n_layer
        if self._is_prefix:
            width = 2 * n_blocks * row_widths(self._spec)[PREFIX_KEY]
        wanted = {EMBEDDINGS: (n, width)}
        if self._kind == DEEP_TYPE:
            wanted |= {_deep(block): (n, width) for block in range(1, n_blocks)}
        for name in self._file.specs:
            if name not in wanted:
                raise self._refused(f"the tensor {name[:200]!r}, which is none of {self._kind} for this model")
        for name, shape in wanted.items():
            if name not in self._file.specs:
                raise CheckpointError(f"adapter {self.name}: {self._file.path} lacks {name}")
            self._check_spec(name, shape, f"{n} rows")
        return [self._kind]

    @property
    def blocks(self) -> Collection[int]:
        return range(1 if self._kind == PROMPT_TYPE else self._spec.n_layer)

    def specs(self, block: int) -> dict[str, TensorSpec]:
        if block not in self.blocks:
            return {}
        kinds = (PREFIX_KEY, PREFIX_VALUE) if self._is_prefix else (PROMPT_TENSOR,)
        widths = row_widths(self._spec)
        return {
            stored_name(block, self.number, what): TensorSpec("F32", (self.n_virtual, widths[what])) for what in kinds
        }

    def arrays(self, block: int) -> dict[str, np.ndarray]:
        if block not in self.blocks:
            return {}
        if not self._is_prefix:
            name = _deep(block) if block else EMBEDDINGS
            return {stored_name(block, self.number, PROMPT_TENSOR): self._floats(name)}
        width = row_widths(self._spec)[PREFIX_KEY]
        return {
            stored_name(block, self.number, what): self._floats(EMBEDDINGS, slice(at * width, (at + 1) * width))
            for at, what in ((2 * block, PREFIX_KEY), (2 * block + 1, PREFIX_VALUE))
        }


def _deep(block: int) -> str:
    return f"transformer.h.{block}.{PROMPT_TENSOR}"


_CLASSES: dict[str, type[Adapter]] = {
    "LORA": LowRankAdapter, PROMPT_TYPE: VirtualAdapter, PREFIX_TYPE: VirtualAdapter, DEEP_TYPE: VirtualAdapter,
}  # fmt: skip
