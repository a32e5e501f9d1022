"""How much memory caches may take on this node, and how it tells the starter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mdi.engine.memory import NodeCaches
from mdi.errors import ControlError
from mdi.model.kernel_stage import TensorStage
from mdi.model.room import CHUNK_ROWS, CacheKind
from mdi.model.stage import Stage
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


def report_caches(
    stage: Stage | TensorStage, dtype: torch.dtype, device: torch.device, by_hand: int | None, weights_are_mapped: bool
) -> CacheReport:
    """What the caches of a stage may take, that is loaded and prepared.

    A moment in which a cache grows is taken off: its old keys or values lie beside the new ones until they are copied. So is,
    from a limit that nobody set by hand, one in which all caches of a block move to a new shelf (`mdi.model.shelf`).

    Args:
        dtype: what they hold.
        by_hand: the limit that the user set.
        weights_are_mapped: whether weights that are as they were stored are pages of a file, which count as free memory, but
            must stay. Those in another format are no parameters of the stage any more.
    """
    own_kinds = stage.cache_kinds(dtype)
    by_window: dict[int | None, int] = {}
    for kind in own_kinds:
        by_window[kind.window] = by_window.get(kind.window, 0) + kind.position_bytes
    copy_bytes = stage.copy_bytes(dtype)
    limit = by_hand
    if limit is None:
        if isinstance(stage, TensorStage):
            mapped = stage.mapped_bytes
        else:
            mapped = sum(p.nbytes for p in stage.parameters()) if weights_are_mapped and device.type == "cpu" else 0
        limit = int((device_free_bytes(device) - mapped) * (1 - MARGIN_SHARE)) - MARGIN_BYTES
        limit -= max(0, limit) // (len(own_kinds) + 1)
    kinds = tuple(CacheKind(window, n) for window, n in by_window.items())
    return CacheReport(max(0, limit - copy_bytes), by_hand is not None, kinds, str(device))


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
