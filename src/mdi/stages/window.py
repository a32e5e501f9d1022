"""The weights of a stage in a window: read from the disk by a thread while it computes, in units that share memory.

Units are read in one order, pass after pass. Position p of all passes is unit p % n, and lies in slot p % W: since n is brought
to a multiple of W (by positions without a unit), each unit has its slot for good. A position may be read as soon as the one
W before it has been freed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mdi.cancel import Cancel
from mdi.checkpoint.packing import EMBEDDING_SCALE, Packing, PartWeights
from mdi.checkpoint.safetensors_layout import TYPES, TensorSpec
from mdi.checkpoint.shapes import widest
from mdi.checkpoint.weights import WeightSource
from mdi.errors import CheckpointError, EngineError, KernelError, LimitError
from mdi.kernels.blocks import Context, ExpertReader, Head, Weights
from mdi.kernels.layout import Matrix
from mdi.kernels.weight_formats import weight_format
from mdi.model.spec import ModelSpec
from mdi.model.tensors import EMBEDDING, TABLES
from mdi.spec.window import WindowOptions
from mdi.stages.expert_slots import ExpertSlots
from mdi.stages.kernel_stage import EmbeddingTable, HeadFunction, WeightUse
from mdi.stages.window_budget import MemoryLimit, RunMemory, WindowPlan, choose_window, taken_bytes
from mdi.stages.window_files import (
    HEAD,
    JOIN_S,
    PAGE_BYTES,
    PIECE_BYTES,
    PanelTable,
    RowTable,
    StoredMatrix,
    Unit,
    WeightBytes,
    block_units,
    expert_units,
    pages,
    read_unit,
    wait_for_disk,
)
from mdi.units import megabytes, size

logger = logging.getLogger("mdi")


class Reader:
    """Reads the units of all passes in a thread of its own.

    Args:
        units: of one pass; None is a position without one.
        slots: memory, uint8 arrays; their number divides that of `units`.

    Attributes:
        read_bytes: that came from the disk.
        wait_s: how long `unit` waited for them.
    """

    def __init__(self, units: Sequence[Unit | None], slots: Sequence[np.ndarray]) -> None:
        assert slots and len(units) % len(slots) == 0
        self._units, self._slots = units, slots
        self._changed = threading.Condition()
        self._next = 0  # the position that is read next, or now
        self._let_go = 0  # positions below are done with
        self._is_closed = False
        self._error: BaseException | None = None
        self._last_sign = time.monotonic()
        self.read_bytes = 0
        self.wait_s = 0.0
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def unit(self, index: int) -> Iterator[None]:
        """Within it, unit `index` of a pass is in its slot. Units between the last one and this are skipped.

        Raises:
            CheckpointError: it cannot be read.
        """
        position = self._let_go + (index - self._let_go) % len(self._units)
        self._wait_for(position)
        try:
            yield
        finally:
            self._move_to(position + 1)

    def close(self) -> None:
        """End the thread; harmless if repeated."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_S)

    @property
    def is_full(self) -> bool:
        """Whether all that may be read has been read."""
        with self._changed:
            return self._next == self._let_go + len(self._slots)

    def _wait_for(self, position: int) -> None:
        if position != self._let_go:
            self._move_to(position)
        with self._changed:
            if self._error is not None:  # met ahead of time, or raised before
                self._error = None  # many errors of disks pass, so it is read again
                self._changed.notify_all()
            unit = self._units[position % len(self._units)]
            self.wait_s += wait_for_disk(self._changed, lambda: self._has_read(position), lambda: self._last_sign, unit)

    def _has_read(self, position: int) -> bool:
        if self._next > position:
            return True
        if self._error is not None:
            raise self._error
        if self._is_closed:
            raise EngineError("the weights of this stage were freed")
        return False

    def _move_to(self, position: int) -> None:
        """All below it is done with."""
        with self._changed:
            while self._units[position % len(self._units)] is None:
                position += 1
            self._let_go = position
            self._next = max(self._next, position)
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._is_closed and (self._error or self._next >= self._let_go + len(self._slots)):
                    self._changed.wait()
                if self._is_closed:
                    return
                position = self._next
            error: BaseException | None = None
            try:
                self._read(position)
            except BaseException as e:  # raised in the waiting thread
                error = e
            with self._changed:
                if error is not None:
                    self._error = error
                elif self._next == position:  # otherwise other units are needed by now
                    self._next += 1
                self._changed.notify_all()

    def _read(self, position: int) -> None:
        unit = self._units[position % len(self._units)]
        if unit is None:
            return
        if position % len(self._units) == 0:
            for file in {run.file for one in self._units if one is not None for run in one.runs}:
                file.check()
        for n_bytes in read_unit(unit, self._slots[position % len(self._slots)]):
            self.read_bytes += n_bytes
            self._last_sign = time.monotonic()
            if self._is_closed or self._let_go > position:
                return


