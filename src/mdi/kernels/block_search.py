"""Numbers into block types of GGUF files: the search for scales and minima that leave the least error.

The error is the sum of w * (x - y)^2 over a block's numbers x and what they become, y; w says how much an input counts
(`checkpoint.packing`). With the whole numbers q of a block fixed, the best scale and minimum are those of a weighted least
squares fit; with scale and minimum fixed, each q is the nearest. So for some widths of the steps q is rounded, the fit is made,
and the one with the least error is kept. In a super-block of 256, whose scales and minima are whole numbers of 6 or 8 bits
times a common factor, the factors are fitted the same way to the q that the rounded scales lead to, and each scale and minimum
is compared with its neighbours.

Arrays have the inputs of a group first, (inputs of a group, groups), so that sums are added in the same order on every machine.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mdi.kernels.weight_formats import BLOCK_TYPES

Floats = np.ndarray  # of float32
Bytes = np.ndarray  # of uint8

SEARCH_VERSION = 2  # raised when the search finds other blocks of the same numbers

_GROUPS_AT_A_TIME = 1 << 11  # of 32: what is computed with stays in a core's cache
_TINY = np.float32(1e-30)
_LARGEST_HALF = 65504.0

# Widths of steps that are tried, over the one at which the largest number gets the last step.
_WIDTHS_4 = tuple(np.float32(1.12 - 0.03 * i) for i in range(16))
_WIDTHS_6 = tuple(np.float32(1.04 - 0.02 * i) for i in range(8))
_WIDTHS_8 = (np.float32(1.0),)


def quantize_rows(form: str, rows: Floats, importance: Floats | None = None) -> Bytes:
    """Rows of numbers (n, n_in), whole blocks -> rows of bytes (n, bytes of a row), as in a file.

    Args:
        form: a key of `SEARCHED`.
        importance: of each input, above 0, (n_in); None: all count the same.
    """
    kind, search = BLOCK_TYPES[form], SEARCHED[form]
    blocks = np.ascontiguousarray(rows, dtype=np.float32).reshape(-1, kind.inputs)
    weights = np.ones(rows.shape[1], dtype=np.float32) if importance is None else _usable_weights(importance)
    weights = weights.reshape(-1, kind.inputs)
    found = np.empty((len(blocks), kind.block_bytes), dtype=np.uint8)
    step = max(1, _GROUPS_AT_A_TIME * 32 // kind.inputs)

    for first in range(0, len(blocks), step):
        own = blocks[first : first + step]
        found[first : first + step] = search(own, weights[np.arange(first, first + len(own)) % len(weights)])
    return found.reshape(len(rows), -1)


def _usable_weights(importance: Floats) -> Floats:
    """Around 1, and none so small that a fit divides by nothing."""
    usual = float(np.mean(importance, dtype=np.float64))
    if not 0 < usual < np.inf:
        return np.ones_like(importance, dtype=np.float32)
    return np.maximum(importance / usual, 1e-6).astype(np.float32)


def _half(x: Floats) -> Floats:
    """As half precision will store it, float32."""
    return np.clip(x, -_LARGEST_HALF, _LARGEST_HALF).astype(np.float16).astype(np.float32)


def _inverse(x: Floats) -> Floats:
    """1 / x, and 0 where x is 0."""
    return np.divide(1, x, out=np.zeros_like(x), where=np.abs(x) > _TINY)


def _sum(x: Floats) -> Floats:
    return np.add.reduce(x, axis=0)


def _fit_scale(x: Floats, w: Floats, low: int, high: int, widths: tuple[np.float32, ...]) -> Floats:
    """Scales of groups without a minimum, (inputs, n) -> (n): x is about scale * q, q from low to high."""
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=0)[None], axis=0)[0]
    xw, best, best_scale = x * w, np.full(x.shape[1:], -1, dtype=np.float32), np.zeros(x.shape[1:], dtype=np.float32)
    for width in widths:
        q = np.rint(x * _inverse(largest * (width / np.float32(low))))
        np.clip(q, low, high, out=q)
        with_x, with_q = _sum(q * xw), _sum(q * q * w)
        scale = with_x * _inverse(with_q)
        gain = with_x * scale  # by which the fit makes the error smaller
        is_better = gain > best
        best = np.where(is_better, gain, best)
        best_scale = np.where(is_better, scale, best_scale)
    return best_scale


def _fit_scale_and_minimum(x: Floats, w: Floats, high: int, widths: tuple[np.float32, ...]) -> tuple[Floats, Floats]:
    """The same with a minimum that is not below 0: x is about scale * q - minimum, q from 0 to high."""
    least = np.minimum(x.min(axis=0), 0)
    span = (x.max(axis=0) - least) / np.float32(high)
    shape = x.shape[1:]
    xw, sum_w = x * w, _sum(w)
    sum_x = _sum(xw)
    best = np.full(shape, -1, dtype=np.float32)
    best_scale = np.zeros(shape, dtype=np.float32)
    best_minimum = np.where(
        span > 0, np.float32(0), np.abs(least)
    )  # numbers that are all alike, below 0, are a minimum alone
    for width in widths:
        # A narrower step cuts off as much at one end as at the other.
        shift = least + span * np.float32(high / 2) * (1 - width) if width < 1 else least
        q = np.rint((x - shift) * _inverse(span * width))
        np.clip(q, 0, high, out=q)
        qw = q * w
        sum_q, sum_qq, sum_qx = _sum(qw), _sum(qw * q), _sum(q * xw)
        inverse = _inverse(sum_w * sum_qq - sum_q * sum_q)
        scale = (sum_w * sum_qx - sum_q * sum_x) * inverse
        minimum = (sum_q * sum_qx - sum_qq * sum_x) * inverse
        has_none = (minimum < 0) | (inverse == 0)
        scale = np.where(has_none, sum_qx * _inverse(sum_qq), scale)
        minimum = np.where(has_none, 0, minimum)
        gain = scale * sum_qx - minimum * sum_x
        is_better = (gain > best) & (scale > 0)
        best = np.where(is_better, gain, best)
        best_scale = np.where(is_better, scale, best_scale)
        best_minimum = np.where(is_better, minimum, best_minimum)
    return best_scale, best_minimum


def _rounded(x: Floats, scale: Floats, minimum: Floats | None, low: int, high: int) -> Floats:
    """The nearest q of each number, (inputs, n), of scales (n)."""
    q = np.rint((x if minimum is None else x + minimum) * _inverse(scale))
    return np.clip(q, low, high, out=q)


def _error(x: Floats, w: Floats, scale: Floats, minimum: Floats | None, low: int, high: int) -> Floats:
    """Of each group, with the nearest q."""
    off = _rounded(x, scale, minimum, low, high)
    off *= scale
    off -= x
    if minimum is not None:
        off -= minimum
    off *= off
    off *= w
    return _sum(off)


def _grouped(blocks: Floats, group: int) -> Floats:
    """(n, inputs of a block) -> (group, n * groups of a block)"""
    return np.ascontiguousarray(blocks.reshape(-1, group).T)


def _per_block(sums: Floats, n_groups: int) -> Floats:
    """(n * groups) -> (n), added in order."""
    return _sum(np.ascontiguousarray(sums.reshape(-1, n_groups).T))


def _q8_0(blocks: Floats, weights: Floats) -> Bytes:
    x, w = _grouped(blocks, 32), _grouped(weights, 32)
    most = _half(np.abs(x).max(axis=0) / np.float32(127))
    fitted = _half(np.abs(_fit_scale(x, w, -127, 127, _WIDTHS_8)))
    scale = np.where(_error(x, w, fitted, None, -127, 127) < _error(x, w, most, None, -127, 127), fitted, most)
    q = _rounded(x, scale, None, -127, 127).T
    return _joined(_halves(scale), q.astype(np.int8).view(np.uint8))


def _q5_0(blocks: Floats, weights: Floats) -> Bytes:
    x, w = _grouped(blocks, 32), _grouped(weights, 32)
    scale = _half(_fit_scale(x, w, -16, 15, _WIDTHS_6))
    q = (_rounded(x, scale, None, -16, 15) + 16).T.astype(np.uint8)
    fifth = np.packbits(q >> 4, axis=1, bitorder="little")
    return _joined(_halves(scale), fifth, (q[:, :16] & 15) | (q[:, 16:] & 15) << 4)


_N_FITS = 3  # rounds of fitting the common factors of a super-block, and then its scales


def _q4_k(blocks: Floats, weights: Floats) -> Bytes:
    n, x, w = len(blocks), _grouped(blocks, 32), _grouped(weights, 32)
    scale, minimum = _fit_scale_and_minimum(x, w, 15, _WIDTHS_4)
    by_block = scale.reshape(n, 8), minimum.reshape(n, 8)
    factors = [_half(one.max(axis=1) / np.float32(63)) for one in by_block]
    wholes = [
        np.clip(np.rint(one * _inverse(factor)[:, None]), 0, 63).reshape(-1)
        for one, factor in zip(by_block, factors, strict=True)
    ]
    best = np.full(n, np.inf, dtype=np.float32)
    kept = [*factors, *wholes]

    def spread(factor: Floats) -> Floats:
        return np.repeat(factor, 8)

    for i in range(_N_FITS + 1):
        d, dmin = (spread(factor) for factor in factors)
        wholes = _neighbours(wholes, lambda sc, m: _error(x, w, d * sc, dmin * m, 0, 15), 0, 63)  # noqa: B023
        sc, m = wholes
        error = _per_block(_error(x, w, d * sc, dmin * m, 0, 15), 8)
        is_better = error < best
        best = np.where(is_better, error, best)
        current = [*factors, *wholes]
        kept = [
            np.where(is_better if len(new) == n else spread(is_better), new, old)
            for new, old in zip(current, kept, strict=True)
        ]
        if i == _N_FITS:
            break
        # x is about d * (sc * q) - dmin * m: both factors at once
        q = _rounded(x, d * sc, dmin * m, 0, 15) * sc
        qw = q * w
        sums = [_sum(qw * q), _sum(qw) * m, _sum(w) * m * m, _sum(qw * x), _sum(w * x) * m]
        aa, ab, bb, ax, bx = (_per_block(one, 8) for one in sums)
        inverse = _inverse(aa * bb - ab * ab)
        fitted = (bb * ax - ab * bx) * inverse, (ab * ax - aa * bx) * inverse
        is_none = (inverse == 0) | (fitted[0] <= 0) | (fitted[1] < 0)
        factors = [_half(np.where(is_none, old, new)) for old, new in zip(factors, fitted, strict=True)]
    factors, wholes = kept[:2], kept[2:]
    d, dmin = (spread(factor) for factor in factors)
    q = _rounded(x, d * wholes[0], dmin * wholes[1], 0, 15).T.astype(np.uint8).reshape(n, 4, 2, 32)
    sc, m = (one.astype(np.uint8).reshape(n, 8) for one in wholes)
    high = np.concatenate((sc[:, :4] | (sc[:, 4:] >> 4) << 6, m[:, :4] | (m[:, 4:] >> 4) << 6), axis=1)
    low = (sc[:, 4:] & 15) | (m[:, 4:] & 15) << 4
    return _joined(*map(_halves, factors), high, low, (q[:, :, 0] | q[:, :, 1] << 4).reshape(n, -1))


def _q6_k(blocks: Floats, weights: Floats) -> Bytes:
    n, x, w = len(blocks), _grouped(blocks, 16), _grouped(weights, 16)
    scale = _fit_scale(x, w, -32, 31, _WIDTHS_6)
    by_block = scale.reshape(n, 16)
    largest = np.take_along_axis(by_block, np.abs(by_block).argmax(axis=1)[:, None], axis=1)[:, 0]
    d = _half(largest / np.float32(-128))
    whole = np.clip(np.rint(by_block * _inverse(d)[:, None]), -128, 127).reshape(-1)
    best, kept = np.full(n, np.inf, dtype=np.float32), (d, whole)
    for i in range(2):
        factor = np.repeat(d, 16)
        (whole,) = _neighbours([whole], lambda sc: _error(x, w, factor * sc, None, -32, 31), -128, 127)  # noqa: B023
        error = _per_block(_error(x, w, factor * whole, None, -32, 31), 16)
        is_better = error < best
        best = np.where(is_better, error, best)
        kept = np.where(is_better, d, kept[0]), np.where(np.repeat(is_better, 16), whole, kept[1])
        if i == 1:
            break
        q = _rounded(x, factor * whole, None, -32, 31) * whole
        fitted = _per_block(_sum(q * w * x), 16) * _inverse(_per_block(_sum(q * q * w), 16))
        d = _half(np.where(fitted == 0, d, fitted))
    d, whole = kept
    q = (_rounded(x, np.repeat(d, 16) * whole, None, -32, 31) + 32).T.astype(np.uint8).reshape(n, 2, 4, 32)
    low = np.concatenate(
        ((q[:, :, 0] & 15) | (q[:, :, 2] & 15) << 4, (q[:, :, 1] & 15) | (q[:, :, 3] & 15) << 4), axis=2
    )
    high = q[:, :, 0] >> 4 | (q[:, :, 1] >> 4) << 2 | (q[:, :, 2] >> 4) << 4 | (q[:, :, 3] >> 4) << 6
    wholes = whole.reshape(n, 16).astype(np.int8).view(np.uint8)
    return _joined(low.reshape(n, -1), high.reshape(n, -1), wholes, _halves(d))


def _neighbours(wholes: list[Floats], error: Callable[..., Floats], low: int, high: int) -> list[Floats]:
    """Whole numbers of groups, each moved by one where that makes the error of its group smaller."""
    best = error(*wholes)
    for i in range(len(wholes)):
        start = wholes[i]
        for step in (-1, 1):
            moved = [*wholes]
            moved[i] = np.clip(start + np.float32(step), low, high)
            found = error(*moved)
            is_better = found < best
            best = np.where(is_better, found, best)
            wholes = [*wholes]
            wholes[i] = np.where(is_better, moved[i], wholes[i])
    return wholes


def _halves(x: Floats) -> Bytes:
    """(n) -> (n, 2)"""
    return x.astype("<f2").view(np.uint8).reshape(-1, 2)


def _joined(*parts: Bytes) -> Bytes:
    return np.concatenate(parts, axis=1)


SEARCHED: dict[str, Callable[[Floats, Floats], Bytes]] = {"q8_0": _q8_0, "q5_0": _q5_0, "q4_k": _q4_k, "q6_k": _q6_k}
