"""llama.cpp's logits of a GGUF file, where llama-cpp-python is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest


def logits_of_llama_cpp(path: Path, ids: Sequence[int], n_vocab: int) -> np.ndarray:
    """float32 (ids, n_vocab), with float32 caches. Without llama-cpp-python the test is skipped."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    n, types = len(ids), {"type_k": 0, "type_v": 0}
    model = llama_cpp.Llama(
        str(path), n_ctx=n, n_batch=n, n_ubatch=n, logits_all=True, verbose=False, n_gpu_layers=0, **types
    )
    try:
        model.eval(list(ids))
        return np.array(model.scores[:n])[:, :n_vocab]
    finally:
        model.close()
