"""Where weights come from: a LitGPT checkpoint or a chunk of one, tensor by tensor, under the full model's names.

Nothing is loaded ahead and nothing in the files is executed. Knows no network and no devices.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mdi.blocks import block_span
from mdi.checkpoint.folder import CONFIG_FILE, WEIGHT_FILES, no_checkpoint
from mdi.checkpoint.hashes import HashCache
from mdi.checkpoint.layout import TensorSpec, main_dtype
from mdi.checkpoint.manifest import METADATA_KEY, Manifest, config_hash
from mdi.checkpoint.parts import PartInfo, part_of, serialize, sha256_of, spec_bytes, stage_parts
from mdi.checkpoint.shapes import check_tensors, read_config
from mdi.checkpoint.weightfile import SafetensorsFile, WeightFile, open_weight_file
from mdi.config import nearest_existing
from mdi.errors import CheckpointError

if TYPE_CHECKING:
    import torch


class WeightSource(ABC):
    """Some or all parts of one model.

    Attributes:
        model: its name.
        config_dict: its litgpt Config as a plain dict; `config_hash` is the hash of that.
        dtype: what most of the weights are stored in, e.g. "bfloat16".
        specs: type and shape of every tensor that can be had.
        quantize, quantize_head: weight format of the blocks, and of head and embedding; None if they are plain.
    """

    model: str
    config_dict: dict[str, Any]
    config_hash: str
    dtype: str
    specs: dict[str, TensorSpec]
    quantize: str | None = None
    quantize_head: str | None = None

    @abstractmethod
    def array(self, name: str) -> np.ndarray:
        """One tensor as stored, mapped from the file where possible; see layout.TYPES for types that numpy lacks."""

    @abstractmethod
    def part_names(self) -> list[str]:
        """The parts that can be had, in the order in which they are computed."""

    @abstractmethod
    def known(self, part: str) -> PartInfo | None:
        """The part's hash, if it is known without reading the weights."""

    @abstractmethod
    def remember(self, info: PartInfo) -> None:
        """Take a hash that was computed while the part was read for something else."""

    @abstractmethod
    def release(self) -> None:
        """Let go of what is mapped; it is mapped again when needed."""

    def info(self, part: str) -> PartInfo:
        """The part's hash; computed at the first call if the source does not know it yet.

        Raises:
            CheckpointError: the source does not have the part, or cannot be read.
        """
        info = self.known(part)
        if info is None:
            info = compute_info(self, part)
            self.remember(info)
        return info

    def part_specs(self, part: str) -> dict[str, TensorSpec]:
        """Type and shape of a part's tensors. Raises CheckpointError if the source does not have it."""
        if part not in self.part_names():
            raise CheckpointError(f"{self} does not hold {part}, only {', '.join(self.part_names())}")
        return {name: spec for name, spec in self.specs.items() if part_of(name) == part}

    def tensor(self, name: str) -> torch.Tensor:
        """`array` for torch: on the CPU, in the same memory."""
        from mdi.checkpoint.tensors import as_tensor

        return as_tensor(self.array(name), self.specs[name])

    def tensors(self, part: str) -> dict[str, torch.Tensor]:
        """The tensors of a part. Raises CheckpointError if the source does not have it or cannot be read."""
        return {name: self.tensor(name) for name in self.part_specs(part)}

    def pieces(self, part: str) -> Iterator[bytes | memoryview]:
        """The canonical bytes of a part, in pieces of at most 4 MiB."""
        return serialize(self.part_specs(part), self.array)

    def close(self) -> None:
        self.release()


