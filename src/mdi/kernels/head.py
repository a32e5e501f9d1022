"""The final norm and the head, or some rows of it, in the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mdi.errors import KernelError
from mdi.kernels.blocks import model_of
from mdi.kernels.context import Context, Linear
from mdi.kernels.layout import Matrix

Weights = Mapping[str, Matrix | np.ndarray]


class Head:
    """Rows that went through all blocks -> logits.

    Args:
        config: litgpt's Config as a plain dict.
        weights: of the part "head".
        n_tokens: how many of the vocabulary the weights are for.

    Raises:
        KernelError: a tensor is missing or of another shape.
    """

    def __init__(self, config: Mapping[str, Any], weights: Weights, n_tokens: int, context: Context) -> None:
        matrix, n_embd = weights.get("lm_head.weight"), int(config["n_embd"])
        if not isinstance(matrix, Matrix) or (matrix.n_out, matrix.n_in) != (n_tokens, n_embd):
            raise KernelError(f"the head is no packed weight of {n_tokens} x {n_embd}")
        bias = _row(weights, "lm_head.bias", n_tokens)
        norm = _row(weights, "transformer.ln_f.weight", n_embd)
        if norm is None:
            norm = np.ones(n_embd, dtype=np.float32)  # a norm without weights
        norms = norm, _row(weights, "transformer.ln_f.bias", n_embd)
        self._linear = Linear(context, model_of(config), norms, matrix, bias, config["final_logit_softcapping"])

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """float32 (M, n_embd) -> (M, n_tokens)"""
        return self._linear(np.ascontiguousarray(x, dtype=np.float32))


def _row(weights: Weights, name: str, size: int) -> np.ndarray | None:
    """float32 (size); None if there is none. The kernels read it unchecked."""
    if name not in weights:
        return None
    found = array_of(weights, name)
    if found.shape != (size,):
        raise KernelError(f"{name} is no row of {size} numbers")
    return np.ascontiguousarray(found, dtype=np.float32)


def array_of(weights: Weights, name: str) -> np.ndarray:
    found = weights.get(name)
    if not isinstance(found, np.ndarray):
        raise KernelError(f"the weights lack {name}")
    return found
