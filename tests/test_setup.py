"""Setting a node up that does not come on: the starter gives it up, and waits for one that does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import mdi.node.setup
from mdi.config import NodeConfig
from mdi.control.client import ControlClient
from mdi.control.messages import CONTROL_VERSION, InitRequest, PartSpec
from mdi.control.server import ControlServer, StatusOnly
from mdi.errors import MdiError, NodeLostError
from mdi.node.patience import Patience
from mdi.node.setup import SecondarySetup

DEADLINE_S = 30.0
PARTS = tuple(PartSpec(f"block.{i}", f"{i:064x}", 10) for i in (1, 2))
REQUEST = InitRequest(
    run="0123456789abcdef", epoch="0123456789abcdef", index=1, names=("starter", "secondary0"), placement="p",
    next_addr="127.0.0.1", next_port=1, model="tiny", config={"n_layer": 5}, config_hash="c",
    stored_dtype="float32", blocks=(1, 3), parts=PARTS, max_length=9,
)  # fmt: skip


class Loading(StatusOnly):
    """Takes a run, and says of itself for ever what it is told to."""

    def __init__(self, **says: Any) -> None:
        self._says = says

    def init(self, request: InitRequest) -> dict[str, Any]:
        return {}

    def status(self, run: str | None) -> dict[str, Any]:
        return {"state": "LOADING", "control_version": CONTROL_VERSION, **self._says}


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mdi.node.setup, "STALL_S", 0.3)
    monkeypatch.setattr(mdi.node.setup, "POLL_S", 0.02)
    yield


def outcome(node: Loading) -> MdiError | None:
    server = ControlServer(node, "127.0.0.1", 0, "secondary0")
    setup = SecondarySetup(ControlClient(NodeConfig("secondary0", "127.0.0.1", server.port, 1)), REQUEST, None, 5.0)  # type: ignore[arg-type]
    try:
        assert setup.wait(DEADLINE_S), "it waits for ever"
        return setup.error
    finally:
        setup.cancel()
        setup.join(DEADLINE_S)
        server.close()


@pytest.mark.parametrize(
    "says",
    [
        {"missing": None},
        {"missing": []},
        {"missing": None, "looking": {"done": 10**9, "total": 10**9}},
        {"missing": None, "looking": {"done": 1, "total": 2}, "loading": 5},
        {"missing": [], "loading": {"done": "1"}},
    ],
)
def test_a_node_that_loads_for_ever_is_given_up(hurried: None, says: dict[str, Any]) -> None:
    error = outcome(Loading(**says))
    assert isinstance(error, NodeLostError) and error.node == "secondary0"


def test_a_part_that_is_named_twice_is_not_sent_twice(hurried: None) -> None:
    entry = {"sha256": PARTS[0].sha256, "have_bytes": 0}
    assert isinstance(outcome(Loading(missing=[entry, entry])), MdiError)


def test_patience_lasts_as_long_as_there_is_progress() -> None:
    patience = Patience("secondary0", 3, 10.0, 0.0)
    for now_s, stage in (
        (9.0, {"looking": {"done": 1}}),
        (18.0, {"looking": {"done": 2}}),
        (27.0, {"loading": {"done": 3}}),
    ):
        patience.look(stage, now_s)
    patience.look({"loading": {"done": 0}}, 36.0)
    for wrong in ({"loading": {"done": 2}}, {"looking": {"done": 99}, "loading": None}, {}):
        with pytest.raises(NodeLostError):
            patience.look(wrong, 38.0)
