"""Adapters: what is added to the linear layers of a model (LoRA), from folders in PEFT's form to the parts that nodes get.

A folder has adapter_config.json and adapter_model.safetensors, whose tensors are named as those of transformers' model:
...layers.<i>.<module>.lora_A.weight (rank, inputs) and ...lora_B.weight (outputs, rank). A layer's weight W stands for
W + scale B A. A folder may come from a stranger: nothing in it is executed, all shapes are compared with the model's before a
tensor is read, and what would change the model in another way is refused by its name. Folders with rows that stand before
those of texts are read by `mdi.checkpoint.virtual_adapters`.

All adapters of a run together are parts "adapter.<i>", one for each block that has some, with canonical bytes and a hash like
other parts. Their tensors, besides those of `mdi.checkpoint.virtual_rows`:

    transformer.h.<i>.<layer>.<adapter>.<first>.a   float32 (rank, inputs)
    transformer.h.<i>.<layer>.<adapter>.<first>.b   float32 (rank, outputs), times the scale; added to outputs from `first` on
    transformer.h.<i>.norm_1.gain, norm_2.gain      float32 (n_embd): the norm's weight, which a node may have multiplied into W

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (2021), section 4; PEFT's checkpoint format.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mdi.block_ranges import ADAPTER_PREFIX
from mdi.checkpoint.chunks import PartFile
from mdi.checkpoint.packing import FOLDED_FORMATS, Packing, PartWeights, gain_offset, norm_before
from mdi.checkpoint.parts import Part, part_of
from mdi.checkpoint.records import HashRecord
from mdi.checkpoint.safetensors_layout import STRANGERS_LIMIT_BYTES, TYPES, TensorSpec
from mdi.checkpoint.shapes import interleaved_rows, part_shapes
from mdi.checkpoint.virtual_rows import MOST_VIRTUAL, PREFIX_KEY, PREFIX_VALUE, STORED_ROWS, row_widths
from mdi.checkpoint.weightfile import SafetensorsFile
from mdi.checkpoint.weights import WeightSource
from mdi.errors import CheckpointError, Code, UsageError
from mdi.families.names import Held, row_counts
from mdi.families.registry import places_of
from mdi.kernels.blocks import LAYERS, MOST_ADAPTERS, MOST_RANK, LowRank
from mdi.kernels.layout import floats
from mdi.model.plain import ModelConfig, spec_of
from mdi.model.spec import Attention, DeltaNet, Mixer, ModelSpec

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
BASE_KEY = (
    "mdi_base"  # of the file's metadata: the hash of the weights that the adapter was trained on, see `weights_hash`
)
CONFIG_LIMIT_BYTES = 1 << 20
MOST_ALPHA = 1e9
LONGEST_NAME = 200  # of a tensor: an expression may look at each letter from each other one

logger = logging.getLogger("mdi")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,99}")
_TENSOR = re.compile(
    r"base_model\.model\.(?:\w+\.)*?(?:layers|h)\.(0|[1-9]\d{0,5})\.([\w.]+?)\.lora_([AB])(?:\.default)?\.weight"
)
_STORED = re.compile(r"transformer\.h\.(\d+)\.([\w.]+?)\.([1-9]\d*)\.(0|[1-9]\d*)\.([ab])")
_GAIN = re.compile(r"transformer\.h\.(\d+)\.(norm_[12])\.gain")
# Settings of PEFT that change more than a product of two matrices with one scale, and their values that do not.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": (None, "none"), "use_dora": (None, False), "lora_bias": (None, False), "modules_to_save": (None, []),
    "rank_pattern": (None, {}), "alpha_pattern": (None, {}), "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []), "layer_replication": (None, []), "use_qalora": (None, False),
    "alora_invocation_tokens": (None, []), "arrow_config": (None,), "use_bdlora": (None,), "exclude_modules": (None, []),
}  # fmt: skip
_OWN_BASES = ("pissa", "olora", "loftq", "corda", "lora_ga")  # ways to begin that change the model's own weights


def _match(form: re.Pattern[str], name: str) -> re.Match[str] | None:
    return form.fullmatch(name) if len(name) <= LONGEST_NAME else None


@dataclass(frozen=True)
class AdapterName:
    """An adapter as the command line has it: the name that requests use, and its folder."""

    name: str
    folder: Path

    @classmethod
    def of(cls, text: str) -> AdapterName:
        """Of NAME=DIR. Raises UsageError."""
        name, _, folder = text.partition("=")
        if not _NAME.fullmatch(name) or not folder:
            raise UsageError(
                f"--adapter {text[:200]}: expected NAME=DIR, with a name of letters, digits and . _ : - (at most 100)"
            )
        return cls(name, Path(folder).expanduser())


def adapter_names(texts: Sequence[str]) -> tuple[AdapterName, ...]:
    """Raises UsageError: one is malformed, two have the same name, or there are too many."""
    found = tuple(AdapterName.of(text) for text in texts)
    if len(found) > MOST_ADAPTERS:
        raise UsageError(f"--adapter: {len(found)} adapters, {MOST_ADAPTERS} are possible")
    names = [one.name for one in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--adapter: two have the name {twice}")
    return found


@dataclass(frozen=True)
class AdaptedRows:
    """Rows of a module's B that belong to a layer of ours: its outputs from `first` on."""

    layer: str
    first: int
    rows: tuple[int, int]
    is_interleaved: bool = False
    of_heads: tuple[int, int, int] | None = (
        None  # of each so many of these rows, those from one on: see families.names.Piece
    )

    def numbers(self, spec: ModelSpec) -> np.ndarray:
        """Of the rows of B that the layer gets, in its order."""
        rows = np.arange(*self.rows)
        if self.of_heads is not None:
            first, n, period = self.of_heads
            return rows.reshape(-1, period)[:, first : first + n].reshape(-1)
        return rows[interleaved_rows(spec)] if self.is_interleaved else rows

    def name(self, block: int, number: int) -> str:
        """Of the two tensors that a node gets for them, without ".a" and ".b"."""
        return f"transformer.h.{block}.{self.layer}.{number}.{self.first}"


