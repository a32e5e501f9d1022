"""A hot spare computes the rows of a node as well: when either is lost, the texts go on without anything computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mdi.run.loop
from loopback import hidden_rows
from mdi.engine.cohort import Beams
from mdi.engine.recorder import Activity, RecordedRing, Recorder
from mdi.engine.replay import COMPUTE, FILL, PASS, SentRows
from mdi.engine.rows import ArrayRows
from mdi.engine.sequence import SamplingParams
from mdi.engine.worker import SecondaryLoop
from mdi.errors import Code, MdiError, NodeLostError, UsageError
from mdi.kernels.slices import SliceTable
from mdi.net.hello import Fault
from mdi.net.wire import REFUSED_S, Frame, FrameType, Slice
from mdi.node.secondary import SecondaryNode
from mdi.run.choice import check_hot_spares
from mdi.run.form import HOT_REFUSED_S, refused_s, replay_roles
from mdi.run.nodes import GivenNodes
from mdi.run.policy import (
    Answer,
    Answered,
    Better,
    Form,
    Lost,
    NotFormed,
    Policy,
    Roll,
    Stage,
    Wait,
    computing,
    with_hot_spares,
)
from mdi.run.run import Run
from mdi.spec.cluster import ClusterConfig, NodeConfig, standalone
from mdi.spec.options import ParallelOptions, StarterOptions
from secondaries import cluster_of, secondaries
from tiny_checkpoint import encode, write_checkpoint
from waiting import until

PLACED = (Stage("starter", 0, 2), Stage("a", 2, 4), Stage("b", 4, 7), Stage("c", 7, 8))


def ring_with(wanted: Sequence[str], spares: Sequence[str], placed: Sequence[Stage] = PLACED) -> tuple[Stage, ...]:
    return with_hot_spares(placed, wanted, spares)


def names(stages: Sequence[Stage]) -> tuple[str, ...]:
    """With * behind each hot spare."""
    return tuple(stage.name + "*" * stage.is_hot for stage in stages)


# Who has one


@pytest.mark.parametrize(
    ("wanted", "spares", "ring"),
    [
        ([], ["x"], ("starter", "a", "b", "c")),
        (["a"], [], ("starter", "a", "b", "c")),
        (["a"], ["x", "y"], ("starter", "x*", "a", "b", "c")),
        (["auto"], ["x"], ("starter", "a", "x*", "b", "c")),
        (["c", "auto"], ["x", "y"], ("starter", "a", "y*", "b", "x*", "c")),
        (["c", "auto"], ["x"], ("starter", "a", "b", "x*", "c")),
        (["lost"], ["a", "x"], ("starter", "a", "x*", "b", "c")),
    ],
)
def test_the_named_node_has_a_hot_spare_else_the_one_with_most_blocks(
    wanted: list[str], spares: list[str], ring: tuple[str, ...]
) -> None:
    found = ring_with(wanted, spares)
    assert names(found) == ring and computing(found) == PLACED
    assert all((a.start, a.stop) == (b.start, b.stop) for a, b in zip(found, found[1:], strict=False) if a.is_hot)


def test_a_spare_that_has_the_blocks_is_taken_before_others() -> None:
    before = ring_with(["b"], ["x"])
    assert names(with_hot_spares(PLACED, ["b"], ["y", "x"], before)) == names(before)
    assert names(with_hot_spares(PLACED, ["a"], ["x"], before, may_load=False)) == names(PLACED)


# Decisions


class World:
    """A ring with hot spares, whose nodes live until they are lost."""

    def __init__(self, wanted: Sequence[str], spares: Sequence[str]) -> None:
        ring = ring_with(wanted, spares)
        self.policy = Policy(ring, spares, self.cut, 6.0, hot=wanted)
        self.alive = {name: f"{name}-1" for name in ("a", "b", "c", *spares)}
        self.now = 0.0
        self.form = Form(ring, is_moved=False)
        self.closed(self.form)

    @staticmethod
    def cut(stages: Sequence[Stage], most: Any) -> tuple[int, ...]:
        own, rest = divmod(8, len(stages))
        return tuple(own + (k < rest) for k in range(len(stages)))

    def closed(self, form: Form) -> None:
        self.policy.formed(form.stages, {name: self.alive[name] for name in form.names[1:]}, self.now)

    def next(self, *lost: str, code: str = "lost") -> tuple[Form, int]:
        """Nodes are lost; the ring that is formed then, and how often the nodes were asked."""
        for name in lost:
            self.alive.pop(name, None)
        n_asked = 0
        decision = self.policy.next(Lost(NodeLostError(lost[0], f"{lost[0]} is lost", Code(code))), self.now)
        while True:
            assert isinstance(decision, Form | Wait), decision
            if isinstance(decision, Wait):
                n_asked += 1
                self.now = max(self.now, decision.until)
                answers = {name: Answer(name, p, "READY", 1 << 30, False) for name, p in self.alive.items()}
                gone = frozenset({"a", "b", "c"} | set(lost)) - answers.keys()
                decision = self.policy.next(Answered(Roll(answers, gone)), self.now)
            elif absent := [name for name in decision.names[1:] if name not in self.alive]:
                decision = self.policy.next(NotFormed(NodeLostError(absent[0], "gone"), decision), self.now)
            else:
                self.closed(decision)
                return decision, n_asked


def test_the_hot_spare_takes_its_nodes_place_and_nobody_is_asked() -> None:
    form, n_asked = World(["b"], ["x"]).next("b")
    assert (names(form.stages), form.fresh, form.is_moved, n_asked) == (
        ("starter", "a", "x", "c"),
        frozenset(),
        False,
        0,
    )


def test_a_hot_spare_that_is_lost_is_left_out() -> None:
    form, n_asked = World(["a", "b"], ["x", "y"]).next("y")
    assert (names(form.stages), form.fresh, n_asked) == (("starter", "x*", "a", "b", "c"), frozenset(), 0)


def test_of_another_node_a_spare_takes_the_blocks_before_a_hot_one_does() -> None:
    world = World(["b"], ["x", "y"])
    form, _ = world.next("a")
    assert names(form.stages) == ("starter", "y", "x*", "b", "c") and form.fresh == {"y"}
    form, _ = world.next("c")
    assert names(form.stages) == ("starter", "y", "b", "x") and form.fresh == {"x"}, "better than a new cut"


def test_both_at_once_are_replaced_like_any_node() -> None:
    form, _ = World(["b"], ["x", "y"]).next("b", "x")
    assert names(form.stages) == ("starter", "a", "y", "c") and form.fresh == {"y"}


def test_a_node_that_failed_leaves_its_place_to_the_hot_spare() -> None:
    """It lives, but it has no caches any more."""
    world = World(["a"], ["x"])
    decision = world.policy.next(Lost(NodeLostError("a", "it failed", MdiError.code)), 0.0)
    assert isinstance(decision, Form) and names(decision.stages) == ("starter", "x", "b", "c")


def test_who_was_lost_is_the_next_hot_spare_when_it_is_back() -> None:
    world = World(["a"], ["x"])
    form, _ = world.next("a")
    world.alive["a"] = "a-2"
    assert world.policy.with_spare(form.stages, []) is None
    found = world.policy.with_spare(form.stages, ["stranger", "a"])
    assert found is not None and names(found.stages) == ("starter", "x", "a*", "b", "c"), "b has the most blocks now"
    assert (found.fresh, found.is_moved) == ({"a"}, False)
    assert world.policy.next(Better(found, world.policy.ring), 1.0) == found
    world.closed(found)
    assert world.policy.with_spare(found.stages, ["y"]) is None, "it has all that it is to have"


def test_another_order_keeps_its_hot_spare() -> None:
    world = World(["a"], ["x"])
    turned = (PLACED[0], Stage("b", 2, 5), Stage("a", 5, 7), PLACED[3])
    found = world.policy.next(Better(Form(turned, is_moved=True), world.policy.ring), 1.0)
    assert isinstance(found, Form) and names(found.stages) == ("starter", "b", "x*", "a", "c")


def test_a_node_that_was_never_there_leaves_its_place_to_the_hot_spare() -> None:
    ring = ring_with(["a"], ["x"])
    policy = Policy(ring, ["x"], World.cut, 6.0, hot=["a"])
    assert policy.next(None, 0.0) == Form(ring, is_moved=False)
    found = policy.next(NotFormed(NodeLostError("a", "it does not answer"), Form(ring, False)), 1.0)
    assert isinstance(found, Form) and names(found.stages) == ("starter", "x", "b", "c")


@settings(max_examples=60)
@given(st.data())
def test_after_any_losses_the_ring_is_whole(data: st.DataObject) -> None:
    spares = ["x", "y", "z"][: data.draw(st.integers(1, 3))]
    targets = data.draw(
        st.lists(st.sampled_from(["a", "b", "c", "auto"]), min_size=1, max_size=len(spares), unique=True)
    )
    world = World(targets, spares)
    form = world.form
    for _ in range(data.draw(st.integers(1, 4))):
        present = [name for name in form.names[1:] if name in world.alive]
        if not present:
            break
        lost = data.draw(st.lists(st.sampled_from(present), min_size=1, max_size=2, unique=True))
        before = form.stages
        form, n_asked = world.next(*lost)
        working = computing(form.stages)
        assert [s.start for s in working] == [0, *(s.stop for s in working[:-1])] and working[-1].stop == 8
        assert len(set(form.names)) == len(form.names) and not set(lost) & set(form.names)
        for spare, node in zip(form.stages, form.stages[1:], strict=False):
            assert not spare.is_hot or ((spare.start, spare.stop) == (node.start, node.stop) and not node.is_hot)
        assert not form.stages[0].is_hot and not form.stages[-1].is_hot
        guards = {s.name: t.name for s, t in zip(before, before[1:], strict=False) if s.is_hot}
        if all(name in guards or name in guards.values() for name in lost) and len(lost) == 1:
            assert (form.fresh, form.is_moved, n_asked) == (frozenset(), False, 0)


# Rows that are sent again


def test_a_hot_spare_has_no_rows_for_its_node() -> None:
    """It keeps what it would send in its node's place, not what both get."""
    ring = ("starter", "x", "a", "b")
    assert replay_roles(ring, frozenset("a"), frozenset("x")) is None
    for fresh, roles in (
        ("x", {}), ("xa", {"x": PASS}), ("b", {"a": FILL}), ("xab", {"x": PASS, "a": PASS}), ("xb", {"a": FILL})
    ):  # fmt: skip
        found = replay_roles(ring, frozenset(fresh), frozenset("x"))
        assert found is not None and found.by_name == roles and found.is_by_starter == ("x" in fresh)


