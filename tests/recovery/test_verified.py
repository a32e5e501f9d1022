"""Nodes that compute nonsense: found by comparing bits, named, and left out; the texts are those of honest nodes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapter_files import write_adapter
from families import greedy
from lying_nodes import LIARS, make_lie
from mdi.control.messages import RowsRequest
from mdi.engine.cohort import Beams
from mdi.engine.sequence import SamplingParams
from mdi.errors import NoMemoryError, UsageError
from mdi.kernels import library
from mdi.net.ring import TcpRing
from mdi.net.wire import Frame
from mdi.node.secondary import SecondaryNode
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.run.texts import TAKEN_BACK
from mdi.spec.cluster import ClusterConfig, NodeConfig
from mdi.spec.options import ParallelOptions, StarterOptions
from mdi.stages.building import StageSpec
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
    with Run(GivenNodes(replace(cluster, spares=spares)), made, N_TOKENS + 60, n_texts=n_texts) as run:
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


OPTIONS: dict[str, dict[str, Any]] = {
    "guesses": {"draft": "auto"},
    "links and caches in 8 bits": {"wire_dtype": "int8", "kv_dtype": "int8"},
    "links in 16 bits": {"wire_dtype": "fp16"},
    "weights in 4 bits": {"quantize": "int4"},
    "little memory for caches": {"kv_memory": 1 << 18},
}


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
            texts = ["".join(one).split(TAKEN_BACK) for one in shown]
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


def test_a_spare_that_ends_is_not_missed(checkpoint: Path, honest: list[list[int]], tmp_path: Path) -> None:
    with secondaries(3, tmp_path) as nodes, run_over(nodes, checkpoint, tmp_path, n_spares=1) as run:
        texts_of(run)
        nodes[2].close()
        assert texts_of(run)[3::2] == honest[::2]
        told = run.verifier
        assert told is not None and told.n_checked == told.n_rows > told.n_by_others and not told.found
