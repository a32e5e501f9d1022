"""Nodes that are killed in the middle of a run: others take their blocks, and every text is that of an undisturbed ring."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from processes import SOON_S, Cluster, Reader, Result, Spawn, Starter, meanwhile, wait_for_tokens

N_TOKENS = 600  # so that a run lasts until something has happened in the middle of it
MANY_TOKENS = 4500  # until a process has started, too

FLAGS: list[tuple[object, ...]] = [
    (),
    ("--temperature", 0.8, "--seed", 5),
    ("--quantize", "int8"),
    ("--quantize", "int4"),
    ("--beams", 4),
]
UNDISTURBED: dict[tuple[object, ...], list[list[int]]] = {}


@pytest.fixture(scope="module")
def spared(reader: Reader, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes and two spares."""
    cluster = Cluster(reader, tmp_path_factory.mktemp("spared"), 5)
    for entry in cluster.entries[3:]:
        entry["spare"] = True
    cluster.path = cluster.nodes_file(5)
    yield cluster
    cluster.end()


@pytest.fixture
def nodes(spared: Cluster) -> Cluster:
    spared.revive()
    return spared


def disturbed(
    ring: Cluster, *actions: Callable[[], object], n_samples: int = 3
) -> contextlib.AbstractContextManager[None]:
    """Do one thing after the other, each after some more tokens of all samples."""

    def act(is_over: Callable[[], bool]) -> None:
        for k, action in enumerate(actions):
            wait_for_tokens(ring, 5 + 15 * k, is_over, n_samples)
            action()

    return meanwhile(act)


def run(starter: Starter, endless: Path, nodes: Path, *flags: object) -> Result:
    return starter(endless, nodes, "--n-tokens", N_TOKENS, "--n-samples", 3, *flags)


@pytest.fixture
def check(endless: Path, starter: Starter, nodes: Cluster) -> Callable[..., list[str]]:
    """Compare a disturbed run's texts with those of one node, and what it says of recoveries."""

    def compare(result: Result, flags: tuple[object, ...], *recoveries: tuple[str, str]) -> list[str]:
        key = (str(endless), *flags)
        if key not in UNDISTURBED:
            UNDISTURBED[key] = run(starter, endless, nodes.nodes_file(1), *flags).token_ids
        assert result.token_ids == UNDISTURBED[key], result.err
        told = result.json["recoveries"]
        assert [(one["node"], one["replaced_by"]) for one in told] == list(recoveries)
        assert all(one["seconds"] > 0 and one["may_differ"] == [] for one in told)
        assert all(sample["may_differ_from"] is None for sample in result.json["samples"])
        return [one["restored_by"] for one in told]

    return compare


@pytest.mark.slow
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "-".join(map(str, flags)).strip("-") or "greedy")
def test_a_spare_takes_the_place_of_a_killed_node(
    nodes: Cluster, endless: Path, starter: Starter, check: Callable[..., list[str]], flags: tuple[object, ...]
) -> None:
    with disturbed(nodes, lambda: nodes[0].signal(signal.SIGKILL)):
        result = run(starter, endless, nodes.path, *flags)
    assert check(result, flags, ("secondary0", "secondary2")) == ["replay"]


@pytest.mark.parametrize("flags", [("--replay-memory", 0), ("--wire-dtype", "int8")], ids=["tokens", "replay-int8"])
def test_either_way_of_restoring_gives_the_same_texts(
    nodes: Cluster, endless: Path, starter: Starter, check: Callable[..., list[str]], flags: tuple[object, ...]
) -> None:
    with disturbed(nodes, lambda: nodes[1].signal(signal.SIGKILL)):
        result = run(starter, endless, nodes.path, *flags)
    nodes.revive()
    undisturbed = run(starter, endless, nodes.path, *flags)
    assert result.token_ids == undisturbed.token_ids
    (told,) = result.json["recoveries"]
    assert told["restored_by"] == ("tokens" if flags[0] == "--replay-memory" else "replay")


@pytest.mark.slow
def test_two_nodes_at_once_and_a_third_one_later(
    nodes: Cluster, endless: Path, starter: Starter, check: Callable[..., list[str]]
) -> None:
    """Two spares take the places; when one of them is killed as well, the others hold its blocks."""

    def kill(*indices: int) -> None:
        for index in indices:
            nodes[index].signal(signal.SIGKILL)

    with disturbed(nodes, lambda: kill(0, 1), lambda: kill(2)):
        result = run(starter, endless, nodes.path)
    first, second = (one["replaced_by"] for one in result.json["recoveries"][:2])
    assert {first, second} == {"secondary2", "secondary3"}
    check(result, (), ("secondary0", "secondary2"), ("secondary1", "secondary3"), ("secondary2", "starter, secondary3"))


