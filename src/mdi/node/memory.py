"""How much memory caches may take on this node, and how it tells the starter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mdi.blocks import block_span
from mdi.engine.memory import NodeCaches
from mdi.errors import ControlError, UsageError
from mdi.model.room import CHUNK_ROWS, CacheKind
from mdi.node.resources import device_free_bytes

# Of what is free, this much is left to the system, to other programs, and to the rows that a stage computes on.
MARGIN_SHARE = 0.15
MARGIN_BYTES = 64 << 20


@dataclass(frozen=True)
class CacheReport:
    """What a node tells of its caches once its stage is loaded.

    Attributes:
        limit_bytes: what they may take.
        is_by_hand: whether that was set with --kv-memory; else it is what is free now, and nodes that share a machine share it.
        kinds: what a position of a sequence takes.
        device: where they lie.
    """

    limit_bytes: int
    is_by_hand: bool
    kinds: tuple[CacheKind, ...]
    device: str

    def to_json(self) -> dict[str, Any]:
        return {
            "limit_bytes": self.limit_bytes,
            "is_by_hand": self.is_by_hand,
            "kinds": [[kind.window, kind.position_bytes] for kind in self.kinds],
            "device": self.device,
        }

    @classmethod
    def from_json(cls, data: Any, where: str) -> CacheReport:
        """Raises ControlError if it cannot be read."""
        try:
            kinds = tuple(CacheKind(window, position_bytes) for window, position_bytes in data["kinds"])
            report = cls(data["limit_bytes"], data["is_by_hand"], kinds, data["device"])
        except (KeyError, TypeError, ValueError):
            raise ControlError(f"{where} does not say in a readable way how much cache it can hold") from None
        numbers = [report.limit_bytes, *(k.position_bytes for k in kinds), *(k.window or 0 for k in kinds)]
        if any(type(n) is not int or n < 0 for n in numbers) or len(kinds) > 1000:
            raise ControlError(f"{where} says of its caches what cannot be: {str(data)[:200]}")
        return report


class CachingStage(Protocol):
    """Of a stage that is loaded and prepared, what there is to know of its memory."""

    start: int
    stop: int

    def run_bytes(self, max_length: int) -> int:
        """Position tables, and the caches of one sequence of full length."""

    def cache_kinds(self) -> list[CacheKind]:
        """What a position takes in each block."""

    @property
    def copy_bytes(self) -> int:
        """What a cache that grows takes for a moment, beside what it had and will have."""

    @property
    def mapped_bytes(self) -> int:
        """Weights that are pages of a file, which count as free memory, but must stay."""


def check_room(name: str, stage: CachingStage, max_length: int, device: str) -> None:
    """Raises UsageError if not even one sequence of full length fits into the memory that node `name` has left."""
    needed, available = stage.run_bytes(max_length), device_free_bytes(device)
    if needed > available:
        raise UsageError(
            f"a sequence of {max_length} tokens needs {needed / 1e9:.1f} GB of caches and tables for "
            f"{block_span(stage.start, stage.stop)} on {name}, but {available / 1e9:.1f} GB are left there: ask for fewer "
            "tokens, or a smaller --sequence-length"
        )


def report_caches(stage: CachingStage, device: str, by_hand: int | None) -> CacheReport:
    """What the caches of a stage may take, that is loaded and prepared.

    A moment in which a cache grows is taken off: its old keys or values lie beside the new ones until they are copied. So is,
    from a limit that nobody set by hand, one in which all caches of a block move to a new shelf (`mdi.model.shelf`).

    Args:
        by_hand: the limit that the user set.
    """
    kinds = stage.cache_kinds()
    by_window: dict[int | None, int] = {}
    for kind in kinds:
        by_window[kind.window] = by_window.get(kind.window, 0) + kind.position_bytes
    limit = by_hand
    if limit is None:
        limit = int((device_free_bytes(device) - stage.mapped_bytes) * (1 - MARGIN_SHARE)) - MARGIN_BYTES
        limit -= max(0, limit) // (len(kinds) + 1)
    together = tuple(CacheKind(window, n) for window, n in by_window.items())
    return CacheReport(max(0, limit - stage.copy_bytes), by_hand is not None, together, device)


def share_out(reports: Sequence[tuple[str, str, CacheReport]], max_length: int) -> tuple[NodeCaches, ...]:
    """What each node can hold, where nodes on one machine or one GPU do not each believe that all of it is theirs.

    Args:
        reports: name, address and report of each node.
    """
    owners: dict[tuple[str, str], list[int]] = {}
    for _, addr, report in reports:
        if not report.is_by_hand and report.kinds:
            owners.setdefault((addr, report.device), []).append(report.limit_bytes)
    nodes = []
    for name, addr, report in reports:
        sharing = owners.get((addr, report.device), []) if not report.is_by_hand else []
        if len(sharing) > 1:
            report = replace(report, limit_bytes=min(sharing) // len(sharing))
        nodes.append(NodeCaches(name, report.limit_bytes, report.kinds, max_length, CHUNK_ROWS))
    return tuple(nodes)
