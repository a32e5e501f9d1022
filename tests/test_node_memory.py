"""How much cache a node may hold: free memory and its limits, what it tells, and who shares it."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import mdi.stages.store as node_memory
from families import model_of
from loopback import stages_of
from mdi.errors import ControlError, UsageError
from mdi.host import threads as node_threads
from mdi.host.computing import Computing
from mdi.host.device import choose_kv_dtype
from mdi.host.threads import pin_to_cores
from mdi.model.caches import PageClass, cache_type_named
from mdi.run.local import cores_of_node
from mdi.stages.store import CacheReport, report_caches, share_out
from mdi.stages.torch_stage import TorchStage

GB = 10**9


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 8 GB to spare."""
    monkeypatch.setattr(node_memory, "device_free_bytes", lambda device: 8 * GB)


@pytest.mark.parametrize("family", ["Llama-3.1-8B", "Gemma-3-1b-it", "deepseek-v3-shape"])
def test_what_a_stage_reports(free: None, family: str) -> None:
    stage = stages_of(model_of(family), ())[0]

    def told(kv_dtype: str, by_hand: int | None, is_mapped: bool) -> CacheReport:
        computing = Computing("cpu", "float32")
        loaded = TorchStage(stage, computing, kv_dtype, "float32" if is_mapped else None)
        loaded.prepare(160)
        return report_caches(loaded, "cpu", by_hand)

    by_hand = told("bf16", 10**7, True)
    assert by_hand.is_by_hand and by_hand.limit_bytes == 10**7
    assert told("bf16", 0, True).limit_bytes == 0
    loaded = told("bf16", None, False)
    mapped = told("bf16", None, True)
    weights = sum(p.nbytes for p in stage.parameters())
    share = 1 - 1 / (len(stage.blocks) + 1)  # a block's keys and values are gathered
    assert 6 * GB * share < mapped.limit_bytes < loaded.limit_bytes < 0.9 * 8 * GB * share
    assert loaded.limit_bytes - mapped.limit_bytes == pytest.approx(0.85 * weights * share, abs=2)
    full = told("float32", None, False)
    assert len(full.classes) == (2 if "Gemma" in family else 1)
    assert sum(c.page_bytes for c in full.classes) > sum(c.page_bytes for c in loaded.classes)


@pytest.mark.parametrize("family", ["Llama-3.1-8B", "Gemma-3-1b-it"])
def test_a_limit_bounds_what_is_reserved_and_what_is_reserved_the_limit(
    free: None, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    computing = Computing("cpu", "float32")
    stage = TorchStage(stages_of(model_of(family), ())[0], computing, "float32", None)
    stage.prepare(64, 100_000)
    assert all(0 <= pool.capacity * pool.page_bytes - 100_000 < pool.page_bytes for pool in stage.caches.pools)
    assert report_caches(stage, "cpu", 100_000).limit_bytes == 100_000
    stage.caches.pools[0].capacity = 1  # as if the system had granted no more
    for by_hand in (100_000, None):
        limit = report_caches(stage, "cpu", by_hand).limit_bytes
        assert limit == stage.caches.pools[0].page_bytes < 100_000


REPORT = CacheReport(100, False, (PageClass(None, 7), PageClass(16, 3)), "cpu")


def test_a_report_travels_as_json() -> None:
    assert CacheReport.from_json(REPORT.to_json(), "here") == REPORT


@pytest.mark.parametrize(
    "change",
    [{"limit_bytes": -1}, {"limit_bytes": "many"}, {"classes": [[None]]}, {"classes": [[None, -1]]}, {"classes": 3},
     {"classes": [["x", 1]]}, {"classes": [[None, 1.5]]}],
)  # fmt: skip
def test_a_report_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ControlError) as e:
        CacheReport.from_json({**REPORT.to_json(), **change}, "secondary0")
    assert "secondary0" in str(e.value) and e.value.code == "control"


@pytest.mark.parametrize("data", [None, [], {}, {"limit_bytes": 5}])
def test_no_report_is_refused(data: object) -> None:
    with pytest.raises(ControlError) as e:
        CacheReport.from_json(data, "secondary0")
    assert "secondary0" in str(e.value) and e.value.code == "control"


def test_nodes_that_share_a_memory_do_not_count_it_twice() -> None:
    def report(n: int, by_hand: bool = False, device: str = "cpu", classes: int = 1) -> CacheReport:
        return CacheReport(n, by_hand, (PageClass(None, 1),) * classes, device)

    nodes = share_out(
        [
            ("starter", "a", report(900)),
            ("secondary0", "a", report(600)),
            ("secondary1", "b", report(900)),
            ("secondary2", "a", report(50, by_hand=True)),
            ("secondary3", "a", report(900, device="cuda:0")),
            ("secondary4", "a", report(900, classes=0)),
        ]
    )
    assert [node.limit_bytes for node in nodes[:5]] == [300, 300, 900, 50, 900]
    assert nodes[5].n_bytes(100) == 0


def test_kv_dtypes() -> None:
    auto = {"float32": "float32", "float16": "fp16", "bfloat16": "bf16"}
    assert {computed: choose_kv_dtype("auto", computed, "cpu", None) for computed in auto} == auto
    for why in (None, "latent attention"):
        for name in ("float32", "bf16", "fp16"):
            assert choose_kv_dtype(name, "float32", "cpu", why) == name
    assert choose_kv_dtype("int8", "float32", "cpu", None) == "int8"
    with pytest.raises(UsageError) as e:
        choose_kv_dtype("int8", "float32", "cpu", "latent attention")
    assert "latent attention" in str(e.value) and e.value.code == "usage"
    with pytest.raises(UsageError):
        choose_kv_dtype("int4", "float32", "cpu", None)
    assert [cache_type_named(name) for name in ("BFloat16", "float16", "fp32", "int8", "auto", "x")] == [
        "bf16", "fp16", "float32", "int8", "auto", "x",
    ]  # fmt: skip


def test_shares_of_cores() -> None:
    assert [list(cores_of_node([4, 5, 6, 7, 8], i, 2)) for i in range(2)] == [[4, 5], [6, 7, 8]]
    assert [list(cores_of_node([4, 5], i, 3)) for i in range(3)] == [[4], [5], [4]]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no pinning on this system")
def test_a_core_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError) as e:
        pin_to_cores([min(os.sched_getaffinity(0)), 4095])
    assert "4095" in str(e.value) and e.value.code == "usage"


def test_a_system_without_pinning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_threads, "os", SimpleNamespace())
    with pytest.raises(UsageError) as e:
        pin_to_cores([0])
    assert sys.platform in str(e.value) and e.value.code == "usage"
