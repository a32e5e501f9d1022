"""The window of weights that fits into a limit of memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from mdi.errors import Code, EngineError, LimitError, MdiError
from mdi.model.spec import BlockSpec, DeltaNet, Experts, LatentAttention, ModelSpec
from mdi.spec.window import WindowOptions
from mdi.stages.window_files import HEAD_PIECE_BYTES, StoredMatrix, Unit, head_units
from mdi.units import megabytes, size

logger = logging.getLogger("mdi")


@dataclass(frozen=True)
class WindowPlan:
    """Units that stay in memory, and units that share slots.

    Attributes:
        units: of one pass, in order; None is a position of the window that holds nothing.
        kept: indices of those that stay.
        n_slots: units in memory at a time, besides those that stay.
        retain: every n-th block stays; None: none does.
        experts, n_expert_slots: those that are read when they are chosen, and how many are in memory; (): `units` have them.
    """

    units: tuple[Unit, ...]
    kept: frozenset[int]
    n_slots: int
    retain: int | None
    experts: tuple[Unit, ...] = ()
    n_expert_slots: int = 0

    @property
    def streamed(self) -> list[int]:
        """Indices of the units that are read in every pass."""
        return [i for i in range(len(self.units)) if i not in self.kept]

    @property
    def slot_bytes(self) -> list[int]:
        """Bytes of each slot: those of its largest unit."""
        sizes = [0] * self.n_slots
        for position, i in enumerate(self.streamed):
            slot = position % self.n_slots
            sizes[slot] = max(sizes[slot], self.units[i].n_bytes)
        return sizes

    @property
    def kept_bytes(self) -> int:
        return sum(self.units[i].n_bytes for i in self.kept)

    @property
    def resident_bytes(self) -> int:
        return self.kept_bytes + sum(self.slot_bytes) + self.n_expert_slots * self.expert_bytes

    @property
    def expert_bytes(self) -> int:
        """Of the largest one."""
        return max((unit.n_bytes for unit in self.experts), default=0)

    @property
    def pass_bytes(self) -> int:
        """Read from the disk for every frame, besides experts that are read when they are chosen."""
        return sum(self.units[i].n_bytes for i in self.streamed)


def plan_window(blocks: Sequence[Unit], head: StoredMatrix | None, n_slots: int, retain: int | None) -> WindowPlan:
    """A window of `n_slots` units over the blocks of a stage and, on a starter, the head.

    Args:
        blocks: attention and MLP of each block, in turn.
        retain: 1 keeps everything, the head as well.
    """
    kept = frozenset(i for i in range(len(blocks)) if retain is not None and i // 2 % retain == 0)
    n_streamed = len(blocks) - len(kept)
    pieces: list[Unit] = []
    if head is not None:
        # No larger than the smallest unit, so that they make no slot larger.
        sizes = [unit.n_bytes for i, unit in enumerate(blocks) if i not in kept and unit.n_bytes]
        smallest = min(sizes, default=HEAD_PIECE_BYTES)
        pieces = head_units(head, smallest, n_slots, n_streamed)
    units = (*blocks, *pieces)
    if retain == 1 or n_slots >= n_streamed + len(pieces):
        return WindowPlan(units, frozenset(range(len(units))), 0, retain)
    return WindowPlan(units, kept, n_slots, retain)


MARGIN_BYTES = 32 << 20  # growth of a running process: buffers of links, Python's objects
DEFAULT_UNITS = 2
LEAST_EXPERTS = 2  # in memory: one is read while another is computed
MOST_SEEN = 256  # rows of states that are computed again at a time (csrc/delta.h)
WIDER = (8, 6, 4)  # windows that are tried, widest first, where memory is left


@dataclass(frozen=True)
class RunMemory:
    """Memory of a run besides weights, in bytes.

    Attributes:
        sequence: caches of one sequence of full length, and tables of positions.
        n_sequences: at the same time.
        work: rows and logits of a frame while they are computed.
        caches: limit that the user set by hand; None: none.
        promised: memory that other stages of this process will take.
    """

    sequence: int
    n_sequences: int
    work: int
    caches: int | None = None
    promised: int = 0

    @property
    def cache_bytes(self) -> int:
        """Bytes of caches: those of all sequences, or as much as was set by hand; never less than one sequence."""
        wanted = self.sequence * self.n_sequences
        return max(self.sequence, wanted if self.caches is None else self.caches)


def work_bytes(spec: ModelSpec, n_rows: int, n_logits: int) -> int:
    """Bytes that the kernels compute on while a frame of `n_rows` goes through: see csrc/stage.h, Scratch."""
    per_row = max(_work_per_row(block, spec.width) for block in spec.kinds)
    seen = max((one.mixer.n_channels for one in spec.kinds if isinstance(one.mixer, DeltaNet)), default=0)
    return 4 * (n_rows * per_row + (n_rows + MOST_SEEN) * seen + 3 * n_logits * spec.n_rows)


def absorbed_bytes(blocks: Iterable[BlockSpec]) -> int:
    """Bytes, at most, of what the kernels make of the up-projections of latent attention, which no window has."""
    latents = (block.mixer for block in blocks if isinstance(block.mixer, LatentAttention))
    return sum(4 * of.n_head * (of.nope_size + of.value_size) * of.kv_rank for of in latents)


def _work_per_row(block: BlockSpec, n_embd: int) -> int:
    mixer, mlp, experts = block.mixer, block.mlp, 0
    width = block.dense.width
    if isinstance(mlp, Experts):
        experts, width = 3 * n_embd, max(width, mlp.shared.width if mlp.shared else 0)
    if isinstance(mixer, DeltaNet):
        wide = mixer.n_head * mixer.v_size
        heads = mixer.n_channels + 2 * mixer.n_head + wide
    elif isinstance(mixer, LatentAttention):
        queries, values = mixer.nope_size + mixer.rope_size, 2 * mixer.kv_rank + mixer.rope_size
        heads = mixer.n_head * (queries + values) + (mixer.q_rank or 0) + mixer.kv_rank + mixer.rope_size
        wide = mixer.n_head * mixer.value_size
    else:
        wide = mixer.n_head * mixer.head_size
        heads = wide + 2 * mixer.n_groups * mixer.head_size + wide * mixer.has_gate
    return 6 * n_embd + heads + wide + 2 * width + 2 * max(n_embd, wide, width) + experts


def choose_window(
    name: str, options: WindowOptions, blocks: Sequence[Unit], head: StoredMatrix | None, run: RunMemory, taken: int,
    apart: tuple[Sequence[Unit], Sequence[Unit]] | None = None,
) -> WindowPlan:  # fmt: skip
    """The window that was asked for, or the best that the memory holds.

    Blocks that stay are not read again, so as many stay as fit beside two units; the rest is for a wider
    window, which evens out a disk that is slow now and then. If experts are apart, the rest is for them: every pass reads the
    other units, but only some of the experts.

    Args:
        name: of the node, for messages.
        taken: bytes that the process has now.
        apart: `blocks` without experts, and these, if they can be read one by one and nothing but the memory was set by hand.

    Raises:
        LimitError: not even one unit fits.
    """
    limit = options.memory
    if limit is None:
        return plan_window(blocks, head, options.units or DEFAULT_UNITS, options.retain)
    beside = taken + run.promised + run.cache_bytes + run.work + MARGIN_BYTES
    least: WindowPlan | None = None
    for plan in _candidates(options, blocks, head, apart):
        if plan.resident_bytes + beside <= limit:
            return _widened(plan, options, blocks, head, limit - beside)
        if least is None or plan.resident_bytes < least.resident_bytes:
            least = plan
    assert least is not None
    enough = megabytes(least.resident_bytes + beside)
    raise LimitError(
        f"{size(limit)} of memory are not enough for {name}: the least that works is --memory {enough}M (the process "
        f"{size(taken)}, weights {size(least.resident_bytes)}, caches and rows {size(beside - taken)})",
        enough * 10**6,
    )


def _candidates(
    options: WindowOptions, blocks: Sequence[Unit], head: StoredMatrix | None,
    apart: tuple[Sequence[Unit], Sequence[Unit]] | None,
) -> Iterator[WindowPlan]:  # fmt: skip
    """From the one that reads least to the one that takes least memory."""
    if apart is not None and apart[1] and options.units is None and options.retain is None:
        yield plan_window(blocks, head, DEFAULT_UNITS, 1)
        for plan in _candidates(options, apart[0], head, None):
            yield replace(plan, experts=tuple(apart[1]), n_expert_slots=min(LEAST_EXPERTS, len(apart[1])))
    retained = [options.retain] if options.retain else [*range(1, len(blocks) // 2 + 1), None]
    units = [options.units] if options.units else [DEFAULT_UNITS, 1]
    for n_slots in units:
        for retain in retained:
            yield plan_window(blocks, head, n_slots, retain)


def _widened(
    plan: WindowPlan, options: WindowOptions, blocks: Sequence[Unit], head: StoredMatrix | None, left: int
) -> WindowPlan:
    """The same with more experts in memory, or with a wider window, if it fits and was not set by hand."""
    if plan.experts:
        more = (left - plan.resident_bytes) // max(plan.expert_bytes, 1)
        return replace(plan, n_expert_slots=min(len(plan.experts), plan.n_expert_slots + more))
    if options.units is not None or plan.n_slots < DEFAULT_UNITS:
        return plan
    wider = (plan_window(blocks, head, n, plan.retain) for n in WIDER)
    return next((one for one in wider if one.resident_bytes <= left), plan)


class MemoryLimit:
    """Holds a process to a limit: it ends with a word rather than take more.

    Args:
        n_bytes: None is no limit.
    """

    def __init__(self, n_bytes: int | None) -> None:
        self._n_bytes = n_bytes

    def check(self) -> None:
        """Raises EngineError (code "memory") if the process has more than the limit in memory."""
        if self._n_bytes is not None and (taken := taken_bytes()) > self._n_bytes:
            raise over_limit(taken, self._n_bytes)


def over_limit(taken: int, limit: int) -> MdiError:
    return EngineError(
        f"this process takes {size(taken)} of memory, more than the {size(limit)} of --memory: raise it, or ask for less",
        Code.MEMORY,
    )


def taken_bytes() -> int:
    """Memory that this process has now, files that are mapped into it among it."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):  # another system
        return int(psutil.Process().memory_info().rss)
