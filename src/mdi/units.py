"""Sizes, times and counts as text for people, in one form everywhere."""

from __future__ import annotations

import math


def size(n_bytes: float) -> str:
    """1234567890 -> "1.2 GB"; powers of ten."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(n_bytes) >= scale:
            return f"{n_bytes / scale:.1f} {unit}"
    return f"{n_bytes:.0f} bytes"


def megabytes(n_bytes: float) -> int:
    """How many M a limit must have that these fit into."""
    return math.ceil(n_bytes / 1e6)


def duration(time_s: float | None) -> str:
    """0.0042 -> "4.2 ms", 12.34 -> "12.3 s", 150 -> "2:30 min", 3662 -> "1:01 h"; None is a time that is not known."""
    if time_s is None:
        return "-"
    if time_s < 0.9995:
        return f"{round(time_s * 1e3, 3):.3g} ms"
    if time_s < 99.95:
        return f"{time_s:.1f} s"
    minutes, seconds = divmod(round(time_s), 60)
    if minutes < 60:
        return f"{minutes}:{seconds:02} min"
    return f"{minutes // 60}:{minutes % 60:02} h" if minutes < 6000 else f"{minutes // 60} h"


def counted(n: int, noun: str) -> str:
    """ "1 node", "3 nodes"."""
    return f"{n} {noun}" + ("" if n == 1 else "s")