PROBE_BYTES = 32 << 20  # read one way, side by side as they will be, then as many the other way
TURNS = 2


def choose_way(files: Iterable[WeightBytes], unit: Unit, memory: np.ndarray, experts: Sequence[Unit] = ()) -> float:
    """Have all files read the way that was faster on one of them, in the better of two turns each.

    Args:
        unit: whose bytes are read for it, into `memory`.
        experts: some of which are read instead, each into `memory`, if there are enough.

    Returns:
        bytes per second of that way; 0 if the unit is too small to tell.
    """
    files, n_turns = list(files), 2 * TURNS
    n = min(len(experts) // n_turns, max(1, PROBE_BYTES // experts[0].n_bytes)) if experts else 0
    if n:  # not side by side, as they will be chosen
        turns = [[run for one in experts[turn::n_turns][:n] for run in one.runs] for turn in range(n_turns)]
    elif unit.runs:
        run = max(unit.runs, key=lambda one: one.stop - one.start)
        each = min(PROBE_BYTES, (run.stop - run.start) // n_turns // PAGE_BYTES * PAGE_BYTES)
        turns = [
            [replace(run, start=at, stop=at + each)] for at in range(run.start, run.start + n_turns * each, each or 1)
        ]
    else:
        return 0.0
    n_bytes = sum(run.stop - run.start for run in turns[0]) if turns else 0
    if not n_bytes:
        return 0.0
    best = {True: float("inf"), False: float("inf")}
    for i, turn in enumerate(turns):
        is_direct = i % 2 == 0 and turn[0].file.can_be_direct
        spent = sum(_timed(run.file, run.start, run.stop - run.start, is_direct, memory.data) for run in turn)
        best[is_direct] = min(best[is_direct], spent)
    is_direct = best[True] < best[False]
    for file in files:
        file.is_direct = is_direct and file.can_be_direct
    rate = n_bytes / max(best[is_direct], 1e-9)
    told = [
        f"{name} {size(n_bytes / best[way])}/s" for way, name in ((True, "direct"), (False, "plain")) if best[way] < 1e9
    ]
    logger.debug("weights are read %s: %s", "past the system's memory" if is_direct else "through it", ", ".join(told))
    return rate


def _timed(file: WeightBytes, start: int, n_bytes: int, is_direct: bool, memory: memoryview) -> float:
    """Seconds for some bytes that the system has not in its memory."""
    file.drop(start, n_bytes)
    file.is_direct = is_direct
    begin = time.perf_counter()
    for at in range(0, n_bytes, PIECE_BYTES):
        file.stream(start + at, memory[: min(PIECE_BYTES, n_bytes - at)])
    return time.perf_counter() - begin


@dataclass
class StoredPart:
    """A part of a model.

    Attributes:
        matrices: packed weights, by name, on the disk.
        arrays: all small tensors, in memory.
        tables: of the embedding, on the disk.
        whole: packed weights, by name, that are in memory and stay.
    """

    matrices: dict[str, StoredMatrix] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    tables: dict[str, RowTable | PanelTable] = field(default_factory=dict)
    whole: dict[str, Matrix] = field(default_factory=dict)

    def add(self, stored: StoredMatrix) -> None:
        """Of tables single rows are read, of others all."""
        if stored.name in TABLES:
            self.tables[stored.name] = PanelTable(stored)
        else:
            self.matrices[stored.name] = stored

    def keep(self) -> None:
        """Read the packed weights, which no window reads."""
        self.whole = {name: stored.whole() for name, stored in self.matrices.items()}

    @property
    def small_bytes(self) -> int:
        """In memory."""
        arrays = sum(array.nbytes for array in self.arrays.values())
        return arrays + sum(matrix.data.nbytes for matrix in self.whole.values())


class StoredParts:
    """Finds the parts of one stage.

    Args:
        packing: the formats wanted.
        folder: for weights that must be packed first.
        limit: bytes that the process may take meanwhile; None is no limit.

    Attributes:
        packed_bytes: that were.
    """

    def __init__(self, packing: Packing, folder: Path, limit: int | None = None) -> None:
        self._packing, self._folder, self._limit = packing, folder, limit
        self._files: dict[Path, WeightBytes] = {}
        self._spill: _Spill | None = None
        self.packed_bytes = 0

    def part(self, source: WeightSource, part: str) -> StoredPart:
        """Raises CheckpointError: the source does not have it, or there is no space for packed weights."""
        stored = source.packing
        is_packed_so = stored is not None and stored.of_part(part) == self._packing.of_part(part)
        if stored is not None and is_packed_so and all(map(source.extent, source.part_specs(part))):
            return self._in_place(source, part, stored)
        return self._spilled(source, part)

    def finish(self) -> None:
        """All parts have been requested: packed weights are on the disk now."""
        if self._spill is not None:
            self._spill.finish()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        if self._spill is not None:
            self._spill.file.close()

    def _in_place(self, source: WeightSource, part: str, packing: Packing) -> StoredPart:
        specs = source.part_specs(part)
        found = StoredPart()
        for name, shape in source.shapes(part).items():
            if not (keys := packing.check(name, shape, specs, str(source))):
                continue
            file, start = self._place(source, name)
            if form := packing.format_of(name, shape):
                skip = source.skipped_inputs(name)
                found.add(StoredMatrix(name, form, shape[0], shape[1], file, start, skip))
                continue
            dtype = TYPES[specs[name].dtype].numpy
            if name == EMBEDDING:
                found.tables[name] = RowTable(file, start, (shape[0], shape[1]), dtype)
            else:
                n_bytes = math.prod(shape) * dtype.itemsize
                found.arrays[name] = file.read(start, n_bytes).view(dtype).reshape(shape)
            if EMBEDDING_SCALE in keys:
                file, start = self._place(source, EMBEDDING_SCALE)
                found.arrays[EMBEDDING_SCALE] = file.read(start, 4 * shape[0]).view(np.float32)
        return found

    def _place(self, source: WeightSource, name: str) -> tuple[WeightBytes, int]:
        extent = source.extent(name)
        if extent is None:
            raise CheckpointError(f"{source}: {name} lies in no file")
        path, start, stop = extent
        if path not in self._files:
            self._files[path] = WeightBytes(path)
        if stop > self._files[path].n_bytes:
            raise CheckpointError(f"{path} was cut short: {self._files[path].n_bytes} bytes, {stop} expected at least")
        return self._files[path], start

    def _spilled(self, source: WeightSource, part: str) -> StoredPart:
        """Packed, tensor by tensor where the source has plain ones, so that little is in memory at a time."""
        if self._spill is None:
            self._spill = _Spill(self._folder)
        found = StoredPart()
        self._check_memory(source, part)
        if not source.has_single_tensors:
            self._add(found, source.weights(part, self._packing))
            return found
        for name in source.shapes(part):
            self._add(found, source.packed(name, self._packing))
            source.release()
        return found

    def _add(self, found: StoredPart, weights: PartWeights) -> None:
        assert self._spill is not None
        spill = self._spill
        for name, weight in weights.items():
            if isinstance(weight, Matrix):
                start = spill.add(weight.data)
                found.add(StoredMatrix(name, weight.format, weight.n_out, weight.n_in, spill.file, start, weight.skip))
            elif name == EMBEDDING:
                shape = weight.shape[0], weight.shape[1]
                found.tables[name] = RowTable(spill.file, spill.add(weight), shape, weight.dtype)
            else:
                found.arrays[name] = weight.copy()
        self.packed_bytes = spill.n_bytes

    def _check_memory(self, source: WeightSource, part: str) -> None:
        """Packing takes memory, too. Raises LimitError."""
        taken = taken_bytes()
        if self._limit is None or taken + max(self._steps(source, part))[0] <= self._limit:
            return
        most, name = max(step for one in source.part_names() for step in self._steps(source, one))
        enough = megabytes(taken + most)
        raise LimitError(
            f"{size(self._limit)} of memory are not enough to pack {name}, which takes {size(most)} beside the {size(taken)} "
            f"of this process: give --memory {enough}M, or store the weights packed before (`mdi prepare-model --quantize`)",
            enough * 10**6,
        )

    def _steps(self, source: WeightSource, part: str) -> Iterator[tuple[int, str]]:
        """What is packed at a time: bytes of the result, of rows in plain numbers and of what is mapped; its name."""
        rows = weight_format(self._packing.of_part(part))
        shapes = source.shapes(part)
        pieces = [{name: shape} for name, shape in shapes.items()] if source.has_single_tensors else [shapes]
        for piece in pieces:
            specs = [self._packing.stored(key, TensorSpec("F32", shape)) for key, shape in piece.items()]
            packed = sum(spec.n_bytes for stored in specs for spec in stored.values())
            mapped = sum(map(source.read_bytes, piece)) if source.has_single_tensors else 0
            yield (
                packed + rows.load_bytes(widest(piece.values())) + mapped,
                next(iter(piece)) if len(piece) == 1 else part,
            )


class _Spill:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                self._fd = os.dup(file.fileno())
        except OSError as e:
            raise self._failed(e) from None
        self.file = WeightBytes(folder / "packed weights", self._fd)
        self.n_bytes = 0

    def add(self, weight: np.ndarray) -> int:
        """Where it lies, on a page of its own."""
        start = self.n_bytes
        data = np.ascontiguousarray(weight).reshape(-1).view(np.uint8).data
        try:
            while data:
                n = os.pwrite(self._fd, data, self.n_bytes)
                data, self.n_bytes = data[n:], self.n_bytes + n
        except OSError as e:
            raise self._failed(e) from None
        self.n_bytes = -(-self.n_bytes // PAGE_BYTES) * PAGE_BYTES
        return start

    def finish(self) -> None:
        try:
            os.ftruncate(self._fd, self.n_bytes)
            os.fsync(self._fd)
        except OSError as e:
            raise self._failed(e) from None
        self.file.settle()
        self.file.drop(0, self.n_bytes)

    def _failed(self, e: OSError) -> CheckpointError:
        return CheckpointError(
            f"weights cannot be packed into {self._folder} ({e.strerror or e}): free some space, choose another place with "
            "MDI_CACHE_DIR, or store them packed (mdi prepare-model --quantize)"
        )


class Window:
    """What stays is read now, and the first units that do not, in the background.

    Raises:
        CheckpointError: a unit cannot be read.
    """

    def __init__(self, plan: WindowPlan, cancel: Cancel | None = None) -> None:
        cancel = cancel or Cancel()
        self.plan = plan
        self._index = {(unit.part, unit.piece): i for i, unit in enumerate(plan.units)}
        streamed = plan.streamed
        self._place = {i: place for place, i in enumerate(streamed)}
        slots = [pages(n) for n in plan.slot_bytes]
        memory = {i: slots[place % plan.n_slots] for i, place in self._place.items()}
        files = {run.file for unit in (*plan.units, *plan.experts) for run in unit.runs}
        probed = max(plan.units, key=lambda unit: unit.n_bytes)
        memory |= {i: pages(plan.units[i].n_bytes) for i in plan.kept}
        self.experts = ExpertSlots(plan.experts, plan.n_expert_slots) if plan.experts else None
        of = memory[plan.units.index(probed)] if self.experts is None else self.experts.slots[0]
        self.disk_bytes_s = choose_way(files, probed, of, plan.experts)
        self._kept_read = 0
        for i in sorted(plan.kept):
            for n_bytes in read_unit(plan.units[i], memory[i]):
                self._kept_read += n_bytes
                cancel.check()
        self._memory = memory
        self._closed_with: list[Callable[[], None]] = [] if self.experts is None else [self.experts.close]
        self._reader: Reader | None = None
        if streamed:
            padding = -len(streamed) % plan.n_slots
            self._reader = Reader([*(plan.units[i] for i in streamed), *[None] * padding], slots)
        self._end = weakref.finalize(self, _close, self._reader, self._closed_with)

    def matrices(self, part: str) -> list[dict[str, Matrix]]:
        """The weights of a part, by name: for each of its units, its place in memory; of an expert, its first one."""
        found = [unit.placed(self._memory[i]) for i, unit in enumerate(self.plan.units) if unit.part == part]
        return found if self.experts is None else found + self.experts.matrices(part)

    def unit(self, part: str, piece: int) -> contextlib.AbstractContextManager[None]:
        """Within this context, the unit is in memory. Ask for units in the order of a pass."""
        place = self._place.get(self._index[part, piece])
        if place is None or self._reader is None:
            return contextlib.nullcontext()
        return self._reader.unit(place)

    @property
    def use(self) -> WeightUse:
        reader = self._reader
        read, wait_s = (reader.read_bytes, reader.wait_s) if reader is not None else (0, 0.0)
        of = WeightUse(0, 0, 0.0) if self.experts is None else self.experts.use
        return of._replace(
            resident_bytes=self.plan.resident_bytes,
            read_bytes=self._kept_read + read + of.read_bytes,
            wait_s=wait_s + of.wait_s,
        )

    @property
    def is_full(self) -> bool:
        """Whether there is nothing to read until a unit is freed."""
        return self._reader is None or self._reader.is_full

    @property
    def reads_direct(self) -> bool:
        """Whether reads go past the system's memory of files."""
        return all(run.file.is_direct for unit in (*self.plan.units, *self.plan.experts) for run in unit.runs)

    def on_close(self, action: Callable[[], None]) -> None:
        """Have something done when the reading has ended."""
        self._closed_with.append(action)

    def close(self) -> None:
        """End the reading; harmless if repeated."""
        self._end()


def _close(reader: Reader | None, others: list[Callable[[], None]]) -> None:
    if reader is not None:
        reader.close()
    for action in others:
        action()


_HEAD, _HEAD_BIAS = "lm_head.weight", "lm_head.bias"


class Windowed:
    """The `StageWeights` (mdi.stages.kernel_stage) of a window.

    Args:
        stored: the parts of the stage, by name.
        window: over their matrices.
        cache_limit: what caches may take at most; None is not known.
        limit: of the process.
    """

    mapped_bytes = 0

    def __init__(
        self, stored: Mapping[str, StoredPart], window: Window, cache_limit: int | None = None,
        limit: MemoryLimit | None = None,
    ) -> None:  # fmt: skip
        self.window, self.cache_limit = window, cache_limit
        self._stored = stored
        self._small_bytes = sum(part.small_bytes for part in stored.values())
        self.check = (limit or MemoryLimit(None)).check

    def __contains__(self, part: str) -> bool:
        return part in self._stored

    def __getitem__(self, part: str) -> Weights:
        units, stored = self.window.matrices(part) if part != HEAD else [], self._stored[part]
        return {**stored.arrays, **stored.whole, **{name: matrix for unit in units for name, matrix in unit.items()}}

    @property
    def experts(self) -> ExpertReader | None:
        return self.window.experts

    def ready(self, block: int, half: int) -> contextlib.AbstractContextManager[None]:
        return self.window.unit(f"block.{block}", half)

    @property
    def n_bytes(self) -> int:
        return self.window.plan.resident_bytes + self._small_bytes

    @property
    def use(self) -> WeightUse:
        use = self.window.use
        return use._replace(resident_bytes=use.resident_bytes + self._small_bytes)

    def table(self, name: str = EMBEDDING) -> EmbeddingTable | None:
        """Rows of the embedding are read as tokens ask for them."""
        found = self._stored["embedding"].tables.get(name)
        if found is not None or name != EMBEDDING:
            return found
        head = self._stored[HEAD].matrices.get(_HEAD)  # which it is
        return None if head is None else PanelTable(head)

    def head(self, spec: ModelSpec, n_tokens: int, context: Context) -> HeadFunction:
        return PiecedHead(spec, self._stored[HEAD].arrays, self.window, n_tokens, context)

    def close(self) -> None:
        self.window.close()


class PiecedHead:
    """Rows that went through all blocks -> logits, as kernels.blocks.Head, from pieces that are in memory while they are used.

    Args:
        spec: of the model.
        weights: the small tensors of the part "head".
        n_tokens: how many of the vocabulary it is for.

    Raises:
        KernelError: the window's head has another number of rows.
    """

    def __init__(self, spec: ModelSpec, weights: Weights, window: Window, n_tokens: int, context: Context) -> None:
        self._window, self._n_tokens = window, n_tokens
        self._pieces: list[Head] = []
        n_rows, bias = 0, weights.get(_HEAD_BIAS)
        for unit in window.matrices(HEAD):
            matrix = unit[_HEAD]
            of_piece: dict[str, Matrix | np.ndarray] = {**weights, _HEAD: matrix}
            if isinstance(bias, np.ndarray):
                of_piece[_HEAD_BIAS] = bias[n_rows : n_rows + matrix.n_out]
            self._pieces.append(Head(spec, of_piece, matrix.n_out, context))
            n_rows += matrix.n_out
        if n_rows != n_tokens:
            raise KernelError(f"the head has {n_rows} rows, {n_tokens} expected")

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """float32 (M, n_embd) -> (M, n_tokens)"""
        logits = np.empty((len(x), self._n_tokens), dtype=np.float32)
        first = 0
        for i, piece in enumerate(self._pieces):
            with self._window.unit(HEAD, i):
                part = piece(x)
            logits[:, first : first + part.shape[1]] = part
            first += part.shape[1]
        return logits


def open_window(
    name: str, options: WindowOptions, parts: Sequence[str], source: Callable[[str], WeightSource], packing: Packing,
    folder: Path, run: RunMemory, cancel: Cancel | None = None, may_be_apart: bool = True,
) -> Windowed:  # fmt: skip
    """The weights of a stage in a window.

    Args:
        name: of the node.
        source: gives that of each part.
        folder: for weights that must be packed first.
        may_be_apart: whether the stage can compute experts one by one.

    Raises:
        LimitError: it does not fit into the memory.
        CheckpointError: the weights cannot be read.
    """
    cancel = cancel or Cancel()
    found = StoredParts(packing, folder, options.memory)
    try:
        stored = {}
        for part in parts:
            cancel.check()
            of = source(part)
            stored[part] = found.part(of, part)
            of.release()  # mapped pages count as this process's memory
        found.finish()
        if "embedding" in stored:  # before the window is chosen, which counts what the process has
            stored["embedding"].keep()
        matrices = {part: stored[part].matrices for part in parts if part.startswith("block.")}
        head = stored[HEAD].matrices["lm_head.weight"] if HEAD in stored else None
        if head is not None and not head.n_bytes:  # a share of it without rows
            head = None
        apart = expert_units(matrices) if may_be_apart else None
        plan = choose_window(name, options, block_units(matrices), head, run, taken_bytes(), apart)
        window = Window(plan, cancel)
    except BaseException:
        found.close()
        raise
    window.on_close(found.close)
    _log_plan(name, plan, window, found.packed_bytes)
    caches = run.caches if options.memory is None else run.cache_bytes
    return Windowed(stored, window, caches, MemoryLimit(options.memory))


def _log_plan(name: str, plan: WindowPlan, window: Window, packed_bytes: int) -> None:
    if packed_bytes:
        logger.info(
            "%s packed %s of weights for its window: mdi prepare-model --quantize stores them so",
            name,
            size(packed_bytes),
        )
    kept = f", every {plan.retain}. block stays" if plan.retain else ""
    way = "direct" if window.reads_direct else "plain"
    rate = f", {way}: the disk gives {size(window.disk_bytes_s)}/s" if window.disk_bytes_s else ""
    logger.info(
        "%s has %s of weights in memory (a window of %d units%s), and reads %s for each pass%s",
        name, size(plan.resident_bytes), plan.n_slots, kept, size(plan.pass_bytes), rate,
    )  # fmt: skip
    if plan.experts:
        logger.info(
            "%s has %d of %d experts in memory, and reads those that are chosen",
            *(name, plan.n_expert_slots, len(plan.experts)),
        )
