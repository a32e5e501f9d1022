"""Converts a Hugging Face directory to a LitGPT checkpoint, with litgpt's converters, in a folder that is never the user's own
Hugging Face directory, unless asked for.

Works block by block, so that about one block is in memory at a time, and neither a shard nor the model. Knows no network.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mdi.checkpoint.derived import fitted
from mdi.checkpoint.disk_space import check_disk, free_bytes
from mdi.checkpoint.folder import CONFIG_FILE, TOKENIZER_FILES, WEIGHT_FILES, is_hf_dir, is_lit_dir, weight_files
from mdi.checkpoint.hfconfig import choose_config
from mdi.checkpoint.hffolder import HfFolder
from mdi.checkpoint.parts import stage_parts
from mdi.checkpoint.quantized import read_quantization
from mdi.checkpoint.records import read_kept
from mdi.checkpoint.safetensors_layout import CODES, TensorSpec
from mdi.checkpoint.shapes import check_tensors
from mdi.checkpoint.torch_tensors import as_tensor
from mdi.checkpoint.weightfile import PickledFile, WeightFile, open_weight_file
from mdi.errors import CheckpointError, UsageError
from mdi.files import replacing
from mdi.spec.model import ModelConfig, why_not_litgpt
from mdi.units import size

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

# (embedding, head) as the families name them; if one is missing, the other is used
_TIED = (
    ("model.embed_tokens.weight", "lm_head.weight"),
    ("gpt_neox.embed_in.weight", "embed_out.weight"),
    ("transformer.word_embeddings.weight", "lm_head.weight"),
    ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight"),
    ("model.language_model.embed_tokens.weight", "lm_head.weight"),
)


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
    """Write model_config.yaml and lit_model.pth of a Hugging Face checkpoint.

    Args:
        path: its directory.
        model_name: the name of a Config of litgpt; None takes the directory's name, or derives one from config.json.
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
    config, model_type = choose_config(directory, model_name)
    reader = _Reader(weight_files(directory), dtype, clips)
    _check_disk(out, reader, dtype)
    weights = out / WEIGHT_FILES[0]
    unfinished = weights.with_name(weights.name + ".part")
    try:
        if converter_lacks(config):
            _write_own(unfinished, HfFolder(directory, model_name, takes_pickles=True), dtype, clips)
        else:
            _write(unfinished, reader, config, model_type, DTYPES.get(dtype or ""), progress)
        written = PickledFile(unfinished)
        check_tensors(config, written.specs, stage_parts(0, config.n_layer, starter=True), str(directory))
        written.release()
        _sync(unfinished)
        _write_config(out, config)
        os.replace(unfinished, weights)
    except (OSError, RuntimeError) as e:  # torch's writer says RuntimeError when the disk is full
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise CheckpointError(f"cannot write {weights} ({size(free_bytes(out))} are free): {reason}") from e
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return out


class _Reader:
    """All tensors of a Hugging Face checkpoint, by name, whichever file they are in; see `convert`."""

    def __init__(self, paths: list[Path], dtype: str | None, clips: bool) -> None:
        self._dtype, self._clips = dtype, clips
        self._files: dict[str, tuple[WeightFile, str]] = {}  # name -> file, and name in the file
        for path in paths:
            file = open_weight_file(path)
            for name in file.specs:
                self._files[name] = (file, name)
        for embedding, head in _TIED:
            # litgpt's converters know a missing head, but not a missing embedding
            if head in self._files and embedding not in self._files and not self._has_embedding():
                self._files[embedding] = self._files.pop(head)
                break

    def _has_embedding(self) -> bool:
        return any(embedding in self._files for embedding, _ in _TIED)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {name: file.specs[stored] for name, (file, stored) in self._files.items()}

    def tensor(self, name: str) -> torch.Tensor:
        file, stored = self._files[name]
        array, spec = file.array(stored), file.specs[stored]
        if self._dtype is not None and CODES[self._dtype] != spec.dtype:
            array, spec = fitted(array, spec, self._dtype, name, self._clips)
        return _own(as_tensor(array, spec))

    def groups(self) -> Iterator[_Group]:
        """Embedding, head and the like, then one block after the other, complete even if it is in two files."""
        groups: dict[int, list[str]] = {-1: []}
        for name in self._files:
            match = re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", name)
            groups.setdefault(int(match[1]) if match else -1, []).append(name)
        for number in sorted(groups):
            yield _Group(self, groups[number])
            self.release()

    def release(self) -> None:
        for file in {id(file): file for file, _ in self._files.values()}.values():
            file.release()


class _Group(Mapping[str, torch.Tensor]):
    """Some of the tensors, each read when it is asked for."""

    def __init__(self, reader: _Reader, names: list[str]) -> None:
        self._reader, self._names = reader, names

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._reader.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _write(
    target: Path,
    reader: _Reader,
    config: ModelConfig,
    model_type: str | None,
    dtype: torch.dtype | None,
    progress: bool,
) -> None:
    from litgpt.utils import incremental_save
    from tqdm import tqdm

    copy = _copy_function(config, model_type)
    specs = reader.specs
    state: dict[str, Any] = {}
    bar = tqdm(
        total=sum(spec.n_bytes for spec in specs.values()), desc="converting", unit="B", unit_scale=True, delay=2,
        disable=not progress,
    )  # fmt: skip
    with bar, torch.no_grad(), incremental_save(target) as saver:
        for group in reader.groups():
            try:
                copy(state, group, saver=saver, dtype=dtype)
            except KeyError as e:
                raise _unknown(e, config, target.parent) from None
            except (NotImplementedError, ValueError) as e:
                raise CheckpointError(f"{target.parent}: litgpt cannot convert this checkpoint: {e}") from None
            if "transformer.wte.weight" in state:
                state.setdefault("lm_head.weight", state["transformer.wte.weight"])
            for name, value in state.items():
                if isinstance(value, torch.Tensor):  # litgpt leaves joined ones in memory until the end
                    state[name] = saver.store_early(_own(value))
            bar.update(sum(specs[name].n_bytes for name in group))
        saver.save(state)


