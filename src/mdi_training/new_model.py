"""The shape of a model to train, by litgpt's name or from a file, and its first weights.

Knows litgpt's Config and GPT; knows nothing of data or optimizers.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from litgpt.config import Config, name_to_config
from litgpt.model import GPT

from mdi.checkpoint.folder import CONFIG_FILE
from mdi.errors import CheckpointError, Code
from mdi.model.plain import ModelConfig, litgpt_fields
from mdi.spec.settings_file import parse_yaml
from mdi_training.storage import missing


def load_shape(source: str | Path) -> Config:
    """The litgpt Config of a folder with model_config.yaml, of such a file, or of a name that litgpt knows.

    Raises:
        CheckpointError: it is missing or does not describe a model.
    """
    path = Path(source)
    if not path.exists() and _is_name(str(source)):
        return _named(str(source))
    if path.is_dir():
        folder, path = path, path / CONFIG_FILE
        if not path.is_file():
            raise CheckpointError(
                f"{folder} holds no {CONFIG_FILE}: put one there, or give the shape with --config", code=Code.MISSING
            )
    elif not path.is_file():
        raise CheckpointError(missing(path, "the checkpoint folder"), code=Code.MISSING)
    try:
        return parse_shape(path.read_bytes(), path)
    except OSError as err:
        raise CheckpointError(f"{path} cannot be read: {err.strerror or err}", code=Code.UNREADABLE) from err


def parse_shape(content: bytes, where: Path) -> Config:
    """The Config that a model_config.yaml describes. Raises CheckpointError."""
    try:
        return Config(**litgpt_fields(ModelConfig.of(parse_yaml(content, str(where)))))
    except (TypeError, ValueError, AssertionError, AttributeError, ZeroDivisionError) as err:
        raise CheckpointError(
            f"{where} does not describe a litgpt model: {type(err).__name__}: {err}", code=Code.SHAPE
        ) from err


def config_file(config: Config) -> bytes:
    """The content of a model_config.yaml that describes this shape."""
    return yaml.safe_dump(_plain(asdict(config))).encode()


def fit_vocabulary(config: Config, vocab_size: int) -> Config:
    """The same shape with room for so many tokens, rounded up as litgpt does (padding_multiple)."""
    fields = asdict(config)
    del fields["padded_vocab_size"]
    return Config(**{**fields, "vocab_size": vocab_size, "padded_vocab_size": None})


def new_model(config: Config, seed: int) -> GPT:
    """A GPT with random float32 weights on the CPU; the same seed gives the same weights.

    Normal with deviation 0.02; what writes into the residual stream is smaller by sqrt(2 n_layer), so that the
    stream's size does not grow with depth (GPT-2's way).
    """
    generator_state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = GPT(config)
        model.apply(model._init_weights)
        for name, weight in model.named_parameters():
            if name.endswith(("attn.proj.weight", "mlp.proj.weight")):
                torch.nn.init.normal_(weight, std=0.02 / math.sqrt(2 * config.n_layer))
    finally:
        torch.random.set_rng_state(generator_state)
    return model


def _is_name(source: str) -> bool:
    """Not a path that someone mistyped."""
    return not source.startswith((".", "/", "~")) and not source.endswith((".yaml", ".yml"))


def _named(name: str) -> Config:
    try:
        config = Config.from_name(name.split("/")[-1])
    except (ValueError, IndexError):
        config = None
    if config is None:
        near = difflib.get_close_matches(name.split("/")[-1], list(name_to_config), n=3)
        hint = f"; names like it: {', '.join(near)}" if near else ""
        raise CheckpointError(
            missing(Path(name), "the checkpoint folder") + f", nor does litgpt know the name{hint}", code=Code.MISSING
        )
    return config


def _plain(value: Any) -> Any:
    """Tuples as lists, as YAML's safe form needs."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
