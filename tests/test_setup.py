"""Setting a node up that does not come on: the starter gives it up, and waits for one that does."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mdi.node.secondary
import mdi.run.setup
from mdi.cancel import Cancel, CancelledError
from mdi.control.client import ControlClient
from mdi.control.messages import COMPILING, CONTROL_VERSION, InitRequest, PartSpec
from mdi.control.reach import reach_node
from mdi.errors import Code, ControlError, KernelError, MdiError, NodeLostError
from mdi.kernels import library
from mdi.model.plain import ModelConfig
from mdi.node.secondary_status import run_status
from mdi.node.worker import Waits
from mdi.run.setup import Patience, SecondarySetup
from mdi.spec.extent import Extent
from mdi.spec.model_id import ModelId
from node_ports import BareNode, Pushing, client_of
from secondaries import entry_of, secondary
from waiting import until

DEADLINE_S = 30.0
RUN = "0123456789abcdef"
PARTS = tuple(PartSpec(f"block.{i}", f"{i:064x}", 10) for i in (1, 2))
REQUEST = InitRequest(
    run=RUN, epoch=RUN, index=1, names=("starter", "secondary0"), placement="p",
    next_addr="127.0.0.1", next_port=1, model=ModelId("tiny", ModelConfig(n_layer=5), "c", "float32"),
    blocks=(1, 3), parts=PARTS, extent=Extent(9),
)  # fmt: skip


class Loading(BareNode):
    """Takes a run, and says of itself for ever what it is told to."""

    def __init__(self, **says: Any) -> None:
        self._says = says

    def init(self, request: InitRequest) -> dict[str, Any]:
        return {}

    def status(self, run: str | None) -> dict[str, Any]:
        return {"state": "LOADING", "control_version": CONTROL_VERSION, **self._says}

    def watch(self, run: str, epoch: str | None) -> Pushing:
        return Pushing(lambda: self.status(run))


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mdi.run.setup, "STALL_S", 0.3)
    monkeypatch.setattr(mdi.run.setup, "SIGN_S", 0.02)
    yield


def outcome(node: Loading, weights: Any = None) -> MdiError | None:
    with client_of(node) as client, Cancel(DEADLINE_S) as cancel:
        setup = SecondarySetup(client, REQUEST, weights, 5.0, cancel)
        try:
            setup.wait()
            return None
        except MdiError as e:
            assert e is setup.error, "it waits for ever"
            return e
        finally:
            cancel.cancel()
            setup.join(DEADLINE_S)


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


@pytest.mark.parametrize("have_bytes", [(0, 0), (-1,), (PARTS[0].n_bytes + 1,), ("x",)])
def test_a_list_of_missing_parts_that_makes_no_sense_is_refused(hurried: None, have_bytes: tuple[Any, ...]) -> None:
    """Twice the same part, or more bytes of one than there are: nothing is sent."""
    missing = [{"sha256": PARTS[0].sha256, "have_bytes": n} for n in have_bytes]
    assert "missing parts that cannot be read" in str(outcome(Loading(missing=missing)))


class Counting(Loading):
    """Gets ready after a while, and counts who asks."""

    def __init__(self) -> None:
        super().__init__(missing=[])
        self.n_asked = self.n_pushed = 0

    def status(self, run: str | None) -> dict[str, Any]:
        self.n_asked += 1
        return super().status(run)

    def watch(self, run: str, epoch: str | None) -> Pushing:
        return Pushing(self._next)

    def _next(self) -> dict[str, Any]:
        self.n_pushed += 1
        loading = {"done": min(self.n_pushed, 2), "total": 2}
        return {**Loading.status(self, RUN), "loading": loading, "state": "READY" if self.n_pushed > 30 else "LOADING"}


def test_a_node_that_loads_is_not_asked_but_says_how_far_it_is() -> None:
    node = Counting()
    assert outcome(node) is None
    assert (node.n_asked, node.n_pushed >= 30) == (2, True), "once to reach it, once as its answer to `/init` is empty"


class Slow(Loading):
    """Refuses a part first, and does not know for a while what it lacks after that."""

    def __init__(self) -> None:
        super().__init__()
        self.lacks: list[Any] = [[{"sha256": PARTS[0].sha256, "have_bytes": 0}]]

    def status(self, run: str | None) -> dict[str, Any]:
        missing = self.lacks.pop(0) if len(self.lacks) > 1 else self.lacks[0]
        return {**super().status(run), "state": "LOADING" if missing != [] else "READY", "missing": missing}

    def receive_part(self, run: str, sha256: str, offset: int, n_bytes: int, read: Callable[[int], bytes]) -> None:
        self.lacks = [None, None, []]
        raise ControlError("another starter sends it", 409, code=Code.BUSY)


class Weights:
    def pieces(self, part: str) -> Iterator[bytes]:
        yield bytes(PARTS[0].n_bytes)


def test_a_node_whose_disk_is_slow_says_later_what_it_lacks() -> None:
    assert outcome(Slow(), Weights()) is None


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


# A node that answers, whatever it waits for itself


class Held:
    """In the place of what takes very long."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.n_begun = 0

    def __call__(self) -> None:
        self.n_begun += 1
        assert self.may_go_on.wait(DEADLINE_S)


