"""Packed weights: what comes out of them, and where the bytes lie."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from forced import forced, instruction_sets

from mdi.kernels import library
from mdi.kernels.layout import (
    Halves,
    PackedRows,
    aligned_bytes,
    bf16_from_float32,
    empty,
    float32_from_bf16,
    matrix_bytes,
    pack,
    pack_halves,
    pack_int4_in_numpy,
    unpack,
)
from mdi.kernels.weight_formats import LAYOUTS

SHAPES = [(1, 1), (16, 128), (17, 130), (48, 64), (300, 257)]


def weight(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", LAYOUTS)
def test_packed_weights_have_their_size_and_lie_on_whole_lines(form: str, shape: tuple[int, int]) -> None:
    matrix = pack(form, weight(shape))
    assert matrix.data.nbytes == matrix_bytes(form, *shape)
    assert matrix.data.ctypes.data % 64 == 0 and matrix.data.nbytes % 64 == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", LAYOUTS)
def test_single_rows_are_those_of_the_whole(form: str, shape: tuple[int, int]) -> None:
    matrix = pack(form, np.random.default_rng(2).standard_normal(shape, dtype=np.float32))
    ids = np.random.default_rng(3).integers(0, shape[0], 70)
    assert np.array_equal(PackedRows(matrix)[ids], unpack(matrix)[ids]) and PackedRows(matrix)[ids[:0]].shape == (
        0,
        shape[1],
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_plain_formats_come_back_to_the_bit(shape: tuple[int, int]) -> None:
    w = weight(shape)
    assert np.array_equal(unpack(pack("float32", w)), w)
    assert np.array_equal(unpack(pack("fp16", w)), w.astype(np.float16).astype(np.float32))
    bits = bf16_from_float32(w)
    assert np.array_equal(unpack(pack("bf16", bits)), float32_from_bf16(bits))
    assert np.array_equal(unpack(pack("bf16", w)), float32_from_bf16(bits))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form, levels", [("int8", 127), ("int4", 7)])
def test_rounding_stays_within_a_step_of_its_group(form: str, levels: int, shape: tuple[int, int]) -> None:
    w = weight(shape)
    back = unpack(pack(form, w))
    group = LAYOUTS[form].group
    for first in range(0, shape[1], group):
        part = w[:, first : first + group]
        step = np.abs(part).max(axis=1) / levels
        # half a step; an int4 scale found by search may cut a large weight by some more
        allowed = (0.51 if form == "int8" else 2.5) * step
        assert np.all(np.abs(back[:, first : first + group] - part).max(axis=1) <= allowed + 1e-7)


def test_int4_searched_scales_beat_the_plain_ones() -> None:
    w = weight((64, 512))
    groups = w.reshape(64, -1, 32)
    step = np.abs(groups).max(axis=2, keepdims=True) / 7
    plain = np.square(np.clip(np.rint(groups / step), -8, 7) * step - groups).mean()
    assert np.square(unpack(pack("int4", w)) - w).mean() < 0.9 * plain


@pytest.mark.parametrize("name", instruction_sets())
def test_int4_packed_in_the_kernels_has_the_bits_of_numpy(name: str) -> None:
    """Also of groups that are zero, have equal largest numbers of either sign, or scales at the end of half precision."""
    random = np.random.default_rng(3)
    w = weight((32, 640)) * 10.0 ** random.integers(-9, 5, (32, 640 // 32)).repeat(32, axis=1).astype(np.float32)
    w[:8][random.random((8, 640)) < 0.7] = 0
    w[8:16] = np.round(4 * w[8:16] / np.abs(w[8:16]).max(axis=1, keepdims=True))
    w[16, 5], w[17, 40], w[18, 70], w[19] = 3e5, -5.2e5, 1e-40, 0
    with forced(name):
        found = pack("int4", w).data
    assert np.array_equal(found, pack_int4_in_numpy(w))


def test_mxfp4_keeps_its_own_numbers_and_rounds_others_to_the_nearest() -> None:
    random = np.random.default_rng(4)
    scales, halves = random.integers(2, 253, (20, 7), np.uint8), random.integers(0, 256, (20, 112), np.uint8)
    halves[0], halves[1, :16], scales[1, 0] = 0, 0x11, 0  # zeros; numbers so small that the kernels count them as zero
    matrix = pack_halves(empty("mxfp4", 20, 224), lambda rows: Halves(scales[rows], halves[rows]))
    by_code = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = np.empty((20, 224))
    for o, i in np.ndindex(20, 224):
        code = int(halves[o, i // 2]) >> 4 * (i % 2) & 15
        numbers[o, i] = (-1) ** (code >> 3) * by_code[code & 7] * 2.0 ** (int(scales[o, i // 32]) - 127)
    assert np.array_equal(unpack(matrix), numbers.astype(np.float32)) and (numbers.astype(np.float32) == numbers).all()
    numbers[1, :32] = 0
    assert np.array_equal(unpack(pack("mxfp4", numbers.astype(np.float32))), numbers)
    w = np.zeros((1, 32), dtype=np.float32)
    w[0, :11] = [6, 0.2, 0.3, -0.25, 0.75, 1.25, 1.75, 2.5, 3.5, -5, 5.1]
    assert list(unpack(pack("mxfp4", w))[0, :11]) == [6, 0, 0.5, 0, 1, 1, 2, 2, 4, -4, 6], "ties to the even code"


def test_mxfp4_chooses_the_scale_that_costs_less() -> None:
    w = weight((64, 512))
    power = np.floor(np.log2(np.abs(w.reshape(64, -1, 32)).max(axis=2))) - 2  # as the standard has it
    scale = np.exp2(power).repeat(32, axis=1)
    by_code = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = by_code[np.abs(np.abs(w / scale)[..., None] - by_code).argmin(axis=2)] * np.sign(w) * scale
    found, plain = np.square(unpack(pack("mxfp4", w)) - w), np.square(nearest - w)
    assert (found.reshape(-1, 32).sum(axis=1) <= plain.reshape(-1, 32).sum(axis=1) * 1.0001).all()
    assert found.sum() < 0.95 * plain.sum()


def test_int4_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    w = weight((17, 130))
    expected = pack("int4", w).data
    monkeypatch.setattr(library, "load", lambda: None)
    assert np.array_equal(pack("int4", w).data, expected)


def test_zeros_and_extremes() -> None:
    w = np.zeros((3, 200), dtype=np.float32)
    w[1, 5], w[2, 199] = 1e-7, 3e5
    for form in LAYOUTS:
        back = unpack(pack(form, w, clips=True))
        assert np.all(np.isfinite(back)) and np.all(back[0] == 0)
    assert unpack(pack("float32", w))[2, 199] == 3e5


def test_one_line_feeds_sixteen_outputs() -> None:
    """The order of bytes that the kernels rely on."""
    w = np.arange(16, dtype=np.float32)[:, None] + 100 * np.arange(128, dtype=np.float32)[None]
    assert list(pack("float32", w).data.view(np.float32)[:18]) == [*range(16), 100, 101]
    assert list(pack("fp16", w).data.view(np.float16)[:18]) == [*range(16), 100, 101]
    assert list(unpack(pack("bf16", w))[:2, 1]) == [100, 101]
    assert list(float32_from_bf16(pack("bf16", w).data.view(np.uint16)[:4])) == [0, 100, 1, 101]
    int8 = pack("int8", w / 12715 * 127)  # the largest of the second group; its scale is about one
    scales = int8.data[:64].view(np.float16)
    assert scales[16] == scales[31] or abs(float(scales[31]) - 1) < 1e-2
    line = int8.data[64 + 16 * 64 : 64 + 17 * 64]  # inputs 64 to 67
    assert line[0] == line[4] or abs(int(line[0]) - int(line[4])) <= 1  # outputs 0 and 1, input 64
    assert line[3] >= line[0]
    int4 = pack("int4", np.tile(np.array([[-8, 1, 2, 3, 4, 5, 6, 7]], dtype=np.float32), (16, 8)))
    assert int4.data[64] == (0 | (12 << 4)) and int4.data[65] == (9 | (13 << 4))


def test_small_weights_lie_together_in_memory_that_ends_with_the_last_of_them() -> None:
    arrays = [aligned_bytes((1 << 20) + 100 * i) for i in range(100)]
    for i, array in enumerate(arrays):
        assert array.ctypes.data % 64 == 0 and array.size == (1 << 20) + 100 * i
        array[:] = i
    assert all((array == i).all() for i, array in enumerate(arrays)), "none is in another's place"
    pieces = {id(array.base): weakref.ref(array.base) for array in arrays}
    assert len(pieces) < 10
    ends = {id(array.base) for array in (arrays[0], arrays[-1])}  # which others may use, too
    kept = arrays[50]
    del arrays, array
    gc.collect()
    assert {which for which, piece in pieces.items() if piece() is not None} - ends == {id(kept.base)} - ends
    assert (kept == 50).all()
