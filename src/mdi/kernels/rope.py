"""Tables of rotary positions, as litgpt computes them, without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Floats = np.ndarray


def rope_n_elem(config: Mapping[str, Any]) -> int:
    """Numbers of a head that are turned."""
    return int(config["rotary_percentage"] * config["head_size"])


def n_tables(config: Mapping[str, Any]) -> int:
    return 1 if config["rope_local_base_freq"] is None else 2


def rope_tables(config: Mapping[str, Any], max_length: int) -> tuple[Floats, Floats]:
    """Cosines and sines, float32 (n_tables, max_length, rope_n_elem).

    Angles are rounded where litgpt rounds them, to float32; their cosines are then exact to the last bit or so.

    Args:
        config: litgpt's Config as a plain dict.
    """
    n = rope_n_elem(config)
    base = _frequencies(config["rope_base"], n)
    scaling = np.float32(1)
    adjustments = config["rope_adjustments"]
    if adjustments is not None:
        base, scaling = _adjusted(base, n, config["rope_base"], adjustments)
    tables = [base]
    if config["rope_local_base_freq"] is not None:
        tables.append(_frequencies(config["rope_local_base_freq"], n))
    positions = np.arange(max_length, dtype=np.float32) / np.float32(config["rope_condense_ratio"])
    angles = [np.tile(np.outer(positions, theta), (1, 2))[:, :n].astype(np.float64) for theta in tables]
    cos = np.stack([np.cos(a).astype(np.float32) * scaling for a in angles])
    sin = np.stack([np.sin(a).astype(np.float32) * scaling for a in angles])
    return np.ascontiguousarray(cos, dtype=np.float32), np.ascontiguousarray(sin, dtype=np.float32)


def _powers(base: float, n: int) -> Floats:
    exponents = np.arange(0, n, 2, dtype=np.float32) / np.float32(n)
    return np.power(np.float64(base), exponents.astype(np.float64)).astype(np.float32)


def _frequencies(base: float, n: int) -> Floats:
    return np.float32(1) / _powers(base, n)


def _adjusted(theta: Floats, n: int, base: float, adjustments: Mapping[str, Any]) -> tuple[Floats, np.float32]:
    """Frequencies for contexts longer than the model was first trained for, and a factor on cosines and sines."""
    one = np.float32(1)
    if "beta_fast" in adjustments or "beta_slow" in adjustments:
        return _yarn(n, base, adjustments)
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


def yarn_mscale(scale: float, mscale: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _yarn(n: int, base: float, adjustments: Mapping[str, Any]) -> tuple[Floats, np.float32]:
    """YaRN (Peng et al. 2023, section 3): low frequencies are stretched, high ones kept, those between are mixed."""
    factor, longest = adjustments["factor"], adjustments["original_max_seq_len"]
    mscale, mscale_all = adjustments.get("mscale"), adjustments.get("mscale_all_dim")
    if mscale and mscale_all:
        scaling = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all)
    else:
        alone = mscale_all or mscale
        scaling = yarn_mscale(factor, alone) if alone else 1.0

    def dimension(rotations: float) -> float:
        return n * math.log(longest / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dimension(adjustments["beta_fast"])), 0)
    high: float = min(math.ceil(dimension(adjustments["beta_slow"])), n // 2 - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(n // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    powers = _powers(base, n)
    one = np.float32(1)
    theta = one / (np.float32(factor) * powers) * (one - ramp) + one / powers * ramp
    return theta.astype(np.float32), np.float32(scaling)