def adapted_rows(config: ModelConfig, where: str, block: int, module: str) -> tuple[tuple[AdaptedRows, ...], int, int]:
    """A module's rows among our layers, none if the model has no such module, and its number of outputs and inputs."""
    shapes = part_shapes(config, where, f"block.{block}")
    found, n_rows, n_in, blocks = [], 0, 0, spec_of(config).blocks
    if block >= len(blocks):
        return (), 0, 0
    mixer = blocks[block].mixer
    has_gate = isinstance(mixer, Attention) and mixer.has_gate
    for layer in LAYERS:
        shape = shapes.get(f"transformer.h.{block}.{layer}.weight")
        for known in places_of(config, layer) if shape is not None else ():
            if layer.startswith("attn.") and layer != "attn.proj" and has_gate != (known.heads is not None):
                continue  # queries and their gates are in one module
            assert shape is not None
            if known.heads is not None:
                for first, (n_heads, begin, n, period) in _of_heads(known, mixer, module):
                    n_rows, n_in = n_heads * period, shape[1]
                    found.append(AdaptedRows(layer, first, (0, n_rows), of_heads=(begin, n, period)))
            elif known.modules == (module,):
                found.append(AdaptedRows(layer, 0, (n_rows, n_rows + shape[0]), known.is_interleaved))
                n_rows, n_in = n_rows + shape[0], shape[1]
            elif module in known.modules:
                counts, which = row_counts(config, block), known.modules.index(module)
                if not (n := counts[which]):
                    continue  # blocks that take values from keys, or both from another block, have no such module
                found.append(AdaptedRows(layer, sum(counts[:which]), (0, n)))
                n_rows, n_in = n, shape[1]
    return tuple(found), n_rows, n_in


def _of_heads(known: Held, mixer: Mixer, module: str) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
    """Of rows of heads that a module has: where they begin in our layer, and `Held.heads`."""
    assert known.heads is not None
    first = 0
    for name, one in zip(known.modules, known.heads(mixer), strict=True):
        if name == module:
            yield first, one
        first += one[0] * one[2]


@dataclass(frozen=True)
class _Module:
    """A module of transformers' model that an adapter changes: names of its two tensors."""

    a: str
    b: str
    pieces: tuple[AdaptedRows, ...]


