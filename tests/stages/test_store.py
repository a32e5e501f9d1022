"""The stages of a secondary and their memory: who gets some, who is put out, who has to wait."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from typing import Any

import pytest

import mdi.stages.store as module
from families import config_of
from mdi.cancel import Cancel
from mdi.checkpoint.packing import Packing
from mdi.control.messages import PartSpec
from mdi.engine.replay import SentRows
from mdi.errors import NoMemoryError
from mdi.host.computing import Computing
from mdi.model.caches import PageClass
from mdi.model.plain import ModelConfig, spec_of
from mdi.model.spec import LatentAttention
from mdi.net.wire import Frame, FrameType, Slice
from mdi.spec.extent import N_TEXTS, Extent
from mdi.spec.model_id import ModelId
from mdi.stages.spec import StageSpec
from mdi.stages.store import CacheReport, Claim, HeldStage, StageBusyError, StageStore
from waiting import DEADLINE_S, until

COMPUTING = Computing("cpu", "float32")
EXTENT = Extent(10, 1, kv_dtype="float32")
MEMORY = 1000


class FakeCaches:
    classes = (PageClass(None, 1),)
    most_bytes = None
    n_bytes = 0

    def clear(self) -> None:
        self.n_bytes = 0


class FakeStage:
    """Of 300 bytes, whose caches may take 100."""

    start, stop, max_length, mapped_bytes, gathered_share = 0, 1, 10, 0, 0.0

    def run_bytes(self, max_length: int) -> int:
        return 0

    def close(self) -> None:
        pass

    def __init__(self) -> None:
        self.caches = FakeCaches()

    def prepare(self, max_length: int, cache_limit: int | None) -> None:
        pass


class FakeFamily:
    def stage_bytes(self, fields: Any, blocks: tuple[int, int], extent: Extent) -> int:
        return 0


class FakeSupply:
    family, memory, cache_dir = FakeFamily(), None, None

    def reading(self, spec: StageSpec, cancel: Cancel) -> Any:
        return contextlib.nullcontext(lambda part: None)


FAMILY: Any = FakeFamily()
SUPPLY: Any = FakeSupply()


def store_of(n_bytes: int | None = None, kv_memory: int | None = None, spare_bytes: int = 0) -> StageStore:
    """Of a node with so many bytes; None is MEMORY, less what is in use."""

    def available(device: str) -> int:
        return MEMORY - made.in_use_bytes(device) if n_bytes is None else n_bytes

    build: Any = lambda *args: FakeStage()  # noqa: E731
    made = StageStore(available, kv_memory, build, spare_bytes)
    return made


@pytest.fixture
def slots() -> StageStore:
    return store_of()


def wanted(
    model: str, run: str = "a" * 16, n_bytes: int = 300, epoch: str = "", keeps_caches: bool = False, replay_bytes: int = 0,
    **changes: Any,
) -> tuple[StageSpec, Claim]:  # fmt: skip
    spec = StageSpec(
        "secondary0", ModelId(model, ModelConfig(n_layer=1), model, "float32"), (0, 1),
        (PartSpec("block.0", "a" * 64, n_bytes),), COMPUTING, None, None, 2, EXTENT,
    )  # fmt: skip
    return replace(spec, **changes), Claim(run, epoch or run, keeps_caches, replay_bytes)


def filled(slots: StageStore, of: tuple[StageSpec, Claim]) -> HeldStage:
    return slots.acquire(*of, SUPPLY, Cancel())


def models(slots: StageStore) -> list[str]:
    return [held.spec.model.name for held in slots.listed]


def test_several_runs_have_their_stages_as_long_as_there_is_memory(slots: StageStore) -> None:
    for model in "xyz":
        filled(slots, wanted(model, run=model * 16))
    with pytest.raises(NoMemoryError) as caught:
        slots.reserve(*wanted("w", run="b" * 16), FAMILY)
    assert caught.value.code == "memory"
    assert models(slots) == ["x", "y", "z"] and slots.in_use_bytes("cpu") == 900 and not slots.in_use_bytes("cuda:0")


def test_each_stage_has_memory_for_what_its_kernels_absorb(slots: StageStore) -> None:
    """Also one that has all of its weights from another."""
    config = ModelConfig.from_litgpt(config_of("deepseek-v3-shape"))
    latent = spec_of(config).blocks[0].mixer
    assert isinstance(latent, LatentAttention)
    absorbed = 4 * latent.n_head * (latent.nope_size + latent.value_size) * latent.kv_rank
    in_torch = replace(wanted("x")[0], model=ModelId("x", config, "x", "float32"))
    one = replace(in_torch, computing=Computing("cpu", "float32", packing=Packing("float32", "float32")))
    assert [spec.weight_bytes({"block.0": {}}) for spec in (in_torch, one)] == [0, absorbed]
    slots.available = lambda device: 10**9
    for run in "ab":
        slots.reserve(one, Claim(run * 16, run * 16, False), FAMILY)
    assert slots.in_use_bytes("cpu") == one.weight_bytes({}) + absorbed + sum(held.cache_bytes for held in slots.listed)


def test_a_status_does_not_wait_while_a_stage_makes_place(slots: StageStore) -> None:
    """Giving the memory of a window back waits for the threads that read its weights."""
    filled(slots, wanted("x"))
    is_asked, may_go_on = threading.Event(), threading.Event()

    def slow(device: str) -> int:
        is_asked.set()
        may_go_on.wait(DEADLINE_S)
        return MEMORY

    slots.available = slow
    reserving = threading.Thread(target=slots.reserve, args=(*wanted("y", run="b" * 16), FAMILY))
    asking = threading.Thread(target=lambda: found.append((models(slots), slots.latest, slots.in_use_bytes("cpu"))))
    found: list[Any] = []
    reserving.start()
    try:
        assert is_asked.wait(DEADLINE_S)
        asking.start()
        until(lambda: found)
    finally:
        may_go_on.set()
        for thread in (reserving, asking):
            thread.join(DEADLINE_S)
    assert found[0] == (["x"], slots.listed[0], 300)


def test_the_one_that_was_not_used_for_longest_makes_place(slots: StageStore) -> None:
    made = {model: filled(slots, wanted(model, run=model * 16)) for model in "xyz"}
    for model in "yx":
        slots.release(made[model], model * 16)
    assert [slot.use for slot in slots.listed] == ["UNUSED", "UNUSED", "USED"]
    filled(slots, wanted("w", run="b" * 16))
    assert models(slots) == ["x", "z", "w"], "y had been unused for longer"
    filled(slots, wanted("v", run="c" * 16, n_bytes=50))
    assert models(slots) == ["x", "z", "w", "v"], "nothing is dropped that is not in the way"


def test_the_same_stage_is_taken_again_if_it_is_not_in_use(slots: StageStore) -> None:
    first = filled(slots, wanted("x"))
    second = filled(slots, wanted("x", run="b" * 16))
    assert first is not second
    slots.release(first, "a" * 16)
    assert filled(slots, wanted("x", run="c" * 16)) is first
    slots.release(first, "a" * 16)
    assert first.use == "USED", "that of another ring now"


def test_a_stage_that_was_never_built_gives_its_memory_back(slots: StageStore) -> None:
    slot = slots.reserve(*wanted("x"), FAMILY)
    slots.release(slot, "a" * 16, is_kept=True)
    assert not slots.listed and not slots.in_use_bytes("cpu")


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_stage_that_has_failed_is_given_to_nobody(slots: StageStore, is_kept: bool) -> None:
    first = filled(slots, wanted("x"))
    slots.release(first, "a" * 16, is_kept, is_failed=True)
    assert not slots.listed and not slots.in_use_bytes("cpu") and first.stage is None
    assert filled(slots, wanted("x")) is not first
    slots.release(first, "a" * 16)
    assert len(slots.listed) == 1


def test_what_is_kept_is_for_its_own_run(slots: StageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = filled(slots, wanted("x", n_bytes=600))
    slots.release(slot, "a" * 16, is_kept=True)
    other = wanted("y", run="b" * 16, n_bytes=600)
    with pytest.raises(StageBusyError) as caught:
        slots.reserve(*other, FAMILY)
    assert caught.value.code == "busy"
    again = slots.reserve(*wanted("x", n_bytes=600, epoch="c" * 16, keeps_caches=True), FAMILY)
    assert again is slot and again.has_caches
    slots.release(slot, "c" * 16, is_kept=True)
    monkeypatch.setattr(module, "KEPT_S", 0.0)
    filled(slots, other)
    assert models(slots) == ["y"], "not for ever"


@pytest.mark.parametrize(
    ("changes", "is_kept"),
    [
        ({}, True),
        ({"keeps_caches": False}, False),
        ({"extent": replace(EXTENT, max_length=11)}, False),
        ({"extent": replace(EXTENT, max_length=9)}, True),
    ],
)
def test_caches_are_kept_for_a_ring_that_wants_them(slots: StageStore, changes: dict[str, Any], is_kept: bool) -> None:
    slots.release(filled(slots, wanted("x")), "a" * 16, is_kept=True)
    again = wanted("x", **{"epoch": "c" * 16, "keeps_caches": True, **changes})
    assert slots.reserve(*again, FAMILY).has_caches is is_kept


def test_another_cut_of_the_run_may_take_the_place_of_what_was_kept(slots: StageStore) -> None:
    slots.release(filled(slots, wanted("x", n_bytes=600)), "a" * 16, is_kept=True)
    slot = slots.reserve(*wanted("x", epoch="c" * 16, n_bytes=700, keeps_caches=True), FAMILY)
    assert slots.listed == [slot] and not slot.has_caches


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What a node is asked about its caches: there are 500 bytes."""
    asked: list[tuple[Any, ...]] = []

    def report_caches(stage: Any, device: str, by_hand: int | None, promised: int) -> CacheReport:
        asked.append((by_hand, promised))
        limit = 500 - promised if by_hand is None else by_hand
        return CacheReport(limit, by_hand is not None, (PageClass(None, 1),), device)

    monkeypatch.setattr(module, "report_caches", report_caches)
    return asked


