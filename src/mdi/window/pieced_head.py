"""The head of a stage with a window: in pieces of rows, each in memory while it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mdi.errors import KernelError
from mdi.kernels.blocks import Head, Weights
from mdi.kernels.context import Context
from mdi.kernels.layout import Matrix
from mdi.window.weight_units import HEAD
from mdi.window.window import Window

_HEAD, _HEAD_BIAS = "lm_head.weight", "lm_head.bias"


class PiecedHead:
    """Rows that went through all blocks -> logits, as kernels.head.Head.

    Args:
        config: litgpt's Config as a plain dict.
        weights: the small tensors of the part "head".
        n_tokens: how many of the vocabulary it is for.

    Raises:
        KernelError: the window's head has another number of rows.
    """

    def __init__(
        self, config: Mapping[str, Any], weights: Weights, window: Window, n_tokens: int, context: Context
    ) -> None:
        self._window, self._n_tokens = window, n_tokens
        self._pieces: list[Head] = []
        n_rows, bias = 0, weights.get(_HEAD_BIAS)
        for unit in window.matrices(HEAD):
            matrix = unit[_HEAD]
            of_piece: dict[str, Matrix | np.ndarray] = {**weights, _HEAD: matrix}
            if isinstance(bias, np.ndarray):
                of_piece[_HEAD_BIAS] = bias[n_rows : n_rows + matrix.n_out]
            self._pieces.append(Head(config, of_piece, matrix.n_out, context))
            n_rows += matrix.n_out
        if n_rows != n_tokens:
            raise KernelError(f"the head has {n_rows} rows, {n_tokens} expected")

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """float32 (M, n_embd) -> (M, n_tokens)"""
        logits = np.empty((len(x), self._n_tokens), dtype=np.float32)
        first = 0
        for i, piece in enumerate(self._pieces):
            with self._window.unit(HEAD, i):
                part = piece(x)
            logits[:, first : first + part.shape[1]] = part
            first += part.shape[1]
        return logits