class LitCheckpoint(WeightSource):
    """A directory with model_config.yaml and lit_model.pth or lit_model.safetensors.

    Where the embedding or the head is missing, the other stands in for it (tied weights).

    Raises:
        CheckpointError: something is missing, cut short, damaged, or of another shape than the config says.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        weights = next((p for name in WEIGHT_FILES if (p := self.path / name).is_file()), None)
        if weights is None or not (self.path / CONFIG_FILE).is_file():
            raise CheckpointError(no_checkpoint(self.path))
        self.config_dict = read_config(self.path / CONFIG_FILE)
        self.config_hash = config_hash(self.config_dict)
        self.model = self.config_dict["name"] or self.path.absolute().name
        self._file: WeightFile = open_weight_file(weights)
        self._stored = _litgpt_names(self._file.specs)  # name -> name in the file
        self.specs = {name: self._file.specs[stored] for name, stored in self._stored.items()}
        check_tensors(self.config_dict, self.specs, self.part_names(), str(weights))
        self.dtype = main_dtype(self.specs.values())
        self.hashes = HashCache(self.path / "parts.json", weights, self.config_hash)

    def __str__(self) -> str:
        return str(self.path)

    def array(self, name: str) -> np.ndarray:
        stored = self._stored[name]
        array = self._file.array(stored)
        return self._reassembled(array, self.specs[name]) if ".attn.attn." in stored else array

    def part_names(self) -> list[str]:
        return stage_parts(0, self.config_dict["n_layer"], starter=True)

    def known(self, part: str) -> PartInfo | None:
        return self.hashes.get("stored", part)

    def remember(self, info: PartInfo) -> None:
        self.hashes.put("stored", info)

    def release(self) -> None:
        self._file.release()

    def _reassembled(self, array: np.ndarray, spec: TensorSpec) -> np.ndarray:
        """LitGPT before 0.5 interleaved query, key and value by group."""
        from litgpt.config import Config
        from litgpt.scripts.convert_hf_checkpoint import qkv_reassemble

        from mdi.checkpoint.tensors import as_array, as_tensor

        return as_array(qkv_reassemble(as_tensor(array, spec), Config(**self.config_dict)))


class ChunkFile(WeightSource):
    """A chunk that prepare_model.py wrote. Its hashes are those of its manifest; `verify_part` computes them.

    Raises:
        CheckpointError: missing, cut short, damaged, not what its manifest says, or no chunk of this program.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = _chunk_path(Path(path))
        self._file = SafetensorsFile(self.path)
        if METADATA_KEY not in self._file.metadata:
            raise CheckpointError(f"{self.path} is no chunk of this version, it has no manifest; {_remedy(self.path)}")
        try:
            self.manifest = Manifest.from_json(self._file.metadata[METADATA_KEY])
        except CheckpointError as e:
            raise CheckpointError(f"{self.path}: {e}") from None
        self.model, self.config_dict = self.manifest.model, self.manifest.config
        self.config_hash, self.dtype = self.manifest.config_hash, self.manifest.dtype
        self.quantize, self.quantize_head = self.manifest.quantize, self.manifest.quantize_head
        self.specs = self._file.specs
        self._infos = {part.name: part for part in self.manifest.parts}
        self._check()

    def __str__(self) -> str:
        return str(self.path)

    def array(self, name: str) -> np.ndarray:
        return self._file.array(name)

    def part_names(self) -> list[str]:
        return list(self._infos)

    def known(self, part: str) -> PartInfo:
        if part not in self._infos:
            raise CheckpointError(f"{self} does not hold {part}, only {', '.join(self._infos)}")
        return self._infos[part]

    def remember(self, info: PartInfo) -> None:
        """A chunk's hashes are fixed."""

    def verify_part(self, name: str) -> None:
        """Compute the sha256 of a part. Raises CheckpointError if it is not the one of the manifest."""
        expected, found = self.info(name), compute_info(self, name)
        if found != expected:
            raise CheckpointError(
                f"{self.path}: {name} is damaged: sha256 {found.sha256}, expected {expected.sha256}; "
                f"{_remedy(self.path)}"
            )

    def release(self) -> None:
        self._file.release()

    def _check(self) -> None:
        start, stop = self.manifest.blocks
        numbers = {int(m[1]) for name in self.specs if (m := re.match(r"transformer\.h\.(\d+)\.", name))}
        if start > 0 and numbers == set(range(stop - start)):
            raise CheckpointError(
                f"{self.path} numbers its blocks from 0, but holds {block_span(start, stop)}; {_remedy(self.path)}"
            )
        check_tensors(self.config_dict, self.specs, self._infos, str(self.path))
        for part, info in self._infos.items():
            if (n_bytes := spec_bytes(self.part_specs(part))) != info.n_bytes:
                raise CheckpointError(
                    f"{self.path}: {part} has {n_bytes} bytes, expected {info.n_bytes} by its manifest; "
                    f"{_remedy(self.path)}"
                )


def open_source(path: str | Path) -> WeightSource:
    """A checkpoint's directory, its weight file, or a chunk. Raises CheckpointError."""
    path = Path(path)
    if path.is_dir():
        return LitCheckpoint(path)
    if path.name in WEIGHT_FILES and path.is_file():
        return LitCheckpoint(path.parent)
    return ChunkFile(path)


def compute_info(source: WeightSource, part: str) -> PartInfo:
    """Read a part and hash it."""
    specs = source.part_specs(part)
    info = PartInfo(part, sha256_of(specs, source.array), spec_bytes(specs))
    source.release()
    return info


def _litgpt_names(specs: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Today's name of each tensor -> its name in the file: tied weights, and the names of litgpt before 0.5."""
    names = {re.sub(r"\.attn\.attn\.(weight|bias)$", r".attn.qkv.\1", name): name for name in specs}
    embedding, head = "transformer.wte.weight", "lm_head.weight"
    if embedding in names:
        names.setdefault(head, names[embedding])
    elif head in names:
        names[embedding] = names[head]
    return names


def _chunk_path(path: Path) -> Path:
    """The .safetensors file itself, or the one beside a .pth name."""
    if path.suffix == ".safetensors":
        return path
    beside = path.with_suffix(".safetensors")
    if beside.is_file():
        return beside
    if path.is_file():
        raise CheckpointError(
            f"{path} is no safetensors file, and there is no {beside.name} beside it; {_remedy(path)}"
        )
    raise CheckpointError(f"no such file: {path} (the nearest that exists is {nearest_existing(path)})")


def _remedy(path: Path) -> str:
    """The command that makes a good chunk: the number of nodes, and often the model, stand in the path."""
    folder = path.absolute().parent
    match = re.fullmatch(r"(\d+)nodes(?:-(\w+))?", folder.name)
    model = folder.parents[1] if match and folder.parent.name == "chunks" else "MODEL"
    form = f" --quantize {match[2]}" if match and match[2] else ""
    return f"make it with: prepare_model.py {model} --n-nodes {match[1] if match else 'N'}{form}"
