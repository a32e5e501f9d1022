"""Names, types and shapes of the tensors of a layer that is stored in a weight format; see model.formats for their meaning."""

from __future__ import annotations

from collections.abc import Mapping

from mdi.checkpoint.layout import TensorSpec
from mdi.errors import CheckpointError

INT4_BLOCK = 256  # weights that share a scale, as in model.int4
SUFFIXES = ("weight_scale", "outliers", "outlier_weight")
_STORED = {"I8": "int8", "U8": "int4"}


def stored_format(spec: TensorSpec) -> str | None:
    """The format of a weight by its type; None for plain numbers."""
    return _STORED.get(spec.dtype)


def encoded_specs(form: str, shape: tuple[int, ...], n_outliers: int) -> dict[str, TensorSpec]:
    """What a weight (out, in) becomes: its tensors by the last part of their names.

    fp16 has just the weight. Embeddings are (vocabulary, n_embd), without outliers.
    """
    n_out, n_in = shape
    specs = {}
    if form == "fp16":
        return {"weight": TensorSpec("F16", shape)}
    if form == "int8":
        specs = {"weight": TensorSpec("I8", shape), "weight_scale": TensorSpec("F32", (n_out,))}
    else:
        n_blocks = -(-n_in // INT4_BLOCK)
        specs = {
            "weight": TensorSpec("U8", (n_out, n_blocks, INT4_BLOCK // 2)),
            "weight_scale": TensorSpec("F16", (n_out, n_blocks)),
        }
    if n_outliers:
        specs["outliers"] = TensorSpec("I32", (n_outliers,))
        specs["outlier_weight"] = TensorSpec("F16", (n_out, n_outliers))
    return specs


def check_encoded(name: str, shape: tuple[int, ...], specs: Mapping[str, TensorSpec], where: str) -> set[str]:
    """Check the tensors of one encoded weight, and return their names.

    Args:
        name: of the weight, as in the full model; `shape` is the one that it has there.

    Raises:
        CheckpointError: one is missing, or of another type or shape than its format has.
    """
    form = stored_format(specs[name])
    if form is None or len(shape) != 2:
        raise CheckpointError(
            f"{where}: tensor {name} has the shape {list(specs[name].shape)}, expected {list(shape)} by the model's config"
        )
    path = name.removesuffix("weight")
    outliers = specs.get(f"{path}outliers")
    n_outliers = outliers.shape[0] if outliers is not None and len(outliers.shape) == 1 else 0
    wanted = {path + suffix: spec for suffix, spec in encoded_specs(form, shape, n_outliers).items()}
    for key, spec in wanted.items():
        if specs.get(key) != spec:
            found = f"{specs[key].name}, {list(specs[key].shape)}" if key in specs else "nothing"
            raise CheckpointError(
                f"{where}: tensor {key}, for a weight in {form}: expected {spec.name}, {list(spec.shape)}, found {found}"
            )
    return set(wanted)
