"""A model as a Hugging Face directory for other programs: config.json, then the weights part by part, one shard each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdi.checkpoint.folder import POOLING_FILES, TOKENIZER_FILES
from mdi.checkpoint.shapes import interleaved_rows
from mdi.checkpoint.weights import WeightSource
from mdi.errors import CheckpointError, UsageError
from mdi.families.names import Names
from mdi.families.registry import written
from mdi.files import replacing
from mdi.model.plain import ModelConfig, spec_of
from mdi.model.tensors import EMBEDDING, HEAD

if TYPE_CHECKING:
    import torch

Tensors = dict[str, "torch.Tensor"]


def export_hf(
    source: WeightSource, directory: Path, out: Path, progress: Callable[[int, int], None] | None = None
) -> None:
    """Write config.json, shards with an index, and the tokenizer's files into `out`.

    Args:
        source: of the whole model.
        directory: where its tokenizer is.
        out: a new directory, or an empty one.

    Raises:
        UsageError: `out` holds something already.
        CheckpointError: transformers has no such model, or the disk refuses.
    """
    import torch

    config = source.config
    family, hf = written(config)
    is_tied = torch.equal(source.tensor(EMBEDDING), source.tensor(HEAD))
    if family.has_one_matrix and not is_tied:
        raise CheckpointError(
            f"head and embedding of {source} differ, which a Hugging Face {family.model_type} model cannot have"
        )
    made_folder(out)
    names = family.names(config)
    parts = [(source, names, part) for part in source.part_names()]
    if (more := source.predicting()) is not None:
        of_more = names.of_predicting(source.spec.n_layer, names.prefixes[0])
        if of_more is None:
            raise CheckpointError(f"a Hugging Face {family.model_type} model has no layers for multi-token prediction")
        parts += [(more, of_more, part) for part in more.part_names()]
        hf[family.predicting_word] = more.spec.n_layer
    weight_map: dict[str, str] = {}
    n_bytes, total = 0, sum(spec.n_bytes for one in (source, more) if one is not None for spec in one.specs.values())
    for i, (of, own, part) in enumerate(parts):
        ours = {name: tensor for name, tensor in of.tensors(part).items() if not (is_tied and name == HEAD)}
        made = _as_stored(own, of.config, ours)
        # blocks that predict further tokens share some, which the first one has written
        tensors = {name: tensor for name, tensor in made.items() if name not in weight_map}
        shard = f"model-{i + 1:05}-of-{len(parts):05}.safetensors"
        _write_shard(out / shard, tensors)
        weight_map |= dict.fromkeys(tensors, shard)
        n_bytes += sum(t.nbytes for t in tensors.values())
        of.release()
        if progress is not None:
            progress(n_bytes, total)
    _write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": n_bytes}, "weight_map": weight_map})
    for name in (*TOKENIZER_FILES, *POOLING_FILES):
        if (directory / name).is_file():
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(directory / name, out / name)
    _write_json(out / "config.json", {**hf, "tie_word_embeddings": is_tied, "torch_dtype": source.dtype})


def _as_stored(names: Names, config: ModelConfig, tensors: Tensors) -> Tensors:
    """The tensors of a part as the family has them: the reverse of how HfFolder reads them."""
    import torch

    found: Tensors = {}
    for name, tensor in tensors.items():
        pieces, first = names.places(name, tuple(tensor.shape), config)[0], 0
        for piece in pieces:
            if piece.tensor not in found:
                found[piece.tensor] = torch.zeros(piece.shape, dtype=tensor.dtype)
            rows = found[piece.tensor] if piece.expert is None else found[piece.tensor][piece.expert]
            rows = rows.T if piece.is_transposed else rows
            rows = rows if piece.rows is None else rows[slice(*piece.rows)]
            numbers = interleaved_rows(spec_of(config)) if piece.is_interleaved else piece.row_numbers
            n_rows = len(rows) if numbers is None else len(numbers)
            own = tensor[first : first + n_rows]
            if numbers is None:
                rows.copy_(own)
            else:
                rows[torch.from_numpy(numbers)] = own
            first += n_rows
    return found


def _write_shard(path: Path, tensors: Tensors) -> None:
    from safetensors.torch import save

    with replacing(path) as file:
        file.write(save(tensors, metadata={"format": "pt"}))


def _write_json(path: Path, data: dict[str, Any]) -> None:
    with replacing(path) as file:
        file.write(json.dumps(data, indent=2).encode())


def made_folder(out: Path) -> None:
    """An empty directory. Raises UsageError, CheckpointError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise UsageError(f"{out} is not empty: name a new directory")
    except OSError as e:
        raise CheckpointError(f"cannot write to {out}: {e.strerror or e}") from None
