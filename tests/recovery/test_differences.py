"""Which tokens may be others than in an undisturbed run: it is known, told, and written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_policy import World

from families import config_of
from mdi.cli.resume import Journaling
from mdi.host.computing import Computing, choose_computing
from mdi.kernels import library
from mdi.metrics import RunMetrics, SampleMetrics
from mdi.model.plain import ModelConfig
from mdi.run.identity import RingArithmetic
from mdi.run.journal import Journal, JournalText, find_run, read_record
from mdi.run.policy import Form, Stage
from mdi.run.report import REPLAY, TOKENS, Records, format_report
from mdi.spec.arithmetic import Arithmetic
from mdi.spec.model_id import Formats
from mdi.spec.options import Options, Requested

CONFIG = ModelConfig.from_litgpt(config_of("pythia-14m"))
KERNELS = Arithmetic("fused", Formats.one("int8"), "float32")
TORCH = Arithmetic("torch", Formats.one("float32"), "float32")
NAMES = ("starter", "a", "b")
CUT = ((0, 2), (2, 4), (4, 6))


def numbers(
    blocks: Sequence[tuple[int, int]] = CUT, names: Sequence[str] = NAMES, shares: Sequence[Any] = (None,) * 3,
    arithmetic: Arithmetic = KERNELS, epoch: int = 1, wire_dtype: str = "auto",
) -> RingArithmetic:  # fmt: skip
    return RingArithmetic.of(names, blocks, [replace(arithmetic, share=one) for one in shares], wire_dtype, epoch)


def shared(*heads: int) -> list[Any]:
    return [(rank, heads, heads) for rank in range(len(heads) - 1)]


ALL = ((0, 6),) * 3


def test_kernels_give_the_same_bits_for_any_cut_and_any_nodes() -> None:
    assert numbers() == numbers(((0, 1), (1, 6)), ("starter", "x"), (None, None), epoch=2)
    assert numbers() == numbers(((0, 6),), ("starter",), (None,), epoch=3)
    assert numbers() != numbers(arithmetic=replace(KERNELS, unit="plain"))


def test_groups_give_the_same_bits_only_with_the_same_shares() -> None:
    three = numbers(ALL, shares=shared(0, 2, 4, 6))
    assert three == numbers(ALL, ("starter", "x", "b"), shared(0, 2, 4, 6), epoch=2), "whoever has them"
    swapped = [shared(0, 2, 4, 6)[rank] for rank in (0, 2, 1)]
    assert three == numbers(ALL, ("starter", "b", "a"), swapped), "in whatever order they stand in the ring"
    others = [numbers(), numbers(ALL, shares=shared(0, 1, 4, 6)), numbers(ALL[:2], NAMES[:2], shared(0, 3, 6))]
    assert len({three, *others}) == 4


def test_a_group_has_its_own_blocks() -> None:
    """A group of two after the starter, or before: other blocks are computed in shares."""
    pair = shared(0, 3, 6)
    assert numbers(((0, 2), (2, 6), (2, 6)), shares=[None, *pair]) != numbers(
        ((0, 4), (0, 4), (4, 6)), shares=[*pair, None]
    )


def test_rounded_links_give_the_same_bits_only_between_the_same_blocks() -> None:
    other = ((0, 1), (1, 4), (4, 6))
    assert numbers(wire_dtype="fp16") == numbers(names=("starter", "x", "b"), wire_dtype="fp16")
    assert numbers(wire_dtype="fp16") != numbers(other, wire_dtype="fp16") and numbers() == numbers(other)
    assert numbers(((0, 6),), NAMES[:1], (None,), wire_dtype="fp16") == numbers(((0, 6),), NAMES[:1], (None,))


def test_torch_is_trusted_in_float32_on_the_same_nodes_of_a_cpu() -> None:
    others = ("starter", "x", "b")
    assert numbers(arithmetic=TORCH) == numbers(arithmetic=TORCH, epoch=2) != numbers(names=others, arithmetic=TORCH)
    for one in (replace(TORCH, formats=Formats.one("bfloat16")), replace(TORCH, unit="cuda:0")):
        assert numbers(arithmetic=one) == numbers(arithmetic=one) != numbers(arithmetic=one, epoch=2)


def test_a_node_with_a_format_or_a_type_of_caches_of_its_own_gives_other_bits() -> None:
    for own in (replace(KERNELS, formats=Formats.one("int4")), replace(KERNELS, kv_dtype="bf16")):
        assert RingArithmetic.of(NAMES, CUT, [KERNELS, KERNELS, own], "auto", 1) != numbers()
        assert numbers(arithmetic=own) == numbers(), "that is in `identity_of`"


def test_what_a_node_computes_with_is_its_class_or_its_device() -> None:
    unit = library.arithmetic()
    for asked, config, expected in ((Requested(), CONFIG, unit), (Requested(dtype="bfloat16"), CONFIG, "torch")):
        assert choose_computing(config, asked, "float32").arithmetic("auto").unit == expected
    assert choose_computing(None, Requested(), "float32").arithmetic("auto").unit == "torch"
    assert Computing("cuda:0", "float32").arithmetic("auto").unit == "cuda:0"


@pytest.mark.parametrize("unit", ["fused", "plain", "torch"])
def test_a_row_has_the_same_bits_in_any_company_where_all_nodes_have_kernels(unit: str) -> None:
    own = replace(KERNELS, unit=unit)
    ring = RingArithmetic.of(NAMES, CUT, [KERNELS, own, KERNELS], "auto", 1)
    assert ring.is_fixed is own.is_certain is (unit != "torch")
    assert not replace(own, share=shared(0, 1, 2)[0]).is_certain, "of a group"


def test_journals_of_earlier_versions_compare() -> None:
    """By a hash of the same bytes."""
    told = {
        "fd7ed892f905fcbb": {},
        "af8bb10fbb379e02": {"arithmetic": replace(KERNELS, unit="plain")},
        "6229a7e6c8345b1a": {"wire_dtype": "fp16"},
        "ae18f5c58e3a371a": {"blocks": ALL, "shares": shared(0, 2, 4, 6)},
        "e830bcb0834a79df": {"arithmetic": TORCH},
        "7ebdf2ffedaa933f": {"arithmetic": replace(TORCH, unit="cuda:0")},
    }
    for expected, changes in told.items():
        assert numbers(epoch=7, **changes).sha256.startswith(expected)


# Losses and moves


def test_a_recovery_names_the_tokens_from_which_texts_may_differ() -> None:
    world = World(["x"])
    world.n_known, world.is_exact = {0: 40, 7: 12}, False
    world.recover(world.lose("a"))
    assert [one.differs for one in world.loop.recoveries] == [{0: 40, 7: 12}]
    world.n_known = {0: 50, 8: 3}
    world.recover(world.lose("b"))
    assert [one.differs for one in world.loop.recoveries][1] == {0: 50, 8: 3}
    assert world.loop.differs_from == {0: 40, 7: 12, 8: 3}, "the first time counts"


def test_a_recovery_with_the_same_numbers_names_none() -> None:
    world = World(["x"])
    world.n_known = {0: 40}
    world.recover(world.lose("a"))
    assert [one.differs for one in world.loop.recoveries] == [{}] and world.loop.differs_from == {}


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_planned_move_is_noted_as_well(is_exact: bool) -> None:
    world = World()
    world.n_known, world.is_exact = {3: 9}, is_exact
    world.move(Form((Stage("starter", 0, 3), Stage("a", 3, 6)), is_moved=True))
    assert world.loop.differs_from == ({} if is_exact else {3: 9}) and not world.loop.recoveries


def test_a_second_loss_before_the_next_token_keeps_what_was_noted() -> None:
    records = Records()
    records.begin(["a"], 1.0)
    records.replace("a", ["x"], TOKENS, {0: 4})
    records.replace("a", ["y"], REPLAY, {})
    assert [(one.replaced_by, one.restored_by, one.differs) for one in records.so_far(2.0)] == [
        (("y",), REPLAY, {0: 4})
    ]


def test_the_tables_name_the_token() -> None:
    sample = SampleMetrics.from_times("a", "b", [1, 2, 3], [1], "length", [0.1, 0.2, 0.3])
    told = format_report(RunMetrics.from_parts("m", [sample, replace(sample, may_differ_from=2)], [], 1.0))
    assert "sample 1 may differ from an undisturbed run from its token 2 on" in told and "sample 0" not in told


# The journal


def session_of(numbers: str, told: dict[int, int | None]) -> Any:
    """A run as the journal sees it; `told` is what its starter says of its samples."""
    samples = [SimpleNamespace(index=i) for i in range(3)]
    run = SimpleNamespace(
        arithmetic=SimpleNamespace(sha256=numbers), identity="i", model=SimpleNamespace(formats=("int8", None)),
        samples=samples,
        may_differ_from=lambda sample: told.get(sample.index), prompt_ids=[[1], [2], [3]],
    )  # fmt: skip
    run.record_to = lambda record: setattr(run, "record", record)
    return run


def begun(folder: Path, session: Any, resume: str | None = None) -> Journaling:
    args = Options(resume=resume, run_dir=folder, n_tokens=9)
    journaling = Journaling(args)
    journaling.begin(args, session, ["a", "b", "c"])
    return journaling


@pytest.mark.parametrize("numbers, expected", [("same", [None, 1, None]), ("other", [2, 1, None])])
def test_a_resumed_run_names_the_token_where_its_numbers_are_others(
    numbers: str, expected: list[int | None], tmp_path: Path
) -> None:
    """The second text may differ already, the third one has ended."""
    told: dict[int, int | None] = {1: 1}
    session = session_of("same", told)
    first = begun(tmp_path, session)
    for index, tokens, reason in ((0, [5, 6], None), (1, [5, 6], None), (2, [5], "eos")):
        session.record(index, tokens, reason, False)
    first.close()
    resumed = begun(tmp_path, session_of(numbers, {}), "last")
    assert resumed.texts is not None and [text.may_differ_from for text in resumed.texts] == expected
    resumed.close()


def test_a_text_that_an_earlier_run_has_ended_is_written_down(tmp_path: Path) -> None:
    """It is told before its sample is there."""
    journaling = begun(tmp_path, session := session_of("same", {}))
    session.samples.clear()
    session.record(0, [], "length", False)
    journaling.close()
    assert [text.finish_reason for text in read_record(find_run(tmp_path, "last")).texts] == ["length", None, None]


def test_the_journal_keeps_where_texts_may_differ(tmp_path: Path) -> None:
    journaling = begun(tmp_path, session := session_of("n", {0: 0, 1: 4}))
    for index in range(3):
        session.record(index, [1], None, False)
    journaling.close()
    record = read_record(find_run(tmp_path, "last"))
    assert record.numbers == "n" and [text.may_differ_from for text in record.texts] == [0, 4, None]
    journal, again = Journal.reopen(find_run(tmp_path, "last"))
    journal.close()
    assert again.texts[1] == JournalText("b", [2], [1], None, 4)
