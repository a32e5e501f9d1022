"""Number formats of partial sums on links: float32, or 16 or 8 bits with scales, as for rows."""

from __future__ import annotations

import numpy as np

from mdi.engine.rows import ENCODERS
from mdi.net.wire import REDUCE_DTYPES as REDUCE_DTYPES

Floats = np.ndarray


class Numbers:
    """One of REDUCE_DTYPES: arrays (n_rows, n_cols) as bytes, and back."""

    def __init__(self, name: str) -> None:
        self._encoder = ENCODERS.get(name)
        self.is_exact = self._encoder is None

    def n_bytes(self, n_rows: int, n_cols: int) -> int:
        if self._encoder is None:
            return 4 * n_rows * n_cols
        return self._encoder.payload_type.n_bytes(n_rows, n_cols)

    def encode(self, x: Floats) -> memoryview:
        """float32 (n_rows, n_cols), contiguous -> bytes; in float32 the memory of `x` itself."""
        if self._encoder is None:
            return x.reshape(-1).view(np.uint8).data
        return self._encoder.encode(x).data

    def decode(self, data: memoryview, n_rows: int, n_cols: int) -> Floats:
        """-> float32 (n_rows, n_cols); in float32 the memory of `data` itself."""
        if self._encoder is None:
            return np.frombuffer(data, dtype=np.float32).reshape(n_rows, n_cols)
        return self._encoder.decode(np.frombuffer(data, dtype=np.uint8), n_rows, n_cols)


EXACT = Numbers("float32")