def test_what_was_promised_to_one_run_is_not_promised_to_another(slots: StageStore, report: list[Any]) -> None:
    first, second = wanted("x"), wanted("y", run="b" * 16, extent=Extent(10, 1000))
    one = filled(slots, first)
    assert slots.grant(one).limit_bytes == 500 and one.cache_bytes == 1, "a page of one text: it needs no more"
    two = filled(slots, second)
    assert slots.grant(two).limit_bytes == 499 == two.cache_bytes
    one.stage.caches.n_bytes = 1  # type: ignore[union-attr, misc]
    slots.grant(two)
    assert report == [(None, 0), (None, 1), (None, 0)], "what is taken already is not free any more"


def test_a_run_that_does_not_say_how_many_texts_it_has_leaves_memory_to_others(
    slots: StageStore, report: list[Any]
) -> None:
    slot = filled(slots, wanted("x", extent=Extent(10)))
    slots.grant(slot)
    assert slot.cache_bytes == N_TEXTS, "a page each"


@pytest.mark.parametrize(
    ("kv_memory", "spare_bytes", "limit"),
    [(None, 0, 500), (None, 120, 380), (None, 499, 1), (None, 900, 1), (80, 120, 80)],
)
def test_caches_leave_spare_memory_but_for_those_of_one_text(
    report: list[Any], kv_memory: int | None, spare_bytes: int, limit: int
) -> None:
    slots = store_of(MEMORY, kv_memory, spare_bytes)
    found = slots.grant(filled(slots, wanted("x", extent=Extent(10, 1000))))
    assert found.limit_bytes == limit and found.is_by_hand is (limit in (1, 80)), "no share of what one text needs"


