"""Opens weights on this machine: a LitGPT checkpoint, or a chunk of one.

Nothing is loaded ahead and nothing in the files is executed. Knows no network and no devices.
"""

from __future__ import annotations

import copy
import functools
import logging
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from mdi.checkpoint.chunks import ChunkFile
from mdi.checkpoint.folder import (
    CONFIG_FILE,
    PARTS_FILE,
    PREDICTING_FILE,
    WEIGHT_FILES,
    is_hf_dir,
    is_lit_dir,
    no_checkpoint,
    weight_files,
)
from mdi.checkpoint.hfconfig import other_positions
from mdi.checkpoint.manifest import config_hash
from mdi.checkpoint.parts import stage_parts
from mdi.checkpoint.predicting import check_predicting, if_whole, n_predicting_blocks
from mdi.checkpoint.records import HashRecord, weights_stamp
from mdi.checkpoint.safetensors_layout import TensorSpec, main_dtype
from mdi.checkpoint.shapes import check_tensors, interleaved_rows, model_shapes, read_config
from mdi.checkpoint.weightfile import WeightFile, open_weight_file
from mdi.checkpoint.weights import WeightSource
from mdi.errors import CheckpointError
from mdi.kernels.lazy_rows import LazyRows, Rows
from mdi.model.plain import ModelConfig, of_predicting
from mdi.model.tensors import EMBEDDING, HEAD

logger = logging.getLogger(__name__)


class LitCheckpoint(WeightSource):
    """A directory with model_config.yaml and lit_model.pth or lit_model.safetensors.

    If the embedding or the head is missing, the other is used for it (tied weights).

    Raises:
        CheckpointError: something is missing, cut short, damaged, or of another shape than the config says.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        weights = next((p for name in WEIGHT_FILES if (p := self.path / name).is_file()), None)
        if weights is None or not (self.path / CONFIG_FILE).is_file():
            raise CheckpointError(no_checkpoint(self.path))
        self.config = read_config(self.path / CONFIG_FILE)
        if differing := other_positions(self.config, self.path / "config.json"):
            _warn_of_positions(weights, ", ".join(differing))
        self.config_hash = config_hash(self.config)
        self.model = self.config.name or self.path.absolute().name
        self.file: WeightFile = open_weight_file(weights)
        self._stored = _litgpt_names(self.file.specs)  # name -> name in the file
        self.specs = {name: self.file.specs[stored] for name, stored in self._stored.items()}
        model_shapes(self.config, str(weights))  # complain now
        check_tensors(self.config, self.specs, self.part_names(), str(weights))
        self.dtype = main_dtype(self.specs.values())
        self.hashes = HashRecord(self.path / PARTS_FILE, weights_stamp([weights], self.config_hash))

    def __str__(self) -> str:
        return str(self.path)

    def array(self, name: str) -> np.ndarray:
        stored = self._stored[name]
        array = self.file.array(stored)
        # LitGPT before 0.5 interleaved query, key and value by group
        return array[interleaved_rows(self.spec)] if ".attn.attn." in stored else array

    def rows(self, name: str) -> Rows:
        stored, shape = self._stored[name], self.specs[name].shape
        if ".attn.attn." in stored:
            return self.array(name)
        return LazyRows(shape, partial(self.file.array, stored))

    def same_as(self, name: str) -> str:
        is_tied = name == HEAD and self.file.is_same(self._stored[HEAD], self._stored[EMBEDDING])
        return EMBEDDING if is_tied else name

    def read_bytes(self, name: str) -> int:
        return self.specs[name].n_bytes if self.file.stays_mapped else 0

    def part_names(self) -> list[str]:
        return stage_parts(0, self.spec.n_layer, starter=not self.is_predicting)

    def predicting(self) -> WeightSource | None:
        path = self.path / PREDICTING_FILE
        return if_whole(self, lambda: self._with_predicting(path)) if path.is_file() else None

    def _with_predicting(self, path: Path) -> WeightSource:
        """Raises CheckpointError."""
        found = copy.copy(self)
        found.file = open_weight_file(path)
        found.specs, found._stored = found.file.specs, {name: name for name in found.file.specs}
        found.hashes, found.is_predicting = None, True
        found.config = of_predicting(self.config, n_predicting_blocks(found.specs))
        check_predicting(found)
        return found

    def release(self) -> None:
        self.file.release()


def open_source(path: str | Path) -> WeightSource:
    """Weights, wherever they are; nothing is written beside them but a record of their hashes in LitGPT's own folders.

    Args:
        path: a folder in LitGPT's form, in Hugging Face's form (as it is, with safetensors), or that of a GGUF file; a GGUF
            file; a weight file in LitGPT's form; or a chunk. A folder with both forms is read in LitGPT's.

    Raises:
        CheckpointError: it is none of these, or damaged.
    """
    path = Path(path)
    if path.suffix == ".gguf" and path.is_file():
        from mdi.checkpoint.ggufsource import GgufSource

        return GgufSource(path)
    if path.is_dir():
        from mdi.checkpoint.ggufsource import open_gguf_directory  # needs tokenizers; a chunk does not
        from mdi.checkpoint.hffolder import HfFolder

        source = open_gguf_directory(path)
        return source or (HfFolder(path) if is_hf_dir(path) and not is_lit_dir(path) else LitCheckpoint(path))
    if path.name in WEIGHT_FILES and path.is_file():
        return LitCheckpoint(path.parent)
    return ChunkFile(path)


def settings_of(path: Path) -> ModelConfig:
    """The configuration of a checkpoint's folder; the weights need not be there. Raises CheckpointError."""
    if (path / CONFIG_FILE).is_file():
        return read_config(path / CONFIG_FILE)
    if (path / "config.json").is_file():
        from mdi.checkpoint.hffolder import folder_config

        return folder_config(path)
    raise CheckpointError(no_checkpoint(path))


@functools.cache  # a run opens its folder several times
def _warn_of_positions(weights: Path, differing: str) -> None:
    """Say that a folder was converted with the positions of litgpt's table, as litgpt and older versions do."""
    folder = weights.parent
    originals = weight_files(folder)
    again = f"remove {weights} and run mdi prepare-model {folder}"
    if not originals or not all(path.is_file() for path in originals):
        again = "download the model again, for there are no other weights in this folder"
    logger.warning(
        "warning: %s has other positions than the config.json beside it, as litgpt and older versions converted models, so "
        "that texts may be wrong (%s): %s",
        folder / CONFIG_FILE, differing, again,
    )  # fmt: skip


def _litgpt_names(specs: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Today's name of each tensor -> its name in the file: tied weights, and the names of litgpt before 0.5."""
    names = {re.sub(r"\.attn\.attn\.(weight|bias)$", r".attn.qkv.\1", name): name for name in specs}
    if EMBEDDING in names:
        names.setdefault(HEAD, names[EMBEDDING])
    elif HEAD in names:
        names[EMBEDDING] = names[HEAD]
    return names
