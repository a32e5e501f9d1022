"""Random numbers without state: number n of a sequence follows from its seed and n alone.

So a text is the same in any batch, over any nodes, and after it was computed again from its token ids.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1


def seed_of(seed: int, index: int) -> int:
    """Seed of sample `index` of a run: samples of the same prompt must differ, runs of the same seed must not."""
    return (seed * 0x9E3779B97F4A7C15 + index * 0xD1B54A32D192ED03) % (1 << 63)


def uniform(seed: int, n: int) -> float:
    """Number `n` of the stream `seed`, from 0 on and below 1: SplitMix64 (Steele, Lea and Flood 2014)."""
    z = (_mixed(seed & _MASK) + (n + 1) * 0x9E3779B97F4A7C15) & _MASK
    return (_mixed(z) >> 11) / (1 << 53)


def _mixed(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
