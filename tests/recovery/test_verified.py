"""Nodes that compute nonsense: found by comparing bits, named, and left out; the texts are those of honest nodes."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapter_files import write_adapter
from families import greedy
from lying_nodes import LIARS, change_a_bit, make_lie
from mdi.cancel import Cancel
from mdi.control.messages import RowsRequest
from mdi.engine.cohort import Beams
from mdi.engine.sequence import SamplingParams
from mdi.errors import Code, ControlError, NoMemoryError, UsageError
from mdi.kernels import library
from mdi.net.hello import Fault
from mdi.net.ring import TcpRing
from mdi.net.wire import Frame
from mdi.node.secondary import SecondaryNode
from mdi.run import verify
from mdi.run.nodes import GivenNodes, StarterPorts
from mdi.run.recomputing import OthersBlocks, OwnBlocks
from mdi.run.run import Run
from mdi.run.texts import RETRACTED
from mdi.spec.cluster import ClusterConfig, NodeConfig
from mdi.spec.options import ParallelOptions, StarterOptions
from mdi.stages.spec import StageSpec
from mdi.stages.store import Claim, HeldStage, StageStore
from secondaries import cluster_of, entry_of, secondaries, secondary
from tiny_checkpoint import encode, tiny_gpt, write_checkpoint
from waiting import until

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")

PROMPTS = ("The ring", "Every node keeps a cache for each sequence.", "A token")
N_TOKENS = 48


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("verified") / "tiny", with_end=False)


@contextlib.contextmanager
def run_over(
    nodes: list[SecondaryNode],
    checkpoint: Path,
    folder: Path,
    n_spares: int = 0,
    n_texts: int = len(PROMPTS),
    ports: StarterPorts | None = None,
    cancel: Cancel | None = None,
    **options: Any,
) -> Iterator[Run]:
    fields = {
        "placement": "even",
        "prompt_style": "none",
        "device": "cpu",
        "dtype": "float32",
        "wait_s": 5,
        "verify": 1.0,
    }
    made = StarterOptions(ckpt=checkpoint, cache_dir=folder, **{**fields, **options})
    cluster = cluster_of(nodes[: len(nodes) - n_spares])
    spares = tuple(entry_of(node, is_spare=True) for node in nodes[len(nodes) - n_spares :])
    given = GivenNodes(replace(cluster, spares=spares))
    with Run(given, made, N_TOKENS + 60, n_texts=n_texts, ports=ports, cancel=cancel) as run:
        yield run
    assert not [thread for thread in threading.enumerate() if thread.name == "verify"]


def texts_of(run: Run) -> list[list[int]]:
    params = [SamplingParams(N_TOKENS, temperature=0), SamplingParams(N_TOKENS, temperature=0.8, seed=5)]
    for i, prompt in enumerate(PROMPTS):
        run.submit(prompt, encode(prompt), params[i % 2])
    run.read()
    return [list(sample.token_ids) for sample in run.samples]


@pytest.fixture(scope="module")
def honest(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    folder = tmp_path_factory.mktemp("honest")
    with secondaries(1, folder) as nodes, run_over(nodes, checkpoint, folder, verify=0.0) as run:
        return texts_of(run)


@pytest.mark.parametrize("place", [0, 1], ids=["in the middle", "last"])
@pytest.mark.parametrize("kind", LIARS)
def test_a_node_that_lies_is_left_out(
    kind: str, place: int, checkpoint: Path, honest: list[list[int]], tmp_path: Path
) -> None:
    with secondaries(2, tmp_path) as nodes:
        make_lie(nodes[place], LIARS[kind])
        with run_over(nodes, checkpoint, tmp_path) as run:
            found = texts_of(run)
            assert run.verifier is not None
            (untrue, _), *others = run.verifier.found
            assert untrue.nodes == (f"secondary{place}",) and not others
            assert f"secondary{place}" not in run.names
            assert found == honest


@pytest.mark.slow
def test_a_spare_gets_no_rows_of_a_liar(checkpoint: Path, honest: list[list[int]], tmp_path: Path) -> None:
    """The cut stays, but the rows that nodes have kept are not replayed: some are wrong."""
    with secondaries(3, tmp_path) as nodes:
        make_lie(nodes[0], LIARS["after many rows"])
        with run_over(nodes, checkpoint, tmp_path, n_spares=1) as run:
            assert texts_of(run) == honest
            assert run.names == ("starter", "secondary2", "secondary1")
            (recovery,) = run.metrics().recoveries
            assert recovery["restored_by"] == "tokens"


def test_lies_are_not_seen_without_it(checkpoint: Path, honest: list[list[int]], tmp_path: Path) -> None:
    with secondaries(2, tmp_path) as nodes:
        make_lie(nodes[0], LIARS["after many rows"])
        with run_over(nodes, checkpoint, tmp_path, verify=0.0) as run:
            assert texts_of(run) != honest and run.verifier is None and not run.n_recoveries


@pytest.mark.parametrize("place", [0, 1], ids=["in the middle", "last"])
def test_numbers_that_are_not_finite_lead_to_the_node(
    place: int, checkpoint: Path, honest: list[list[int]], tmp_path: Path
) -> None:
    with secondaries(2, tmp_path) as nodes:
        make_lie(nodes[place], LIARS["after many rows"], lambda rows: rows.fill(np.nan))
        with run_over(nodes, checkpoint, tmp_path, verify=1e-9) as run:
            assert texts_of(run) == honest
            assert run.verifier is not None
            assert [untrue.nodes for untrue, _ in run.verifier.found] == [(f"secondary{place}",)]


@pytest.mark.parametrize("way", ["it sends others than it says", "it says that it got others"])
def test_of_two_nodes_that_contradict_each_other_both_are_left_out(
    way: str, checkpoint: Path, honest: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with secondaries(3, tmp_path) as nodes:
        liar = nodes[1]
        rows, send = liar.rows, TcpRing.send

        def told(request: RowsRequest) -> dict[str, Any]:
            answer = rows(request)
            return {**answer, "sha256": "0" * 64} if request.which == "received" else answer

        def send_others(ring: TcpRing, frame: Frame) -> None:
            if frame.n_rows and any(worker.ring is ring for worker in liar.workers):
                payload = bytearray(frame.payload)
                payload[-2] ^= 1 << 6
                frame = replace(frame, payload=payload)
            send(ring, frame)

        if way == "it says that it got others":
            monkeypatch.setattr(liar, "rows", told)
        else:
            monkeypatch.setattr(TcpRing, "send", send_others)
        with run_over(nodes, checkpoint, tmp_path) as run:
            assert texts_of(run) == honest
            assert run.verifier is not None
            (untrue, _), *_ = run.verifier.found
            assert "secondary1" in untrue.nodes and len(untrue.nodes) == 2
            assert not set(untrue.nodes) & set(run.names)


def test_the_starter_is_believed(checkpoint: Path, honest: list[list[int]], tmp_path: Path) -> None:
    """So its neighbour alone is named."""
    with secondaries(2, tmp_path) as nodes:
        rows = nodes[0].rows

        def told(request: RowsRequest) -> dict[str, Any]:
            answer = rows(request)
            return {**answer, "sha256": "0" * 64} if request.which == "received" else answer

        nodes[0].rows = told  # type: ignore[method-assign]
        with run_over(nodes, checkpoint, tmp_path) as run:
            assert texts_of(run) == honest
            assert run.verifier is not None
            assert [untrue.nodes for untrue, _ in run.verifier.found] == [("secondary0",)]


# A ring ends before all of its rows are compared


class Loss:
    """Another node is lost, or has left, when a liar has computed a few rows."""

    def __init__(self, node: SecondaryNode, how: str) -> None:
        self._node, self._how = node, how
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._lose, name="loss")

    @property
    def has_begun(self) -> bool:
        return self._has_begun.is_set()

    def when(self, n_before: int, seq_id: int) -> bool:
        """The liar lies until then."""
        if n_before > 45 and not self._has_begun.is_set():
            self._has_begun.set()
            self._thread.start()
        return not self.has_begun

    def _lose(self) -> None:
        name = self._node.config.name
        for worker in self._node.runs.active:
            worker.abort(Fault(name, "its power fails", name, self._how))

    def join(self) -> None:
        self._thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["lost", "left"])
def test_rows_that_were_not_compared_when_a_ring_ends_do_not_count(
    how: str, checkpoint: Path, honest: list[list[int]], tmp_path: Path
) -> None:
    """A node lies before the loss of another one, in rows of which fewer are there than are compared at a time."""
    with secondaries(3, tmp_path) as nodes:
        loss = Loss(nodes[2], how)
        make_lie(nodes[0], loss.when)
        with run_over(nodes, checkpoint, tmp_path) as run:
            found = texts_of(run)
            loss.join()
            told = run.verifier
            assert run.n_recoveries and told is not None and told.n_void > 0
            assert found == honest


@pytest.mark.slow
def test_rows_are_compared_before_a_ring_is_left(checkpoint: Path, honest: list[list[int]], tmp_path: Path) -> None:
    """A node is asked to end. Another one is found to lie of which no rows were compared before, though it lies no more."""
    is_left, found = threading.Event(), []  # by then, at each time that a ring was left
    with secondaries(3, tmp_path) as nodes:
        rows = nodes[0].rows

        def told(request: RowsRequest) -> dict[str, Any]:
            is_left.wait(60)
            return rows(request)

        def lies(n_before: int, seq_id: int) -> bool:
            if n_before > 45:
                nodes[2].leave()
            return not is_left.is_set()

        nodes[0].rows = told  # type: ignore[method-assign]
        make_lie(nodes[0], lies)
        with run_over(nodes, checkpoint, tmp_path) as run:
            finish = run.loop.on_left

            def leave() -> None:
                is_left.set()
                finish()
                found.append([] if run.verifier is None else [one.nodes for one, _ in run.verifier.found])

            run.loop.on_left = leave
            assert texts_of(run) == honest
            assert found[0] == [("secondary0",)]
            assert run.names == ("starter", "secondary1")


@pytest.mark.slow
def test_a_text_is_taken_back_over_earlier_rings(checkpoint: Path, honest: list[list[int]], tmp_path: Path) -> None:
    """No row was chosen in the ring in which a node lied; it is found in the next one, by numbers that are not finite."""
    with secondaries(3, tmp_path) as nodes:
        loss = Loss(nodes[2], "left")

        def spoil(rows: np.ndarray) -> None:
            rows.fill(np.nan) if loss.has_begun else change_a_bit(rows)

        def lies(n_before: int, seq_id: int) -> bool:
            return loss.when(n_before, seq_id) or n_before > 20  # of the stage, which is another one in the next ring

        make_lie(nodes[0], lies, spoil)
        with run_over(nodes, checkpoint, tmp_path, verify=1e-9) as run:
            found = texts_of(run)
            loss.join()
            assert run.verifier is not None
            assert [one.nodes for one, _ in run.verifier.found] == [("secondary0",)]
            assert found == honest


@pytest.mark.slow
def test_a_text_is_taken_back_to_where_all_accused_nodes_were_right(checkpoint: Path, tmp_path: Path) -> None:
    """Of the second node fewer rows were compared, when it contradicts the first one; and the text has more by then."""
    ids, is_far, asked = encode(PROMPTS[0]), threading.Event(), set()

    def lies(n_before: int, seq_id: int) -> bool:
        if n_before > 80:
            is_far.set()
        return n_before > 40

    with secondaries(3, tmp_path) as nodes:
        rows = nodes[1].rows

        def told(request: RowsRequest) -> dict[str, Any]:
            answer = rows(request)
            if request.which == "received" and request.stop > 40:  # first it is asked whether the node before is right
                is_far.wait(60)
                answer["sha256"] = "0" * 64 if request in asked else answer["sha256"]
                asked.add(request)
            return answer

        make_lie(nodes[1], lies, lambda rows: np.negative(rows, out=rows))
        nodes[1].rows = told  # type: ignore[method-assign]
        with run_over(nodes, checkpoint, tmp_path) as run:
            sample = run.submit(PROMPTS[0], ids, SamplingParams(100, temperature=0))
            run.read()
            assert run.verifier is not None
            assert [one.nodes for one, _ in run.verifier.found] == [("secondary0", "secondary1")]
            assert list(sample.token_ids) == greedy(tiny_gpt(), ids, 100)


# Nodes that do not want to be verified


def answer_with(node: SecondaryNode, change: Callable[[RowsRequest, dict[str, Any]], dict[str, Any]]) -> None:
    """Have a node change what it tells of rows."""
    rows = node.rows
    node.rows = lambda request: change(request, rows(request))  # type: ignore[method-assign]


def test_a_node_that_says_later_that_it_computes_otherwise_is_untrue(
    checkpoint: Path, honest: list[list[int]], tmp_path: Path
) -> None:
    """Else it would not be verified any more."""
    with secondaries(2, tmp_path) as nodes:
        make_lie(nodes[0], LIARS["always"])
        answer_with(
            nodes[0], lambda request, answer: {**answer, "arithmetic": {**answer["arithmetic"], "unit": "torch"}}
        )
        with run_over(nodes, checkpoint, tmp_path) as run:
            assert texts_of(run) == honest
            assert run.verifier is not None
            (untrue, _), *_ = run.verifier.found
            assert untrue.nodes == ("secondary0",) and "torch" in untrue.reason


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["!!!!", "AAAA", None], ids=["no base64", "too few", "nothing"])
def test_a_node_whose_rows_cannot_be_read_is_untrue(
    rows: str | None, checkpoint: Path, honest: list[list[int]], tmp_path: Path
) -> None:
    """And the node behind it is verified further on."""
    with secondaries(3, tmp_path) as nodes:
        make_lie(nodes[1], LIARS["after many rows"])
        answer_with(nodes[0], lambda request, answer: {**answer, "rows": rows} if request.is_whole else answer)
        with run_over(nodes, checkpoint, tmp_path) as run:
            assert texts_of(run) == honest
            told = run.verifier
            assert told is not None and not told.verified.not_verified
            assert {one.nodes for one, _ in told.found} <= {("secondary0",), ("secondary1",)}
            assert told.verified.untrue[0] == "secondary0" and "secondary0" not in run.names


def test_rows_that_a_node_does_not_tell_are_asked_for_again(
    checkpoint: Path, honest: list[list[int]], tmp_path: Path
) -> None:
    """Those behind them do not count before: it lied in the first ones."""
    refused: set[tuple[int, int]] = set()

    def told(request: RowsRequest, answer: dict[str, Any]) -> dict[str, Any]:
        if request.which == "sent" and request.start < 32 and (request.seq_id, request.stop) not in refused:
            refused.add((request.seq_id, request.stop))
            raise ControlError("busy", 409, code=Code.BUSY)
        return answer

    with secondaries(2, tmp_path) as nodes:
        make_lie(nodes[0], lambda n_before, seq_id: 30 < n_before < 45 or n_before > 160)
        answer_with(nodes[0], told)
        with run_over(nodes, checkpoint, tmp_path) as run:
            assert texts_of(run) == honest
            assert run.verifier is not None
            assert [one.nodes for one, _ in run.verifier.found] == [("secondary0",)]


def test_a_node_that_never_tells_its_rows_is_untrue(
    checkpoint: Path, honest: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "PAUSE", 0.001)

    def told(request: RowsRequest, answer: dict[str, Any]) -> dict[str, Any]:
        if request.which == "sent" and request.start < 32:
            raise ControlError("busy", 409, code=Code.BUSY)
        return answer

    with secondaries(2, tmp_path) as nodes:
        make_lie(nodes[0], lambda n_before, seq_id: 30 < n_before < 45)
        answer_with(nodes[0], told)
        with run_over(nodes, checkpoint, tmp_path) as run:
            assert texts_of(run) == honest
            assert run.verifier is not None
            (untrue, _), *_ = run.verifier.found
            assert untrue.nodes == ("secondary0",) and "busy" in untrue.reason


def test_rows_that_the_memory_is_too_small_for_are_counted(
    checkpoint: Path, honest: list[list[int]], tmp_path: Path
) -> None:
    """Nobody is to blame."""
    with secondaries(2, tmp_path) as nodes, run_over(nodes, checkpoint, tmp_path, replay_memory=20_000) as run:
        assert texts_of(run) == honest
        told = run.verifier
        assert told is not None and not told.found and told.n_void == told.n_rows - told.n_checked > 0


def test_the_report_says_what_was_not_verified(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mdi")
    with (
        secondaries(1, tmp_path) as nodes,
        secondary(1, tmp_path / "1", quantize="int8") as other,
        run_over([*nodes, other], checkpoint, tmp_path) as run,
    ):
        texts_of(run)
        told = run.verifier
        assert told is not None
    found = run.metrics().to_json()["verified"]
    assert found == {
        "rows": told.n_rows, "checked": told.n_checked, "by_others": 0, "void": 0, "not_verified": ["secondary1"],
        "untrue": [],
    }  # fmt: skip
    assert 0 < found["checked"] < found["rows"] and "not verified: secondary1" in caplog.text


# A verdict is not waited for in vain


@pytest.mark.parametrize("what", ["a node is lost", "the run is cancelled"])
def test_the_engine_does_not_wait_for_a_verdict_that_cannot_come(
    what: str, checkpoint: Path, honest: list[list[int]], tmp_path: Path
) -> None:
    """Numbers are not finite, and no node tells its rows. A ring that breaks meanwhile is not the end of the run."""
    cancel, is_over = Cancel(), threading.Event()

    def told(request: RowsRequest, answer: dict[str, Any]) -> dict[str, Any]:
        if what == "the run is cancelled":
            cancel.cancel()
        else:
            loss.when(100, 0)
        is_over.wait(60)
        return answer

    with secondaries(3, tmp_path) as nodes:
        loss = Loss(nodes[2], "left")
        make_lie(nodes[0], lambda n_before, seq_id: not loss.has_begun, lambda rows: rows.fill(np.nan))
        answer_with(nodes[0], told)
        try:
            with run_over(nodes, checkpoint, tmp_path, cancel=cancel, verify=1e-9) as run:
                run.submit(PROMPTS[0], encode(PROMPTS[0]), SamplingParams(N_TOKENS, temperature=0))
                until(lambda: cancel.is_cancelled or loss.has_begun)
                if what == "the run is cancelled":
                    until(lambda: not run.engine.n_known)
                    is_over.set()
                else:
                    until(
                        lambda: (
                            run.loop.failure is not None or (ring := run.loop.running) is not None and ring.number > 1
                        )
                    )
                    is_over.set()
                    run.read()
                    assert [list(one.token_ids) for one in run.samples] == honest[:1]
        finally:
            is_over.set()
            if loss.has_begun:
                loss.join()


def test_a_ring_may_end_while_a_job_of_it_begins(
    checkpoint: Path, honest: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of the ring before are given back then, which may take long: the jobs of the next ring are done all the same."""
    close, is_slow, is_next = OwnBlocks.close, threading.Event(), threading.Event()

    def slowly(blocks: OwnBlocks) -> None:
        if is_slow.is_set() and threading.current_thread().name == "verify":
            is_slow.clear()
            loss.when(100, 0)
            is_next.wait(60)
        close(blocks)

    monkeypatch.setattr(OwnBlocks, "close", slowly)
    with secondaries(3, tmp_path) as nodes, run_over(nodes, checkpoint, tmp_path) as run:
        assert texts_of(run) == honest
        assert run.verifier is not None and run.ring is not None
        loss, first = Loss(nodes[2], "left"), Loss(nodes[1], "failed")
        first.when(100, 0)
        first.join()
        until(lambda: run.loop.running is not None and run.loop.running.number > 1)
        is_slow.set()
        begin = run.verifier.begin

        def note() -> Mapping[int, int]:
            found = begin()
            is_next.set()
            return found

        monkeypatch.setattr(run.verifier, "begin", note)
        assert texts_of(run)[3::2] == honest[::2]
        loss.join()
        assert is_next.is_set() and run.loop.failure is None


