"""What is trained at the starter while the blocks stay as they are: LoRA, prompts, deep prompts, prefixes; and its files.

The nodes get it in each step, as the tensors of `mdi.stages.trained_tensors`. In a folder it has PEFT's form, which peft
and `--adapter NAME=DIR` read; deep prompts, which PEFT does not have, are in a form of our own.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from mdi.checkpoint.adapters import BASE_KEY, CONFIG_FILE, WEIGHTS_FILE, AdaptedRows, adapted_rows, norm_gain
from mdi.checkpoint.packing import norm_before
from mdi.checkpoint.parts import serialize
from mdi.checkpoint.safetensors_layout import STRANGERS_LIMIT_BYTES, TensorSpec
from mdi.checkpoint.virtual_adapters import DEEP_TYPE, EMBEDDINGS, PREFIX_TYPE, PROMPT_TYPE
from mdi.checkpoint.virtual_rows import MOST_VIRTUAL, PREFIX_KEY, row_widths, why_no_rows
from mdi.checkpoint.weightfile import SafetensorsFile
from mdi.checkpoint.weights import WeightSource
from mdi.errors import CheckpointError, Code, UsageError
from mdi.families.names import Names
from mdi.families.registry import family_of
from mdi.files import replacing
from mdi.kernels.blocks import MOST_RANK
from mdi.model.plain import ModelConfig, spec_of
from mdi.model.spec import Attention
from mdi.spec.decode import Meta, decode_text
from mdi.spec.options import ADAPTED, DEEP_PROMPT, LORA, PREFIX, PROMPT
from mdi.stages.side import MOST_LABELS

KEY = "mdi_tuning"  # of the file's metadata
SCORE = "base_model.model.score.weight"  # of the classes, as PEFT has it beside LoRA
SCORE_OF_VIRTUAL = "base_model.score.weight"  # ... and beside prompts and prefixes, whose model is wrapped once less
Named = dict[str, torch.nn.Parameter]


@dataclass(frozen=True)
class TuningKind:
    """What is trained, besides its numbers.

    Attributes:
        method: of spec.options.METHODS, but not "side".
        rank, alpha, targets: of LoRA; targets are of spec.options.ADAPTED.
        length: rows of a prompt or prefix.
        labels: of the classes; none where texts are written.
    """

    method: str
    rank: Annotated[int, Meta(ge=1, le=MOST_RANK)] = 8
    alpha: Annotated[int, Meta(ge=1, le=1 << 16)] = 16
    targets: tuple[str, ...] = ("query", "value")
    length: Annotated[int, Meta(ge=1, le=MOST_VIRTUAL)] = 16
    labels: Annotated[tuple[str, ...], Meta(max_length=MOST_LABELS)] = ()


class TunedTensors(ABC):
    """Attributes:
    named: what is learned, by names of its own.
    n_rows: rows that stand before those of each text; 0: none.
    """

    n_rows = 0
    _score = SCORE  # its name in the file

    def __init__(self, kind: TuningKind, config: ModelConfig, seed: int) -> None:
        self.kind, self.spec = kind, spec_of(config)
        self.named: Named = {}
        self._generator = torch.Generator().manual_seed(seed)
        if kind.labels:
            self._add(SCORE, (len(kind.labels), self.spec.width), 0.02)

    def _add(self, name: str, shape: tuple[int, ...], scale: float) -> torch.nn.Parameter:
        self.named[name] = torch.nn.Parameter(scale * torch.randn(shape, generator=self._generator))
        return self.named[name]

    @property
    def _blocks(self) -> range:
        return range(self.spec.n_layer)

    def before(self) -> torch.Tensor | None:
        """The rows before each text, (n_rows, n_embd)."""
        return None

    @abstractmethod
    def of_blocks(self) -> dict[str, torch.Tensor]:
        """What the nodes get."""

    # Its files

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """PEFT's settings, of this method."""

    def _arrays(self) -> dict[str, torch.Tensor]:
        """What PEFT's file has."""
        return {self._in_file(name): one for name, one in self.named.items()}

    def _in_file(self, name: str) -> str:
        return self._score if name == SCORE else name

    def _take(self, arrays: Mapping[str, torch.Tensor]) -> None:
        """Learned numbers from such a file."""
        for name, parameter in self.named.items():
            parameter.copy_(arrays[self._in_file(name)])

    def write(self, folder: Path, base: str, weights: str | None) -> Path:
        """Write it into a folder, which is made.

        Args:
            base: name of the model.
            weights: `weights_hash` of the model's, if that is known.

        Raises:
            CheckpointError: the disk refuses.
        """
        found = {name: np.ascontiguousarray(one.detach().numpy()) for name, one in self._arrays().items()}
        specs = {name: TensorSpec("F32", array.shape) for name, array in found.items()}
        metadata = {"format": "pt", KEY: json.dumps(asdict(self.kind), sort_keys=True)}
        if weights is not None:
            metadata[BASE_KEY] = weights
        with replacing(folder / WEIGHTS_FILE, makes_folder=True) as file:
            for piece in serialize(specs, found.__getitem__, metadata):
                file.write(piece)
        settings = {
            "task_type": "SEQ_CLS" if self.kind.labels else "CAUSAL_LM", "base_model_name_or_path": base,
            "inference_mode": True, **self._settings(),
        }  # fmt: skip
        with replacing(folder / CONFIG_FILE) as file:
            file.write(json.dumps(settings, indent=1).encode())
        return folder / WEIGHTS_FILE

    def _virtual(self, peft_type: str, n_heads: int, width: int) -> dict[str, Any]:
        return {
            "peft_type": peft_type, "num_virtual_tokens": self.kind.length, "token_dim": width,
            "num_transformer_submodules": 1, "num_attention_heads": n_heads, "num_layers": self.spec.n_layer,
        }  # fmt: skip