def test_a_lost_node_is_noticed_sooner_where_that_costs_little() -> None:
    ring = ring_with(["b"], ["x"])
    assert [refused_s(ring, k) == HOT_REFUSED_S for k in range(5)] == [False, True, True, False, False]
    assert HOT_REFUSED_S < REFUSED_S


# Frames


def frame_of(number: int, payload: Any, is_replay: bool = False) -> Frame:
    slices, n = SliceTable([Slice(1, number, 1, 0)]), int(bool(payload))
    return Frame(FrameType.BATCH, 7, number, "float32", n, n, slices, payload=payload, is_replay=is_replay)


class Line:
    """A ring that gives one frame after the other in the same buffer, and notes what is done."""

    def __init__(self, *frames: Frame) -> None:
        self.frames, self.sent, self.done = list(frames), list[Frame](), list[str]()

    def poll(self) -> Frame:
        return self.frames.pop(0)

    def send(self, frame: Frame) -> None:
        self.sent.append(frame)
        self.done.append("send")

    def release(self, frame: Frame) -> None:
        if isinstance(frame.payload, bytearray):
            frame.payload[:] = bytes(len(frame.payload))
        self.done.append("release")


def stepped(line: Line, is_hot: bool, replay: str = COMPUTE) -> SentRows:
    """A stage that doubles all numbers; the rows that it keeps."""

    class Stage:
        row_in = row_out = hidden_rows(1)
        caches = SimpleNamespace(rearrange=lambda freed, copies: None)

        def __call__(self, x: Any, slices: Any) -> Any:
            line.done.append("compute")
            return 2 * x

    sent, stage, ring = SentRows(1 << 10), Stage(), line
    anything: Any = (stage, ArrayRows(), ring, False)
    loop = SecondaryLoop(*anything, sent=sent, replay=replay, is_hot=is_hot)
    while line.frames:
        loop.step()
    return sent


