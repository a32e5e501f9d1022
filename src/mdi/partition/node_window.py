"""Predictions for a node that reads its weights through a window, and their wording."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mdi.partition.steady import PassTimes
from mdi.units import duration, size


@dataclass(frozen=True)
class WindowChoice:
    """A window: units, which blocks stay (every n-th; None: none), and the time of a frame."""

    units: int
    retain: int | None
    times: PassTimes

    def __str__(self) -> str:
        if not self.units:
            return "all weights fit into the memory"
        return f"--window {self.units}" + (f" --retain {self.retain}" if self.retain else "")


@dataclass(frozen=True)
class NodeWindow:
    """One node.

    Attributes:
        resident_bytes, pass_bytes: weights in memory; weights that are read for every frame.
        disk_bytes_s: read rate of the disk.
        is_tight, is_loose: whether TPI-LLM's conditions hold that computing never waits, see partition.steady.
        best: the fastest window that fits into the same memory.
    """

    name: str
    chosen: WindowChoice
    resident_bytes: int
    pass_bytes: int
    disk_bytes_s: float
    is_tight: bool
    is_loose: bool
    best: WindowChoice

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def lines(self, is_share: bool = False) -> Iterator[str]:
        """For a terminal; `is_share`: of the node's share of every block."""
        times, name = self.chosen.times, f"share of {self.name}" if is_share else self.name
        yield (
            f"window:   {name}: {self.chosen}: {size(self.resident_bytes)} of weights in memory, {size(self.pass_bytes)} "
            f"read for each frame, at {size(self.disk_bytes_s)}/s"
        )
        waits = (
            "never waits for the disk"
            if times.wait_s == 0
            else (f"waits {duration(times.wait_s)} ({times.wait_share:.0%}) for the disk")
        )
        conditions = "tight" if self.is_tight else "loose" if self.is_loose else "no"
        yield f"disk:     {name}: a frame takes {duration(times.pass_s)} and {waits}; steady by TPI-LLM: {conditions}"
        if self.best.times.pass_s < times.pass_s:
            yield f"best:     {name}: {self.best}, {duration(self.best.times.pass_s)} for a frame"
