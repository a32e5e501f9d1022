"""Writes a model as a Hugging Face directory for other programs, part by part, one shard each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdi.checkpoint.convert import litgpt_family
from mdi.checkpoint.folder import TOKENIZER_FILES
from mdi.checkpoint.hffamilies import Json
from mdi.checkpoint.hfwrite import hf_config
from mdi.checkpoint.weights import WeightSource
from mdi.errors import CheckpointError, UsageError
from mdi.whole_files import replacing

if TYPE_CHECKING:
    import torch

_EMBEDDING, _HEAD = "transformer.wte.weight", "lm_head.weight"

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

    config = source.config_dict
    written = hf_config(config)
    model_type = written["model_type"]
    is_tied = torch.equal(source.tensor(_EMBEDDING), source.tensor(_HEAD))
    if model_type.startswith("gemma") and not is_tied:
        raise CheckpointError(
            f"head and embedding of {source} differ, which a Hugging Face {model_type} model cannot have"
        )
    _make(out)
    convert = _converter(model_type, config)
    parts = source.part_names()
    weight_map: dict[str, str] = {}
    n_bytes = 0
    for i, part in enumerate(parts):
        tensors = convert({name: t for name, t in source.tensors(part).items() if not (is_tied and name == _HEAD)})
        shard = f"model-{i + 1:05}-of-{len(parts):05}.safetensors"
        _write_shard(out / shard, tensors)
        weight_map |= dict.fromkeys(tensors, shard)
        n_bytes += sum(t.nbytes for t in tensors.values())
        source.release()
        if progress is not None:
            progress(n_bytes, sum(spec.n_bytes for spec in source.specs.values()))
    _write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": n_bytes}, "weight_map": weight_map})
    for name in TOKENIZER_FILES:
        if (directory / name).is_file():
            shutil.copyfile(directory / name, out / name)
    _write_json(out / "config.json", {**written, "tie_word_embeddings": is_tied, "torch_dtype": source.dtype})


def _converter(model_type: str, config: Json) -> Callable[[Tensors], Tensors]:
    """litgpt's way back for a family, over the tensors of a part."""
    from litgpt.config import Config
    from litgpt.scripts import convert_lit_checkpoint as litgpt

    functions: dict[str, Callable[..., None]] = {
        "falcon": litgpt.copy_weights_falcon,
        "gemma2": litgpt.copy_weights_gemma_2,
        "gemma3_text": litgpt.copy_weights_gemma_3,
        "phi": litgpt.copy_weights_phi,
        "phi3": litgpt.copy_weights_phi,
        "qwen2": litgpt.copy_weights_qwen_2_5,
        "qwen3": litgpt.copy_weights_qwen_3,
        "qwen3_moe": litgpt.copy_weights_qwen_3,
        "olmo2": litgpt.copy_weights_olmo2,
        "gpt_neox": litgpt.copy_weights_gpt_neox,
    }
    copy = functions.get(model_type, litgpt.copy_weights_llama)
    lit_config = Config(**{**config, "name": litgpt_family(model_type, config)})

    def convert(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        rest = dict(tensors)
        for name in tensors if model_type == "olmo2" else ():  # which litgpt's way back forgets
            if name.endswith("post_attention_norm.weight"):
                number = name.split(".")[2]
                found[f"model.layers.{number}.post_attention_layernorm.weight"] = rest.pop(name)
        copy(lit_config, found, rest)
        return found

    return convert


def _write_shard(path: Path, tensors: Tensors) -> None:
    from safetensors.torch import save

    with replacing(path) as file:
        file.write(save({name: t.contiguous().clone() for name, t in tensors.items()}, metadata={"format": "pt"}))


def _write_json(path: Path, data: dict[str, Any]) -> None:
    with replacing(path) as file:
        file.write(json.dumps(data, indent=2).encode())


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise UsageError(f"{out} is not empty: name a new directory")
    except OSError as e:
        raise CheckpointError(f"cannot write to {out}: {e.strerror or e}") from None