ROW, DOUBLE = np.float32(1.5).tobytes(), np.float32(3).tobytes()


@pytest.mark.parametrize("is_hot", [False, True])
def test_a_hot_spare_sends_a_frame_on_before_it_computes_it(is_hot: bool) -> None:
    line = Line(frame_of(0, bytearray(ROW)))
    sent = stepped(line, is_hot)
    assert line.done == (["send", "compute", "release"] if is_hot else ["compute", "send", "release"])
    assert bytes(line.sent[0].payload) == (ROW if is_hot else DOUBLE), "the buffer has been used again since"
    assert sent.fill(Frame(FrameType.BATCH, 0, slices=SliceTable([Slice(1, 0, 1)]))).payload == DOUBLE, (
        "what it would send in its node's place"
    )


@pytest.mark.parametrize(("replay", "payload"), [(COMPUTE, b""), (PASS, ROW)])
def test_rows_are_sent_again_only_to_whom_they_are_for(replay: str, payload: bytes) -> None:
    line = Line(frame_of(0, bytearray(ROW), is_replay=True))
    stepped(line, True, replay)
    assert (bytes(line.sent[0].payload), line.sent[0].n_rows) == (payload, int(bool(payload)))
    assert line.done == ["send", "compute", "release"]
    line = Line(frame_of(0, b"", is_replay=True))
    stepped(line, True, replay)
    assert line.done == ["send", "release"] and not line.sent[0].n_rows, "it is for other nodes"


