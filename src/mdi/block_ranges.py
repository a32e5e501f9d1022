"""Ranges of blocks as text for people: inclusive. In JSON, on disk and in code a range is [start, stop)."""

from __future__ import annotations


def span(start: int, stop: int) -> str:
    """ "0-3" for [0, 4), "3" for [3, 4), "none" for [4, 4): for a place that says that it is about blocks."""
    if stop <= start:
        return "none"
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"


def block_span(start: int, stop: int) -> str:
    """ "blocks 0-3", "block 3" or "no blocks"."""
    if stop <= start:
        return "no blocks"
    return f"{'block' if stop == start + 1 else 'blocks'} {span(start, stop)}"
