"""The files of a training run: checkpoints for all our programs, and the state to resume from.

    <folder>/lit_model.pth, model_config.yaml, tokenizer    the best weights so far
    <folder>/adapter/                                       of a run with LoRA: the adapters alone, in PEFT's form
    <folder>/last/...                                       the same files, with the last weights
    <folder>/train_state.pth                                weights or adapters, optimizer, progress, settings

Each file is replaced whole, so whatever ends a save leaves the one before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from litgpt.model import GPT

from mdi.checkpoint.adapters import BASE_KEY, CONFIG_FILE, WEIGHTS_FILE, weights_hash
from mdi.checkpoint.parts import serialize
from mdi.checkpoint.safetensors_layout import TensorSpec
from mdi.checkpoint.source import open_source
from mdi.errors import CheckpointError, Code
from mdi.files import replacing
from mdi_training.loop import TrainingProgress
from mdi_training.lora import ADAPTER_NAME, has_adapters, merged_weights, peft_settings, peft_tensors, trained_weights
from mdi_training.storage import make_folder
from mdi_training.training_settings import LoraSettings, TrainingSettings

WEIGHTS_NAME = "lit_model.pth"
STATE_NAME = "train_state.pth"
PEFT_FOLDER = "adapter"
LAST = "last"
# What a checkpoint has beside weights and tokenizer, and keeps when it is trained further.
KEPT_FILES = ("model_config.yaml", "prompt_style.yaml", "generation_config.json")
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Base:
    """The checkpoint that adapters belong to; its weights are not written again.

    Attributes:
        sha256: of its file of weights.
    """

    folder: str
    sha256: str


@dataclass(frozen=True)
class SavedRun:
    """What train_state.pth holds.

    Attributes:
        weights: of the model, or of its adapters if there is a base; float32.
        optimizer, scaler: their state dicts.
        files: to write beside the weights, with the shape; the tokenizer comes with the data.
        data_sha256: of the train.bin that it was trained on.
    """

    settings: TrainingSettings
    progress: TrainingProgress
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    files: dict[str, bytes]
    data_sha256: str
    lora: LoraSettings | None = None
    base: Base | None = None


def save_checkpoint(
    model: GPT, folder: Path, dtype: torch.dtype, files: Mapping[str, bytes], base: Base | None = None
) -> Path:  # fmt: skip
    """Writes lit_model.pth, a state dict with litgpt's names and floating point as `dtype`, and the files beside it.

    Adapters are merged in, and also written alone, in litgpt's form (lit_model.pth.lora) and in PEFT's (adapter/).

    Args:
        base: that adapters belong to.

    Returns:
        the path of the weights.

    Raises:
        CheckpointError: a file cannot be written.
    """
    make_folder(folder)
    for name, content in files.items():
        _write_bytes(folder / name, content)
    if has_adapters(model):
        _write(folder / ADAPTER_NAME, {"model": _stored(trained_weights(model), dtype)})
        if tensors := peft_tensors(model):
            _save_peft(model, tensors, folder / PEFT_FOLDER, base)
    path = folder / WEIGHTS_NAME
    _write(path, _stored(merged_weights(model), dtype))
    return path


def _save_peft(model: GPT, tensors: Mapping[str, torch.Tensor], folder: Path, base: Base | None) -> None:
    """The adapters in float32, with a hash of the weights that they belong to, where these are plain."""
    make_folder(folder)
    known = None if base is None else weights_hash(open_source(base.folder))
    metadata = {"format": "pt", **({} if known is None else {BASE_KEY: known})}
    arrays = {name: tensor.float().cpu().contiguous().numpy() for name, tensor in tensors.items()}
    specs = {name: TensorSpec("F32", array.shape) for name, array in arrays.items()}
    with replacing(folder / WEIGHTS_FILE) as file:
        for piece in serialize(specs, arrays.__getitem__, metadata):
            file.write(piece)
    settings = peft_settings(model, tensors) | (
        {} if base is None else {"base_model_name_or_path": Path(base.folder).name}
    )
    _write_bytes(folder / CONFIG_FILE, json.dumps(settings, indent=1).encode())


def save_last(
    model: GPT, folder: Path, dtype: torch.dtype, files: Mapping[str, bytes], base: Base | None = None
) -> Path:  # fmt: skip
    """`save_checkpoint` into the folder for the last weights. Raises CheckpointError, UsageError."""
    return save_checkpoint(model, folder / LAST, dtype, files, base)


def save_state(folder: Path, run: SavedRun) -> Path:
    """Writes train_state.pth. Raises CheckpointError, UsageError."""
    make_folder(folder)
    state = {
        "format_version": FORMAT_VERSION,
        "settings": asdict(run.settings),
        "progress": asdict(run.progress),
        "weights": run.weights,
        "optimizer": run.optimizer,
        "scaler": run.scaler,
        "files": {name: content.decode() for name, content in run.files.items() if name in KEPT_FILES},
        "data_sha256": run.data_sha256,
        "lora": None if run.lora is None else {**asdict(run.lora), "targets": list(run.lora.targets)},
        "base": None if run.base is None else asdict(run.base),
    }
    _write(folder / STATE_NAME, state)
    return folder / STATE_NAME


def load_state(folder: Path) -> SavedRun:
    """Reads train_state.pth, without unpickling anything but tensors and plain values.

    Raises:
        CheckpointError: it is missing, damaged, or of another version.
    """
    path = folder / STATE_NAME
    if not path.is_file():
        found = sorted(str(p.parent) for p in folder.glob(f"*/{STATE_NAME}"))
        hint = f"; there is one in {', '.join(found)}" if found else "; it is written by a run of mdi train"
        raise CheckpointError(f"nothing to resume: {folder} holds no {STATE_NAME}{hint}", code=Code.MISSING)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format_version {state['format_version']}, expected {FORMAT_VERSION}")
        lora, base = state["lora"], state["base"]
        return SavedRun(
            settings=TrainingSettings(**state["settings"]),
            progress=TrainingProgress(**state["progress"]),
            weights=state["weights"],
            optimizer=state["optimizer"],
            scaler=state["scaler"],
            files={name: text.encode() for name, text in state["files"].items()},
            data_sha256=state["data_sha256"],
            lora=None if lora is None else LoraSettings(**{**lora, "targets": tuple(lora["targets"])}),
            base=None if base is None else Base(**base),
        )
    except Exception as err:  # torch raises RuntimeError, EOFError, pickle's errors, and others for strange contents
        reason = (str(err).splitlines() or [""])[0]
        raise CheckpointError(
            f"{path} cannot be used: {type(err).__name__}: {reason:.200}; start again, or begin with the weights by "
            "--init finetune",
            code=Code.UNREADABLE,
        ) from err


def _stored(state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in state.items()
    }


def _write(path: Path, content: object) -> None:
    with replacing(path) as handle:
        torch.save(content, handle)


def _write_bytes(path: Path, content: bytes) -> None:
    if path.is_file() and path.read_bytes() == content:
        return
    with replacing(path) as handle:
        handle.write(content)
