"""The manifest of a chunk: of which model it is, which blocks it holds, and the hash of each part.

It is stored in the chunk's own safetensors metadata, so that a chunk which is copied alone says what it is.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from mdi.checkpoint.parts import PartInfo
from mdi.errors import CheckpointError

FORMAT_VERSION = 1
METADATA_KEY = "mdi_manifest"


@dataclass(frozen=True)
class Manifest:
    """See the module.

    Attributes:
        model: name of the model.
        config: litgpt Config as a plain object; `config_hash` is its hash.
        dtype: of the stored weights.
        node: "starter" or "secondary<i>" of a cut over `n_nodes` nodes.
        blocks: (start, stop), global block numbers.
    """

    model: str
    config: dict[str, Any]
    config_hash: str
    dtype: str
    n_nodes: int
    node: str
    blocks: tuple[int, int]
    n_layer: int
    parts: tuple[PartInfo, ...]
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, where: str) -> Manifest:
        """Raises CheckpointError naming the field that is missing or wrong."""
        try:
            data = json.loads(text)
            version = data["format_version"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise CheckpointError(f"{where}: its manifest cannot be read") from None
        if version != FORMAT_VERSION:
            raise CheckpointError(f"{where}: manifest version {version!r}, this program reads version {FORMAT_VERSION}")
        kinds = {"model": str, "config": dict, "config_hash": str, "dtype": str, "n_nodes": int, "node": str,
                 "blocks": list, "n_layer": int, "parts": list}  # fmt: skip
        for key, kind in kinds.items():
            if not isinstance(data.get(key), kind):
                raise CheckpointError(f"{where}: the manifest's field {key!r} is missing or wrong")
        try:
            parts = tuple(PartInfo(str(p["name"]), str(p["sha256"]), int(p["n_bytes"])) for p in data["parts"])
            start, stop = (int(b) for b in data["blocks"])
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{where}: the manifest's parts or blocks are wrong") from None
        if not 0 <= start <= stop <= data["n_layer"]:
            raise CheckpointError(f"{where}: blocks [{start}, {stop}) of a model of {data['n_layer']} blocks")
        fields = {key: data[key] for key in kinds if key not in ("blocks", "parts")}
        return cls(**fields, blocks=(start, stop), parts=parts)


def config_hash(config: dict[str, Any]) -> str:
    """Hash of what makes two models the same kind: all of litgpt's Config but the names.

    Of the name only what litgpt derives from it counts: Gemma's norms add one to their weights, OLMo's first ones have none.
    """
    kept = {key: value for key, value in config.items() if key not in ("name", "hf_config")}
    name = str(config.get("name", ""))
    kept["_family"] = [family for family in ("Gemma", "OLMo") if family in name]
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=list).encode()).hexdigest()
