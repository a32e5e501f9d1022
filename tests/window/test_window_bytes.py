"""What a window holds and reads: counted, and compared with what the plan says."""

from __future__ import annotations

from pathlib import Path

import pytest
from windows import FRAMES, LENGTH, chunks, run, windowed

from mdi.checkpoint.packing import Packing
from mdi.checkpoint.source import open_source
from mdi.errors import EngineError, LimitError
from mdi.kernels import library
from mdi.kernels.layout import matrix_bytes
from mdi.model.plain import spec_of
from mdi.spec.window import WindowOptions
from mdi.stages.kernel_stage import KernelStage
from mdi.stages.window import StoredParts, Window, Windowed
from mdi.stages.window_budget import (
    MARGIN_BYTES,
    MemoryLimit,
    RunMemory,
    choose_window,
    plan_window,
    taken_bytes,
    work_bytes,
)
from mdi.stages.window_files import PAGE_BYTES, StoredMatrix, Unit, WeightBytes, block_units, head_units
from tiny_checkpoint import write_checkpoint
from waiting import until

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")

N_BLOCKS = 5
MB = 1 << 20


def window_of(stage: KernelStage) -> Window:
    assert isinstance(stage.weights, Windowed)
    return stage.weights.window


def wait_until_full(stage: KernelStage) -> None:
    until(lambda: window_of(stage).is_full)


def read_bytes(unit: Unit) -> int:
    """Of the disk: whole pages, but for the end of the file."""
    return sum(min(run.stop, run.file.n_bytes) - run.start for run in unit.runs)


