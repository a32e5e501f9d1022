"""Rows on the wire: what a hop costs in precision, bytes and independence, and what must never get lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopback import CPU
from mdi.engine.rows import ENCODERS
from mdi.errors import WireError
from mdi.net.wire import BLOCK_INT8, DTYPE_CODES, DTYPES, ROW_FLOAT16, BufferPool, Frame, FrameType, Slice
from tensor_frames import frame_of, rows_of

WIDTHS = [1, 63, 64, 65, 100, 2048]


def rows(n: int, n_cols: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, n_cols, generator=torch.Generator().manual_seed(seed))


def hop(x: torch.Tensor, wire: str) -> torch.Tensor:
    """What the next node sees of `x`."""
    slices = (Slice(1, 0, x.size(0), 0),)
    frame = frame_of(x, 1, 0, slices, (), wire)
    assert memoryview(frame.payload).nbytes == DTYPES[DTYPE_CODES[frame.dtype]].n_bytes(*x.shape)
    return rows_of(frame, x.size(1), CPU, x.dtype)


def error(x: torch.Tensor, wire: str) -> float:
    return ((hop(x, wire) - x).norm() / x.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n_cols", WIDTHS)
def test_as_computed_is_the_same_bits(n_cols: int, dtype: torch.dtype) -> None:
    x = rows(3, n_cols).to(dtype)
    assert torch.equal(hop(x, "auto"), x)


def test_as_computed_is_sent_and_received_without_a_copy() -> None:
    x = rows(3, 64)
    frame = frame_of(x, 1, 0, (), ())
    assert torch.frombuffer(frame.payload, dtype=torch.uint8).data_ptr() == x.data_ptr()
    assert rows_of(frame, 64, CPU, torch.float32).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("n_cols", WIDTHS)
@pytest.mark.parametrize(("wire", "limit"), [("fp16", 0.0005), ("int8", 0.007)])
def test_the_error_of_a_hop(wire: str, limit: float, n_cols: int) -> None:
    x = rows(16, n_cols)
    assert error(x, wire) < limit
    assert error(x * 1e-12, wire) < limit and error(x * 1e12, wire) < limit


@pytest.mark.parametrize(("wire", "limit"), [("fp16", 0.0005), ("int8", 0.007)])
@pytest.mark.parametrize("ratio", [30, 300, 3000])
def test_large_channels_leave_the_others_what_they_were(wire: str, limit: float, ratio: int) -> None:
    """0.2 % of the channels are so many times larger, and the next layer undoes that: the error of its result."""
    x, weight = rows(16, 2048), rows(64, 2048, seed=1)
    large = torch.arange(13, 2048, 512)
    x[:, large] *= ratio
    weight[:, large] /= ratio
    y = x @ weight.T
    assert ((hop(x, wire) @ weight.T - y).norm() / y.norm()).item() < limit


def test_values_that_are_equally_large_with_either_sign() -> None:
    x = torch.tensor([[4.0, -4.0, 4.0, 1.0, -0.5, 0.0]])
    assert torch.allclose(hop(x, "int8"), x, atol=4 / 127 / 2)


def test_no_step_of_a_block_becomes_its_mark() -> None:
    """The scale is sent rounded, by up to 1/256 of it: the largest of the others must still not get the step -128."""
    halfway = np.arange(256, 512) / 256  # scales that lie on bfloat16's numbers and between two of them
    near = np.spacing(np.float32(1)) * np.arange(-3, 4)
    largest = (np.float32(127) * (halfway[:, None] + near)).astype(np.float32).ravel()
    for sign, scale in ((1, 1.0), (-1, 1.0), (-1, 2.0**-90), (1, 2.0**90)):
        x = np.zeros((len(largest), 64), dtype=np.float32)
        x[:, 0], x[:, 1] = 1000 * scale, sign * largest * np.float32(scale)
        encoder = ENCODERS["int8"]
        steps = np.frombuffer(encoder.encode(x), dtype=np.int8)[len(x) * 4 :].reshape(x.shape)
        assert (steps[:, 0] == -128).all() and (steps[:, 1] == sign * 127).all()
        found = encoder.decode(encoder.encode(x), *x.shape)
        np.testing.assert_allclose(found[:, 1], x[:, 1], rtol=1 / 200)


@pytest.mark.parametrize("wire", ["fp16", "int8"])
@pytest.mark.parametrize("value", [65504.0, 65520.0, 1e5, 3e38, -1e6])
def test_what_float16_cannot_hold_stays_finite_and_right(wire: str, value: float) -> None:
    x = rows(2, 64)
    x[0, 7] = value
    found = hop(x, wire)
    assert torch.isfinite(found).all()
    assert found[0, 7].item() == pytest.approx(value, rel=0.005)
    assert torch.equal(found[1], hop(x[1:], wire)[0])


@pytest.mark.parametrize("wire", ["fp16", "int8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_not_hidden(wire: str, value: float) -> None:
    x = rows(2, 70)
    x[1, 69] = value
    found = hop(x, wire)
    assert not torch.isfinite(found[1]).all() and torch.isfinite(found[0]).all()


@pytest.mark.parametrize("wire", ["fp16", "int8"])
def test_zeros_stay_zeros(wire: str) -> None:
    assert torch.equal(hop(torch.zeros(2, 50), wire), torch.zeros(2, 50))


@settings(max_examples=100)
@given(
    wire=st.sampled_from(["fp16", "int8"]),
    n_rows=st.integers(1, 9),
    n_cols=st.integers(1, 80),
    scale=st.sampled_from([1e-6, 1.0, 1e7]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_a_row_does_not_depend_on_its_batch(
    wire: str, n_rows: int, n_cols: int, scale: float, dtype: torch.dtype, seed: int
) -> None:
    x = rows(n_rows, n_cols, seed)
    x[n_rows // 2] *= scale
    x = x.to(dtype)
    together = hop(x, wire)
    assert together.dtype == dtype
    for i in range(n_rows):
        assert torch.equal(hop(x[i : i + 1], wire)[0], together[i])


def test_rows_that_are_a_view_of_others_are_encoded_alike() -> None:
    x = rows(4, 64)[1::2]
    assert not x.is_contiguous() or x.size(0) == 1
    for wire in ENCODERS:
        assert torch.equal(hop(x, wire), hop(x.contiguous(), wire))


@pytest.mark.parametrize("wire", ["auto", "fp16", "int8"])
def test_no_rows_are_no_bytes(wire: str) -> None:
    frame = frame_of(torch.empty(0, 64), 1, 0, (), (3,), wire)
    assert (frame.n_rows, bytes(frame.payload)) == (0, b"")
    assert rows_of(frame, 64, CPU, torch.float32).shape == (0, 64)


def test_bytes_per_row() -> None:
    assert ROW_FLOAT16.n_bytes(3, 2048) == 3 * (2 * 2048 + 4)
    assert BLOCK_INT8.n_bytes(3, 2048) == 3 * (2048 + 4 * 32)
    assert BLOCK_INT8.n_bytes(1, 65) == 65 + 8  # the last block is short, its scale is not


@pytest.mark.parametrize("kind", [ROW_FLOAT16, BLOCK_INT8])
def test_rows_of_another_width_are_refused(kind: object) -> None:
    name, n_bytes = kind.name, kind.n_bytes(1, 64)  # type: ignore[attr-defined]
    frame = Frame(FrameType.BATCH, 1, 0, name, 1, 64, payload=bytearray(n_bytes))
    with pytest.raises(WireError):
        rows_of(frame, 65, CPU, torch.float32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("wire", ["auto", "fp16", "int8"])
def test_from_one_gpu_to_the_next(wire: str) -> None:
    from mdi.engine.rows import pinned_buffer

    x = rows(5, 100)
    gpu = torch.device("cuda")
    sent = frame_of(x.to(gpu), 1, 0, (), (), wire)
    pool = BufferPool(2, pinned_buffer)
    view = pool.take(memoryview(sent.payload).nbytes)
    view[:] = sent.payload
    assert torch.frombuffer(view, dtype=torch.uint8).is_pinned()
    received = Frame(FrameType.BATCH, 1, 0, sent.dtype, 5, 100, payload=view)
    assert torch.equal(rows_of(received, 100, gpu, torch.float32).cpu(), hop(x, wire))
    pool.give_back(view)
    assert pool.take(10).obj is view.obj
