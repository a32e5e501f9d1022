"""Rows with more columns than hidden, some of which travel without it: their layout at each cut, their frames, and a ring in
which the tokens are those of a plain computation on one list.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

import mdi.run.verify
from loopback import CPU
from made_up_columns import BLOCKS, SPEC, ColumnStage, block, plain_tokens
from made_up_rings import N_TOKENS, Ring, Source, prompt
from mdi.checkpoint.virtual_rows import why_no_rows
from mdi.control.messages import ToldRows
from mdi.engine.replay import SentRows
from mdi.engine.rows import ArrayRows, TensorRows, whole_rows
from mdi.engine.worker import SecondaryLoop, TappedStage
from mdi.errors import RingError, UsageError, WireError
from mdi.kernels.slices import Slice, SliceTable
from mdi.model.rows import Column, RowLayout
from mdi.net.wire import PLAIN, Frame, FrameCodec, FrameType, Limits
from mdi.run.policy import Stage
from mdi.run.recomputing import OwnBlocks
from mdi.run.run import Run
from mdi.run.verify import RowVerifier

HIDDEN_TEXT_SHARED = ["hidden", "text", "shared"]


def names_at(cut: int) -> list[str]:
    return [one.name for one in SPEC.row_at(cut).columns]


def test_a_row_has_what_is_given_in_front_of_the_cut_and_read_behind_it() -> None:
    assert SPEC.allowed_cuts() == [0, 1, 3, 4, 5, 7, 8]
    assert [names_at(cut) for cut in (0, 1)] == [["hidden", "text"]] * 2
    assert [names_at(cut) for cut in (3, 4, 5)] == [HIDDEN_TEXT_SHARED] * 3
    assert names_at(7) == ["hidden", "shared"] and names_at(8) == ["hidden"]
    assert [SPEC.row_at(cut).width for cut in (0, 5, 7, 8)] == [4, 7, 5, 2] and SPEC.widest_row == 7
    at = SPEC.row_at(5)
    assert (at.place("text"), at.place("shared"), at.cached.width) == (slice(2, 4), slice(4, 7), 3)


def test_blocks_that_make_nothing_of_hidden_for_other_rows_are_skipped() -> None:
    assert SPEC.skipped_from == 4
    assert [cut for cut in range(9) if SPEC.row_at(cut).is_skipped] == [4, 5, 6, 7], (
        "behind the last one are only logits"
    )
    own_cache_last = replace(SPEC, blocks=(*BLOCKS[:7], block()))
    gives_last = replace(SPEC, blocks=(*BLOCKS[:7], replace(BLOCKS[7], gives=(Column("more", 1),))))
    assert own_cache_last.skipped_from == gives_last.skipped_from == 8
    assert not own_cache_last.row_at(5).is_skipped


class Line:
    """Gives these frames, and keeps what is sent."""

    def __init__(self, *frames: Frame) -> None:
        self.frames, self.sent = [*frames], list[Frame]()

    def poll(self) -> Frame:
        return self.frames.pop(0)

    def send(self, frame: Frame) -> None:
        self.sent.append(frame)

    def release(self, frame: Frame) -> None:
        """Nothing is used again."""


SLICES = SliceTable([Slice(1, 0, 4, 0), Slice(2, 0, 3, 1), Slice(3, 0, 1, 1)])


def frame_at(cut: int, slices: SliceTable = SLICES) -> Frame:
    """As the starter sends it, if it has the blocks in front of the cut."""
    stage = ColumnStage(0, cut)
    x = stage.embed(np.arange(slices.n_rows) % 9, slices)
    return TappedStage(stage, ArrayRows(), (), 0, 0)(Frame(FrameType.BATCH, 1, slices=slices), x, False, "auto")


def sent_on(frame: Frame, start: int, stop: int, sent: SentRows | None = None) -> Frame:
    line: Any = Line(frame)
    SecondaryLoop(ColumnStage(start, stop), ArrayRows(), line, stop == len(BLOCKS), sent=sent).step()
    (found,) = line.sent
    return found


def test_rows_that_skip_blocks_travel_without_hidden() -> None:
    """Over a link before these blocks, rows have all columns; then two of eight rows have, and over the last link no others."""
    first = frame_at(3)
    second = sent_on(first, 3, 5)
    last = sent_on(second, 5, 8)
    assert [(one.n_rows, one.n_cols, one.n_cached) for one in (first, second, last)] == [
        (8, 4, 3),
        (2, 4, 3),
        (2, 2, 0),
    ]
    assert [len(one.payload) for one in (first, second, last)] == [4 * (8 * 7), 4 * (2 * 4 + 8 * 3), 4 * (2 * 2)]
    prompts_alone = sent_on(frame_at(3, SliceTable([Slice(1, 0, 4, 0)])), 3, 5)
    assert prompts_alone.n_rows == 0 and len(prompts_alone.payload) == 4 * (4 * 3) and prompts_alone.has_rows
    for frame in (first, second, last, prompts_alone):
        header = PLAIN.head(frame)
        codec = FrameCodec(Limits(max_cols=8))
        found = codec.frame(codec.header(header[:72]), header[72:], bytearray(frame.payload))
        assert replace(found, payload=bytes(found.payload)) == replace(frame, payload=bytes(frame.payload))


@pytest.mark.parametrize(
    ("cut", "changed"),
    [
        (5, {"n_rows": 8, "payload": bytes(4 * 8 * 7)}),  # hidden in rows that are skipped
        (3, {"n_rows": 2, "payload": bytes(4 * (2 * 4 + 8 * 3))}),  # no hidden in rows that are not
        (3, {"n_cached": 0, "payload": bytes(4 * 8 * 4)}),
        (3, {"n_cached": 2, "payload": bytes(4 * 8 * 6)}),
        (3, {"n_cols": 5, "payload": bytes(4 * 8 * 8)}),
        (5, {"n_cols": 5, "payload": bytes(4 * (2 * 5 + 8 * 3))}),
    ],
)
def test_rows_with_other_columns_are_refused(cut: int, changed: dict[str, Any]) -> None:
    with pytest.raises(WireError, check=lambda e: e.code == "wire"):
        sent_on(replace(frame_at(cut), **changed), cut, 8)


@pytest.mark.parametrize("rows", [ArrayRows(), TensorRows(CPU, torch.float32)], ids=["arrays", "tensors"])
@pytest.mark.parametrize("wire", ["auto", "fp16", "int8"])
@pytest.mark.parametrize("is_skipped", [False, True])
def test_columns_come_back_from_every_number_format(rows: Any, wire: str, is_skipped: bool) -> None:
    """Those of a row are the same in any company, and what a row does not carry is 0."""
    layout = RowLayout((Column("hidden", 70), Column("text", 3), Column("shared", 66, is_cached=True)), is_skipped)
    x = np.random.default_rng(1).standard_normal((8, layout.width)).astype(np.float32)
    x[:, :70] *= 1000

    class Idle:
        row_in = row_out = layout

        def __call__(self, x: Any, slices: object) -> Any:
            return x

    stage: Any = Idle()
    tapped = TappedStage(stage, rows, (), 0, 0)

    def hop(x: np.ndarray, slices: Sequence[Slice]) -> np.ndarray:
        out = tapped(Frame(FrameType.BATCH, 1, slices=SliceTable(slices)), rows.of_array(x), False, wire)
        found: np.ndarray = rows.array(whole_rows(rows, replace(out, payload=bytearray(out.payload)), layout))
        return found

    found = hop(x, SLICES)
    expected, kept = x.copy(), [6, 7] if is_skipped else [*range(8)]
    expected[[i for i in range(8) if i not in kept], :73] = 0
    np.testing.assert_allclose(found, expected, atol={"auto": 0, "fp16": 1.1, "int8": 20}[wire])
    np.testing.assert_allclose(found[:, 73:], x[:, 73:], atol={"auto": 0, "fp16": 2e-3, "int8": 0.02}[wire])
    alone = [hop(x[i : i + 1], [Slice(1, 0, 1, int(i in kept))]) for i in range(8)]
    assert np.array_equal(np.concatenate(alone), found)
    none = hop(x[:4], [Slice(1, 0, 4, 0)])
    assert np.array_equal(none, found[:4])


@pytest.mark.parametrize(("start", "stop", "width"), [(3, 4, 3), (1, 3, 7)])
def test_a_node_keeps_the_columns_that_a_replay_needs(start: int, stop: int, width: int) -> None:
    """Where rows without logits are skipped, those for caches; else all."""
    sent = SentRows(1 << 10)
    out = sent_on(frame_at(start), start, stop, sent)
    assert sent.n_bytes == 4 * 8 * width
    again = sent.fill(Frame(FrameType.BATCH, 1, slices=SliceTable([Slice(2, 1, 2), Slice(3, 0, 1)])))
    layout = SPEC.row_at(stop)
    before, after = (whole_rows(ArrayRows(), one, layout) for one in (out, again))
    skipped = layout.width - layout.cached.width if layout.is_skipped else 0
    assert np.array_equal(after[:, skipped:], before[[5, 6, 7], skipped:]) and not after[:, :skipped].any()


def test_blocks_that_are_computed_again_give_what_the_node_sent() -> None:
    """All columns, in this process and on another node."""
    part = Slice(7, 0, 5, 5)
    before = frame_at(1, SliceTable([part]))
    after = sent_on(before, 1, 3)
    held = SimpleNamespace(stage=ColumnStage(1, 3), spec=SimpleNamespace(arithmetic=None))
    own = OwnBlocks(cast(Any, held), cast(Any, None), "auto")
    assert own.compute(7, 0, before) == (after.dtype, bytes(after.payload)) and after.n_cached == 3


def test_rows_that_a_node_tells_in_pieces_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = SentRows(1 << 20)
    sent_on(frame_at(1, SliceTable([Slice(7, 0, 5, 1)])), 1, 3, sent)
    asked: list[tuple[int, int]] = []

    def ask(ring: Any, index: int, seq_id: int, start: int, stop: int, which: str, is_whole: bool) -> ToldRows:
        asked.append((start, stop))
        found = sent.fill(Frame(FrameType.BATCH, 0, slices=SliceTable([Slice(seq_id, start, stop - start)])))
        return ToldRows(found.dtype, found.n_cols, "", cast(Any, None), base64.b64encode(found.payload).decode())

    monkeypatch.setattr(mdi.run.verify, "ROWS_BYTES", 2 * 8 * 7)
    ring = SimpleNamespace(stages=[Stage("starter", 0, 1), Stage("secondary0", 1, 3), Stage("secondary1", 3, 8)])
    model = SimpleNamespace(spec=SPEC)
    former = SimpleNamespace(basis=SimpleNamespace(weights=SimpleNamespace(model=model)))
    verifier: Any = SimpleNamespace(_former=former, _ask=ask, n_fetched=0)
    verifier.row_at_cut = partial(RowVerifier.row_at_cut, verifier)
    found = RowVerifier.kept_rows_of(verifier, cast(Any, ring), 1, 7, 0, 5)
    whole = sent.fill(Frame(FrameType.BATCH, 0, slices=SliceTable([Slice(7, 0, 5)])))
    assert found == replace(whole, payload=found.payload) and found.payload == whole.payload
    assert asked == [(0, 2), (2, 4), (4, 5)] and verifier.n_fetched == 4 * 5 * 7


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"_taps": (1,)}, "side networks cannot"), ({"_gradients": True}, "training over a ring cannot"),
        ({"verify": 0.5}, "--verify cannot"), ({"_taps": (1,), "verify": 0.5}, "side networks and --verify cannot"),
    ],
)  # fmt: skip
def test_what_knows_only_hidden_is_refused(asked: dict[str, Any], words: str) -> None:
    run: Any = SimpleNamespace(**{"_taps": (), "_gradients": False, **asked})
    choice: Any = SimpleNamespace(spec=SPEC, options=SimpleNamespace(verify=asked.get("verify", 0.0)))
    with pytest.raises(
        UsageError, match=f"made up: its rows have columns besides hidden or skip blocks, which {words} use"
    ):
        Run.check_columns(run, choice)
    choice.spec = replace(SPEC, blocks=(block(), block(), block(cache_of=1)))
    assert choice.spec.widest_row == choice.spec.width
    with pytest.raises(UsageError, match=f"or skip blocks, which {words} use"):
        Run.check_columns(run, choice)
    choice.spec = replace(SPEC, blocks=(block(), block()))
    Run.check_columns(run, choice)


def test_a_prefix_is_for_blocks_with_keys_of_their_own() -> None:
    own = replace(SPEC, blocks=(block(), block()))
    assert why_no_rows(True, own) is None
    assert "read the keys and values of others" in (
        why_no_rows(True, replace(own, blocks=(block(), block(cache_of=0)))) or ""
    )


# Links before the blocks that are skipped, between them, and both; of one, two and three nodes.
RINGS = [((0, 8), True), ((0, 5, 8), True), ((0, 1, 3, 8), False), ((0, 4, 7, 8), True)]
RINGS += [((0, 3, 5, 8), is_guessed) for is_guessed in (False, True)]
LOSSES = {2: ["none"], 3: ["none", "link", "0", "all"], 4: ["none", "link", "0", "1", "01", "all"]}


@pytest.mark.parametrize(
    ("cuts", "is_guessed", "loss"), [(*one, loss) for one in RINGS for loss in LOSSES[len(one[0])]], ids=str
)
def test_tokens_are_those_of_one_list(cuts: tuple[int, ...], is_guessed: bool, loss: str) -> None:
    """The first two texts have the same prompt, which one computes."""
    prompts = [prompt(70, 1), prompt(70, 1), prompt(3, 2), prompt(190, 3)]
    expected = [plain_tokens(ids, N_TOKENS) for ids in prompts]
    ring = Ring(ColumnStage, cuts)
    if is_guessed:
        ring.engine.speculation = Source(dict(enumerate(expected)))  # type: ignore[assignment]
    lose_at = None if loss == "none" else 20
    texts = [ring.submit(ids, lose_at if i == 3 else None, owner="a") for i, ids in enumerate(prompts)]
    if loss != "none":
        with ring.closed() as run, pytest.raises(RingError):
            run()
        ring.come_back(loss)
    with ring.closed() as run:
        run()
    assert [text.ids for text in texts] == expected
    assert any(text.request.sequence.n_evictions for text in texts) == (loss == "all"), "begun again"
    assert ring.engine.n_reused >= 69 and (ring.engine.scheduler.n_guessed > 20) == is_guessed


def test_a_prefix_is_gone_on_from_where_texts_fork() -> None:
    ring, first = Ring(ColumnStage, (0, 3, 5, 8)), prompt(160, 1)
    answer = ring.submit(first, owner="a")
    with ring.closed() as run:
        run()
        assert answer.ids == plain_tokens(first, N_TOKENS)
        far, near = [*first[:119], *prompt(30, 4)], [*first, *answer.ids, *prompt(20, 5)]
        for ids, n_reused in ((far, 119), (near, 160 + N_TOKENS - 1)):
            before, text = ring.engine.n_reused, ring.submit(ids, owner="a")
            run()
            assert text.ids == plain_tokens(ids, N_TOKENS)
            assert ring.engine.n_reused - before == n_reused


def test_rows_of_a_prompt_skip_the_last_blocks() -> None:
    """Of the 100 rows of a prompt one gives logits: the last node computes it and those behind it, and no others."""
    ring = Ring(ColumnStage, (0, 3, 5, 8))
    ring.submit(prompt(100, 1))
    with ring.closed() as run:
        run()
    assert ring.stages[0].n_computed == 3 * (100 + N_TOKENS - 1)
    assert ring.stages[1].n_computed == 100 + N_TOKENS - 1 + N_TOKENS
    assert ring.stages[2].n_computed == 3 * N_TOKENS


def test_every_cut_gives_the_same_tokens() -> None:
    ids = prompt(12, 7)
    expected = plain_tokens(ids, N_TOKENS)
    for first, second in itertools.combinations(SPEC.allowed_cuts()[:-1], 2):
        ring = Ring(ColumnStage, (0, first, second, 8))
        text = ring.submit(ids)
        with ring.closed() as run:
            run()
        assert text.ids == expected, (first, second)