def read_settings(named: AdapterName) -> dict[str, Any]:
    """adapter_config.json of a folder. Raises CheckpointError."""
    path = named.folder / CONFIG_FILE
    if path.exists() and not path.is_file():  # to open a pipe waits for who writes
        raise CheckpointError(f"adapter {named.name}: {path} is no file")
    try:
        with open(path, encoding="utf-8") as file:
            told = json.loads(file.read(CONFIG_LIMIT_BYTES))
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"adapter {named.name}: {path} cannot be read: {e}") from None
    if not isinstance(told, dict):
        raise CheckpointError(f"adapter {named.name}: {path} has no settings, but {type(told).__name__}")
    return told


class Adapter(ABC):
    """One folder; `mdi.checkpoint.virtual_adapters.open_adapter` chooses the class.

    Args:
        number: from 1 on, by which the nodes know it.
        config: of the model.
        told: its settings, see `read_settings`.
        base: gives the hash of the model's weights (`weights_hash`), None if that is unknown; called if the folder names one.

    Attributes:
        sha256: of what it does: two adapters with the same one are the same.
        n_virtual: positions before those of each text.

    Raises:
        CheckpointError: it is damaged, is for another model, or has what is not served.
    """

    n_virtual = 0
    _factor = np.float32(1)  # that its numbers are multiplied by

    def __init__(
        self,
        named: AdapterName,
        number: int,
        config: ModelConfig,
        told: Mapping[str, Any],
        base: Callable[[], str | None],
    ) -> None:
        self.name, self.number, self.folder = named.name, number, named.folder
        self._config, self._told = config, told
        path = self.folder / WEIGHTS_FILE
        if not path.is_file():
            raise CheckpointError(
                f"adapter {self.name}: {self.folder} has no {WEIGHTS_FILE} (files that are pickled are not read)"
            )
        self._file = SafetensorsFile(path, STRANGERS_LIMIT_BYTES)
        facts = self._checked()
        trained_on = self._file.metadata.get(BASE_KEY)
        found = None if trained_on is None else base()
        if found is None:
            why = "its file does not name them" if trained_on is None else "this model's are packed"
            logger.warning("warning: adapter %s: not known whether it was trained on these weights: %s", self.name, why)
        elif found != trained_on:
            raise CheckpointError(
                f"adapter {self.name}: {self.folder} was trained on other weights than this model's", code=Code.ADAPTER
            )
        digest = hashlib.sha256(json.dumps(facts).encode())
        for name in sorted(self._file.specs):
            digest.update(f"{name} {self._file.specs[name]}\n".encode())
            kind = self._file.specs[name].dtype
            for piece in self._file.pieces(name):
                digest.update(piece)
                with np.errstate(over="ignore"):
                    values = floats(np.frombuffer(piece, TYPES[kind].numpy)) * self._factor
                if not np.isfinite(values).all():
                    raise self._refused(f"numbers in {name} that are not finite")
        self.sha256 = digest.hexdigest()

    @abstractmethod
    def _checked(self) -> list[Any]:
        """Compare settings and shapes with the model's, before a tensor is read.

        Returns:
            settings that are part of the hash.
        """

    @property
    @abstractmethod
    def blocks(self) -> Collection[int]:
        """That it has tensors for."""

    @abstractmethod
    def specs(self, block: int) -> dict[str, TensorSpec]:
        """Its tensors for a block, as they are sent."""

    @abstractmethod
    def arrays(self, block: int) -> dict[str, np.ndarray]:
        """The same as numbers, float32."""

    @property
    def _settings_path(self) -> Path:
        return self.folder / CONFIG_FILE

    def _refused(self, what: str) -> CheckpointError:
        return CheckpointError(f"adapter {self.name}: {self.folder} has {what}", code=Code.ADAPTER)

    def _check_plain(self, keys: Collection[str]) -> None:
        """Raises CheckpointError if a setting has another value than one that changes nothing."""
        for key in keys:
            if self._told.get(key) not in _PLAIN[key]:
                raise self._refused(f"{key} {str(self._told[key])[:100]} in {self._settings_path}, which is not served")

    def _check_spec(self, name: str, shape: tuple[int, ...], why: str) -> None:
        """Raises CheckpointError unless a tensor of the file has this shape, which the model needs."""
        spec = self._file.specs[name]
        if spec.shape != shape or spec.dtype not in ("F32", "F16", "BF16"):
            raise CheckpointError(
                f"adapter {self.name}: {self._file.path}: {name} is {spec.name} {list(spec.shape)}, where this model and {why} "
                f"need numbers of {list(shape)}: it is for another model"
            )

    def _floats(self, name: str, columns: slice = slice(None)) -> np.ndarray:
        """A tensor (any, any), or some of its columns, as float32."""
        return np.ascontiguousarray(floats(self._file.array(name)[:, columns]))