# Our layers by what --lora-targets calls them; of query, key and value, which one it is.
_LAYERS: dict[str, tuple[tuple[str, ...], int | None]] = {
    "query": (("attn.qkv",), 0),
    "key": (("attn.qkv",), 1),
    "value": (("attn.qkv",), 2),
    "projection": (("attn.proj",), None),
    "mlp": (("mlp.fc_1", "mlp.fc_2", "mlp.fc", "mlp.proj"), None),
}


def _modules(names: Names, target: str) -> list[str]:
    """Of transformers' model. Its own name if the family has no such module, which no block has."""
    layers, part = _LAYERS[target]
    found = [names.modules(layer) for layer in layers]
    one = [modules if part is None or len(modules) == 1 else modules[part : part + 1] for modules in found]
    return [module for modules in one for module in modules] or [target]


class Lora(TunedTensors):
    """A and B of modules of transformers' model, W + alpha / r B A; B begins with zeros. See mdi.checkpoint.adapters.

    Args:
        gain: gives a norm's weight by its name, None if there is none.

    Raises:
        UsageError: the model's blocks have no such layers.
    """

    def __init__(
        self, kind: TuningKind, config: ModelConfig, seed: int, gain: Callable[[str], np.ndarray | None]
    ) -> None:
        super().__init__(kind, config, seed)
        names = family_of(config).names(config)
        self._config = config
        self._path = f"{names.prefixes[0]}{names.blocks}"
        self._of_family = {module for one in _LAYERS for module in _modules(names, one)}
        self._modules = list(dict.fromkeys(module for one in kind.targets for module in _modules(names, one)))
        self._rows = {(i, module): self._rows_of(i, module) for i in self._blocks for module in self._modules}
        self._gains: dict[str, torch.Tensor] = {}
        for (i, _), rows in self._rows.items():
            for one in rows:
                norm = norm_before(f"transformer.h.{i}.{one.layer}.weight", self.spec)
                if norm is not None and (found := gain(norm)) is not None:
                    self._gains[f"{norm.removesuffix('weight')}gain"] = torch.tensor(found)

    def _rows_of(self, block: int, module: str) -> tuple[AdaptedRows, ...]:
        rows, n_out, n_in = adapted_rows(self._config, "the model", block, module)
        if not rows:
            raise UsageError(
                f"--lora-targets: block {block} has no {module} that can be adapted: experts, their router and latent "
                "attention cannot; name others", code=Code.KERNELS,
            )  # fmt: skip
        path = f"base_model.model.{self._path}.{block}.{module}"
        bound = n_in**-0.5
        a = torch.empty(self.kind.rank, n_in).uniform_(-bound, bound, generator=self._generator)
        self.named[f"{path}.lora_A.weight"] = torch.nn.Parameter(a)
        self._add(f"{path}.lora_B.weight", (n_out, self.kind.rank), 0)
        return rows

    def of_blocks(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = dict(self._gains)
        scale = self.kind.alpha / self.kind.rank
        for (i, module), rows in self._rows.items():
            path = f"base_model.model.{self._path}.{i}.{module}"
            for one in rows:
                b = self.named[f"{path}.lora_B.weight"][torch.from_numpy(one.numbers(self.spec))] * scale
                found[f"{one.name(i, 1)}.a"] = self.named[f"{path}.lora_A.weight"]
                found[f"{one.name(i, 1)}.b"] = b.T
        return found

    def _settings(self) -> dict[str, Any]:
        last = [module.rpartition(".")[2] for module in self._of_family]
        names = sorted(
            module if last.count(name := module.rpartition(".")[2]) > 1 else name for module in self._modules
        )
        return {
            "peft_type": "LORA", "r": self.kind.rank, "lora_alpha": self.kind.alpha, "lora_dropout": 0.0, "bias": "none",
            "target_modules": names, **({"modules_to_save": ["score"]} if self.kind.labels else {}),
        }  # fmt: skip


class Prompt(TunedTensors):
    """Rows before each text; deep prompts are also added to these rows before each further block, and begin with zeros.

    Args:
        embed: gives the rows of token ids; the first ones begin as those of random tokens.
    """

    _score = SCORE_OF_VIRTUAL

    def __init__(
        self, kind: TuningKind, config: ModelConfig, seed: int, embed: Callable[[np.ndarray, int], np.ndarray] | None
    ) -> None:
        super().__init__(kind, config, seed)
        if (why_not := why_no_rows(False, self.spec)) is not None:
            raise UsageError(
                f"--method {kind.method}: {config.name} {why_not}: choose lora or prefix", code=Code.KERNELS
            )
        self.n_rows = kind.length
        rows = self._add(EMBEDDINGS, (kind.length, self.spec.width), 0.02)
        if embed is not None:
            ids = torch.randint(0, self.spec.n_vocab, (kind.length,), generator=self._generator)
            rows.data = torch.tensor(embed(ids.numpy()[None], 0)[0])
        for i in self._blocks[1:] if kind.method == DEEP_PROMPT else ():
            self._add(f"transformer.h.{i}.prompt", (kind.length, self.spec.width), 0)

    def before(self) -> torch.Tensor | None:
        return self.named[EMBEDDINGS]

    def of_blocks(self) -> dict[str, torch.Tensor]:
        return {name: one for name, one in self.named.items() if name not in (EMBEDDINGS, SCORE)}

    def _settings(self) -> dict[str, Any]:
        kind = DEEP_TYPE if self.kind.method == DEEP_PROMPT else PROMPT_TYPE
        return {
            **self._virtual(kind, self.spec.blocks[0].mixer.n_head, self.spec.width),
            "prompt_tuning_init": "RANDOM",
        }


class Prefix(TunedTensors):
    """Keys and values of each block that stand before those of each text."""

    _score = SCORE_OF_VIRTUAL

    def __init__(self, kind: TuningKind, config: ModelConfig, seed: int) -> None:
        super().__init__(kind, config, seed)
        if (why_not := why_no_rows(True, self.spec)) is not None:
            raise UsageError(f"--method {PREFIX}: {config.name} {why_not}", code=Code.KERNELS)
        self._width = row_widths(self.spec)[PREFIX_KEY]
        for i in self._blocks:
            for name in ("key", "value"):
                self._add(f"transformer.h.{i}.prefix_{name}", (kind.length, self._width), 0.02)

    def of_blocks(self) -> dict[str, torch.Tensor]:
        return {name: one for name, one in self.named.items() if name != SCORE}

    def _arrays(self) -> dict[str, torch.Tensor]:
        own = torch.cat(list(self.of_blocks().values()), dim=1)
        return {EMBEDDINGS: own, **({self._score: self.named[SCORE]} if self.kind.labels else {})}

    def _take(self, arrays: Mapping[str, torch.Tensor]) -> None:
        for name, rows in zip(self.of_blocks(), arrays[EMBEDDINGS].split(self._width, dim=1), strict=True):
            self.named[name].copy_(rows)
        if self.kind.labels:
            self.named[SCORE].copy_(arrays[self._score])

    def _settings(self) -> dict[str, Any]:
        mixer = self.spec.blocks[0].mixer
        assert isinstance(mixer, Attention)  # see why_no_rows
        own = self._virtual(PREFIX_TYPE, mixer.n_groups, self._width)
        return {**own, "encoder_hidden_size": self._width, "prefix_projection": False}


def new_tensors(
    kind: TuningKind, config: ModelConfig, seed: int, source: Callable[[str], WeightSource],
    embed: Callable[[np.ndarray, int], np.ndarray] | None = None,
) -> TunedTensors:  # fmt: skip
    """Tensors that are not trained yet. Raises UsageError, CheckpointError: the model cannot have them.

    Args:
        source: of a part of the model.
        embed: gives the rows of token ids.
    """
    if kind.method == LORA:
        return Lora(kind, config, seed, lambda norm: norm_gain(source(f"block.{norm.split('.')[2]}"), norm))
    if kind.method == PREFIX:
        return Prefix(kind, config, seed)
    assert kind.method in (PROMPT, DEEP_PROMPT)
    return Prompt(kind, config, seed, embed)


def read_tensors(
    folder: Path, config: ModelConfig, source: Callable[[str], WeightSource], base: str | None = None
) -> TunedTensors:
    """Tensors that `TunedTensors.write` has written, perhaps for a stranger. Raises UsageError, CheckpointError.

    Args:
        base: `weights_hash` of the model's weights, if that is known.
    """
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise UsageError(f"{folder} has no {WEIGHTS_FILE}: give a folder that `mdi finetune` wrote", code=Code.MISSING)
    file = SafetensorsFile(path, STRANGERS_LIMIT_BYTES)
    if KEY not in file.metadata:
        raise CheckpointError(f"{path} was not written by `mdi finetune`")
    kind = decode_text(TuningKind, file.metadata[KEY], str(path), CheckpointError)
    if kind.method not in (LORA, PROMPT, DEEP_PROMPT, PREFIX) or not {*kind.targets} <= {*ADAPTED}:
        raise CheckpointError(f"{path}: its description is none of `mdi finetune`")
    if base is not None and file.metadata.get(BASE_KEY, base) != base:
        raise CheckpointError(f"{path} was trained on other weights than this model's", code=Code.ADAPTER)
    found = new_tensors(kind, config, 0, source)
    wanted = {name: TensorSpec("F32", tuple(one.shape)) for name, one in found._arrays().items()}
    if file.specs != wanted:
        raise CheckpointError(f"{path}: its tensors are not those of its description for this model")
    arrays = {name: torch.from_numpy(file.array(name)) for name in wanted}
    if not all(bool(one.isfinite().all()) for one in arrays.values()):
        raise CheckpointError(f"{path} has numbers that are not finite")
    with torch.no_grad():
        found._take(arrays)
    return found


def n_numbers(tensors: Iterable[torch.Tensor] | Sequence[np.ndarray]) -> int:
    """How many numbers they have."""
    return sum(int(np.prod(one.shape)) for one in tensors)
