"""The manifest of a chunk: model, cut, and the sha256 of every part.

Stored in the chunk's own metadata, so that a chunk copied alone says what it is. Checked field by field. Knows no tensors
and no files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from mdi.checkpoint.packing import Packing
from mdi.checkpoint.parts import PartInfo, stage_parts
from mdi.errors import CheckpointError
from mdi.kernels import LAYOUT_VERSION
from mdi.kernels.weight_formats import LAYOUTS, is_packed_form
from mdi.model.plain import NAME_WORDS, ModelConfig, decode_with_config
from mdi.spec.decode import FormatText, Name, Span, Text, Whole, parsed, shown

FORMAT_VERSION = 2
METADATA_KEY = "mdi_manifest"
PLAIN = "plain"  # each tensor as the checkpoint has it

_NOT_DEFINING = ("name", "hf_config", "padding_multiple")
_NODE = re.compile(r"starter|secondary(0|[1-9][0-9]*)")


@dataclass(frozen=True)
class Manifest:
    """What a chunk holds.

    Attributes:
        model: name of the model, as in its configuration.
        config: of the model; `config_hash` is its hash.
        dtype: stored number type of the weights, e.g. "bfloat16".
        n_nodes: length of the ring that the model was cut for.
        node: "starter" or "secondary<i>".
        blocks: (start, stop), global and half-open.
        parts: in the order of `stage_parts`.
        format, format_head: of the blocks, and of head and embedding: PLAIN, or of packed weights (checkpoint.packing).
        layout_version: version of the layout of packed weights.
    """

    model: Text
    config: ModelConfig
    config_hash: Name
    dtype: Name
    n_nodes: Whole
    node: Name
    blocks: Span
    n_layer: Whole
    parts: tuple[PartInfo, ...]
    format: FormatText = PLAIN
    format_head: FormatText = PLAIN
    layout_version: Whole = LAYOUT_VERSION
    format_version: int = FORMAT_VERSION

    @property
    def is_starter(self) -> bool:
        return self.node == "starter"

    @property
    def packing(self) -> Packing | None:
        return None if self.format == PLAIN else Packing(self.format, self.format_head)

    def to_json(self) -> str:
        return json.dumps(
            {**dataclasses.asdict(self), "config": self.config.plain()}, sort_keys=True, separators=(",", ":")
        )

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Raises CheckpointError naming the field that is missing, wrong, or does not fit the others."""
        data = parsed(text, "the manifest", CheckpointError)
        version = data.get("format_version") if isinstance(data, dict) else None
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"the manifest is of format_version {shown(version)}, this program reads {FORMAT_VERSION}"
            )
        for field in dataclasses.fields(cls):
            if field.name not in data:
                raise CheckpointError(f"the manifest: the field {field.name!r} is missing")
        manifest = decode_with_config(cls, data, "the manifest", CheckpointError)
        manifest._check()
        return manifest

    def _check(self) -> None:
        start, stop = self.blocks
        if self.n_layer != self.config.n_layer:
            raise _error("n_layer", f"the n_layer of its config, {self.config.n_layer}", self.n_layer)
        if not 1 <= self.n_nodes <= self.n_layer + 1:
            raise _error("n_nodes", f"a number from 1 to {self.n_layer + 1}", self.n_nodes)
        if self._index() >= self.n_nodes:
            raise _error("node", f"a node of a ring of {self.n_nodes}", self.node)
        # only a starter may be without a block, and its blocks are the first ones
        if not 0 <= start <= stop <= self.n_layer or (start > 0 if self.is_starter else start == stop):
            raise _error("blocks", f"a range that {self.node} can hold of {self.n_layer} blocks", list(self.blocks))
        is_plain = self.format == PLAIN
        for field, form in (("format", self.format), ("format_head", self.format_head)):
            if not (form == PLAIN if is_plain else is_packed_form(form)):
                raise _error(field, f"{PLAIN} for both, or one of {', '.join(LAYOUTS)}", form)
        if not is_plain and self.layout_version != LAYOUT_VERSION:
            raise _error("layout_version", f"{LAYOUT_VERSION}, which this program reads", self.layout_version)
        if self.config_hash != config_hash(self.config):
            raise _error("config_hash", f"{config_hash(self.config)}, the hash of its config", self.config_hash)
        names, expected = [part.name for part in self.parts], stage_parts(start, stop, starter=self.is_starter)
        if names != expected:
            raise _error("parts", f"{expected}, as its blocks say", names)

    def _index(self) -> int:
        match = _NODE.fullmatch(self.node)
        if match is None:
            raise _error("node", "'starter' or 'secondary<i>'", self.node)
        return 0 if match[1] is None else 1 + int(match[1])


def config_hash(config: ModelConfig) -> str:
    """sha256 of what defines the model, in hex. Its name does not count, except for the words in which litgpt sees norms."""
    defining = {key: value for key, value in config.plain().items() if key not in _NOT_DEFINING}
    defining["name_says"] = [word for word in NAME_WORDS if word in config.name]
    text = json.dumps(_plain(defining), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    """10000.0 and 10000 are the same setting, a tuple and a list as well."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _error(field: str, expected: str, found: Any) -> CheckpointError:
    return CheckpointError(f"the manifest.{field}: expected {expected}, found {shown(found)}")
