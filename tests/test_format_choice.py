"""The weight format of a run: "auto" takes the largest that fits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mdi.run.choice as format_choice
from mdi.errors import PlacementError
from mdi.kernels import library
from mdi.run.choice import NotKnownError, first_that_fits, formats_to_try
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import ClusterConfig, NodeConfig
from mdi.spec.options import StarterOptions

NANO = Path(__file__).resolve().parents[1] / "assets" / "nano-llama"


def stored(dtype: str, quantize: str | None = None, native: str | None = None, own: str | None = None) -> Any:
    return SimpleNamespace(model=SimpleNamespace(dtype=dtype), quantize=quantize, native=native, own_formats=own)


def test_formats_from_large_to_small() -> None:
    assert formats_to_try(stored("float32")) == [None, "int8", "int4"]
    assert formats_to_try(stored("bfloat16")) == ["int8", "int4"], "8 bits instead of 16 by default"
    assert formats_to_try(stored("bfloat16"), in_kernels=False) == [None, "int8", "int4"], "on a GPU, or with --dtype"
    own = "int4;mlp.proj=int8"
    assert formats_to_try(stored("float16", native="int4", own=own)) == [own], "the bits of the file"
    assert formats_to_try(stored("float16", own="fp16;mlp.proj=int8")) == ["fp16;mlp.proj=int8", "int4"]
    assert formats_to_try(stored("bfloat16", "int8")) == ["int8"], "what is rounded already is not rounded again"
    assert formats_to_try(stored("bfloat16", native="mxfp4")) == ["mxfp4"], "as the checkpoint has them"
    assert formats_to_try(stored("float32", native="int4")) == [None, "int4"]


@pytest.mark.parametrize("fitting", [None, "int8", "int4", "nothing"])
def test_the_first_that_can_be_placed(fitting: str | None) -> None:
    tried: list[str | None] = []

    def place(form: str | None) -> None:
        tried.append(form)
        if form != fitting:
            raise PlacementError("too large", {"": 1})

    if fitting == "nothing":
        with pytest.raises(PlacementError):
            first_that_fits([None, "int8", "int4"], place)
    else:
        first_that_fits([None, "int8", "int4"], place)
        assert tried[-1] == fitting
    assert tried == [None, "int8", "int4"][: len(tried)]


def test_no_smaller_one_is_tried_where_nothing_is_known_of_the_nodes() -> None:
    tried: list[str | None] = []

    def place(form: str | None) -> None:
        tried.append(form)
        raise NotKnownError("not known")

    with pytest.raises(PlacementError):
        first_that_fits([None, "int8"], place)
    assert tried == [None]


@pytest.mark.skipif(library.load() is None, reason="no kernels")
@pytest.mark.parametrize("free, expected", [(10**9, "int8"), (7_000_000, "int8"), (1, "int4")])
def test_one_node_takes_what_its_memory_allows(free: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format_choice, "device_free_bytes", lambda device: free)
    node = NodeConfig("starter", "127.0.0.1", 0, 0)
    starter = Run(
        GivenNodes(ClusterConfig(node, ())),
        StarterOptions(ckpt=NANO, quantize="auto", quantize_head="auto"),
        20,
        n_texts=1,
    )
    try:
        starter.open()
        packing = starter.model.computing.packing
        assert packing is not None and packing.blocks == packing.head == expected
    finally:
        starter.close()


@pytest.mark.skipif(library.load() is None, reason="no kernels")
@pytest.mark.parametrize("there", [4_000_000, 10**12])
def test_more_than_half_of_the_memory_is_said(
    there: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(format_choice, "memory_bytes", lambda: there)
    caplog.set_level("INFO", "mdi")
    options = StarterOptions(ckpt=NANO, quantize="auto", quantize_head="auto")
    with Run(GivenNodes(ClusterConfig(NodeConfig("starter", "127.0.0.1", 0, 0), ())), options, 20, n_texts=1):
        pass
    told = next(one.getMessage() for one in caplog.records if ": weights in" in one.getMessage())
    assert ("of memory" in told) is (there == 4_000_000)
