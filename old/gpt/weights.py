"""Where the weights of NanoGPT and GPT-2 come from, part by part, under litgpt's names.

Two forms on disk: a checkpoint that nanoGPT/train.py wrote, and a directory of GPT-2 in Hugging Face's form. Nothing in the
files is executed: safetensors, or pickles through torch's restricted unpickler.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from gpt.model import PositionGPT
from gpt.shape import GPTConfig, config_of, gpt2_config
from mdi.block_ranges import default_split, parse_layers, ranges
from mdi.checkpoint.manifest import config_hash
from mdi.checkpoint.parts import stage_parts
from mdi.checkpoint.records import HashRecord, weights_stamp
from mdi.checkpoint.safetensors_layout import TensorSpec, main_dtype
from mdi.checkpoint.weightfile import WeightFile, open_weight_file
from mdi.checkpoint.weights import WeightSource
from mdi.errors import CheckpointError, Code, UsageError
from mdi.model.plain import ModelConfig, spec_of
from mdi.spec.cluster import nearest_existing, read_json
from mdi.spec.settings_file import parse_yaml
from mdi.stages.starter_weights import StarterWeights

NANO_WEIGHTS, NANO_CONFIG = "lit_model.pth", "model_config.yaml"
EMBEDDING, HEAD = "transformer.wte.weight", "lm_head.weight"

# litgpt's name of a block's tensor -> Hugging Face's
_BLOCK_NAMES = {
    "norm_1": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "norm_2": "ln_2",
    "mlp.fc": "mlp.c_fc",
    "mlp.proj": "mlp.c_proj",
}


class GPTSource(WeightSource):
    """All parts of one model.

    Args:
        where: the directory.
        config: of the model.
        stored: tensor's name -> (file that it is in, its name there). The head's weight is the embedding if it has none.
        is_turned: whether matrices are stored (in, out), as OpenAI's Conv1D has them.
    """

    def __init__(
        self, where: Path, config: GPTConfig, stored: dict[str, tuple[WeightFile, str]], is_turned: bool
    ) -> None:
        self.path = where
        self.config = ModelConfig.from_litgpt(config)
        self.config_hash = config_hash(self.config)
        self.model = config.name
        if EMBEDDING in stored:
            stored.setdefault(HEAD, stored[EMBEDDING])
        self._stored, self._is_turned = stored, is_turned
        self.specs = {name: self._spec(name) for name in stored}
        _check_tensors(config, self.specs, where)
        self.dtype = main_dtype(self.specs.values())
        first = next(iter(stored.values()))[0]
        self.hashes = HashRecord(where / "parts.json", weights_stamp([first.path], self.config_hash))

    def __str__(self) -> str:
        return str(self.path)

    def array(self, name: str) -> np.ndarray:
        file, stored = self._stored[name]
        array = file.array(stored)
        return np.ascontiguousarray(array.T) if self._turns(name) else array

    def part_names(self) -> list[str]:
        return stage_parts(0, self.config.n_layer, starter=True)

    def release(self) -> None:
        for file, _ in self._stored.values():
            file.release()

    def _turns(self, name: str) -> bool:
        return self._is_turned and ".h." in name and ".norm_" not in name and name.endswith(".weight")

    def _spec(self, name: str) -> TensorSpec:
        file, stored = self._stored[name]
        spec = file.specs[stored]
        return TensorSpec(spec.dtype, spec.shape[::-1]) if self._turns(name) else spec


def open_nano(where: Path) -> GPTSource:
    """A checkpoint of nanoGPT/train.py or GPT2/train.py.

    Raises:
        CheckpointError: something is missing, damaged, or of another shape than the config says.
    """
    for name in (NANO_CONFIG, NANO_WEIGHTS):
        if not (where / name).is_file():
            raise CheckpointError(
                f"{where} is no NanoGPT checkpoint: it lacks {name} (the nearest folder that exists is "
                f"{nearest_existing(where)}); nanoGPT/train.py makes one"
            )
    file = open_weight_file(where / NANO_WEIGHTS)
    return GPTSource(where, read_nano_config(where / NANO_CONFIG), {name: (file, name) for name in file.specs}, False)


def read_nano_config(path: Path) -> GPTConfig:
    """Raises CheckpointError."""
    try:
        return parse_nano_config(path.read_bytes(), path)
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror or e}", code=Code.UNREADABLE) from None


def parse_nano_config(content: bytes, path: Path) -> GPTConfig:
    """The content of model_config.yaml; `path` is for errors. Raises CheckpointError."""
    return config_of(parse_yaml(content, str(path)), str(path))


def open_gpt2(where: Path) -> GPTSource:
    """A directory with config.json and model.safetensors (whole or in shards) or pytorch_model.bin, or of GPT2/train.py.

    Raises:
        CheckpointError: as `open_nano`; also a GPT-2 of a variant that this model does not compute.
    """
    if (where / NANO_CONFIG).is_file() and (where / NANO_WEIGHTS).is_file():
        return open_nano(where)
    if not (where / "config.json").is_file():
        raise CheckpointError(
            f"{where} is no Hugging Face directory of GPT-2: it lacks config.json (the nearest folder that exists is "
            f"{nearest_existing(where)})"
        )
    config = _gpt2_config(where)
    found = {name: (file, name) for file in _weight_files(where) for name in file.specs}
    stored = {}
    for name in _shapes(config):
        theirs = _their_name(name)
        # Saved from the bare model, or from the one with a head, whose names have a prefix.
        key = next((k for k in (f"transformer.{theirs}", theirs) if k in found), None)
        if key is not None:
            stored[name] = found[key]
    if not stored:
        raise CheckpointError(f"{where}: the weight files hold no tensor that GPT-2 has")
    return GPTSource(where, config, stored, is_turned=True)


def _their_name(name: str) -> str:
    if not name.startswith("transformer.h."):
        return name.removeprefix("transformer.")
    index, module = name.removeprefix("transformer.h.").split(".", 1)
    module, leaf = module.rsplit(".", 1)
    return f"h.{index}.{_BLOCK_NAMES[module]}.{leaf}"


def _weight_files(where: Path) -> list[WeightFile]:
    if (where / "model.safetensors").is_file():
        return [open_weight_file(where / "model.safetensors")]
    index = where / "model.safetensors.index.json"
    if index.is_file():
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise CheckpointError(f"{index}: expected a weight_map from tensors to files")
        names = sorted(set(listed.values()))
        if any(Path(name).name != name for name in names):
            raise CheckpointError(f"{index} names a file outside its folder", code=Code.UNSAFE)
        return [open_weight_file(where / name) for name in names]
    if (where / "pytorch_model.bin").is_file():
        return [open_weight_file(where / "pytorch_model.bin")]
    raise CheckpointError(f"{where} holds neither model.safetensors nor pytorch_model.bin")


def _gpt2_config(where: Path) -> GPTConfig:
    path = where / "config.json"
    try:
        data = read_json(path)
    except UsageError as e:
        raise CheckpointError(str(e)) from None
    if data.get("model_type", "gpt2") != "gpt2":
        raise CheckpointError(f"{path} is of a model of type {data['model_type']!r}, not of GPT-2", code=Code.SHAPE)
    wanted: Mapping[str, tuple[Any, ...]] = {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    }
    for key, allowed in wanted.items():
        if data.get(key, allowed[0]) not in allowed:
            raise CheckpointError(
                f"{path}: {key} is {data[key]!r}, but this model computes with {allowed[0]!r}", code=Code.SHAPE
            )
    sizes = {}
    for key in ("n_layer", "n_embd", "n_head", "vocab_size", "n_positions"):
        value = data.get(key, data.get("n_ctx") if key == "n_positions" else None)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{path}: {key}: expected a whole number from 1 on, found {value!r}", code=Code.SHAPE)
        sizes[key] = value
    context = sizes.pop("n_positions")
    if sizes["n_embd"] % sizes["n_head"]:
        raise CheckpointError(
            f"{path}: n_embd {sizes['n_embd']} is no multiple of n_head {sizes['n_head']}", code=Code.SHAPE
        )
    config = gpt2_config(where.absolute().name, context=context, **sizes)
    eps, width = data.get("layer_norm_epsilon", 1e-5), data.get("n_inner") or 4 * config.n_embd
    if not isinstance(eps, float) or not isinstance(width, int):
        raise CheckpointError(
            f"{path}: layer_norm_epsilon {eps!r}, n_inner {width!r}: expected numbers", code=Code.SHAPE
        )
    config.norm_eps, config.intermediate_size = eps, width
    return config


def _shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = PositionGPT(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _check_tensors(config: GPTConfig, specs: Mapping[str, TensorSpec], where: Path) -> None:
    wanted = _shapes(config)
    for name, shape in wanted.items():
        if name not in specs:
            raise CheckpointError(f"{where} lacks the tensor {name}, of shape {list(shape)}", code=Code.TENSOR)
        if specs[name].shape != shape:
            raise CheckpointError(
                f"{where}: tensor {name} has the shape {list(specs[name].shape)}, expected {list(shape)} by the config",
                code=Code.TENSOR,
            )
    if unknown := next((name for name in specs if name not in wanted), None):
        raise CheckpointError(f"{where} holds the tensor {unknown}, which this model does not have")


class GPTWeights(StarterWeights):
    """A checkpoint of one of these families, and its cut: by hand, by the thesis' tables, or an even one."""

    def __init__(
        self, source: GPTSource, n_nodes: int, layers: str | None, cuts: Mapping[Any, tuple[int, ...]]
    ) -> None:
        self._source, self._cuts = source, cuts
        super().__init__(source.path, None, n_nodes, layers)

    def _find(self, ckpt: Path | None, chunk: Path | None, n_nodes: int, layers: str | None, will_be_cut: bool) -> None:
        source = self._source
        self.sources.append(source)
        self.directory = source.path
        self.model = source.model_id
        self.quantize = self.quantize_head = self.native = self.own_formats = None
        self.is_cut_by_chunks = False
        counts = self._cuts.get((self.n_layer, n_nodes))
        if layers is not None:
            counts = parse_layers(layers, self.n_layer, n_nodes)
        self.blocks = ranges(counts or default_split(spec_of(self.config), n_nodes))


def nano_config_file(config: GPTConfig) -> bytes:
    """model_config.yaml, for `read_nano_config`."""
    return yaml.safe_dump(json.loads(json.dumps(asdict(config)))).encode()
