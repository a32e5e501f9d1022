"""Converts a Hugging Face directory to a LitGPT checkpoint, in a folder that is never the user's own Hugging Face directory,
unless asked for.

What reads the directory is what reads it when it is used as it is (hffolder.py), tensor by tensor: neither a shard nor the
model is in memory. Knows no network.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mdi.checkpoint.derived import CastSource
from mdi.checkpoint.disk_space import check_disk, free_bytes
from mdi.checkpoint.folder import (
    CONFIG_FILE,
    POOLING_FILES,
    PREDICTING_FILE,
    TOKENIZER_FILES,
    WEIGHT_FILES,
    is_hf_dir,
    is_lit_dir,
    weight_files,
)
from mdi.checkpoint.hffolder import HfFolder
from mdi.checkpoint.predicting import write_predicting
from mdi.checkpoint.quantized import read_quantization
from mdi.checkpoint.records import read_kept
from mdi.checkpoint.shapes import check_tensors
from mdi.checkpoint.weightfile import PickledFile
from mdi.checkpoint.weights import WeightSource
from mdi.errors import CheckpointError, UsageError
from mdi.files import replacing
from mdi.model.plain import ModelConfig
from mdi.model.tensors import EMBEDDING, HEAD
from mdi.spec.cluster import DTYPES
from mdi.units import size


def needs_conversion(path: str | Path, target: Path | None = None) -> bool:
    """Whether there is a Hugging Face checkpoint, and no equally new LitGPT one in `target` (None: beside it)."""
    path = Path(path)
    target = target or path
    if not is_hf_dir(path) or read_quantization(path) is not None:
        return False  # quantized weights are read as they are
    if not is_lit_dir(target):
        return True
    converted = max((target / name).stat().st_mtime for name in WEIGHT_FILES if (target / name).is_file())
    return any(file.is_file() and file.stat().st_mtime > converted for file in weight_files(path))


def convert(
    path: str | Path, model_name: str | None = None, dtype: str | None = None, progress: bool = True,
    target: Path | None = None, clips: bool = False,
) -> Path:  # fmt: skip
    """Write model_config.yaml and lit_model.pth of a Hugging Face checkpoint, and blocks that predict further tokens.

    Args:
        path: its directory.
        model_name: the name of a Config of litgpt; None derives one, see `choose_config`.
        dtype: to store the weights in; None keeps their type.
        progress: draw a bar on stderr, if it takes long.
        target: an existing directory to write to; None is the checkpoint's.
        clips: whether numbers that are too large for `dtype` are clipped instead of refused.

    Returns:
        That directory.

    Raises:
        CheckpointError: something is missing, damaged, of another shape, of an unknown architecture, or too large for `dtype`;
            or the disk is full.
        UsageError: no such dtype.
    """
    directory = Path(path)
    out = target or directory
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    if not is_hf_dir(directory):
        raise CheckpointError(f"{directory} is not a Hugging Face checkpoint: it needs config.json and weights")
    folder = HfFolder(directory, model_name, takes_pickles=True)
    source: WeightSource = folder if dtype is None else CastSource(folder, dtype, clips)
    is_tied = folder.tensor_pieces[HEAD] == folder.tensor_pieces[EMBEDDING]
    needed = sum(spec.n_bytes for name, spec in source.specs.items() if not (name == HEAD and is_tied))
    if (predicting := source.predicting()) is not None:
        needed += sum(spec.n_bytes for spec in predicting.specs.values())
    check_disk(out, needed, "converting", CheckpointError)
    weights = out / WEIGHT_FILES[0]
    unfinished = weights.with_name(weights.name + ".part")
    try:
        _write(unfinished, source, is_tied, progress)
        written = PickledFile(unfinished)
        check_tensors(folder.config, written.specs, folder.part_names(), str(directory))
        written.release()
        _sync(unfinished)
        (out / PREDICTING_FILE).unlink(missing_ok=True)  # of another model
        if predicting is not None:
            write_predicting(predicting, out / PREDICTING_FILE)
        _write_config(out, folder.config)
        os.replace(unfinished, weights)
    except (OSError, RuntimeError) as e:  # torch's writer says RuntimeError when the disk is full
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise CheckpointError(f"cannot write {weights} ({size(free_bytes(out))} are free): {reason}") from e
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return out


def _write(target: Path, source: WeightSource, is_tied: bool, progress: bool) -> None:
    """Write a file of torch tensor by tensor.

    Args:
        is_tied: whether the head is the embedding, which is then written once.
        progress: draw a bar on stderr, if it takes long.
    """
    from litgpt.utils import incremental_save
    from tqdm import tqdm

    total = sum(spec.n_bytes for spec in source.specs.values())
    bar = tqdm(total=total, desc="converting", unit="B", unit_scale=True, delay=2, disable=not progress)
    state: dict[str, Any] = {}
    with bar, torch.no_grad(), incremental_save(target) as saver:
        for part in source.part_names():
            for name, spec in source.part_specs(part).items():
                if name == HEAD and is_tied:
                    state[name] = state[EMBEDDING]
                else:
                    state[name] = saver.store_early(source.tensor(name))
                bar.update(spec.n_bytes)
            source.release()
        saver.save(state)


def _write_config(directory: Path, config: ModelConfig) -> None:
    import yaml

    with replacing(directory / CONFIG_FILE) as file:
        file.write(yaml.safe_dump(config.plain()).encode())


def _sync(path: Path) -> None:
    with open(path, "r+b") as file:
        os.fsync(file.fileno())


logger = logging.getLogger("mdi")

NOTE = "converted_from.json"  # in a folder that was made here: of which directory

_KEPT = (*TOKENIZER_FILES, *POOLING_FILES, "prompt_style.yaml")


def ready(
    directory: Path, home: Path, out: Path | None = None, model_name: str | None = None, dtype: str | None = None,
    clips: bool = False,
) -> tuple[Path, Path]:  # fmt: skip
    """A directory in Hugging Face's or LitGPT's form, converted if need be; arguments as of `destination` and `convert`.

    Returns:
        The folder of the LitGPT checkpoint, and the folder for its chunks.

    Raises:
        CheckpointError, UsageError: as `destination` and `convert`.
    """
    target = destination(directory, home, out)
    with _nothing_left(target):
        make_ready(target, directory)
        if needs_conversion(directory, target):
            logger.info("converting %s%s", directory, "" if target == directory else f", into {target}")
            convert(directory, model_name, dtype, progress=True, target=target, clips=clips)
            return target, target
    return (target if is_lit_dir(target) else directory), target


def destination(directory: Path, home: Path, out: Path | None = None) -> Path:
    """The folder for the converted model and for its chunks.

    Args:
        directory: the user's directory, in Hugging Face's or LitGPT's form.
        home: where checkpoints are kept.
        out: what the user chose; None is the directory itself if it has LitGPT's form or lies in `home`, else a folder of its
            name in `home`.

    Raises:
        UsageError: there is such a folder already, of another model.
    """
    is_as_it_is = not needs_conversion(directory) and (is_lit_dir(directory) or not is_hf_dir(directory))
    if out is None and (is_as_it_is or directory.resolve().is_relative_to(home.resolve())):
        return directory
    target = out or home / directory.resolve().name
    is_used = target.is_dir() and target.resolve() != directory.resolve() and any(target.iterdir())
    if is_used and _origin(target) != str(directory.resolve()):
        raise UsageError(f"{target} is there already, and was not made from {directory}: choose another with --out DIR")
    return target


def make_ready(target: Path, directory: Path) -> None:
    """Copy the files that a model needs besides its weights to `target`; harmless if it is `directory` itself.

    Raises:
        CheckpointError: the disk refuses.
    """
    if target.resolve() == directory.resolve():
        return
    try:
        target.mkdir(parents=True, exist_ok=True)
        with replacing(target / NOTE) as file:
            file.write(json.dumps({"directory": str(directory.resolve())}).encode())
        for name in (*_KEPT, CONFIG_FILE):
            if (directory / name).is_file():
                (target / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(directory / name, target / name)
    except OSError as e:
        raise CheckpointError(f"cannot write to {target}: {e.strerror or e}") from None


@contextlib.contextmanager
def _nothing_left(folder: Path) -> Iterator[None]:
    """If the block fails, what has come into the folder meanwhile is removed: it would be in the way of another try."""
    before = set(folder.iterdir()) if folder.is_dir() else None
    try:
        yield
    except BaseException:
        if before is None:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                for path in set(folder.iterdir()) - before:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise


def _origin(target: Path) -> str | None:
    return read_kept(target / NOTE, lambda data: str(data["directory"]), None)
