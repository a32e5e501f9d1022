"""Bringing the layers of a stage into a weight format: those that a file holds in one, and those that are to get one now."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
import torch.nn.functional as F
from litgpt.model import GemmaMLP, LLaMAMLP

from mdi.errors import CheckpointError
from mdi.model.allocator import give_back_freed
from mdi.model.formats import Encoded, decode, encode, format_of
from mdi.model.int4 import unpack_int4
from mdi.model.packed import ByteLinear, Fp16Linear, pack_int8
from mdi.model.tiles import keep_rows_apart

if TYPE_CHECKING:
    from mdi.model.stage import Stage

OUTLIER_RATIO = 6.0  # columns that are so many times larger than the median one are multiplied beside
_SUFFIXES = ("weight", "weight_scale", "outliers", "outlier_weight")


@dataclass(frozen=True)
class Layer:
    """An encoded linear layer; `n_in` and `bias` are those of the layer whose place it takes."""

    format: str
    encoded: Encoded
    n_in: int
    bias: torch.Tensor | None


class Quantizer:
    """For `Stage.load`: gives each part its format, one after the other, so that only one exists twice.

    Args:
        blocks, head: format for the blocks, and for head and embedding; None leaves them as they are stored.
    """

    def __init__(self, blocks: str | None = None, head: str | None = None) -> None:
        self._blocks, self._head = blocks, head

    def take(
        self, part: str, tensors: Mapping[str, torch.Tensor], stage: Stage, device: torch.device, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Build the layers that are stored in a format; the tensors that are left are plain ones.

        On a device without these kernels, they become plain weights again. Tensors are let go of one by one: if each is
        mapped by itself, as in `ChunkFile.tensors`, no more of the part than one layer stands in memory twice.

        Raises:
            CheckpointError: they do not belong to a linear layer of this stage, or not together.
        """
        rest = dict(tensors)
        del tensors
        layers: dict[str, Layer] = {}
        for name in [n for n, t in rest.items() if n.endswith(".weight") and format_of(t.dtype)]:
            path = name.removesuffix(".weight")
            module, n_in = _module(stage, path)
            stored = {s: rest.pop(f"{path}.{s}") for s in _SUFFIXES if f"{path}.{s}" in rest}
            form = format_of(stored["weight"].dtype)
            assert form is not None
            if "outliers" in stored and not 0 <= int(stored["outliers"].min()) <= int(stored["outliers"].max()) < n_in:
                raise CheckpointError(f"{path}.outliers names columns that a layer of {n_in} inputs does not have")
            if device.type != "cpu":
                rest[name] = plain_weight(form, stored, n_in).to(dtype)
            elif isinstance(module, nn.Embedding):
                stage.transformer["wte"] = ByteEmbedding(stored["weight"], stored["weight_scale"])
            else:
                bias = rest.pop(f"{path}.bias", None)
                layers[path] = Layer(form, stored, n_in, bias)
            del stored
        install(stage, layers)
        return rest

    def finish(self, part: str, stage: Stage) -> None:
        """Bring what was loaded as plain weights into the format that was asked for."""
        if part.startswith("block."):
            block = stage.get_submodule(f"transformer.h.{part.removeprefix('block.')}")
            if self._blocks is not None:
                quantize_block(block, self._blocks)
            if any(isinstance(module, (ByteLinear, Fp16Linear)) for module in block.modules()):
                _leave_file(block)
        elif part == "head" and self._head is not None and isinstance(stage.lm_head, nn.Linear):
            head = stage.lm_head
            stage.lm_head = decode(encode(head.weight, self._head), self._head, head.in_features, head.bias)
        elif part == "embedding" and self._head is not None and isinstance(stage.transformer["wte"], nn.Embedding):
            stage.transformer["wte"] = quantized_embedding(stage.transformer["wte"].weight, self._head)
        give_back_freed()


def quantize_block(block: nn.Module, name: str) -> None:
    """Replace the plain linear layers of a block by those of a format."""
    large = expected_outliers(block)
    layers = {}
    for path, linear in linears(block):
        bias = None if linear.bias is None else linear.bias.detach()
        layers[path] = Layer(name, encode(linear.weight, name, large.get(path)), linear.in_features, bias)
    install(block, layers)


def linears(block: nn.Module) -> Iterable[tuple[str, nn.Linear]]:
    """The layers of a block that a format replaces, with their paths.

    Routers of experts stay as they are: they are small, and a wrong choice of expert costs more than rounding. So does the
    up-projection of latent attention, whose weights are read in pieces.
    """
    for path, module in block.named_modules():
        if isinstance(module, nn.Linear) and is_quantizable(path):
            yield path, module


def is_quantizable(path: str) -> bool:
    return not path.endswith(("gate", "kv_b_proj"))


def install(root: nn.Module, layers: dict[str, Layer]) -> None:
    """Put layers in the places of those with their paths below `root`; the two halves of a gate become one layer.

    Takes them out of the dict one by one, so that what they were read from can go.
    """
    if layers:
        keep_rows_apart(root)
    gates = {path.rpartition(".")[0] for path in layers if path.endswith(".fc_1")}
    for parent in gates:
        mlp = root.get_submodule(parent)
        first, second, proj = (f"{parent}.{name}" for name in ("fc_1", "fc_2", "proj"))
        if type(mlp) not in (LLaMAMLP, GemmaMLP) or not {first, second, proj} <= layers.keys():
            continue
        if _match(layers[first], layers[second]):
            fc = _build(_stacked(layers.pop(first), layers.pop(second)))
            _set(root, parent, GatedMLP(fc, _build(layers.pop(proj)), _activation(mlp)))
    while layers:
        path, layer = layers.popitem()
        _set(root, path, _build(layer))
        del layer