class LowRankAdapter(Adapter):
    """LoRA."""

    def _checked(self) -> list[Any]:
        rank, self.scale = self._settings()
        self._factor = np.float32(self.scale)
        self.modules = self._modules(rank)
        return [rank, self.scale]

    @property
    def blocks(self) -> Collection[int]:
        return self.modules

    def _settings(self) -> tuple[int, float]:
        """Rank and scale."""
        told, path = self._told, self._settings_path
        self._check_plain(_PLAIN)
        begun = told.get("init_lora_weights")
        if isinstance(begun, str) and begun.lower().startswith(_OWN_BASES):
            raise self._refused(
                f"init_lora_weights {begun[:100]!r} in {path}: it belongs to changed weights; convert it to a plain adapter"
            )
        rank, alpha = told.get("r"), told.get("lora_alpha", 8)
        if type(rank) is not int or not 1 <= rank <= MOST_RANK:
            raise self._refused(f"rank {str(rank)[:100]} in {path}; ranks from 1 to {MOST_RANK} are served")
        if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not abs(alpha) <= MOST_ALPHA:
            raise self._refused(f"lora_alpha {str(alpha)[:100]} in {path}, which is no number, or too large")
        return rank, float(alpha) / (math.sqrt(rank) if told.get("use_rslora") is True else rank)

    def _modules(self, rank: int) -> dict[int, list[_Module]]:
        """By block, what the file changes there; all shapes are those of the model."""
        where = f"adapter {self.name}: {self._file.path}"
        found: dict[tuple[int, str], dict[str, str]] = {}
        for name in self._file.specs:
            match = _match(_TENSOR, name)
            if match is None:
                raise self._refused(f"the tensor {name[:200]!r}, which is not of a linear layer in a block")
            found.setdefault((int(match[1]), match[2]), {})[match[3]] = name
        if not found:
            raise CheckpointError(f"{where} has no tensors")
        modules: dict[int, list[_Module]] = {}
        for (block, module), tensors in sorted(found.items()):
            if tensors.keys() != {"A", "B"}:
                raise CheckpointError(f"{where} has only one of the two matrices of block {block}'s {module}")
            pieces, n_out, n_in = self._pieces_of(block, module)
            for tensor, shape in ((tensors["A"], (rank, n_in)), (tensors["B"], (n_out, rank))):
                self._check_spec(tensor, shape, f"rank {rank}")
            modules.setdefault(block, []).append(_Module(tensors["A"], tensors["B"], pieces))
        return modules

    def _pieces_of(self, block: int, module: str) -> tuple[tuple[AdaptedRows, ...], int, int]:
        """A module's rows among our layers, and its number of outputs and inputs."""
        pieces, n_rows, n_in = adapted_rows(self._config, str(self.folder), block, module)
        mixer = spec_of(self._config).blocks[block].mixer if pieces else None
        if isinstance(mixer, DeltaNet) and mixer.is_in_turn and any(one.layer.startswith("delta.") for one in pieces):
            raise self._refused(
                f"{module[:200]} of block {block}, whose heads are in another order in this model (a GGUF file's)"
            )
        if not pieces:
            raise self._refused(
                f"{module[:200]} of block {block}, where this model has no such layer that can be adapted"
            )
        return pieces, n_rows, n_in

    def specs(self, block: int) -> dict[str, TensorSpec]:
        found = {}
        for module in self.modules.get(block, ()):
            rank, n_in = self._file.specs[module.a].shape
            for piece in module.pieces:
                name = piece.name(block, self.number)
                found[f"{name}.a"] = TensorSpec("F32", (rank, n_in))
                found[f"{name}.b"] = TensorSpec("F32", (rank, len(piece.numbers(spec_of(self._config)))))
        return found

    def arrays(self, block: int) -> dict[str, np.ndarray]:
        found = {}
        for module in self.modules.get(block, ()):
            a, b = self._floats(module.a), self._floats(module.b)
            for piece in module.pieces:
                name = piece.name(block, self.number)
                found[f"{name}.a"] = a
                found[f"{name}.b"] = np.ascontiguousarray(b[piece.numbers(spec_of(self._config))].T * self._factor)
        return found