# Runs


PROMPT = "The ring is closed link by link. The starter"
N_TOKENS = 60


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("hot") / "tiny", n_layer=6, with_end=False, block_size=65536)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[SecondaryNode]]:
    with secondaries(3, tmp_path) as found:
        yield found


def spared(nodes: list[SecondaryNode], n_spares: int = 1) -> ClusterConfig:
    """The last nodes are spares."""
    cluster = cluster_of(nodes)
    ring, spares = cluster.secondaries[:-n_spares], cluster.secondaries[-n_spares:]
    return replace(cluster, secondaries=ring, spares=tuple(replace(node, is_spare=True) for node in spares))


def options_of(checkpoint: Path, **changes: Any) -> StarterOptions:
    fields = {"ckpt": checkpoint, "prompt_style": "none", "device": "cpu", "placement": "even", **changes}
    return StarterOptions(**fields)


def lose(node: SecondaryNode) -> None:
    """It says that it is lost, and drops its caches."""
    name = node.config.name
    until(
        lambda: (worker := node.runs.latest) is not None and worker.ring is not None
    )  # the starter may be ahead of it
    worker = node.runs.latest
    if worker is not None and worker.ring is not None:
        worker.ring.fail(Fault(name, "its caches and connections are dropped", name, Code.LOST))