@pytest.mark.slow
def test_without_spares_a_node_that_is_back_has_its_place_again(
    nodes: Cluster, endless: Path, starter: Starter, check: Callable[..., list[str]]
) -> None:
    def start_again() -> None:
        nodes[1].signal(signal.SIGKILL)
        nodes.start(1)

    with disturbed(nodes, start_again):
        result = run(starter, endless, nodes.nodes_file(3), "--silence-s", 60)
    check(result, (), ("secondary1", "secondary1"))


@pytest.mark.slow
def test_a_stopped_node_is_replaced_and_can_be_used_again(
    nodes: Cluster, endless: Path, checkpoint: Path, starter: Starter, check: Callable[..., list[str]]
) -> None:
    with disturbed(nodes, lambda: nodes[1].signal(signal.SIGSTOP)):
        result = run(starter, endless, nodes.path, "--silence-s", 2)
    nodes[1].signal(signal.SIGCONT)
    check(result, (), ("secondary1", "secondary2"))
    nodes.wait_states("IDLE", "READY")


@pytest.mark.slow
def test_nobody_is_left(nodes: Cluster, endless: Path, starter: Starter, check: Callable[..., list[str]]) -> None:
    """Even then the starter can go on alone, if the model fits it."""
    with disturbed(nodes, lambda: [nodes[i].signal(signal.SIGKILL) for i in range(2)]):
        result = run(starter, endless, nodes.nodes_file(3), "--silence-s", 1.5)
    check(result, (), ("secondary0", "starter"), ("secondary1", "starter"))


@pytest.mark.slow
def test_a_node_that_is_told_to_end_hands_its_blocks_over(
    nodes: Cluster, endless: Path, starter: Starter, check: Callable[..., list[str]]
) -> None:
    with disturbed(nodes, lambda: nodes[1].signal(signal.SIGTERM)):
        result = run(starter, endless, nodes.path)
    check(result, (), ("secondary1", "secondary2"))
    assert nodes[1].wait(SOON_S) in (0, 143) and "Traceback" not in nodes[1].err


@pytest.mark.slow
def test_a_node_that_is_back_is_taken_in_again(
    nodes: Cluster, endless: Path, starter: Starter, check: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks had gone to the others; with it, the slowest node has fewer."""
    monkeypatch.setattr("mdi.run.loop.LOOK_S", 0.2)

    def start_later() -> None:
        nodes.start(1)
        nodes[1].wait_for("waits for its starter")

    flags = ("--silence-s", 1.5, "--n-tokens", MANY_TOKENS, "--n-samples", 2)
    with disturbed(nodes, lambda: nodes[1].signal(signal.SIGKILL), start_later, n_samples=2):
        result = run(starter, endless, nodes.nodes_file(3), *flags)
    assert [len(ids) for ids in result.token_ids] == [MANY_TOKENS] * 2
    assert "secondary1 joins the ring" in result.err and result.json["n_nodes"] == 3
    assert all(one == result.token_ids[0] for one in result.token_ids)


def test_a_fixed_ring_ends_with_its_first_loss(nodes: Cluster, endless: Path, starter: Starter) -> None:
    with disturbed(nodes, lambda: nodes[0].signal(signal.SIGKILL)):
        result = run(starter, endless, nodes.path, "--fixed")
    assert result.status == 1 and "secondary0 is lost" in result.json["error"]
    assert all(5 < len(sample["token_ids"]) < N_TOKENS for sample in result.json["samples"])


@pytest.mark.slow
def test_a_chat_goes_on(nodes: Cluster, checkpoint: Path, spawn: Spawn) -> None:
    chat = spawn(
        "chat", "--ckpt", checkpoint, "--nodes-config", nodes.path, "--temperature", 0, "--n-tokens", 5, "--prompt-style",
        "none", stdin=subprocess.PIPE,
    )  # fmt: skip
    stdin = chat.child.stdin
    assert stdin is not None
    for k, n_answers in enumerate((1, 2)):
        if k:
            nodes[0].signal(signal.SIGKILL)
            chat.wait_for("ring restored")
        stdin.write(b"/new\nWho are you?\n")
        stdin.flush()
        chat.wait_for_out("Model: ", n_answers)
    stdin.close()
    assert chat.wait(SOON_S) == 0, chat.story()
    answers = [piece.split("\n")[0] for piece in chat.out.split("Model: ")[1:]]
    assert len(answers) == 2 and answers[0] == answers[1] != ""


@pytest.mark.slow
def test_a_hot_spare_takes_the_place_of_a_killed_node(
    nodes: Cluster, endless: Path, starter: Starter, check: Callable[..., list[str]]
) -> None:
    """Then a spare takes the place of the node that was the hot one."""
    kills = [lambda: nodes[0].signal(signal.SIGKILL), lambda: nodes[2].signal(signal.SIGKILL)]
    with disturbed(nodes, *kills):
        result = run(starter, endless, nodes.path, "--hot-spare", "secondary0")
    told = check(result, (), ("secondary0", "secondary2"), ("secondary2", "secondary3"))
    assert told == ["hot spare", "replay"]