@pytest.mark.parametrize(("units", "retain"), [(1, None), (2, None), (2, 2), (3, 2), (4, 3), (6, None)])
def test_bytes_read_and_resident_are_those_of_the_plan(tmp_path: Path, units: int, retain: int | None) -> None:
    (chunk,) = chunks(tmp_path)
    stage = windowed(chunk, 0, N_BLOCKS, WindowOptions(units, retain))
    plan = window_of(stage).plan
    try:
        run(stage)
        wait_until_full(stage)
        streamed = [plan.units[i] for i in plan.streamed]
        one_pass = sum(map(read_bytes, streamed))
        # Positions without a unit make a pass a multiple of the window; they take their part of what is read ahead.
        ahead = sum(read_bytes(unit) for unit in (streamed + [None] * (-len(streamed) % units))[:units] if unit)
        kept = sum(read_bytes(plan.units[i]) for i in plan.kept)
        use = stage.weight_use
        assert use.read_bytes == kept + len(FRAMES) * one_pass + ahead
        assert plan.kept == {i for i in range(2 * N_BLOCKS) if retain and i // 2 % retain == 0}
        small = sum(
            w.nbytes
            for part in chunk.manifest.parts
            for n, w in stage.weights[part.name].items()
            if "norm" in n or "ln_f" in n
        )
        assert use.resident_bytes == plan.resident_bytes + small == stage.weights.n_bytes
        assert plan.resident_bytes == plan.kept_bytes + sum(plan.slot_bytes)
    finally:
        stage.close()


def test_two_units_take_one_attention_and_one_mlp(tmp_path: Path) -> None:
    (chunk,) = chunks(tmp_path, form="float32")
    stage = windowed(chunk, 0, N_BLOCKS, WindowOptions(2))
    stage.close()
    c = chunk.config
    width = (c.n_head + 2 * c.n_query_groups) * c.head_size
    attention = matrix_bytes("float32", width, c.n_embd) + matrix_bytes("float32", c.n_embd, c.n_head * c.head_size)
    mlp = 2 * matrix_bytes("float32", c.intermediate_size, c.n_embd)
    mlp += matrix_bytes("float32", c.n_embd, c.intermediate_size)
    slots = window_of(stage).plan.slot_bytes
    for slot, needed in zip(slots, (attention, mlp), strict=True):
        assert needed <= slot <= needed + 4 * PAGE_BYTES
    assert sum(slots) < sum(window_of(stage).plan.units[i].n_bytes for i in range(2 * N_BLOCKS)) / 3


def test_a_delta_net_is_read_with_the_half_of_attention(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(PAGE_BYTES))
    names = [f"transformer.h.0.{name}.weight" for name in ("delta.qkv", "mlp.fc", "delta.proj", "mlp.proj")]
    file = WeightBytes(tmp_path / "weights")
    attention, mlp = block_units({"block.0": {name: StoredMatrix(name, "int8", 16, 32, file, 0) for name in names}})
    file.close()
    assert [[one.name for one in unit.matrices] for unit in (attention, mlp)] == [names[::2], names[1::2]]


def test_each_slot_is_as_large_as_the_largest_unit_that_comes_into_it() -> None:
    units = [Unit("block.0", i % 2, ()) for i in range(8)]
    for unit, n_bytes in zip(units, (10, 300, 20, 200, 30, 250, 15, 100), strict=True):
        unit.n_bytes = n_bytes
    assert plan_window(units, None, 2, None).slot_bytes == [30, 300]
    assert plan_window(units, None, 3, None).slot_bytes == [200, 300, 250]
    with_retained = plan_window(units, None, 2, 2)
    assert (with_retained.streamed, with_retained.slot_bytes) == ([2, 3, 6, 7], [20, 200])
    assert with_retained.resident_bytes == 10 + 300 + 30 + 250 + 20 + 200 and with_retained.pass_bytes == 335


def test_a_window_as_wide_as_the_stage_reads_once(tmp_path: Path) -> None:
    (chunk,) = chunks(tmp_path)
    for options in (WindowOptions(1000), WindowOptions(2, 1)):
        stage = windowed(chunk, 0, N_BLOCKS, options)
        before = stage.weight_use
        run(stage)
        assert stage.weight_use == before and before.wait_s == 0
        assert window_of(stage).plan.pass_bytes == 0
        stage.close()


def test_the_head_comes_in_pieces_no_larger_than_a_unit() -> None:
    file = WeightBytes(Path(__file__))
    head = StoredMatrix("lm_head.weight", "int8", 1000, 256, file, PAGE_BYTES)
    for piece_bytes, multiple in ((1, 1), (20_000, 2), (50_000, 3), (1 << 30, 1)):
        units = head_units(head, piece_bytes, multiple, 4)
        rows = [unit.matrices[0] for unit in units]
        assert sum(one.n_out for one in rows) == 1000 and all(one.n_out % 16 == 0 for one in rows[:-1])
        assert (len(units) + 4) % multiple == 0
        ends = [one.start + one.n_bytes for one in rows]
        assert [one.start for one in rows[1:]] == ends[:-1] and ends[-1] == head.start + head.n_bytes
        assert len(units) == 63 or all(unit.n_bytes <= max(piece_bytes, 0) for unit in units)
    file.close()


# A limit of memory


def parts_of(folder: Path) -> tuple[StoredParts, list[Unit], StoredMatrix]:
    (chunk,) = chunks(folder)
    assert chunk.packing is not None
    found = StoredParts(chunk.packing, folder)
    blocks = {part: found.part(chunk, part).matrices for part in chunk.part_names() if part.startswith("block.")}
    return found, block_units(blocks), found.part(chunk, "head").matrices["lm_head.weight"]


def test_the_best_window_that_fits_is_chosen_and_the_least_that_works_is_told(tmp_path: Path) -> None:
    found, blocks, head = parts_of(tmp_path)
    memory, taken = RunMemory(sequence=1 * MB, n_sequences=3, work=2 * MB), 50 * MB
    beside = taken + 3 * MB + 2 * MB + MARGIN_BYTES

    def chosen(weights: int) -> tuple[int, int | None, int]:
        limit = WindowOptions(memory=beside + weights)
        plan = choose_window("starter", limit, blocks, head, memory, taken)
        assert plan.resident_bytes <= weights
        return plan.n_slots, plan.retain, plan.pass_bytes

    everything = plan_window(blocks, head, 2, 1).resident_bytes
    assert chosen(everything) == (0, 1, 0)
    n_slots, retain, _ = chosen(everything - 1)
    assert n_slots >= 2 and retain in (2, 3)
    least = plan_window(blocks, head, 2, None).resident_bytes
    assert chosen(least)[:2] == (2, None)
    retained = [chosen(weights)[1] or 99 for weights in range(least, everything, PAGE_BYTES)]
    assert retained == sorted(retained, reverse=True) and retained[-1] == retain, (
        "more memory never means fewer blocks that stay"
    )
    one = plan_window(blocks, head, 1, None).resident_bytes
    assert chosen(one)[:2] == (1, None)
    with pytest.raises(LimitError) as error:
        chosen(one - 1)
    assert beside + one <= error.value.least_bytes < beside + one + 10**6 and error.value.code == "memory"
    choose_window("starter", WindowOptions(memory=error.value.least_bytes), blocks, head, memory, taken)
    found.close()


def test_a_part_of_the_limit_is_left_for_what_grows(tmp_path: Path) -> None:
    """Buffers of links, and Python's objects: what a process takes is more than what it has reckoned."""
    found, blocks, head = parts_of(tmp_path)
    memory, taken = RunMemory(sequence=1 * MB, n_sequences=3, work=2 * MB, promised=7 * MB), 50 * MB
    with pytest.raises(LimitError) as error:
        choose_window("starter", WindowOptions(memory=1), blocks, head, memory, taken)
    plan = choose_window("starter", WindowOptions(memory=error.value.least_bytes), blocks, head, memory, taken)
    left = error.value.least_bytes - (taken + plan.resident_bytes + (3 + 2 + 7) * MB)
    assert 16 * MB <= left < 64 * MB
    found.close()


def test_logits_of_all_rows_count(tmp_path: Path) -> None:
    spec = spec_of(chunks(tmp_path)[0].config)
    row = 4 * spec.n_rows
    assert work_bytes(spec, 20, 12) - work_bytes(spec, 20, 4) >= 8 * row
    assert work_bytes(spec, 20, 4) > work_bytes(spec, 12, 4)


def test_what_is_set_by_hand_is_kept_or_refused(tmp_path: Path) -> None:
    found, blocks, head = parts_of(tmp_path)
    memory, limit = RunMemory(0, 1, 0), MARGIN_BYTES + plan_window(blocks, head, 2, 3).resident_bytes
    plan = choose_window("starter", WindowOptions(2, 3, limit), blocks, head, memory, 0)
    assert (plan.n_slots, plan.retain) == (2, 3)
    for by_hand in (WindowOptions(4, 3, limit), WindowOptions(2, 2, limit)):
        with pytest.raises(LimitError):
            choose_window("starter", by_hand, blocks, head, memory, 0)
    found.close()


def test_a_limit_that_packing_needs_is_named(tmp_path: Path) -> None:
    """For the largest weight of the model, in the unit in which limits are typed and read."""
    source = open_source(write_checkpoint(tmp_path / "tiny"))
    packing = Packing("int8", "int8")
    parts = StoredParts(packing, tmp_path / "spill", taken_bytes() // 2)
    with pytest.raises(LimitError, match=r"give --memory \d+M") as error:
        parts.part(source, "block.0")
    largest = max(source.read_bytes(name) for part in source.part_names() for name in source.shapes(part))
    assert error.value.least_bytes % 10**6 == 0 and error.value.least_bytes > taken_bytes() // 2 + largest
    parts.close()
    enough = StoredParts(packing, tmp_path / "spill", error.value.least_bytes + MARGIN_BYTES)
    for part in source.part_names():
        enough.part(source, part)
    enough.close()
    source.close()


def test_a_process_that_outgrows_its_limit_ends_with_a_word(tmp_path: Path) -> None:
    (chunk,) = chunks(tmp_path)
    with pytest.raises(EngineError) as error:
        MemoryLimit(1 * MB).check()
    assert error.value.code == "memory"
    MemoryLimit(None).check()
    MemoryLimit(1 << 50).check()
    # Chosen for a process that has nothing yet, so that what this one has is too much.
    limit = taken_bytes() + 512 * MB
    memory = RunMemory(0, 1, work_bytes(spec_of(chunk.config), 1, 1))
    stage = windowed(chunk, 0, N_BLOCKS, WindowOptions(memory=limit), run=memory)
    try:
        stage.check = MemoryLimit(1 * MB).check
        with pytest.raises(EngineError):
            run(stage)
    finally:
        stage.close()


def test_caches_have_their_part_of_a_limit(tmp_path: Path) -> None:
    (chunk,) = chunks(tmp_path)
    limit = taken_bytes() + 512 * MB
    for n_sequences in (1, 4):
        stage = windowed(chunk, 0, N_BLOCKS, WindowOptions(memory=limit), run=RunMemory(MB, n_sequences, 0))
        stage.prepare(LENGTH)
        assert stage.caches.most_bytes is not None
        assert stage.caches.most_bytes <= n_sequences * MB
        stage.close()
