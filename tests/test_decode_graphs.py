"""Recorded decoding steps against the plain path, with what a CUDA graph is on the CPU: calls repeated on the same memory."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from families import FAMILIES, model_of, prompt
from loopback import CPU, stages_of
from mdi.kernels.page_sizes import PAGE
from mdi.model.cache import DevicePages
from mdi.model.decode_graphs import LARGEST, DecodeGraphs, can_record, rounded_up
from mdi.model.stage import StarterStage
from recorded_calls import CallRecorder
from tolerance import assert_alike

LATENT_OR_EXPERTS = {"Mixtral-8x7B-v0.1", "Qwen3-30B-A3B", "deepseek-v3-shape"}
PLAIN = [family for family in FAMILIES if family not in LATENT_OR_EXPERTS]


def stage_of(family: str, kv_dtype: torch.dtype = torch.float32) -> StarterStage:
    stage = stages_of(model_of(family), (), kv_dtype=kv_dtype)[0]
    assert isinstance(stage, StarterStage)
    return stage


def recorded(family: str, kv_dtype: torch.dtype = torch.float32) -> tuple[StarterStage, CallRecorder]:
    stage, recorder = stage_of(family, kv_dtype), CallRecorder()
    stage.graphs = DecodeGraphs(stage, recorder)
    return stage, recorder


def decode(
    stages: tuple[StarterStage, StarterStage], lengths: dict[int, int], n_steps: int, kept: torch.dtype = torch.float32
) -> None:
    """Prompts of these lengths, by seq_id, then steps of all of them at once: both stages must give the same rows."""
    for seq_id, length in lengths.items():
        for start in range(0, length, 40):
            ids = torch.tensor(prompt(length, seq_id)[start : start + 40])
            for stage in stages:
                stage(stage.embed(ids), [(seq_id, start, len(ids))])
    for i in range(n_steps):
        ids = torch.tensor(prompt(len(lengths), 100 + i))
        slices = [(seq_id, length + i, 1) for seq_id, length in lengths.items()]
        one, other = (stage(stage.embed(ids), slices) for stage in stages)
        # Where all of a cache is read, the same bits. Of a window, a recorded step reads whole pages and masks what is outside,
        # so softmax and values are summed in another order.
        assert_alike(one, other, stages[0].config, kept)


@pytest.mark.parametrize("family", PLAIN)
def test_recorded_steps_give_what_the_plain_path_gives(family: str) -> None:
    """Sequences of other lengths, with other pages, in another number, over the end of pages and of windows."""
    stage, recorder = recorded(family)
    plain = stage_of(family)
    decode((stage, plain), {0: 2, 1: 30, 2: 75}, 4)
    assert (recorder.n_recorded, recorder.n_replayed) == (1, 4)
    for each in (stage, plain):
        each.caches.free(1)
    decode((stage, plain), {5: 60, 6: 3}, 6)  # in pages that another one had
    decode((stage, plain), {7: 50}, 2)
    before = recorder.n_recorded
    decode((stage, plain), {8: 61, 9: 40}, 6)  # other numbers for a step that is recorded already
    assert recorder.n_recorded == before


def test_caches_of_another_type() -> None:
    stage, recorder = recorded("Gemma-2-9b", torch.bfloat16)
    decode((stage, stage_of("Gemma-2-9b", torch.bfloat16)), {0: 20, 1: 50}, 3, torch.bfloat16)
    assert recorder.n_recorded == 1


def test_rows_that_no_sequence_has_change_nothing() -> None:
    """Three rows are computed as... three, five as six: the sixth writes to the scratch page and into no sequence's."""
    stage, _ = recorded("Llama-3.1-8B")
    decode((stage, stage_of("Llama-3.1-8B")), {i: 10 + 7 * i for i in range(5)}, 3)
    assert stage.graphs is not None and stage.graphs.n_recorded == 1
    (key,) = stage.graphs.steps
    assert key[0] == 6
    whole = prompt(17, 1) + [prompt(5, 100 + i)[1] for i in range(3)]
    expected = model_of("Llama-3.1-8B")(torch.tensor([[*whole, 1]]))[0, -1]
    found = stage.head(stage(stage.embed(torch.tensor([1])), [(1, 20, 1)]))[0]
    assert_alike(found, expected, stage.config)


def test_what_is_not_recorded_goes_the_plain_way() -> None:
    stage, recorder = recorded("Llama-3.1-8B")
    ids = torch.tensor(prompt(LARGEST + 1, 1))
    stage(stage.embed(ids[:9]), [(0, 0, 9)])
    stage(stage.embed(ids[:3]), [(0, 9, 1), (1, 0, 2)])
    stage(stage.embed(ids), [(100 + i, 0, 1) for i in range(LARGEST + 1)])
    assert recorder.n_recorded == 0
    assert not can_record(stage_of("Mixtral-8x7B-v0.1").blocks) and not can_record(stage_of("deepseek-v3-shape").blocks)
    assert stage_of("Llama-3.1-8B").graphs is None, "on a CPU nothing is recorded"


def test_pages_beyond_the_first_slab_go_the_plain_way() -> None:
    stage, recorder = recorded("Llama-3.1-8B")
    caches, dtype = stage.caches, torch.float32
    pool = DevicePages(caches.pools[0].page_bytes, 64, dtype, CPU, 3 * caches.pools[0].page_bytes)
    pool.slab_pages, pool.first_pages = 2, 4
    caches.pools[0] = pool
    for block in caches.blocks:
        block.pool = pool
    decode((stage, stage_of("Llama-3.1-8B")), {0: 2 * PAGE - 2}, 1)
    assert recorder.n_recorded == 1
    decode((stage, stage_of("Llama-3.1-8B")), {1: 4 * PAGE - 2}, 1)
    assert recorder.n_replayed == 1 and len(pool.slabs) > 1


def test_a_step_that_cannot_be_recorded_is_computed_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    stage, tries = stage_of("Llama-3.1-8B"), []

    def refuse(step: object) -> None:
        tries.append(step)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    stage.graphs = DecodeGraphs(stage, refuse)  # type: ignore[arg-type]
    decode((stage, stage_of("Llama-3.1-8B")), {0: 5}, 3)
    assert len(tries) == 1 and [record.levelname for record in caplog.records] == ["WARNING"]
    stage.caches.free(0)
    assert stage.caches.n_bytes == 0


def test_recordings_and_their_page_go_with_the_caches() -> None:
    stage, recorder = recorded("Gemma-3-1b-it")
    decode((stage, stage_of("Gemma-3-1b-it")), {0: 5}, 1)
    assert stage.graphs is not None
    stage.caches.clear()
    assert stage.graphs.n_recorded == 0 and stage.caches.n_bytes == 0
    decode((stage, stage_of("Gemma-3-1b-it")), {0: 5}, 1)
    assert recorder.n_recorded == 2
    gone = weakref.ref(stage)
    gc.disable()
    try:
        del stage
        assert gone() is None, "memory of a stage comes back when it is dropped, not when somebody looks for circles"
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("n", "found"), [(1, 1), (2, 2), (3, 3), (5, 6), (7, 8), (9, 12), (13, 16), (33, 48), (49, 64)]
)
def test_sizes_are_rounded_up(n: int, found: int) -> None:
    assert rounded_up(n, 1) == found and rounded_up(n, 4) == max(4, found)