def texts_of(
    cluster: ClusterConfig, options: StarterOptions, n_beams: int, at: dict[int, Callable[[Run], object]]
) -> tuple[list[list[int]], Run]:
    """A greedy text, a sampled one, and, perhaps, beams; after so many tokens of the first one, something is done."""
    n = 0

    def note(text: str) -> None:
        nonlocal n
        n += 1
        at.get(n, lambda run: None)(run)

    with Run(GivenNodes(cluster), options, 2 * N_TOKENS, n_texts=2 + n_beams) as run:
        samples = [
            run.submit(PROMPT, encode(PROMPT), SamplingParams(N_TOKENS, temperature=0), on_text=note),
            run.submit(PROMPT, encode(PROMPT), SamplingParams(N_TOKENS // 2, temperature=0.9, seed=3)),
        ]
        if n_beams:
            samples += run.submit_beams(PROMPT, encode(PROMPT), SamplingParams(20, temperature=0), Beams(n_beams))
        run.read()
        found = [list(sample.token_ids) for sample in samples]
    return found, run


MODES: dict[str, dict[str, Any]] = {
    "float32": {},
    "guesses": {"draft": "auto"},
    "int8 on links": {"wire_dtype": "int8"},
    "no rows kept": {"replay_memory": 0},
    "beams": {"n_beams": 3},
}


@pytest.fixture(scope="module")
def undisturbed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """Without a hot spare, and without a loss."""
    with secondaries(2, tmp_path_factory.mktemp("undisturbed")) as found:
        return {mode: texts_of(cluster_of(found), *options_in(mode, checkpoint), {})[0] for mode in MODES}


def options_in(mode: str, checkpoint: Path, **changes: Any) -> tuple[StarterOptions, int]:
    """And how many beams."""
    fields = dict(MODES[mode])
    n_beams = fields.pop("n_beams", 0)
    return options_of(checkpoint, **fields, **changes), n_beams


@pytest.mark.parametrize(
    ("mode", "first", "second"),
    [
        *((mode, 0, None) for mode in MODES),
        ("beams", 2, None),
        ("guesses", 2, None),
        ("float32", 0, 1),
        ("float32", 1, 0),
    ],
)
def test_texts_are_the_same_whoever_is_lost(
    checkpoint: Path, nodes: list[SecondaryNode], undisturbed: dict[str, list[list[int]]], mode: str, first: int,
    second: int | None,
) -> None:  # fmt: skip
    """secondary2 is the hot spare of secondary0, which may be lost before or after another one."""
    at: dict[int, Callable[[Run], object]] = {7 + 4 * first: lambda run: lose(nodes[first])}
    if second is not None:
        at[25] = lambda run: lose(nodes[second])
    found, run = texts_of(spared(nodes), *options_in(mode, checkpoint, hot_spare=("secondary0",)), at)
    told = run.metrics().recoveries
    assert found == undisturbed[mode]
    assert told[0]["node"] == f"secondary{first}" and all(one["may_differ"] == [] for one in told)
    if first != 1:
        assert (told[0]["restored_by"], told[0]["replaced_by"]) == (
            "hot spare",
            "secondary2" if first == 0 else "secondary0",
        )


@pytest.mark.slow
def test_every_row_is_there_whatever_the_moment(
    checkpoint: Path, nodes: list[SecondaryNode], undisturbed: dict[str, list[list[int]]]
) -> None:
    for k in range(2, 42, 8):
        options = options_of(checkpoint, hot_spare=("auto",))
        found, run = texts_of(spared(nodes), options, 0, {k: lambda run: lose(nodes[0])})
        assert found == undisturbed["float32"]
        assert run.names == ("starter", "secondary2", "secondary1")


def test_a_node_that_is_back_becomes_the_next_hot_spare(
    checkpoint: Path, nodes: list[SecondaryNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the rows of all texts while these go on; then its node is lost, too, and then it is told to end itself."""
    monkeypatch.setattr(mdi.run.loop, "LOOK_S", 0.05)
    monkeypatch.setattr(mdi.run.loop, "NOTICE_S", 0.02)
    with Run(GivenNodes(spared(nodes)), options_of(checkpoint, hot_spare=("auto",)), 20_000, n_texts=1) as run:

        def wait_for(*order: str) -> None:
            """Its ring, and tokens of it: before the first one there may be nothing yet that a hot spare could have."""
            until(lambda: (ring := run.loop.running) is not None and names(ring.stages) == order)
            n_before = run.engine.n_tokens
            until(lambda: run.engine.n_tokens > n_before + 1)

        sample = run.submit(PROMPT, encode(PROMPT), SamplingParams(19_000, temperature=0))
        wait_for("starter", "secondary2*", "secondary0", "secondary1")
        lose(nodes[0])
        wait_for("starter", "secondary0*", "secondary2", "secondary1")
        lose(nodes[2])
        wait_for("starter", "secondary2*", "secondary0", "secondary1")
        until(lambda: (worker := nodes[0].runs.latest) is not None and worker.ring is not None)
        worker = nodes[0].runs.latest
        assert worker is not None
        worker.announce_leave()
        wait_for("starter", "secondary2", "secondary1")
        sample.cancel()
        run.read()
        told = run.metrics().recoveries
    found = list(sample.token_ids)
    assert [one["restored_by"] for one in told] == ["hot spare"] * 3
    with Run(GivenNodes(standalone()), options_of(checkpoint), 20_000, n_texts=1) as run:
        alone = run.submit(PROMPT, encode(PROMPT), SamplingParams(len(found), temperature=0))
        run.read()
    assert found == list(alone.token_ids)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"fixed": True}, "--fixed"),
        ({"verify": 0.5}, "--verify"),
        ({"parallel": ParallelOptions(mode="tensor")}, "--parallel tensor"),
        ({"parallel": ParallelOptions(mode="auto")}, "--parallel auto"),
        ({"hot_spare": ("secondary2",)}, "expected auto, or some of secondary0, secondary1"),
        ({"hot_spare": ("secondary0", "secondary1")}, "needs 2 spares, but there are 1"),
    ],
)
def test_what_cannot_be_together_is_refused_by_name(changes: dict[str, Any], told: str) -> None:
    entries = [NodeConfig(f"secondary{i}", "127.0.0.1", 0, 0, is_spare=i > 1) for i in range(3)]
    there = ClusterConfig(NodeConfig("starter", "127.0.0.1", 0, 0), tuple(entries[:2]), spares=tuple(entries[2:]))
    options = StarterOptions(**{"hot_spare": ("secondary0",), **changes})
    with pytest.raises(UsageError, match=told):
        Run(GivenNodes(there), options, 10, n_texts=1).open()
    with pytest.raises(UsageError, match="--swarm"):
        check_hot_spares(options, there, is_swarm=True)


# What it measures


def test_what_a_hot_spare_computes_is_recorded() -> None:
    recorder = Recorder()
    frame: Any = frame_of(3, b"rows")
    inner: Any = SimpleNamespace(poll=lambda: frame, send=lambda frame: None, release=lambda frame: None)
    ring = RecordedRing(inner, recorder, sends_first=True)
    for _ in range(2):
        assert ring.poll() is frame
        ring.send(frame)
        ring.release(frame)
    found = [span.activity for span in recorder.buffer.last()]
    assert found == [Activity.WAIT, Activity.BLOCKS] * 2