def weights_hash(source: WeightSource) -> str | None:
    """A hash of plain weights, of whatever file they are in; None of packed ones, whose numbers are others."""
    if source.packing is not None:
        return None
    parts = [source.info(part).sha256 for part in source.part_names()]
    return hashlib.sha256(json.dumps([source.config_hash, parts]).encode()).hexdigest()


class AdapterSource(WeightSource):
    """The parts of all adapters of a run.

    Args:
        adapters: numbered from 1 on.
        model: gives the source of a part of the model.

    Raises:
        CheckpointError: the gains of the model's norms are not known any more, and an adapter needs them.
    """

    dtype = "float32"

    def __init__(self, adapters: Sequence[Adapter], model: Callable[[str], WeightSource]) -> None:
        self._adapters, self._model_of = adapters, model
        first = model("block.0")
        self.model, self.config, self.config_hash = first.model, first.config, first.config_hash
        self.hashes = HashRecord()
        self._arrays: tuple[int, dict[str, np.ndarray]] = (-1, {})
        self.specs, self._gains = {}, dict[str, str]()
        self._blocks = sorted({block for adapter in adapters for block in adapter.blocks})
        for block in self._blocks:
            for adapter in adapters:
                self.specs.update(adapter.specs(block))
            self._take_gains(block)

    def _take_gains(self, block: int) -> None:
        """The norms before the layers that are adapted."""
        source = self._model_of(f"block.{block}")
        layers = {match[2] for name in self.specs if (match := _match(_STORED, name)) and int(match[1]) == block}
        for layer in layers:
            norm = norm_before(f"transformer.h.{block}.{layer}.weight", self.spec)
            if norm is None or norm not in source.specs:
                continue
            norm_gain(source, norm)  # complain now
            name = f"{norm.removesuffix('weight')}gain"
            self._gains[name], self.specs[name] = norm, TensorSpec("F32", (self.spec.width,))

    def __str__(self) -> str:
        return " and ".join(str(adapter.folder) for adapter in self._adapters)

    def part_names(self) -> list[str]:
        return [f"{ADAPTER_PREFIX}{block}" for block in self._blocks]

    def part_specs(self, part: str) -> dict[str, TensorSpec]:
        prefix = f"transformer.h.{part.removeprefix(ADAPTER_PREFIX)}."
        return {name: spec for name, spec in self.specs.items() if name.startswith(prefix)}

    def array(self, name: str) -> np.ndarray:
        if name in self._gains:
            found = norm_gain(self._model_of(f"block.{name.split('.')[2]}"), self._gains[name])
            assert found is not None
            return found
        block = int(name.split(".")[2])
        kept = self._arrays  # several threads may read several blocks
        if kept[0] != block:
            kept = self._arrays = block, {k: v for one in self._adapters for k, v in one.arrays(block).items()}
        return kept[1][name]

    def weights(self, part: str, packing: Packing | None = None) -> PartWeights:
        """The same in any format."""
        return {name: self.array(name).copy() for name in self.part_specs(part)}

    def release(self) -> None:
        self._arrays = (-1, {})


def norm_gain(source: WeightSource, norm: str) -> np.ndarray | None:
    """A norm's weight, float32; None if the model has no such norm.

    Raises:
        CheckpointError: it is not known any more, because it was multiplied into stored weights.
    """
    if norm not in source.specs:
        return None
    values, code = source.array(norm), source.specs[norm].dtype
    values = floats(values) if code in ("F32", "BF16", "F16") else values.astype(np.float32)
    values, packing = np.ascontiguousarray(values[: source.spec.width]), source.packing
    form = None if packing is None else packing.of_part(part_of(norm))
    if form in FOLDED_FORMATS and is_folded(norm, values, source.spec):
        raise CheckpointError(
            f"the weights of {source} are stored in {form}, without the gains of their norms, which adapters "
            f"need: start from the model's own weights (--quantize {form} packs them)", code=Code.ADAPTER,
        )  # fmt: skip
    return values


class AdapterFile(PartFile):
    """A part of adapters that was received.

    Raises:
        CheckpointError: it is damaged, or not for this model.
    """

    def __init__(self, path: Path, info: Part, config: ModelConfig, config_hash: str) -> None:
        super().__init__(path, info, config, config_hash)
        check_stored(self.specs, info.name, config, str(path))

    def part_specs(self, part: str) -> dict[str, TensorSpec]:
        return self.specs

    def weights(self, part: str, packing: Packing | None = None) -> PartWeights:
        """The same in any format, in memory of their own."""
        return {name: floats(self.array(name)).copy() for name in self.specs}


