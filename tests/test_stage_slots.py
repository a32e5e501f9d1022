"""The stages of a secondary and their memory: who gets some, who is put out, who has to wait."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import mdi.node.stage_slots as module
from mdi.control.messages import N_TEXTS, InitRequest, PartSpec
from mdi.engine.replay import SentRows
from mdi.errors import ControlError
from mdi.kernels.page_sizes import CacheClass
from mdi.machine.computing import Computing
from mdi.net.wire import Frame, FrameType, Slice
from mdi.node.cache_budget import CacheReport
from mdi.node.stage_slots import Slot, StageSlots
from waiting import DEADLINE_S, until

COMPUTING = Computing("cpu", "float32", "float32", None)
MEMORY = 1000


class FakeCaches:
    classes = (CacheClass(None, 1),)
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


class FakeHolder:
    def key(self, request: InitRequest, computing: Computing) -> tuple[Any, ...]:
        return (request.config_hash, request.blocks, request.parts, False, 1, computing)

    def needed_bytes(self, request: InitRequest, computing: Computing, loaded: Any = ()) -> int:
        return sum(part.n_bytes for part in request.parts)


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> StageSlots:
    """Of a node with 1000 bytes."""
    made = StageSlots("secondary0", FakeHolder(), lambda device: MEMORY - made.in_use_bytes(device), None)  # type: ignore[arg-type]
    return made


def request(model: str, run: str = "a" * 16, n_bytes: int = 300, **changes: Any) -> InitRequest:
    fields: dict[str, Any] = {
        "run": run, "epoch": run, "index": 1, "names": ("starter", "secondary0"), "placement": "p", "next_addr": "127.0.0.1",
        "next_port": 1, "model": model, "config": {"n_layer": 1}, "config_hash": model, "stored_dtype": "float32",
        "blocks": (0, 1), "parts": (PartSpec("block.0", "a" * 64, n_bytes),), "max_length": 10, "n_sequences": 1,
    }  # fmt: skip
    return InitRequest(**{**fields, **changes})


def filled(slots: StageSlots, wanted: InitRequest) -> Slot:
    slot, _ = slots.reserve(wanted, COMPUTING)
    if slot.stage is None:
        slots.fill(slot, FakeStage(), 10)  # type: ignore[arg-type]
    return slot


def models(slots: StageSlots) -> list[str]:
    return [slot.model for slot in slots.listed]


def test_several_runs_have_their_stages_as_long_as_there_is_memory(slots: StageSlots) -> None:
    for model in "xyz":
        filled(slots, request(model, run=model * 16))
    with pytest.raises(ControlError) as caught:
        slots.reserve(request("w", run="b" * 16), COMPUTING)
    assert (caught.value.status, caught.value.code) == (507, "memory")
    assert models(slots) == ["x", "y", "z"] and slots.in_use_bytes("cpu") == 900 and not slots.in_use_bytes("cuda:0")


def test_a_status_does_not_wait_while_a_stage_makes_place(slots: StageSlots) -> None:
    """Giving the memory of a window back waits for the threads that read its weights."""
    filled(slots, request("x"))
    is_asked, may_go_on = threading.Event(), threading.Event()

    def slow(device: str) -> int:
        is_asked.set()
        may_go_on.wait(DEADLINE_S)
        return MEMORY

    slots.available = slow
    reserving = threading.Thread(target=slots.reserve, args=(request("y", run="b" * 16), COMPUTING))
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


def test_the_one_that_was_not_used_for_longest_makes_place(slots: StageSlots) -> None:
    made = {model: filled(slots, request(model, run=model * 16)) for model in "xyz"}
    for model in "yx":
        slots.release(made[model], model * 16)
    assert [slot.use for slot in slots.listed] == ["UNUSED", "UNUSED", "USED"]
    filled(slots, request("w", run="b" * 16))
    assert models(slots) == ["x", "z", "w"], "y had been unused for longer"
    filled(slots, request("v", run="c" * 16, n_bytes=50))
    assert models(slots) == ["x", "z", "w", "v"], "nothing is dropped that is not in the way"


def test_the_same_stage_is_taken_again_if_it_is_not_in_use(slots: StageSlots) -> None:
    first = filled(slots, request("x"))
    second = filled(slots, request("x", run="b" * 16))
    assert first is not second
    slots.release(first, "a" * 16)
    assert filled(slots, request("x", run="c" * 16)) is first
    slots.release(first, "a" * 16)
    assert first.use == "USED", "that of another ring now"


def test_a_stage_that_was_never_built_gives_its_memory_back(slots: StageSlots) -> None:
    slot, _ = slots.reserve(request("x"), COMPUTING)
    slots.release(slot, "a" * 16, is_kept=True)
    assert not slots.listed and not slots.in_use_bytes("cpu")


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_stage_that_has_failed_is_given_to_nobody(slots: StageSlots, is_kept: bool) -> None:
    first = filled(slots, request("x"))
    slots.release(first, "a" * 16, is_kept, is_failed=True)
    assert not slots.listed and not slots.in_use_bytes("cpu") and first.stage is None
    assert filled(slots, request("x")) is not first
    slots.release(first, "a" * 16)
    assert len(slots.listed) == 1


def test_what_is_kept_is_for_its_own_run(slots: StageSlots, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = filled(slots, request("x", n_bytes=600))
    slots.release(slot, "a" * 16, is_kept=True)
    other = request("y", run="b" * 16, n_bytes=600)
    with pytest.raises(ControlError) as caught:
        slots.reserve(other, COMPUTING)
    assert (caught.value.status, caught.value.code) == (409, "busy")
    again, has_caches = slots.reserve(request("x", n_bytes=600, epoch="c" * 16, keep_caches=True), COMPUTING)
    assert again is slot and has_caches
    slots.release(slot, "c" * 16, is_kept=True)
    monkeypatch.setattr(module, "KEPT_S", 0.0)
    filled(slots, other)
    assert models(slots) == ["y"], "not for ever"


@pytest.mark.parametrize(
    ("changes", "is_kept"),
    [({}, True), ({"keep_caches": False}, False), ({"max_length": 11}, False), ({"max_length": 9}, True)],
)
def test_caches_are_kept_for_a_ring_that_wants_them(slots: StageSlots, changes: dict[str, Any], is_kept: bool) -> None:
    slots.release(filled(slots, request("x")), "a" * 16, is_kept=True)
    assert slots.reserve(request("x", **{"epoch": "c" * 16, "keep_caches": True, **changes}), COMPUTING)[1] is is_kept


def test_another_cut_of_the_run_may_take_the_place_of_what_was_kept(slots: StageSlots) -> None:
    slots.release(filled(slots, request("x", n_bytes=600)), "a" * 16, is_kept=True)
    slot, has_caches = slots.reserve(request("x", epoch="c" * 16, n_bytes=700, keep_caches=True), COMPUTING)
    assert slots.listed == [slot] and not has_caches


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What a node is asked about its caches: there are 500 bytes."""
    asked: list[tuple[Any, ...]] = []

    def report_caches(stage: Any, device: str, by_hand: int | None, promised: int) -> CacheReport:
        asked.append((by_hand, promised))
        limit = 500 - promised if by_hand is None else by_hand
        return CacheReport(limit, by_hand is not None, (CacheClass(None, 1),), device)

    monkeypatch.setattr(module, "report_caches", report_caches)
    return asked


