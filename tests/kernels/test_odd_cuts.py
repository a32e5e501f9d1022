"""Shares of weights that end within a group of 64 activations or within a record: 6, 6, 5 and 5 groups of 32 inputs.

Activations are rounded in groups of 64. In int8 and in the types of GGUF files the groups of a share begin where those of the
whole do, with zeros in front. In int4 and mxfp4, whose scales are those of 32 inputs, they begin with the share's first input.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kernels.block_files import random_rows
from kernels.test_block_types import multiplied, packed
from mdi.kernels import library
from mdi.kernels.layout import Matrix, cut, pack, unpack
from mdi.kernels.weight_formats import BLOCK_TYPES

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")

N_OUT, N_ROWS = 40, 9
HALVES = ("int4", "mxfp4")


def shares(form: str) -> tuple[Matrix, list[tuple[int, int]]]:
    """A weight, and the inputs of each share; blocks of 256 inputs make two groups more."""
    groups = [6, 6, 5, 7] if form in BLOCK_TYPES and BLOCK_TYPES[form].inputs == 256 else [6, 6, 5, 5]
    bounds = [32 * n for n in itertools.accumulate(groups, initial=0)]
    if form in BLOCK_TYPES:
        whole = packed(form, random_rows(form, N_OUT, bounds[-1]))
    else:
        whole = pack(form, np.random.default_rng(3).standard_normal((N_OUT, bounds[-1]), dtype=np.float32))
    return whole, list(itertools.pairwise(bounds))


def activations(n_in: int) -> np.ndarray:
    """With some that are much larger than others, so that it shows which are rounded together."""
    x = np.random.default_rng(5).standard_normal((N_ROWS, n_in)).astype(np.float32)
    x[:, ::48] *= 20
    return x


@pytest.mark.parametrize("form", ["int8", *BLOCK_TYPES])
@pytest.mark.parametrize("n_rows", [1, N_ROWS])
def test_a_share_computes_what_the_whole_does_of_its_inputs(form: str, n_rows: int) -> None:
    whole, columns = shares(form)
    x = activations(whole.n_in)[:n_rows]
    for first, last in columns:
        own = np.zeros_like(x)
        own[:, first:last] = x[:, first:last]
        part = cut(whole, None, (first, last))
        found, wanted = multiplied(part, np.ascontiguousarray(x[:, first:last])), multiplied(whole, own)
        assert np.array_equal(found, wanted), (first, last)


@pytest.mark.parametrize("form", HALVES)
@pytest.mark.parametrize("n_rows", [1, N_ROWS])
def test_groups_of_a_share_in_half_bytes_begin_with_its_first_input(form: str, n_rows: int) -> None:
    whole, columns = shares(form)
    x = activations(whole.n_in)[:n_rows]
    for first, last in columns:
        part = cut(whole, None, (first, last))
        assert part.skip == 0 and np.array_equal(unpack(part), unpack(whole)[:, first:last])
        alone = pack(form, unpack(whole)[:, first:last])
        rows = np.ascontiguousarray(x[:, first:last])
        assert np.array_equal(unpack(alone), unpack(part)) and np.array_equal(
            multiplied(part, rows), multiplied(alone, rows)
        )


@pytest.mark.parametrize("form", ["int8", *HALVES, *BLOCK_TYPES])
def test_shares_add_up_to_the_whole(form: str) -> None:
    """As nearly as activations are rounded: a hundredth of the largest of 64."""
    whole, columns = shares(form)
    x = activations(whole.n_in)
    parts = [multiplied(cut(whole, None, (a, b)), np.ascontiguousarray(x[:, a:b])) for a, b in columns]
    largest = np.abs(x).max(axis=1, keepdims=True) / 127
    bound = largest * np.abs(unpack(whole)).sum(axis=1)
    assert (np.abs(np.sum(parts, axis=0) - x @ unpack(whole).T) <= bound).all()
    if form in HALVES:
        return
    assert np.allclose(np.sum(parts, axis=0), multiplied(whole, x), atol=float(bound.max()))