def test_memory_for_caches_that_was_set_by_hand_is_for_all_runs_together(report: list[Any]) -> None:
    slots = store_of(MEMORY, 80)
    first, second = wanted("x", extent=Extent(10, 1000)), wanted("y", run="b" * 16)
    one = filled(slots, first)
    assert slots.grant(one).limit_bytes == 80
    assert slots.grant(filled(slots, second)).limit_bytes == 0
    slots.release(one, "a" * 16)
    assert slots.grant(slots.listed[1]).limit_bytes == 80


def test_rows_that_are_kept_are_promised_and_counted_once(slots: StageStore, report: list[Any]) -> None:
    """What is there already is not to come any more."""
    slot = filled(slots, wanted("m", replay_bytes=40))
    assert slots.in_use_bytes("cpu") == 300 + 40
    slots.grant(slot)
    assert report[-1][1] == 40
    slot.sent = SentRows(1 << 30)
    slot.sent.add(Frame(FrameType.BATCH, 1, 0, "float32", 6, 1, (Slice(0, 0, 6, 0),), payload=bytes(24)))
    slots.grant(slot)
    assert report[-1][1] == 16
    with pytest.raises(NoMemoryError):
        slots.reserve(*wanted("n", "b" * 16, 700, replay_bytes=40), FAMILY)