def test_what_was_promised_to_one_run_is_not_promised_to_another(slots: StageSlots, report: list[Any]) -> None:
    first, second = request("x"), request("y", run="b" * 16, n_sequences=1000)
    one = filled(slots, first)
    assert slots.grant(one, first).limit_bytes == 500 and one.cache_bytes == 1, "a page of one text: it needs no more"
    two = filled(slots, second)
    assert slots.grant(two, second).limit_bytes == 499 == two.cache_bytes
    one.stage.caches.n_bytes = 1  # type: ignore[union-attr, misc]
    slots.grant(two, second)
    assert report == [(None, 0), (None, 1), (None, 0)], "what is taken already is not free any more"


def test_a_run_that_does_not_say_how_many_texts_it_has_leaves_memory_to_others(
    slots: StageSlots, report: list[Any]
) -> None:
    wanted = InitRequest.from_json({**request("x").to_json(), "n_sequences": None})
    slot = filled(slots, wanted)
    slots.grant(slot, wanted)
    assert slot.cache_bytes == N_TEXTS, "a page each"


def test_memory_for_caches_that_was_set_by_hand_is_for_all_runs_together(report: list[Any]) -> None:
    slots = StageSlots("secondary0", FakeHolder(), lambda device: MEMORY, 80)  # type: ignore[arg-type]
    first, second = request("x", n_sequences=1000), request("y", run="b" * 16)
    one = filled(slots, first)
    assert slots.grant(one, first).limit_bytes == 80
    assert slots.grant(filled(slots, second), second).limit_bytes == 0
    slots.release(one, "a" * 16)
    assert slots.grant(slots.listed[1], second).limit_bytes == 80


def test_rows_that_are_kept_are_promised_and_counted_once(slots: StageSlots, report: list[Any]) -> None:
    """No more than the run's positions have, 10 of 4 bytes each; what is there already is not to come any more."""
    wanted = request("m", config={"n_layer": 1, "n_embd": 1}, replay_bytes=1 << 30)
    slot = filled(slots, wanted)
    assert slots.in_use_bytes("cpu") == 300 + 40
    slots.grant(slot, wanted)
    assert report[-1][1] == 40
    slot.sent = SentRows(1 << 30)
    slot.sent.add(Frame(FrameType.BATCH, 1, 0, "float32", 6, 1, (Slice(0, 0, 6, 0),), payload=bytes(24)))
    slots.grant(slot, wanted)
    assert report[-1][1] == 16
    with pytest.raises(ControlError):
        slots.reserve(request("n", "b" * 16, 700, config={"n_layer": 1, "n_embd": 1}, replay_bytes=1 << 30), COMPUTING)