def converter_lacks(config: ModelConfig) -> str | None:
    """Name what litgpt's converters do not know of a model; None if they convert it."""
    is_falcons = config.mlp_class_name == "GptNeoxMLP" and config.rotary_percentage == 1
    if is_falcons and (config.bias or not config.parallel_residual):
        return "a Falcon with biases, or with attention and MLP one after the other"
    return why_not_litgpt(config)


def _write_own(target: Path, source: HfFolder, dtype: str | None, clips: bool) -> None:
    """Write what litgpt's converters do not know as it is read, part by part."""
    from litgpt.utils import incremental_save

    state: dict[str, Any] = {}
    with torch.no_grad(), incremental_save(target) as saver:
        for part in source.part_names():
            for name, spec in source.part_specs(part).items():
                array = source.array(name)
                if dtype is not None and CODES[dtype] != spec.dtype:
                    array, spec = fitted(array, spec, dtype, name, clips)
                state[name] = saver.store_early(_own(as_tensor(array, spec)))
            source.release()
        saver.save(state)


def _copy_function(config: ModelConfig, model_type: str | None) -> Callable[..., None]:
    """litgpt's converter for a family: by its name, as litgpt itself chooses, or by the model_type it was derived from."""
    from litgpt.config import Config
    from litgpt.scripts import convert_hf_checkpoint as litgpt

    name = config.name if model_type is None else litgpt_family(model_type, config)
    lit_config, name = Config(**{**config.litgpt_plain(), "name": name}), name.lower()
    qkv: dict[Any, Any] = {}  # halves of joined tensors, between two calls
    if "falcon" in name:
        return functools.partial(litgpt.copy_weights_falcon, lit_config)
    if name.startswith("gemma-2"):
        return functools.partial(litgpt.copy_weights_gemma_2, qkv)
    if name.startswith("gemma-3"):
        return functools.partial(litgpt.copy_weights_gemma_3, qkv, config=lit_config)
    families = {
        ("phi",): litgpt.copy_weights_phi,
        ("qwen2.5", "qwq"): litgpt.copy_weights_qwen_2_5,
        ("olmo-2-",): litgpt.copy_weights_olmo2,
        ("qwen3",): litgpt.copy_weights_qwen_3,
    }
    for prefixes, function in families.items():
        if name.startswith(prefixes):
            return functools.partial(function, lit_config, qkv)
    if config.mlp_class_name in ("LLaMAMLP", "GemmaMLP", "LLaMAMoE"):
        return functools.partial(litgpt.copy_weights_hf_llama, lit_config, qkv)
    return functools.partial(litgpt.copy_weights_gpt_neox, lit_config)


def litgpt_family(model_type: str, config: ModelConfig) -> str:
    """A name by which litgpt's converters recognise a model of this model_type: they go by names."""
    if model_type == "falcon":
        return "falcon-7b" if config.shared_attention_norm else "falcon-40b"
    families = {
        "olmo2": "OLMo-2-", "gemma2": "Gemma-2", "gemma3_text": "Gemma-3", "phi": "phi", "phi3": "Phi-3",
        "qwen2": "Qwen2.5", "qwen3": "Qwen3", "qwen3_moe": "Qwen3", "gpt_neox": "pythia",
    }  # fmt: skip
    return families.get(model_type, "Llama")


def _unknown(error: KeyError, config: ModelConfig, directory: Path) -> CheckpointError:
    name = str(error.args[0]) if error.args else "?"
    if name == "transformer.wte.weight":
        return CheckpointError(f"{directory} has neither an embedding nor a head")
    return CheckpointError(
        f"{directory} holds the tensor {name.replace('{}', '<i>')}, which a {config.name} of litgpt does not have: "
        "is --model-name right?"
    )


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, without the rest of a larger storage, which would be written with it."""
    if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() and tensor.is_contiguous():
        return tensor
    return tensor.contiguous().clone()


def _check_disk(directory: Path, reader: _Reader, dtype: str | None) -> None:
    specs = reader.specs.values()
    needed = sum(spec.n_bytes * (DTYPES[dtype].itemsize / spec.itemsize if dtype else 1) for spec in specs)
    check_disk(directory, needed, "converting", CheckpointError)


def _write_config(directory: Path, config: ModelConfig) -> None:
    import yaml

    with replacing(directory / CONFIG_FILE) as file:
        file.write(yaml.safe_dump(config.plain()).encode())


def _sync(path: Path) -> None:
    with open(path, "r+b") as file:
        os.fsync(file.fileno())


logger = logging.getLogger("mdi")

NOTE = "converted_from.json"  # in a folder that was made here: of which directory

_KEPT = (*TOKENIZER_FILES, "prompt_style.yaml")


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
                    path.unlink()
        raise


def _origin(target: Path) -> str | None:
    return read_kept(target / NOTE, lambda data: str(data["directory"]), None)
