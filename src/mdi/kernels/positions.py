"""Positions: tables of rotary cosines and sines for a run, and what ALiBi adds to scores.

Scaled ones are those of transformers 5.23, and of litgpt where its Config says them. Two scalings depend on the length of a
text ("longrope" and "dynamic"). A table is for a run, and so for the longest text that the run may have: it is what
transformers uses for one text of that length, from its first position on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mdi.kernels.layout import bf16_from_float32, floats
from mdi.model.caches import PAGE
from mdi.model.spec import Alibi, Attention, BlockSpec, Rotary

Floats = np.ndarray


def rope_tables(rotary: Rotary, max_length: int) -> tuple[Floats, Floats]:
    """Cosines and sines, float32 (max_length, rotary.n_elem).

    Angles are rounded where litgpt and transformers round them, to float32; their cosines are then exact to the last bit or so.
    """
    n = rotary.n_elem
    theta, scaling = _scaled(rotary, max_length)
    positions = np.arange(max_length, dtype=np.float32) / np.float32(rotary.condense)
    angles = np.tile(np.outer(positions, theta), (1, 2))[:, :n].astype(np.float64)
    cos, sin = (np.ascontiguousarray(f(angles).astype(np.float32) * scaling, np.float32) for f in (np.cos, np.sin))
    return cos, sin


def score_bias(attention: Attention, max_length: int) -> Floats | None:
    """Terms of the scores of the key at each position, float32 (n_head, max_length in whole pages); None for nothing.

    ALiBi (Press et al. 2022): the heads' slopes times the position, counted from the text's first token as in transformers
    (softmax takes the same from all keys). Rounded, slopes, positions and their products are bfloat16, and the whole is divided
    like the scores.
    """
    alibi = attention.positions
    if not isinstance(alibi, Alibi):
        return None
    slopes = alibi_slopes(alibi.n_slopes)[alibi.first : alibi.first + attention.n_head, None]
    positions = np.arange(-(-max_length // PAGE) * PAGE, dtype=np.float32)[None]
    if not alibi.is_rounded:
        return np.ascontiguousarray(slopes * positions)
    products = _as_bf16(_as_bf16(slopes) * _as_bf16(positions))
    return np.ascontiguousarray(products / np.float32(math.sqrt(attention.head_size)))


def table_bytes(blocks: Iterable[BlockSpec], max_length: int) -> int:
    """Bytes of all tables of positions of some blocks: each one is there once."""
    mixers = {block.mixer for block in blocks}
    rotary = {mixer.positions for mixer in mixers if isinstance(mixer.positions, Rotary)}
    biases = {(m.positions, m.n_head) for m in mixers if isinstance(m, Attention) and isinstance(m.positions, Alibi)}
    n_pages = -(-max_length // PAGE)
    return 4 * (sum(2 * one.n_elem for one in rotary) * max_length + sum(n for _, n in biases) * n_pages * PAGE)


def alibi_slopes(n_head: int) -> Floats:
    """float32 (n_head): powers of 2^(-8 / n) of the largest power of two n of heads, then every second one of twice as many."""
    n = 1 << (n_head.bit_length() - 1)
    first = [2.0 ** (-8 * i / n) for i in range(1, n + 1)]
    rest = [2.0 ** (-4 * i / n) for i in range(1, 2 * (n_head - n) + 1, 2)]
    return np.array(first + rest, dtype=np.float32)


def _as_bf16(x: Floats) -> Floats:
    return floats(bf16_from_float32(np.ascontiguousarray(x)))


def _powers(base: float, n: int) -> Floats:
    exponents = np.arange(0, n, 2, dtype=np.float32) / np.float32(n)
    return np.power(np.float64(base), exponents.astype(np.float64)).astype(np.float32)


def _frequencies(base: float, n: int) -> Floats:
    return np.float32(1) / _powers(base, n)


def _scaled(rotary: Rotary, max_length: int) -> tuple[Floats, np.float32]:
    """Frequencies, and a factor on cosines and sines."""
    one, n, base, adjustments = np.float32(1), rotary.n_elem, rotary.base, rotary.scaling
    theta = _frequencies(base, n)
    if not adjustments:
        return theta, one
    kind = adjustments.get("rope_type")
    if kind == "yarn":
        return _yarn(n, base, adjustments, is_litgpts=False)
    if kind == "longrope":
        return _longrope(n, base, adjustments, max_length)
    if kind == "proportional":  # frequencies of a whole head, of which the lower ones turn nothing
        theta[int(adjustments["partial_rotary_factor"] * n // 2) :] = 0
        return theta, one
    if kind == "dynamic":
        return _dynamic(n, base, adjustments, max_length), one
    if "beta_fast" in adjustments or "beta_slow" in adjustments:
        return _yarn(n, base, adjustments, is_litgpts=True)
    if "low_freq_factor" in adjustments:
        factor, low = np.float32(adjustments["factor"]), np.float32(adjustments["low_freq_factor"])
        ratio = np.float32(adjustments["original_max_seq_len"]) / (np.float32(2 * math.pi) / theta)
        smooth = np.clip(
            (ratio - low) / np.float32(adjustments["high_freq_factor"] - adjustments["low_freq_factor"]), 0, 1
        )
        return ((one - smooth) * (theta / factor) + smooth * theta).astype(np.float32), one
    if "factor" in adjustments:
        return theta / np.float32(adjustments["factor"]), one
    return theta, one


def _dynamic(n: int, base: float, adjustments: Mapping[str, Any], max_length: int) -> Floats:
    """A larger base for texts that are longer than the trained ones ("NTK", as transformers' "dynamic")."""
    factor, trained = adjustments["factor"], adjustments["max_position_embeddings"]
    longest = max(max_length, trained)
    return _frequencies(base * ((factor * longest / trained) - (factor - 1)) ** (n / (n - 2)), n)


def _longrope(n: int, base: float, adjustments: Mapping[str, Any], max_length: int) -> tuple[Floats, np.float32]:
    """LongRoPE (Ding et al. 2024): a factor for each frequency, others for texts beyond the length before its extension."""
    original, factor = adjustments["original_max_position_embeddings"], adjustments["factor"]
    scaling = adjustments.get("attention_factor")
    if scaling is None:
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = adjustments["long_factor" if max_length > original else "short_factor"]
    theta = np.float32(1) / (np.array(factors, dtype=np.float32) * _powers(base, n))
    return theta, np.float32(scaling)


def _mscale(scale: float, mscale: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _yarn(n: int, base: float, adjustments: Mapping[str, Any], is_litgpts: bool) -> tuple[Floats, np.float32]:
    """YaRN (Peng et al. 2023, section 3): low frequencies are stretched, high ones kept, those between are mixed.

    Args:
        is_litgpts: litgpt's form, which mixes the other way round, ends the ramp earlier, and has no factor by default.
    """
    factor = adjustments["factor"]
    longest = adjustments["original_max_seq_len" if is_litgpts else "original_max_position_embeddings"]
    mscale, mscale_all = adjustments.get("mscale"), adjustments.get("mscale_all_dim")
    scaling = adjustments.get("attention_factor")
    if scaling is None:
        alone = (mscale_all or mscale) if is_litgpts else 1.0
        scaling = _mscale(factor, alone) if alone else 1.0
        if mscale and mscale_all:
            scaling = _mscale(factor, mscale) / _mscale(factor, mscale_all)

    def dimension(rotations: float) -> float:
        return n * math.log(longest / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(adjustments.get("beta_fast") or 32), dimension(adjustments.get("beta_slow") or 1)
    if adjustments.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, n // 2 - 1 if is_litgpts else n - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(n // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    powers, one = _powers(base, n), np.float32(1)
    kept = ramp if is_litgpts else one - ramp
    theta = one / (np.float32(factor) * powers) * (one - kept) + one / powers * kept
    return theta.astype(np.float32), np.float32(scaling)
