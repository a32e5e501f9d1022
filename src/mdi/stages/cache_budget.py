"""The memory for caches on this node, and its report to the starter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol

from mdi.block_ranges import block_span
from mdi.engine.memory import NodeCaches
from mdi.errors import ControlError, NoMemoryError
from mdi.host.resources import device_free_bytes
from mdi.kernels.page_sizes import CacheClass
from mdi.kernels.pages import CachePages
from mdi.spec.decode import Bytes, Meta, Name, Whole, decode
from mdi.units import size

# Free memory that is left to the system, to other programs, and to the rows of a stage.
MARGIN_SHARE = 0.15
MARGIN_BYTES = 64 << 20
N_CLASSES_LIMIT = 1000
_SHARE = "cache_share"


@dataclass(frozen=True)
class CacheReport:
    """What a node tells of its caches once its stage is loaded.

    Attributes:
        limit_bytes: limit for the caches.
        is_by_hand: whether --kv-memory set it; else it is the memory that is free now, which nodes of one machine share.
        classes: what pages take, for each window of its blocks.
        device: whose memory they use.
    """

    limit_bytes: int
    is_by_hand: bool
    classes: tuple[CacheClass, ...]
    device: str

    def to_json(self) -> dict[str, Any]:
        return {
            "limit_bytes": self.limit_bytes,
            "is_by_hand": self.is_by_hand,
            "classes": [[c.window, c.page_bytes] for c in self.classes],
            "device": self.device,
        }

    @classmethod
    def from_json(cls, data: Any, where: str) -> CacheReport:
        """Raises ControlError if it cannot be read."""
        told = decode(_Told, data, f"{where}, of its caches", ControlError)
        return cls(told.limit_bytes, told.is_by_hand, tuple(CacheClass(*one) for one in told.classes), told.device)


@dataclass(frozen=True)
class _Told:
    """A report as it travels; a class is (window, page_bytes)."""

    limit_bytes: Bytes
    is_by_hand: bool
    classes: Annotated[tuple[tuple[Whole | None, Bytes], ...], Meta(max_length=N_CLASSES_LIMIT)]
    device: Name


class CachingStage(Protocol):
    """The memory of a loaded and prepared stage."""

    start: int
    stop: int

    def run_bytes(self, max_length: int) -> int:
        """Position tables, and the caches of one sequence of full length."""

    @property
    def caches(self) -> CachePages:
        """Those of the run that it is prepared for."""

    @property
    def cache_limit(self) -> int | None:
        """What its caches may take whatever is free, because the whole process has a limit; None without one."""

    @property
    def gathered_share(self) -> float:
        """Temporary memory of attention besides the caches, as a share of them."""

    @property
    def mapped_bytes(self) -> int:
        """Weights that are pages of a file, which count as free memory, but must stay."""


def share_extensions(share: float) -> dict[str, Any]:
    """The extension of `/init` with the share of free memory for a run's caches; empty if that is all of it."""
    return {} if share == 1.0 else {_SHARE: share}


def share_in(extensions: Mapping[str, Any]) -> float:
    """The share in such an extension; anything invalid means all."""
    share = extensions.get(_SHARE)
    return share if isinstance(share, float) and 0 < share < 1 else 1.0


def check_capacity(name: str, stage: CachingStage, max_length: int, device: str, promised: int = 0) -> None:
    """Raises NoMemoryError if not even one sequence of full length fits into the memory that node `name` has left.

    Args:
        promised: as for `report_caches`.
    """
    needed, available = stage.run_bytes(max_length), device_free_bytes(device) - promised
    if needed > available:
        raise NoMemoryError(
            f"a sequence of {max_length} tokens needs {size(needed)} of caches and tables for "
            f"{block_span(stage.start, stage.stop)} on {name}, but {size(available)} are left there: ask for fewer "
            "tokens, or a smaller --sequence-length"
        )


def report_caches(stage: CachingStage, device: str, by_hand: int | None, promised: int = 0) -> CacheReport:
    """What the caches of a stage may take, that is loaded and prepared.

    Unless the limit was set by hand, the temporary memory of attention is subtracted from it. No limit is larger
    than what the system has reserved.

    Args:
        by_hand: the limit that the user set.
        promised: bytes of the free memory that other stages of this process will take or must keep.
    """
    limits = [limit for limit in (by_hand, stage.cache_limit) if limit is not None]
    limit = min(limits, default=None)
    if limit is None:
        limit = int((device_free_bytes(device) - stage.mapped_bytes - promised) * (1 - MARGIN_SHARE)) - MARGIN_BYTES
        limit = int(limit / (1 + stage.gathered_share))
    if (reserved := stage.caches.most_bytes) is not None:
        limit = min(limit, reserved)
    return CacheReport(max(0, limit), bool(limits), tuple(stage.caches.classes), device)


def share_out(reports: Sequence[tuple[str, str, CacheReport]]) -> tuple[NodeCaches, ...]:
    """What each node can hold, when nodes on one machine or GPU share its memory.

    Args:
        reports: name, address and report of each node.
    """
    owners: dict[tuple[str, str], list[int]] = {}
    for _, addr, report in reports:
        if not report.is_by_hand and report.classes:
            owners.setdefault((addr, report.device), []).append(report.limit_bytes)
    nodes = []
    for name, addr, report in reports:
        sharing = owners.get((addr, report.device), []) if not report.is_by_hand else []
        if len(sharing) > 1:
            report = replace(report, limit_bytes=min(sharing) // len(sharing))
        nodes.append(NodeCaches(name, report.limit_bytes, report.classes))
    return tuple(nodes)
