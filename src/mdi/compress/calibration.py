"""Which input columns of a model's layers are large: the model is run over a short text, block by block, and watched.

Only one block is in memory at a time. Petals and LLM.int8() (Dettmers et al. 2022, section 3) look for such columns at each
forward; looking once costs nothing when the model runs, and finds the columns that are large for (nearly) every token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from litgpt.config import Config

from mdi.checkpoint.files import replacing
from mdi.checkpoint.source import WeightSource
from mdi.errors import CheckpointError
from mdi.model.quantize import OUTLIER_RATIO, large_columns, linears
from mdi.model.stage import Stage, StarterStage
from mdi.settings import parse_json

N_ROWS = 512  # tokens that the model is run over
FILE = "outliers.json"

Outliers = Mapping[str, Sequence[int]]
Progress = Callable[[int, int], None]  # blocks done, blocks in all


def find_outliers(source: WeightSource, ids: Sequence[int], progress: Progress | None = None) -> dict[str, list[int]]:
    """Large input columns by the name of the weight whose columns they are; layers without any are left out.

    Args:
        source: the whole model, in plain weights.
        ids: tokens of the text; at most N_ROWS of them are used.
        progress: told after each block.

    Raises:
        CheckpointError: the weights cannot be read, or are not finite.
    """
    config = Config(**source.config_dict)
    ids = list(ids)[: min(N_ROWS, config.block_size)]
    found: dict[str, list[int]] = {}
    head = StarterStage(config, 0)
    _load(head, ["embedding", "head"], source)
    x = head.embed(torch.tensor(ids))
    for i in range(config.n_layer):
        stage = Stage(config, i, i + 1)
        _load(stage, [f"block.{i}"], source)
        stage.prepare(len(ids), x.device, x.dtype)
        prefix = f"transformer.h.{i}."
        with _Watch({prefix + path: linear for path, linear in linears(stage.blocks[0])}) as watch:
            x = stage(x, [(0, 0, len(ids))])
        if not torch.isfinite(x).all():
            raise CheckpointError(
                f"block {i} of {source.model} gives numbers that are not finite: its weights are damaged"
            )
        found.update(watch.large())
        if progress is not None:
            progress(i + 1, config.n_layer)
    with _Watch({"lm_head": head.lm_head}) as watch:
        head.head(x)
    found.update(watch.large())
    return found


def kept_outliers(
    source: WeightSource, directory: Path, ids: Sequence[int], progress: Progress | None = None
) -> tuple[dict[str, list[int]], str]:
    """`find_outliers`, remembered in the checkpoint's directory, and a label that says what they were found with."""
    shas = [[name, spec.dtype, list(spec.shape)] for name, spec in source.specs.items()]
    text = json.dumps([source.config_hash, list(ids), OUTLIER_RATIO, shas, _stamp(directory)])
    label = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = directory / FILE
    columns = _read(path, label)
    if columns is None:
        columns = find_outliers(source, ids, progress)
        with replacing(path) as file:
            file.write(json.dumps({"label": label, "columns": columns}).encode())
    return columns, label


class _Watch:
    """The largest number of each input column of some layers, while they are run."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self._size: dict[str, torch.Tensor] = {}
        self._hooks = [layer.register_forward_pre_hook(self._see(name)) for name, layer in layers.items()]

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _see(self, name: str) -> Callable[[nn.Module, Any], None]:
        def hook(_: nn.Module, args: Any) -> None:
            rows = args[0].detach().flatten(0, -2).abs()
            if rows.size(0):  # an expert that no token chose shows nothing
                seen = rows.amax(dim=0)
                self._size[name] = torch.maximum(self._size[name], seen) if name in self._size else seen

        return hook

    def large(self) -> dict[str, list[int]]:
        columns = {f"{name}.weight": large_columns(size).tolist() for name, size in self._size.items()}
        return {name: numbers for name, numbers in columns.items() if numbers}


def _load(stage: Stage, parts: list[str], source: WeightSource) -> None:
    stage.load(parts, source.tensors, torch.device("cpu"), torch.float32)
    source.release()


def _stamp(directory: Path) -> list[list[object]]:
    """Size and time of the weight files, which stand for their contents."""
    files = sorted(path for path in directory.glob("lit_model.*"))
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _read(path: Path, label: str) -> dict[str, list[int]] | None:
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
        if data["label"] == label:
            return {str(name): [int(n) for n in numbers] for name, numbers in data["columns"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # not there, or not ours: it is made again
    return None
