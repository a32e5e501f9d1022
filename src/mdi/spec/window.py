"""The user's choices for a window of weights: a node reads them from its disk while it computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mdi.spec.decode import Meta
from mdi.spec.options import Units, WeightMemory


@dataclass(frozen=True)
class WindowOptions:
    """See the flags --window, --retain and --memory.

    Attributes:
        units: halves of blocks, or pieces of the head, that are in memory at a time; None: chosen from `memory`, or 2.
        retain: every n-th block stays in memory; None: chosen from `memory`, or none does.
        memory: limit of the process in bytes; None is no limit.
    """

    units: Units | None = None
    retain: Units | None = None
    memory: Annotated[int, Meta(ge=1, le=1 << 50)] | None = None


@dataclass(frozen=True)
class WindowMemory(WeightMemory):
    """Where weights are read from while computing: from a window."""

    window: WindowOptions = WindowOptions()


def window_of(memory: WeightMemory, asked: WindowOptions | None = None) -> WindowOptions | None:
    """The window of a node, None if it has none: by what it was started with, else by what the starter of a run asks for."""
    return memory.window if isinstance(memory, WindowMemory) else asked


def window_options(units: int | None, retain: int | None, memory: int | None) -> WindowOptions | None:
    """The options that flags give; None without a window."""
    if units is None and memory is None:
        return None
    return WindowOptions(units, retain, memory)
