"""The beginning of a training run: random weights, a checkpoint, or an interrupted run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from litgpt.config import Config
from litgpt.model import GPT

from mdi.checkpoint.folder import CONFIG_FILE
from mdi.checkpoint.source import LitCheckpoint
from mdi.errors import CheckpointError, Code, UsageError
from mdi_training.checkpoint import KEPT_FILES, STATE_NAME, WEIGHTS_NAME, Base, SavedRun
from mdi_training.data import DataSet
from mdi_training.loop import Trainer, TrainingProgress
from mdi_training.lora import add_adapters, load_base
from mdi_training.new_model import config_file, load_shape, new_model, parse_shape
from mdi_training.storage import sha256_file
from mdi_training.training_settings import LoraSettings


@dataclass(frozen=True)
class Beginning:
    """Attributes:
    model: on the CPU, float32.
    files: to write beside the weights: the shape, the tokenizer, ...
    saved: the run to resume, if there is one.
    base: of adapters.
    """

    model: GPT
    config: Config
    files: dict[str, bytes]
    lora: LoraSettings | None = None
    base: Base | None = None
    saved: SavedRun | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def progress(self) -> TrainingProgress | None:
        return None if self.saved is None else replace(self.saved.progress)


def from_scratch(config: Config, seed: int, data: DataSet) -> Beginning:
    """Random weights of the given shape."""
    return Beginning(new_model(config, seed), config, {CONFIG_FILE: config_file(config), **data.tokenizer})


def from_checkpoint(folder: Path, lora: LoraSettings | None, seed: int, data: DataSet) -> Beginning:
    """The weights of a litgpt checkpoint; with adapters on them if asked to.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    config = load_shape(folder)
    model = add_adapters(config, lora, seed) if lora else _empty(config)
    _load(model, folder, has_adapters=lora is not None)
    kept = {name: (folder / name).read_bytes() for name in KEPT_FILES if (folder / name).is_file()}
    files = {**kept, **data.tokenizer}
    notes = []
    names = [name for name in ("tokenizer.json", "tokenizer.model") if (folder / name).is_file()]
    if names and not any(data.tokenizer.get(name) == (folder / name).read_bytes() for name in names):
        notes.append(
            f"warning: {data.folder} was prepared with another tokenizer than that of {folder}; the weights know other "
            f"words by these ids (mdi prepare-data --tokenizer {folder})"
        )
    return Beginning(model, config, files, lora, _base(folder) if lora else None, notes=notes)


def from_state(folder: Path, saved: SavedRun, data: DataSet) -> Beginning:
    """Where an earlier run stopped.

    Raises:
        CheckpointError: its weights do not fit the shape, or the base of its adapters is not there any more.
    """
    notes = []
    if saved.data_sha256 != data.sha256:
        notes.append(f"warning: {data.folder} is not the data set that this run began with")
    config = parse_shape(saved.files[CONFIG_FILE], folder / STATE_NAME)
    files = {**saved.files, **data.tokenizer}
    if saved.lora is None:
        model = _empty(config)
        _fill(model, saved.weights, f"{folder / STATE_NAME}")
        return Beginning(model, config, files, saved=saved, notes=notes)
    if saved.base is None:
        raise CheckpointError(f"{folder / STATE_NAME} has adapters, but does not say for which weights")
    base = Path(saved.base.folder)
    model = add_adapters(config, saved.lora, saved.settings.seed)
    _load(model, base, has_adapters=True)
    if _base(base) != saved.base:
        raise CheckpointError(
            f"the weights in {base} are not those that the adapters in {folder} began with", code=Code.CHANGED
        )
    model.load_state_dict(saved.weights, strict=False)
    return Beginning(model, config, files, saved.lora, saved.base, saved, notes)


def restore(trainer: Trainer, saved: SavedRun) -> None:
    """Puts the optimizer and the gradient scaler where they were.

    Raises:
        CheckpointError: they belong to another model.
    """
    rates = [(group["weight_decay"], group["betas"], group["eps"]) for group in trainer.optimizer.param_groups]
    try:
        trainer.optimizer.load_state_dict(saved.optimizer)
    except (ValueError, KeyError) as err:
        raise CheckpointError(f"the optimizer's state does not fit this model: {err}") from err
    # The flags of today, not those that the state was written with.
    for group, (decay, betas, eps) in zip(trainer.optimizer.param_groups, rates, strict=True):
        group.update(weight_decay=decay, betas=betas, eps=eps)
    if trainer.scaler.is_enabled() and saved.scaler:
        trainer.scaler.load_state_dict(saved.scaler)


def check_free(folder: Path, overwrite: bool) -> None:
    """Refuses to train over an existing checkpoint, unless asked to.

    Raises:
        UsageError: names the file.
    """
    for name in (WEIGHTS_NAME, STATE_NAME):
        if (folder / name).exists() and not overwrite:
            raise UsageError(
                f"{folder / name} exists already; --overwrite replaces it, --init resume continues it, --out "
                "chooses another folder",
                code=Code.EXISTS,
            )


def check_fit(config: Config, data: DataSet) -> None:
    """Refuses a data set with ids that the model has no embedding for.

    Raises:
        UsageError: names both sizes.
    """
    if data.vocab_size > config.padded_vocab_size:
        raise UsageError(
            f"{data.folder} has {data.vocab_size} token ids, but the model {config.name} has only "
            f"{config.padded_vocab_size}; use --fit-vocab, or prepare the data with fewer",
            code=Code.VOCABULARY,
        )


def _empty(config: Config) -> GPT:
    with torch.random.fork_rng(devices=[]):  # the weights that come are overwritten
        return GPT(config)


def _load(model: GPT, folder: Path, *, has_adapters: bool) -> None:
    source = LitCheckpoint(folder)
    try:
        state = {name: source.tensor(name).float() for name in source.specs}
        if has_adapters:
            load_base(model, state)
        else:
            _fill(model, state, str(folder))
    finally:
        source.close()


def _fill(model: GPT, state: dict[str, Any], where: str) -> None:
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as err:
        raise CheckpointError(
            f"{where} does not fit the shape of the model: {str(err).splitlines()[-1].strip()}", code=Code.SHAPE
        ) from err


def _base(folder: Path) -> Base:
    weights = next(path for name in (WEIGHTS_NAME, "lit_model.safetensors") if (path := folder / name).is_file())
    return Base(str(folder.resolve()), sha256_file(weights))