class GatedMLP(nn.Module):
    """litgpt's LLaMAMLP and GemmaMLP with both input layers in one, so that the input is quantized and read once."""

    def __init__(self, fc: nn.Module, proj: nn.Module, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fc, self.proj = fc, proj
        self._activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., n_embd) -> (..., n_embd)"""
        gate, up = self.fc(x.view(-1, x.size(-1))).chunk(2, dim=1)
        y: torch.Tensor = self.proj(self._activation(gate).mul_(up))
        return y.view(x.shape)


class ByteEmbedding(nn.Module):
    """An embedding with 8 bits a number and a scale per token.

    Args:
        weight: int8 (vocabulary, n_embd).
        scale: (vocabulary).
    """

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__()
        self._weight, self._scale = weight.clone(), scale.to(torch.float32, copy=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(N,) -> (N, n_embd), float32"""
        return self._weight[ids].float() * self._scale[ids, None]


class HalfEmbedding(nn.Module):
    """An embedding in half precision, read as float32."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self._weight = weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(N,) -> (N, n_embd), float32"""
        return self._weight[ids].float()


def quantized_embedding(weight: torch.Tensor, name: str) -> nn.Module:
    """In 8 bits for int4 as well: one row of it is read per token, and 4 bits would only cost precision."""
    if name == "fp16":
        return HalfEmbedding(encode(weight, "fp16")["weight"])
    return ByteEmbedding(*pack_int8(weight.detach().float()))


def expected_outliers(block: nn.Module) -> dict[str, torch.Tensor]:
    """Input columns that weights alone say to be large: those that a norm's gain, or the layer before, makes large."""
    found: dict[str, torch.Tensor] = {}
    shared = block.norm_2 is None
    offset = 1.0 if getattr(block.norm_1, "add_unit_offset", False) else 0.0
    for path, module in linears(block):
        parent, _, child = path.rpartition(".")
        size: torch.Tensor | None = None
        if path in ("attn.qkv", "attn.q_a_proj", "attn.kv_a_proj_with_mqa"):
            size = _gain(block.norm_1, offset)
        elif child in ("fc", "fc_1", "fc_2"):
            size = _gain(block.norm_1 if shared else block.norm_2, offset)
        elif child == "proj" and parent != "attn":
            before = [getattr(block.get_submodule(parent), name, None) for name in ("fc", "fc_2")]
            weights = [layer.weight for layer in before if isinstance(layer, nn.Linear)]
            size = weights[0].float().norm(dim=1) if weights else None
        if size is not None and (large := large_columns(size)).numel():
            found[path] = large
        assert isinstance(module, nn.Linear)
    return found


def large_columns(size: torch.Tensor) -> torch.Tensor:
    """Numbers of the entries that stand out: (in) -> (n)"""
    return torch.nonzero(size.abs() > OUTLIER_RATIO * size.abs().median()).flatten()


def plain_weight(name: str, encoded: Mapping[str, torch.Tensor], n_in: int) -> torch.Tensor:
    """The float32 weight (out, in) that an encoded one stands for."""
    if name == "int8":
        weight = encoded["weight"].float() * encoded["weight_scale"].float()[:, None]
    else:
        weight = unpack_int4(encoded["weight"], encoded["weight_scale"])[:, :n_in]
    if "outliers" in encoded:
        weight = weight.index_copy(1, encoded["outliers"].long(), encoded["outlier_weight"].float())
    return weight


def _leave_file(module: nn.Module) -> None:
    """Copy what is left of a block in plain weights: a single norm that stays mapped keeps all that was read in memory."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone()


def _build(layer: Layer) -> nn.Module:
    return decode(layer.encoded, layer.format, layer.n_in, layer.bias)


def _match(first: Layer, second: Layer) -> bool:
    """Whether both can be one layer."""
    a, b = first.encoded, second.encoded
    same_columns = torch.equal(a.get("outliers", torch.empty(0)), b.get("outliers", torch.empty(0)))
    return first.format == second.format and same_columns and (first.bias is None) == (second.bias is None)


def _stacked(first: Layer, second: Layer) -> Layer:
    """Both as one layer with the outputs of the first before those of the second."""
    a, b = first.encoded, second.encoded
    encoded = {key: a[key] if key == "outliers" else torch.cat((a[key], b[key])) for key in a}
    bias = None if first.bias is None or second.bias is None else torch.cat((first.bias, second.bias))
    return Layer(first.format, encoded, first.n_in, bias)


def _activation(mlp: LLaMAMLP) -> Callable[[torch.Tensor], torch.Tensor]:
    if isinstance(mlp, GemmaMLP):
        kind = mlp.config.gelu_approximate
        return lambda x: F.gelu(x, approximate=kind)
    return F.silu


def _module(stage: nn.Module, path: str) -> tuple[nn.Linear | nn.Embedding, int]:
    """The layer at a path, and its inputs."""
    module: nn.Module | None = None
    with contextlib.suppress(AttributeError):
        module = stage.get_submodule(path)
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        raise CheckpointError(f"{path}.weight is stored in a weight format, but this stage has no linear layer there")
    return module, module.weight.size(1)


def _set(root: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, child = path.rpartition(".")
    setattr(root.get_submodule(parent), child, module)


def _gain(norm: object, offset: float) -> torch.Tensor | None:
    weight = getattr(norm, "weight", None)
    return None if weight is None else weight.detach().float() + offset
