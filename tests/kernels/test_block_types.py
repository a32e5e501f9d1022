"""The block types of GGUF files as formats of the kernels: the file's own numbers, whatever is made of them."""

from __future__ import annotations

import numpy as np
import pytest
from block_files import extreme_rows, halves_of, numbers, random_rows
from forced import forced, instruction_sets
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from mdi.checkpoint import gguf
from mdi.errors import CheckpointError
from mdi.kernels import library
from mdi.kernels.block_rows import drawn_rows, file_block_bytes, pack_rows, pack_rows_in_numpy
from mdi.kernels.blocks import Context, Linear
from mdi.kernels.layout import (
    Matrix,
    PackedRows,
    block_rows,
    cut,
    empty,
    matrix_bytes,
    pack_blocks,
    pack_halves,
    unpack,
)
from mdi.kernels.weight_formats import BLOCK_TYPES, LAYOUTS, layout_of

FORMS = list(BLOCK_TYPES)


@pytest.mark.parametrize("form", FORMS)
def test_numbers_by_chance_are_finite_and_have_a_mean_of_zero(form: str) -> None:
    rows = drawn_rows(form, 16, 300, np.random.default_rng(0))
    matrix = empty(form, 16, -(-300 // BLOCK_TYPES[form].inputs) * BLOCK_TYPES[form].inputs)
    pack_blocks(matrix, lambda at: rows[at])
    found = unpack(matrix)
    assert np.isfinite(found).all() and 0 < np.abs(found).max() < 2
    assert abs(found.mean()) < 0.15 * found.std()


needs_kernels = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")


def packed(form: str, rows: np.ndarray) -> Matrix:
    kind = BLOCK_TYPES[form]
    matrix = empty(form, len(rows), rows.shape[1] // kind.block_bytes * kind.inputs)
    pack_blocks(matrix, lambda at: rows[at], "w")
    return matrix


def test_the_table_has_the_sizes_and_numbers_of_the_gguf_package() -> None:
    for form, kind in BLOCK_TYPES.items():
        of_package = GGMLQuantizationType[form.upper()]
        assert (of_package.value, GGML_QUANT_SIZES[of_package]) == (kind.type_id, (kind.inputs, kind.block_bytes))
        assert kind.block_bytes == 2 * kind.halves + kind.bytes + 4 * kind.words
        assert layout_of(form).record_bytes % 64 == 0
        assert layout_of(form).bits < 1.01 * 8 * kind.block_bytes / kind.inputs
    every = [layout.number for layout in LAYOUTS.values()] + [kind.number for kind in BLOCK_TYPES.values()]
    assert every == list(range(len(every)))


@pytest.mark.parametrize("form", FORMS)
def test_numbers_are_those_of_the_file_to_the_bit(form: str) -> None:
    n_in = 1280 if BLOCK_TYPES[form].inputs == 256 else 416  # 13 blocks of 32: the last record is half empty
    for rows in (random_rows(form, 75, n_in), random_rows(form, 16, BLOCK_TYPES[form].inputs, 1), extreme_rows(form)):
        matrix = packed(form, rows)
        assert matrix.data.size == matrix_bytes(form, matrix.n_out, matrix.n_in)
        assert np.array_equal(block_rows(matrix), rows)
        assert np.array_equal(unpack(matrix).view(np.uint32), numbers(form, rows).view(np.uint32))
        some = np.array([len(rows) - 1, 0, 5, 5])
        assert np.array_equal(PackedRows(matrix)[some], numbers(form, rows)[some])
        in_numpy = np.full_like(matrix.data, 7)
        assert pack_rows_in_numpy(form, rows, in_numpy)
        assert np.array_equal(in_numpy, matrix.data)


@pytest.mark.parametrize("form", FORMS)
def test_scales_that_are_not_finite_are_refused_by_name(form: str) -> None:
    n_in = 2 * BLOCK_TYPES[form].inputs
    for at in halves_of(form):
        for bad in (np.nan, np.inf, -np.inf):
            rows = random_rows(form, 20, n_in)
            rows[17, at : at + 2] = np.array([bad], dtype=np.float16).view(np.uint8)
            to = np.empty(matrix_bytes(form, 20, n_in), dtype=np.uint8)
            assert not pack_rows_in_numpy(form, rows, to) and not pack_rows(form, rows, to)
            with pytest.raises(CheckpointError, match="^blk.7 "):
                pack_blocks(empty(form, 20, n_in), lambda part, rows=rows: rows[part], "blk.7")


@needs_kernels
@pytest.mark.parametrize("kind, form", [("Q4_0", "int4"), ("MXFP4", "mxfp4")])
def test_halves_of_bytes_are_those_that_numpy_makes(kind: str, form: str) -> None:
    """Of rows and blocks that fill their panels and records, and of others; a scale that is not finite is refused."""
    random, size = np.random.default_rng(4), file_block_bytes(form)
    for n_out, n_blocks in ((32, 4), (75, 13), (5, 1), (16, 2)):
        rows = random.integers(0, 256, (n_out, n_blocks, size), np.uint8)
        rows[..., size - 17] &= 0x3B  # finite scales
        rows = rows.reshape(n_out, -1)
        found, expected = empty(form, n_out, 32 * n_blocks), empty(form, n_out, 32 * n_blocks)
        found.data[:] = 7
        pack_blocks(found, lambda at, rows=rows: rows[at])
        pack_halves(expected, lambda at, rows=rows: gguf.halves_of(kind, rows[at], "w"))
        assert np.array_equal(found.data, expected.data)
        rows[-1, size - 17] = 0x7C if form == "int4" else 253
        with pytest.raises(CheckpointError, match="^blk.7 "):
            pack_blocks(found, lambda at, rows=rows: rows[at], "blk.7")


def test_several_threads_make_the_bytes_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, n_out = random_rows("q4_k", 1000, 8192), 1000
    found, expected = empty("q4_k", n_out, 8192), empty("q4_k", n_out, 8192)
    assert pack_rows("q4_k", rows, expected.data)
    seen = set()

    def read(at: slice) -> np.ndarray:
        seen.add((at.start, at.stop))
        return rows[at]

    for n_threads in (1, 3):
        monkeypatch.setattr("mdi.kernels.layout.n_cores", lambda n=n_threads: n)
        found.data[:], seen = 7, set()
        pack_blocks(found, read)
        assert np.array_equal(found.data, expected.data) and len(seen) > 3
    rows[n_out - 1, 1] = 0x7C  # the last piece
    with pytest.raises(CheckpointError, match="^blk.7 "):
        pack_blocks(found, read, "blk.7")


def exact_activations(n_rows: int, n_in: int, seed: int = 2) -> np.ndarray:
    """Whole numbers up to 127, which every group of 64 has: they are not rounded."""
    random = np.random.default_rng(seed)
    x = random.integers(-127, 128, (n_rows, n_in)).astype(np.float32)
    x[:, ::64] = 127 * random.choice([-1, 1], x[:, ::64].shape)
    return x


def multiplied(matrix: Matrix, x: np.ndarray, bias: np.ndarray | None = None, n_threads: int = 1) -> np.ndarray:
    return Linear(Context(n_threads), matrix, bias)(x)


@needs_kernels
@pytest.mark.parametrize("name", instruction_sets())
@pytest.mark.parametrize("form", FORMS)
def test_products_are_those_of_the_numbers(form: str, name: str) -> None:
    """Also of weights at the end of what a type holds, of large activations, of many rows and of cut ones."""
    inputs = BLOCK_TYPES[form].inputs
    for n_out, n_in in ((1, inputs), (75, 5 * inputs), (33, 3 * inputs)):
        rows = random_rows(form, n_out, n_in)
        bias = np.random.default_rng(3).standard_normal(n_out).astype(np.float32)
        with forced(name):
            for n_rows in (1, 2, 3, 5, 7, 8, 9, 20, 100):
                x = exact_activations(n_rows, n_in)
                x[n_rows // 2, 3], x[0, n_in - 1] = 1e5, -3e4
                found = multiplied(packed(form, rows), x, bias)
                exact = x.astype(np.float64) @ numbers(form, rows).astype(np.float64).T + bias
                size = np.abs(x).astype(np.float64) @ np.abs(numbers(form, rows)).astype(np.float64).T + np.abs(bias)
                assert (np.abs(found - exact) < 2e-6 * size).all()
    extreme = np.concatenate([extreme_rows(form)] * 4, axis=1)
    finite = np.abs(numbers(form, extreme)).max(axis=1) < 1e6  # and sums within float32
    for sign in (1, -1):
        x = np.full((3, 4 * inputs), sign * 127, dtype=np.float32)
        with forced(name):
            found = multiplied(packed(form, extreme), x)[:, finite]
        weights = numbers(form, extreme)[finite].astype(np.float64)
        size = np.abs(x) @ (np.abs(weights) + np.abs(weights).max(axis=1)[:, None]).T
        assert (np.abs(found - x @ weights.T) <= 1e-5 * size).all()


@needs_kernels
@pytest.mark.parametrize("form", FORMS)
def test_all_instruction_sets_any_company_and_threads_give_the_same_bits(form: str) -> None:
    n_in = 5 * BLOCK_TYPES[form].inputs
    matrix = packed(form, random_rows(form, 75, n_in))
    x = np.random.default_rng(5).standard_normal((200, n_in)).astype(np.float32)
    x[:, 7] *= 40
    expected = multiplied(matrix, x)
    for name in instruction_sets():
        with forced(name):
            own = expected if name != "plain" else multiplied(matrix, x)
            for n_rows, n_threads in ((1, 1), (2, 2), (5, 1), (9, 1), (16, 2), (97, 1), (200, 3)):
                assert multiplied(matrix, x[:n_rows], None, n_threads).tobytes() == own[:n_rows].tobytes(), name


ROWS = [None, [(0, 32)], [(16, 75)], [(5, 9)], [(0, 16), (32, 48), (64, 75)], [(1, 30), (30, 31), (70, 75)], [(7, 7)]]
COLUMNS = [None, (0, 256), (256, 1280), (64, 192), (32, 96), (10, 33), (320, 1248), (1279, 1280), (5, 5)]


@pytest.mark.parametrize("form", FORMS)
def test_a_part_has_the_numbers_of_the_whole(form: str) -> None:
    whole = packed(form, random_rows(form, 75, 1280))
    for rows in ROWS:
        chosen = unpack(whole) if rows is None else np.concatenate([unpack(whole)[a:b] for a, b in rows])
        for columns in COLUMNS:
            part = cut(whole, rows, columns)
            first, last = columns or (0, 1280)
            assert part.data.size == matrix_bytes(form, part.n_out, part.n_in)
            assert (part.n_out, part.n_in - part.skip) == (len(chosen), last - first)
            assert last == first or part.skip == first % (64 if BLOCK_TYPES[form].inputs == 32 else 256)
            if part.data.size:
                assert np.array_equal(unpack(part)[:, part.skip :], chosen[:, first:last])
