"""Where weights are read from: a LitGPT checkpoint or a chunk. Nothing is unpickled, and every shape is checked on opening."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mdi.checkpoint.manifest import METADATA_KEY, Manifest, config_hash
from mdi.checkpoint.parts import PartInfo, part_of, serialized_bytes, sha256_of
from mdi.config import nearest_existing
from mdi.errors import CheckpointError

WEIGHT_FILES = ("lit_model.pth", "lit_model.safetensors")
_CANNOT = (RuntimeError, ValueError, TypeError, KeyError, AssertionError, ImportError, OSError)


class WeightSource(ABC):
    """Weights of (a part of) a model.

    Attributes:
        path: file or directory.
        model: name of the model.
        config_dict: litgpt Config as a plain object; `config_hash` is its hash.
        dtype: of the stored weights, e.g. "bfloat16".
    """

    path: Path
    model: str
    config_dict: dict[str, Any]
    config_hash: str
    dtype: str

    @abstractmethod
    def part_names(self) -> list[str]:
        """The parts that it can give."""

    @abstractmethod
    def info(self, part: str) -> PartInfo:
        """Hash and size of a part."""

    @abstractmethod
    def tensors(self, part: str) -> dict[str, torch.Tensor]:
        """The tensors of a part, on the CPU, as they are stored; read from the file when they are used."""

    def close(self) -> None:  # noqa: B027
        """Let go of the file."""


def open_source(path: str | Path) -> WeightSource:
    """Open a checkpoint directory or a chunk file, whichever `path` is.

    Raises:
        CheckpointError: it is neither, or damaged.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return LitCheckpoint(path)
    return ChunkFile(path)


class LitCheckpoint(WeightSource):
    """A directory with model_config.yaml and lit_model.pth (or .safetensors), as litgpt and `mdi prepare-model` make it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        if not self.path.is_dir():
            raise CheckpointError(f"no such checkpoint: {path} (the nearest that exists is {nearest_existing(path)})")
        self._file = self._weight_file()
        config = read_config(self.path / "model_config.yaml")
        self.config_dict = asdict(config)
        self.config_hash = config_hash(self.config_dict)
        self.model = config.name or self.path.resolve().name
        self._tensors = _tie(_read_tensors(self._file))
        _check_shapes(self._tensors, config_shapes(self.config_dict), self._file)
        self.dtype = str(next(iter(self._tensors.values())).dtype).removeprefix("torch.")
        self._parts: dict[str, list[str]] = {}
        for name in self._tensors:
            self._parts.setdefault(part_of(name), []).append(name)

    def _weight_file(self) -> Path:
        for name in WEIGHT_FILES:
            if (self.path / name).is_file():
                return self.path / name
        hint = (
            f": it looks like a Hugging Face checkpoint, so convert it with prepare_model.py {self.path}"
            if (self.path / "config.json").is_file()
            else ""
        )
        raise CheckpointError(f"{self.path} holds neither {' nor '.join(WEIGHT_FILES)}{hint}")

    def part_names(self) -> list[str]:
        return sorted(self._parts, key=_part_order)

    def tensors(self, part: str) -> dict[str, torch.Tensor]:
        return {name: self._tensors[name] for name in self._parts[part]}

    @functools.cached_property
    def _stamp(self) -> str:
        stat = self._file.stat()
        return f"{stat.st_size}-{stat.st_mtime_ns}"

    @functools.cached_property
    def _known(self) -> dict[str, PartInfo]:
        """Hashes that were computed before, remembered beside the weights."""
        try:
            data = json.loads((self.path / "parts.json").read_text(encoding="utf-8"))
            if data["stamp"] != self._stamp:
                return {}
            return {name: PartInfo(name, str(sha), int(size)) for name, (sha, size) in data["parts"].items()}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def info(self, part: str) -> PartInfo:
        if part not in self._known:
            tensors = self.tensors(part)
            self._known[part] = PartInfo(part, sha256_of(tensors), serialized_bytes(tensors))
            self._remember()
        return self._known[part]

    def _remember(self) -> None:
        data = {"stamp": self._stamp, "parts": {p.name: [p.sha256, p.n_bytes] for p in self._known.values()}}
        unfinished = self.path / f"parts.json.{os.getpid()}.part"
        with contextlib.suppress(OSError):  # a directory that cannot be written to costs time, nothing else
            unfinished.write_text(json.dumps(data), encoding="utf-8")
            os.replace(unfinished, self.path / "parts.json")


class ChunkFile(WeightSource):
    """A chunk: a safetensors file with a manifest in its metadata."""

    def __init__(self, path: str | Path) -> None:
        path = Path(path).expanduser()
        if path.suffix == ".pth" and path.with_suffix(".safetensors").is_file():
            path = path.with_suffix(".safetensors")  # the name that older documents use
        if not path.is_file():
            raise CheckpointError(f"no such chunk: {path} (the nearest that exists is {nearest_existing(path)})")
        self.path = path
        if path.suffix != ".safetensors":
            raise CheckpointError(f"{path} is no chunk of this version: {_REMAKE}")
        self._handle = open_safetensors(path)
        text = (self._handle.metadata() or {}).get(METADATA_KEY)
        names = list(self._handle.keys())
        if text is None:
            raise CheckpointError(
                f"{path} has no manifest, so nothing says which blocks it holds (older chunks count them from 0): {_REMAKE}"
            )
        self.manifest = Manifest.from_json(text, str(path))
        manifest = self.manifest
        self.model, self.config_dict, self.config_hash = manifest.model, manifest.config, manifest.config_hash
        self.dtype = manifest.dtype
        if config_hash(manifest.config) != manifest.config_hash:
            raise CheckpointError(f"{path}: the manifest's configuration does not fit its hash; {_REMAKE}")
        self._infos = {part.name: part for part in manifest.parts}
        self._parts: dict[str, list[str]] = {name: [] for name in self._infos}
        for name in names:
            part = part_of(name)
            if part not in self._parts:
                raise CheckpointError(f"{path} holds {name}, which its manifest does not list; {_REMAKE}")
            self._parts[part].append(name)
        wanted = {n: s for n, s in config_shapes(self.config_dict).items() if part_of(n) in self._infos}
        _check_shapes({name: self._handle.get_slice(name) for name in names}, wanted, path)

    def part_names(self) -> list[str]:
        return sorted(self._parts, key=_part_order)

    def info(self, part: str) -> PartInfo:
        return self._infos[part]

    def tensors(self, part: str) -> dict[str, torch.Tensor]:
        return {name: self._handle.get_tensor(name) for name in self._parts[part]}

    def verify_part(self, part: str) -> None:
        """Raises CheckpointError if the part's bytes are not those that the manifest was written for."""
        found = sha256_of(self.tensors(part))
        if found != self._infos[part].sha256:
            raise CheckpointError(
                f"{self.path}: {part} is damaged (sha256 {found}, expected {self._infos[part].sha256})"
            )

    def close(self) -> None:
        del self._handle


