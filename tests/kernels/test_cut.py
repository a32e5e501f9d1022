"""Parts of packed weights: the same numbers as those of the whole, wherever the cut is."""

from __future__ import annotations

import numpy as np
import pytest

from mdi.kernels.layout import cut, matrix_bytes, pack, unpack
from mdi.kernels.weight_formats import LAYOUTS

N_OUT, N_IN = 75, 300
ROWS = [None, [(0, 32)], [(16, 75)], [(5, 9)], [(0, 16), (32, 48), (64, 75)], [(1, 30), (30, 31), (70, 75)], [(7, 7)]]
COLUMNS = [None, (0, 128), (128, 300), (64, 192), (32, 96), (10, 33), (250, 300), (299, 300), (5, 5)]


@pytest.mark.parametrize("form", LAYOUTS)
def test_a_part_has_the_numbers_of_the_whole(form: str) -> None:
    weight = np.random.default_rng(1).normal(size=(N_OUT, N_IN)).astype(np.float32)
    packed = pack(form, weight)
    numbers = unpack(packed)
    for rows in ROWS:
        chosen = numbers if rows is None else np.concatenate([numbers[a:b] for a, b in rows])
        for columns in COLUMNS:
            part = cut(packed, rows, columns)
            first, last = columns or (0, N_IN)
            assert part.data.size == matrix_bytes(form, part.n_out, part.n_in)
            assert (part.n_out, part.n_in - part.skip) == (len(chosen), last - first)
            assert part.data.ctypes.data % 64 == 0 or not part.data.size
            if part.data.size:
                found = unpack(part)
                np.testing.assert_array_equal(found[:, part.skip :], chosen[:, first:last])
                assert not found[:, : part.skip].any()


@pytest.mark.parametrize("form", LAYOUTS)
def test_what_lies_in_whole_groups_needs_no_zeros(form: str) -> None:
    packed = pack(form, np.ones((16, 256), dtype=np.float32))
    assert cut(packed, None, (64, 256)).skip == 0