def check_stored(specs: Mapping[str, TensorSpec], part: str, config: ModelConfig, where: str) -> None:
    """Raises CheckpointError unless a part's tensors belong to its block, and have shapes that its layers can have."""
    shapes, model = part_shapes(config, where, f"block.{part.removeprefix(ADAPTER_PREFIX)}"), spec_of(config)
    widths = row_widths(model)
    for name, spec in specs.items():
        n, width = spec.shape if len(spec.shape) == 2 else (0, 0)
        if (match := _match(_GAIN, name)) is not None:
            is_right = f"{ADAPTER_PREFIX}{match[1]}" == part and spec.shape == (model.width,)
        elif (match := STORED_ROWS.fullmatch(name)) is not None:
            is_known = f"{ADAPTER_PREFIX}{match[1]}" == part and int(match[2]) <= MOST_ADAPTERS
            pair = {PREFIX_KEY: PREFIX_VALUE, PREFIX_VALUE: PREFIX_KEY}.get(match[3], match[3])
            other = specs.get(name.removesuffix(match[3]) + pair)
            is_right = is_known and 1 <= n <= MOST_VIRTUAL and width == widths[match[3]]
            is_right = is_right and other is not None and other.shape == spec.shape
        elif (match := _match(_STORED, name)) is not None:
            n_out, n_in = shapes.get(f"transformer.h.{match[1]}.{match[2]}.weight", (0, 0))
            other = specs.get(name[:-1] + ("b" if match[5] == "a" else "a"))
            is_known = f"{ADAPTER_PREFIX}{match[1]}" == part and match[2] in LAYERS and int(match[3]) <= MOST_ADAPTERS
            fits = width == n_in if match[5] == "a" else 1 <= width <= n_out - int(match[4])
            is_right = is_known and 1 <= n <= MOST_RANK and fits and other is not None and other.shape[:1] == (n,)
        else:
            is_right = False
        if not is_right or spec.dtype != "F32":
            raise CheckpointError(f"{where}: {name[:200]}, {list(spec.shape)}, is no part of an adapter for this model")


def is_folded(norm: str, weight: np.ndarray, model: ModelSpec) -> bool:
    """Whether the norm of this name has no gain: it was multiplied into the layers behind it (checkpoint.packing.folded)."""
    return bool((weight == np.float32(1 - gain_offset(norm, model))).all())


def gain_factor(norm: str, gain: np.ndarray | None, own: np.ndarray | None, model: ModelSpec) -> np.ndarray | None:
    """The factors of an adapter's A where a node's weights have their norm's gain; None: there are none.

    Args:
        gain: the norm's weight in the model; own: the same as the node has it.

    Raises:
        CheckpointError: the norm is another one than the adapter's model has.
    """
    if gain is None or own is None or np.array_equal(gain, own):
        return None
    if not is_folded(norm, own, model):
        raise CheckpointError(f"{norm} is not that of the model that the adapters are for", code=Code.ADAPTER)
    found: np.ndarray = gain + gain_offset(norm, model)
    return found


def low_rank(
    weights: Mapping[str, Any], block: int, own: Callable[[str], np.ndarray | None], model: ModelSpec
) -> list[LowRank]:
    """A part of adapters as the kernels read it.

    Args:
        weights: of the part.
        own: a norm's weight as this node has it, by its name; None if there is none.

    Raises:
        CheckpointError: the norm is another one than the adapter's model has.
    """
    found = []
    for name in sorted(weights):
        match = _match(_STORED, name)
        if match is None or match[5] == "b":
            continue
        a, norm = weights[name], norm_before(f"transformer.h.{block}.{match[2]}.weight", model)
        gain = None if norm is None else weights.get(f"{norm.removesuffix('weight')}gain")
        here = None if norm is None else own(norm)
        if norm is not None and (factor := gain_factor(norm, gain, here, model)) is not None:
            a = a * factor
        found.append(
            LowRank(int(match[3]), match[2], int(match[4]), np.ascontiguousarray(a), weights[name[:-1] + "b"])
        )  # fmt: skip
    return found
