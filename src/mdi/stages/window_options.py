"""The user's choices for a window: number of units, blocks that always stay, and the memory limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from mdi.errors import ControlError, UsageError
from mdi.spec.cluster import WeightMemory
from mdi.spec.decode import Meta, decode
from mdi.spec.options import Units

_FIELD = "window"  # of the extensions of a run


@dataclass(frozen=True)
class WindowOptions:
    """See the flags --window, --retain and --memory.

    Attributes:
        units: halves of blocks, or pieces of the head, that are in memory at a time; None: chosen from `memory`, or 2.
        retain: every so-manieth block stays in memory for good; None: chosen from `memory`, or none does.
        memory: limit of the process in bytes; None is no limit.
    """

    units: Units | None = None
    retain: Units | None = None
    memory: Annotated[int, Meta(ge=1, le=1 << 50)] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class WindowMemory(WeightMemory):
    """Where weights are read from while computing: from a window."""

    window: WindowOptions = WindowOptions()


def window_of(memory: WeightMemory, asked: Mapping[str, Any] | None = None) -> WindowOptions | None:
    """The window of a node, None if it has none.

    Args:
        memory: what the node was started with; it overrides the request.
        asked: extensions of a run's request, what its starter asks for (`extensions_of`).

    Raises:
        ControlError (400): the starter's request cannot be read.
    """
    if isinstance(memory, WindowMemory):
        return memory.window
    return options_from_json((asked or {}).get(_FIELD))


def extensions_of(memory: WeightMemory) -> dict[str, Any]:
    """What tells a node with its part of a run that it is to have a window as well."""
    return {_FIELD: memory.window.to_json()} if isinstance(memory, WindowMemory) else {}


def window_options(units: int | None, retain: int | None, memory: int | None) -> WindowOptions | None:
    """What flags say; None without a window. Raises UsageError."""
    if units is None and memory is None:
        if retain is not None:
            raise UsageError("--retain needs a window: give --window or --memory as well")
        return None
    return WindowOptions(units, retain, memory)


def options_from_json(data: Any) -> WindowOptions | None:
    """What another node asks for. Raises ControlError (400)."""
    if data is None:
        return None
    return decode(WindowOptions, data, "window", lambda message: ControlError(message, 400))