_REMAKE = "make the chunks again with `prepare_model.py MODEL --n-nodes N`"


def open_safetensors(path: Path) -> Any:
    """A lazily read safetensors file; CheckpointError if it is cut short or damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as e:
        raise CheckpointError(f"{path} is cut short or damaged: {e}") from None


def read_config(path: Path) -> Any:
    """litgpt's Config from a model_config.yaml; CheckpointError says what is wrong with it."""
    from litgpt.config import Config

    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: a LitGPT checkpoint says there what shape the model has")
    try:
        import yaml

        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(fields, dict):
            raise ValueError("no fields in it")
        return Config(**fields)
    except (*_CANNOT, yaml.YAMLError, UnicodeDecodeError) as e:
        raise CheckpointError(f"{path} is no configuration of litgpt: {_first_line(e)}") from None


def config_shapes(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Shape of every tensor of a model, without making one."""
    from litgpt.config import Config
    from litgpt.model import GPT

    fields = dict(config)
    try:
        with torch.device("meta"):
            model = GPT(Config(**fields))
    except _CANNOT as e:
        raise CheckpointError(f"no model can be built from this configuration: {_first_line(e)}") from None
    return {name: list(tensor.shape) for name, tensor in model.state_dict().items()}


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        handle = open_safetensors(path)
        return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    return read_pth(path)


def read_pth(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a .pth or .bin file, mapped into memory if its format allows it. Code in it is never run."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as e:  # torch raises pickle, zip, struct and runtime errors for what is not a checkpoint
        why = "it holds more than weights" if "weights_only" in str(e).lower() else _first_line(e)
        raise CheckpointError(f"{path} is cut short, damaged or no checkpoint: {why}") from None
    if isinstance(state, dict) and isinstance(state.get("model"), dict):
        state = state["model"]
    if not isinstance(state, dict) or not state or not all(isinstance(t, torch.Tensor) for t in state.values()):
        raise CheckpointError(f"{path} holds no table of tensors")
    return state


def _tie(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With tied embeddings only one of the two may be stored; it stands in for the other."""
    pair = ("lm_head.weight", "transformer.wte.weight")
    present = [name for name in pair if name in tensors]
    if len(present) == 1:
        missing = pair[1 - pair.index(present[0])]
        return {**tensors, missing: tensors[present[0]]}
    return tensors


def _check_shapes(found: Mapping[str, Any], wanted: Mapping[str, list[int]], where: Path) -> None:
    for name, shape in wanted.items():
        if name not in found:
            legacy = name.replace(".attn.qkv.", ".attn.attn.")
            hint = (
                " (it was written by an older litgpt: convert it again)" if legacy in found and legacy != name else ""
            )
            raise CheckpointError(f"{where} lacks the tensor {name}{hint}")
        given = found[name]
        given_shape = list(given.get_shape() if hasattr(given, "get_shape") else given.shape)
        if given_shape != shape:
            raise CheckpointError(f"{where}: tensor {name} has the shape {given_shape}, expected {shape}")
    for name in found:
        if name not in wanted:
            raise CheckpointError(f"{where} holds the tensor {name}, which this model does not have")


def _part_order(part: str) -> tuple[int, int]:
    if part.startswith("block."):
        return 1, int(part.removeprefix("block."))
    return (0, 0) if part == "embedding" else (2, 0)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().split("\n")[0][:300]