HURRIED = Waits(kernels_s=0.01)


@pytest.fixture
def held() -> Iterator[Held]:
    one = Held()
    yield one
    one.may_go_on.set()


def test_a_node_answers_while_its_kernels_are_compiled(
    tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "load", held)
    with secondary(0, tmp_path, waits=HURRIED) as node:
        client = ControlClient(entry_of(node))
        status = client.status()
        assert (status["state"], status["kernels"], status["arithmetic"]) == (COMPILING, "compiling", None)
        held.may_go_on.set()
        until(lambda: client.status()["state"] == "IDLE")
        status = client.status()
        assert (status["kernels"], status["arithmetic"]) == ("off", "torch")
        assert status["devices"] and isinstance(status["disk_free_bytes"], int)


def test_who_answers_when_the_kernels_are_just_there_says_which(
    tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "load", held)

    def late(*args: Any) -> dict[str, Any]:
        held.may_go_on.set()
        until(lambda: all(thread.name != "kernels" for thread in threading.enumerate()))
        return run_status(*args)

    with secondary(0, tmp_path, waits=HURRIED) as node:
        monkeypatch.setattr(mdi.node.secondary, "run_status", late)
        status = ControlClient(entry_of(node)).status()
        assert (status["state"], status["arithmetic"]) == ("IDLE", "torch")


def test_a_disk_that_cannot_be_read_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", told.append)

    def broken() -> int:
        raise OSError(errno.EIO, "Input/output error")

    with secondary(0, tmp_path) as node:
        monkeypatch.setattr(node.store, "free_bytes", broken)
        status = ControlClient(entry_of(node)).status()
        assert (status["state"], status["disk_free_bytes"], told) == ("IDLE", None, [])


def test_a_node_answers_while_its_disk_hangs(tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    with secondary(0, tmp_path) as node:
        client = ControlClient(entry_of(node))
        monkeypatch.setattr(node.store, "free_bytes", held)
        for _ in range(2):
            status = client.status()
            assert (status["state"], status["disk_free_bytes"]) == ("IDLE", None)
        assert held.n_begun == 1, "a disk that hangs is asked once"
        held.may_go_on.set()
        monkeypatch.undo()
        until(lambda: isinstance(client.status()["disk_free_bytes"], int))


def test_two_threads_compile_once(monkeypatch: pytest.MonkeyPatch, held: Held) -> None:
    def find() -> Path:
        held()
        raise KernelError("there is no compiler")

    monkeypatch.setattr(library, "find_library", find)
    monkeypatch.delenv(library.FORCED, raising=False)
    library.look_again()
    threads = [threading.Thread(target=library.load) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        until(lambda: held.n_begun)
        held.may_go_on.set()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert held.n_begun == 1
    finally:
        monkeypatch.undo()
        library.look_again()


class Compiling(Loading):
    """Compiles for some questions, and is idle then."""

    def __init__(self, n: int) -> None:
        super().__init__(control_version=CONTROL_VERSION)
        self.n = n

    def status(self, run: str | None) -> dict[str, Any]:
        self.n -= 1
        return {**super().status(run), "state": COMPILING if self.n >= 0 else "IDLE"}


def reached(node: Compiling, is_cancelled: bool = False) -> dict[str, Any]:
    cancel = Cancel()
    if is_cancelled:
        cancel.cancel()
    with client_of(node) as client:
        return reach_node(client, 0.0, cancel)


def test_a_node_that_compiles_is_waited_for() -> None:
    assert reached(Compiling(4))["state"] == "IDLE"
    with pytest.raises(CancelledError):
        reached(Compiling(10**9), is_cancelled=True)
