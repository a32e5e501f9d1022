"""Blocks that another node computes again, without a node: what it is sent, and what its answers may be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from loopback import hidden_rows
from mdi.cancel import Cancel
from mdi.errors import EngineError, RingError
from mdi.model.caches import PAGE
from mdi.net.wire import Frame, FrameType
from mdi.run.form import VerifyRing
from mdi.run.recomputing import OthersBlocks
from mdi.stages.store import CacheReport, PageClass

N_COLS, PAGE_BYTES = 2, 100


class Echo:
    """A link to a node that gives the rows back that it gets, as they are or `changed`."""

    epoch, leaving = 1, ()

    def __init__(self, **changed: Any) -> None:
        self.sent: list[Frame] = []
        self._changed = changed

    def send(self, frame: Frame) -> None:
        self.sent.append(frame)

    def recv(self, timeout_s: float) -> Any:
        last = self.sent[-1]
        told = {"dtype": last.dtype, "n_rows": last.n_rows, "n_cols": last.n_cols, "number": last.number}
        return SimpleNamespace(**{**told, "payload": last.payload, **self._changed})

    def release(self, frame: Frame) -> None: ...

    def wake(self) -> None: ...


def blocks_behind(link: Echo, n_pages: int) -> OthersBlocks:
    """On a node that has memory for so many pages."""
    client = SimpleNamespace(node=SimpleNamespace(name="secondary1"))
    caches = CacheReport(n_pages * PAGE_BYTES, True, (PageClass(None, PAGE_BYTES),), "cpu")
    return OthersBlocks(
        VerifyRing(cast(Any, client), "1", cast(Any, link), "fused", caches), hidden_rows(N_COLS), Cancel()
    )


def rows(n: int) -> Frame:
    return Frame(FrameType.BATCH, 0, 0, "float32", n, N_COLS, payload=bytes(4 * n * N_COLS))


def test_caches_are_not_filled_beyond_the_memory_of_the_node() -> None:
    """Those of other texts are freed for it, with the frame that needs the room."""
    link = Echo()
    blocks = blocks_behind(link, 4)
    for seq_id in (1, 2):
        blocks.compute(seq_id, 0, rows(PAGE + 1))
    assert blocks.cached == {1: PAGE + 1, 2: PAGE + 1} and not any(frame.freed for frame in link.sent)
    blocks.compute(2, PAGE + 1, rows(PAGE))
    assert blocks.cached == {2: 2 * PAGE + 1} and link.sent[-1].freed == (1,)


def test_a_text_that_is_too_long_for_the_node_is_refused() -> None:
    link = Echo()
    with pytest.raises(EngineError, match="secondary1 has no memory"):
        blocks_behind(link, 1).compute(1, 0, rows(PAGE + 1))
    assert not link.sent


@pytest.mark.parametrize("changed", [{"n_rows": 2}, {"n_cols": 1}, {"number": 7}], ids=str)
def test_an_answer_of_another_shape_is_none(changed: dict[str, Any]) -> None:
    with pytest.raises(RingError, match="secondary1 answered 3 rows"):
        blocks_behind(Echo(**changed), 4).compute(1, 0, rows(3))