OPTIONS: dict[str, dict[str, Any]] = {
    "guesses": {"draft": "auto"},
    "links and caches in 8 bits": {"wire_dtype": "int8", "kv_dtype": "int8"},
    "links in 16 bits": {"wire_dtype": "fp16"},
    "weights in 4 bits": {"quantize": "int4"},
    "little memory for caches": {"kv_memory": 1 << 18},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_all_rows_of_honest_nodes_are_found_right(name: str, checkpoint: Path, tmp_path: Path) -> None:
    options = OPTIONS[name]
    with secondaries(2, tmp_path) as nodes:
        with run_over(nodes, checkpoint, tmp_path, **options, verify=0.0) as run:
            expected = texts_of(run)
        with run_over(nodes, checkpoint, tmp_path, **options) as run:
            found = texts_of(run)
            assert run.verifier is not None
            told = run.verifier
            assert found == expected and not told.found
            assert told.n_checked >= told.n_rows > 200 and not told.n_void


@pytest.mark.slow
def test_the_rate_is_the_share_of_rows_that_is_computed_again(checkpoint: Path, tmp_path: Path) -> None:
    """Whatever rows were left out before those that are chosen."""
    n_texts, rate = 40, 0.25
    with secondaries(2, tmp_path) as nodes, run_over(nodes, checkpoint, tmp_path, n_texts=n_texts, verify=rate) as run:
        for seed in range(n_texts):
            run.submit("", encode("The ring"), SamplingParams(100, temperature=0.8, seed=seed))
        run.read()
        told = run.verifier
        assert told is not None and not told.found and not told.n_void and told.n_rows >= 2 * 99 * n_texts
        # The mean of 80 pairs of a text and a node, each with a deviation below 0.45: the bounds are four times its own away.
        assert 0.05 < told.n_checked / told.n_rows < 0.45


def test_a_node_that_computes_otherwise_is_not_verified(
    checkpoint: Path, honest: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with secondaries(1, tmp_path, quantize="int8") as nodes, run_over(nodes, checkpoint, tmp_path) as run:
        texts_of(run)
        assert run.verifier is not None and not run.verifier.found and not run.verifier.n_checked
    assert "secondary0 is not verified" in caplog.text


@pytest.mark.parametrize(
    ("options", "named"),
    [({"replay_memory": 0}, "--replay-memory"), ({"fixed": True}, "--fixed"), ({"dtype": "float16"}, "--dtype float16"),
     ({"parallel": ParallelOptions("tensor")}, "--parallel tensor"), ({"taps": (1,)}, "side network")],
)  # fmt: skip
def test_where_nothing_can_be_compared_it_is_refused(
    options: dict[str, Any], named: str, checkpoint: Path, tmp_path: Path
) -> None:
    """Before a node is asked: there is none."""
    nowhere = NodeConfig("secondary0", "127.0.0.1", 1, 1)
    taps = options.pop("taps", ())
    made = StarterOptions(ckpt=checkpoint, device="cpu", verify=1.0, **options)
    cluster = ClusterConfig(NodeConfig("starter", "127.0.0.1", 0, 0), (nowhere,))
    with pytest.raises(UsageError, match=named) as refused, Run(GivenNodes(cluster), made, 8, taps=taps):
        pass
    assert refused.value.code == "flags" and "--verify" in str(refused.value)


def test_beams_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    """What a search has dropped cannot be computed again."""
    with secondaries(1, tmp_path) as nodes, run_over(nodes, checkpoint, tmp_path) as run:
        with pytest.raises(UsageError, match="--verify") as refused:
            run.submit_beams(PROMPTS[0], encode(PROMPTS[0]), SamplingParams(4), Beams(2), on_texts=(None,))
        assert refused.value.code == "flags" and texts_of(run)


def test_rows_of_adapters_are_compared(checkpoint: Path, tmp_path: Path) -> None:
    expected = greedy(write_adapter(tmp_path / "sql", tiny_gpt(), 1), encode(PROMPTS[0]), N_TOKENS)
    with secondaries(2, tmp_path) as nodes:
        make_lie(nodes[1], LIARS["after many rows"])
        with run_over(nodes, checkpoint, tmp_path, adapter=(f"sql={tmp_path / 'sql'}",)) as run:
            params = SamplingParams(N_TOKENS, temperature=0)
            for name in ("sql", "", "sql"):
                run.submit(PROMPTS[0], encode(PROMPTS[0]), params, adapter=name)
            run.read()
            first, plain, second = [sample.token_ids for sample in run.samples]
            assert first == second == expected != plain
            told = run.verifier
            assert told is not None and [one.nodes for one, _ in told.found] == [("secondary1",)]


def test_what_was_shown_is_taken_back(checkpoint: Path, honest: list[list[int]], tmp_path: Path) -> None:
    """A reader hears it; a stop string is sought anew; a journal has the text as it is in the end."""
    shown: list[list[str]] = [[] for _ in range(4)]
    records: dict[int, list[int]] = {}

    def record(index: int, tokens: list[int], reason: str | None, is_anew: bool) -> None:
        records[index] = [*([] if is_anew else records.get(index, [])), *tokens]

    with secondaries(1, tmp_path) as nodes:
        make_lie(nodes[0], LIARS["after many rows"])
        with run_over(nodes, checkpoint, tmp_path) as run:
            run.record_to(record)
            prompt, params = PROMPTS[0], SamplingParams(N_TOKENS, temperature=0)
            for one in shown:
                run.submit(prompt, encode(prompt), params, ["never there"], on_text=one.append)
            run.read()
            assert [sample.token_ids for sample in run.samples] == [honest[0]] * 4
            assert list(records.values()) == [honest[0]] * 4
            texts = ["".join(one).split(RETRACTED) for one in shown]
            assert any(len(pieces) == 2 for pieces in texts)
            assert [pieces[-1] for pieces in texts] == [sample.text for sample in run.samples]


def test_logprobs_go_on(checkpoint: Path, tmp_path: Path) -> None:
    """Behind tokens that a text has already."""
    params, ids = SamplingParams(8, temperature=0, n_logprobs=1), encode(PROMPTS[0])
    with secondaries(1, tmp_path) as nodes, run_over(nodes, checkpoint, tmp_path, verify=0.0) as run:
        whole = list(run.engine.submit(ids, params))
        tokens = [token for event in whole for token in event.tokens]
        rest = list(run.engine.submit(ids, params, generated=tokens[:3]))
        known = [one for event in whole for one in event.logprobs]
        assert [one for event in rest for one in event.logprobs] == known[3:]


# Other nodes compute again


@pytest.mark.slow
def test_a_spare_computes_again_what_it_has_no_part_in(
    checkpoint: Path, honest: list[list[int]], tmp_path: Path
) -> None:
    """One for both nodes of the ring, and none of it here. It gives way as a spare when one of them is lost."""
    with secondaries(3, tmp_path) as nodes, run_over(nodes, checkpoint, tmp_path, n_spares=1) as run:
        assert texts_of(run) == honest
        told = run.verifier
        assert told is not None and not told.found and not told.n_void
        assert told.n_by_others == told.n_checked >= told.n_rows > 200
        nodes[0].leave()
        until(lambda: run.names == ("starter", "secondary2", "secondary1"))
        assert texts_of(run)[3::2] == honest[::2]  # the others are drawn


def test_a_liar_is_found_by_a_spare(checkpoint: Path, honest: list[list[int]], tmp_path: Path) -> None:
    """This node has the last word."""
    with secondaries(3, tmp_path) as nodes:
        make_lie(nodes[1], LIARS["after many rows"])
        with run_over(nodes, checkpoint, tmp_path, n_spares=1) as run:
            assert texts_of(run) == honest
            assert run.verifier is not None and run.verifier.n_by_others
            assert [one.nodes for one, _ in run.verifier.found] == [("secondary1",)]


def test_a_third_opinion_that_cannot_be_had_is_asked_for_again(
    checkpoint: Path, honest: list[list[int]], tmp_path: Path
) -> None:
    """Its blocks are given back, also if it comes to nothing."""
    asked: set[RowsRequest] = set()
    is_refused = threading.Event()

    def told(request: RowsRequest, answer: dict[str, Any]) -> dict[str, Any]:
        if request in asked and request.is_whole and not is_refused.is_set():  # a second time: for a third opinion
            is_refused.set()
            raise ControlError("busy", 409, code=Code.BUSY)
        asked.add(request)
        return answer

    ports = StarterPorts()
    try:
        with secondaries(3, tmp_path) as nodes:
            make_lie(nodes[1], lambda n_before, seq_id: 60 < n_before < 75)
            answer_with(nodes[0], told)
            with run_over(nodes, checkpoint, tmp_path, n_spares=1, ports=ports) as run:
                assert texts_of(run) == honest
                assert run.verifier is not None and is_refused.is_set()
                assert [one.nodes for one, _ in run.verifier.found] == [("secondary1",)]
        assert not [held.use for held in ports.caches.listed if held.use == "USED"]
    finally:
        ports.close()


@pytest.mark.slow
def test_a_spare_that_lies_harms_nobody(checkpoint: Path, honest: list[list[int]], tmp_path: Path) -> None:
    """It is named, and not used any more: the ring goes on as it is, and is verified here."""
    with secondaries(3, tmp_path) as nodes:
        make_lie(nodes[2], LIARS["after many rows"])
        with run_over(nodes, checkpoint, tmp_path, n_spares=1) as run:
            assert texts_of(run) == honest
            told = run.verifier
            assert told is not None and [one.nodes for one, _ in told.found] == [("secondary2",)]
            assert told.n_checked > told.n_by_others and not told.n_void
            assert run.n_recoveries == 0 and not run.loop.may_use("secondary2")


def test_without_a_third_opinion_both_are_named(
    checkpoint: Path, honest: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire = StageStore.acquire

    def refuse(store: StageStore, spec: StageSpec, claim: Claim, *args: Any) -> HeldStage:
        if claim.run.startswith("verify"):
            raise NoMemoryError("no memory")
        return acquire(store, spec, claim, *args)

    monkeypatch.setattr(StageStore, "acquire", refuse)
    with secondaries(3, tmp_path) as nodes:
        make_lie(nodes[0], LIARS["after many rows"])
        with run_over(nodes, checkpoint, tmp_path, n_spares=1) as run:
            assert texts_of(run) == honest
            assert run.verifier is not None
            assert [one.nodes for one, _ in run.verifier.found] == [("secondary0", "secondary2")]
            assert run.names == ("starter", "secondary1")


def test_a_spare_that_computes_otherwise_is_not_asked(
    checkpoint: Path, honest: list[list[int]], tmp_path: Path
) -> None:
    with (
        secondaries(2, tmp_path) as nodes,
        secondary(2, tmp_path / "2", quantize="int8") as other,
        run_over([*nodes, other], checkpoint, tmp_path, n_spares=1) as run,
    ):
        assert texts_of(run) == honest
        told = run.verifier
        assert told is not None and not told.found and told.n_checked > 200 and not told.n_by_others


@pytest.mark.slow
def test_a_spare_that_ends_is_not_missed(checkpoint: Path, honest: list[list[int]], tmp_path: Path) -> None:
    with secondaries(3, tmp_path) as nodes, run_over(nodes, checkpoint, tmp_path, n_spares=1) as run:
        texts_of(run)
        nodes[2].close()
        assert texts_of(run)[3::2] == honest[::2]
        told = run.verifier
        assert told is not None and told.n_checked == told.n_rows > told.n_by_others and not told.found


def test_texts_that_have_ended_keep_no_caches_with_who_computes_again(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[OthersBlocks] = []
    begin = OthersBlocks.__init__

    def note(blocks: OthersBlocks, *args: Any) -> None:
        begin(blocks, *args)
        made.append(blocks)

    monkeypatch.setattr(OthersBlocks, "__init__", note)
    with secondaries(3, tmp_path) as nodes, run_over(nodes, checkpoint, tmp_path, n_spares=1) as run:
        texts_of(run)
        assert made
        until(lambda: not any(blocks.cached for blocks in made))
