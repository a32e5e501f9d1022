"""Whole runs over real secondaries: the right ids, again and again on the same processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from processes import Cluster, Spawn, Starter
from tiny_checkpoint import CONTEXT, TEXT, encode, reference, write_checkpoint

LONG = (TEXT * 4)[:1100]
# of 1 token, of several, of several hundred
PROMPTS = ["A", "Who are you?", LONG, "The ring", "x", TEXT, "Where have you been all the time?"]
NODE_FIELDS = {
    "name", "layers", "peak_rss_bytes", "compute_s", "wait_s", "send_s", "bytes_sent", "frames",
    "weights_resident_bytes", "weights_read_bytes", "disk_wait_s", "expert_hits", "expert_misses",
}  # fmt: skip
SAMPLE_FIELDS = {
    "prompt", "text", "token_ids", "prompt_ids", "finish_reason", "ttft_s", "tokens_per_s", "may_differ_from",
    "guessed", "confirmed", "tokens_per_round",
}  # fmt: skip


def prompt_flags(prompts: list[str]) -> list[str]:
    return [flag for prompt in prompts for flag in ("--prompt", prompt)]


def test_prompts_are_as_long_as_they_are_meant_to_be() -> None:
    assert len(encode("A")) == len(encode("x")) == 1
    assert 300 < len(encode(LONG)) < CONTEXT


@pytest.mark.parametrize("n_samples", [1, 3, 7])
def test_greedy_ids_are_those_of_litgpt(ring: Cluster, checkpoint: Path, starter: Starter, n_samples: int) -> None:
    prompts = PROMPTS[:n_samples]
    result = starter(checkpoint, ring.path, "--n-tokens", 16, "--n-samples", n_samples, *prompt_flags(prompts))
    assert result.token_ids == [list(reference(prompt, 16)) for prompt in prompts]
    assert [s["prompt_ids"] for s in result.json["samples"]] == [encode(prompt) for prompt in prompts]
    assert [s["prompt"] for s in result.json["samples"]] == prompts


def test_the_json_object(ring: Cluster, checkpoint: Path, starter: Starter) -> None:
    result = starter(checkpoint, ring.path, "--n-tokens", 9, *prompt_flags(["A", "Who are you?", LONG]))
    found = result.json
    assert set(found) == {
        "samples", "tokens_per_s", "n_nodes", "nodes", "model", "seed", "parallel", "recoveries", "guessed", "confirmed",
        "inexact_guesses", "tokens_per_round", "weights",
    }  # fmt: skip
    assert result.out.count("\n") == 1
    assert all(set(sample) == SAMPLE_FIELDS for sample in found["samples"])
    assert all(set(node) == NODE_FIELDS for node in found["nodes"])
    assert found["n_nodes"] == 3 and found["model"] == "tiny-random"
    assert [node["name"] for node in found["nodes"]] == ["starter", "secondary0", "secondary1"]
    bounds = [node["layers"] for node in found["nodes"]]
    assert bounds[0][0] == 0 and bounds[2][1] == 5 and bounds[0][1] == bounds[1][0] and bounds[1][1] == bounds[2][0]
    for node in found["nodes"]:
        assert node["peak_rss_bytes"] > 50e6 and node["frames"] > 9 and node["bytes_sent"] > 1000
        assert node["compute_s"] > 0 and node["wait_s"] >= 0 and node["send_s"] >= 0
    # "A" meets the token that ends a text, which is not among its ids
    assert [s["finish_reason"] for s in found["samples"]] == ["eos", "length", "length"]
    for sample in found["samples"]:
        assert sample["ttft_s"] > 0 and sample["tokens_per_s"] > 0
    assert found["tokens_per_s"] > 0


def test_a_full_context_ends_a_sample(ring: Cluster, checkpoint: Path, starter: Starter) -> None:
    n_prompt = len(encode(LONG))
    result = starter(checkpoint, ring.path, "--n-tokens", 50, "--sequence-length", n_prompt + 5, "--prompt", LONG)
    assert result.token_ids == [list(reference(LONG, 5))] * 3  # a single prompt is three samples
    assert {s["finish_reason"] for s in result.json["samples"]} == {"length"}


@pytest.mark.slow
def test_sampling_does_not_depend_on_the_number_of_nodes(ring: Cluster, checkpoint: Path, starter: Starter) -> None:
    flags = ["--n-tokens", 14, "--temperature", "0.9", "--top-k", "50", "--top-p", "0.95", "--seed", "77"]
    flags += [*prompt_flags(["A", "Who are you?"]), "--n-samples", "5"]
    found = [starter(checkpoint, ring.nodes_file(n), *flags).token_ids for n in (1, 2, 3)]
    assert found[0] == found[1] == found[2]
    assert len({tuple(ids) for ids in found[0]}) == 5, "samples of the same prompt differ"
    other = starter(checkpoint, ring.nodes_file(1), *flags[:-1], "5", "--seed", "78").token_ids
    assert other != found[0]


@pytest.mark.slow
def test_runs_one_after_another_on_the_same_secondaries(
    ring: Cluster, checkpoint: Path, starter: Starter, tmp_path: Path
) -> None:
    """Other prompts, sample counts, dtypes, cuts and models; what was sent once is kept."""
    expected = [list(reference("Who are you?", 10))]
    first = starter(checkpoint, ring.path, "--n-tokens", 10, "--n-samples", 1)
    assert first.token_ids == expected
    again = starter(checkpoint, ring.path, "--n-tokens", 6, "--n-samples", 2, "--prompt", "The ring")
    assert again.token_ids == [list(reference("The ring", 6))] * 2
    assert "sending" not in again.err

    for layers in ("1,3,1", "0,1,4", "3,1,1"):
        cut = starter(checkpoint, ring.path, "--n-tokens", 10, "--n-samples", 1, "--layers", layers)
        assert cut.token_ids == expected
        assert [n["layers"][1] - n["layers"][0] for n in cut.json["nodes"]] == [int(n) for n in layers.split(",")]

    half = [
        starter(checkpoint, ring.nodes_file(n), "--n-tokens", 10, "--n-samples", 1, "--dtype", "bfloat16").token_ids
        for n in (3, 1)
    ]
    assert half[0] == half[1]

    other = write_checkpoint(tmp_path / "other", seed=11, n_layer=4)
    sent = starter(other, ring.path, "--n-tokens", 10, "--n-samples", 1)
    kept = starter(other, ring.path, "--n-tokens", 10, "--n-samples", 1)
    assert "sending" in sent.err and "sending" not in kept.err
    assert sent.token_ids == kept.token_ids == [list(reference("Who are you?", 10, seed=11, n_layer=4))]

    back = starter(checkpoint, ring.path, "--n-tokens", 10, "--n-samples", 1)
    assert back.token_ids == expected and "sending" not in back.err
    assert [status["state"] for status in ring.wait_states("READY")] == ["READY", "READY"]


def test_a_stop_string_ends_a_sample(ring: Cluster, checkpoint: Path, starter: Starter) -> None:
    whole = starter(checkpoint, ring.path, "--n-tokens", 16, "--n-samples", 1).json["samples"][0]
    text = whole["text"]
    stop = next(c for c in text[3:] if c.isascii() and c.isprintable() and c not in text[:3])
    cut = starter(checkpoint, ring.path, "--n-tokens", 16, "--n-samples", 1, "--stop", stop).json["samples"][0]
    assert cut["finish_reason"] == "stop" and cut["text"] == text[: text.index(stop)]
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]


@pytest.mark.slow
def test_starter_as_a_process_and_what_both_sides_answer_meanwhile(ring: Cluster, endless: Path, spawn: Spawn) -> None:
    args = ("--ckpt", endless, "--nodes-config", ring.path, "--prompt-style", "none", "--n-tokens", 60000)
    starter = spawn("starter", *args, "--n-samples", 2)
    starter.wait_bytes(300)
    own = ring.status(0)
    assert own["state"] == "RUNNING" and own["name"] == "starter" and own["n_nodes"] == 3
    assert len(own["samples"]) == 2 and all(s["n_tokens"] > 10 for s in own["samples"])
    before = [s["n_tokens"] for s in own["samples"]]
    starter.wait_bytes(len(starter.out) + 300)
    assert all(s["n_tokens"] > n for s, n in zip(ring.status(0)["samples"], before, strict=True)), "it goes on"
    for node in (1, 2):
        status = ring.status(node)
        assert status["state"] == "RUNNING" and status["model"] == "tiny-random" and status["error"] is None
        assert status["memory"]["rss_bytes"] > 50e6 and status["blocks"][0] < status["blocks"][1]
        assert status["metrics"] is None, "only who knows the run is told about it"


@pytest.mark.slow
def test_stop_nodes_ends_the_secondaries(
    make_cluster: Callable[[int], Cluster], checkpoint: Path, starter: Starter
) -> None:
    cluster = make_cluster(2)
    cluster.start(0)  # it may well come after its starter
    result = starter(checkpoint, cluster.path, "--n-tokens", 4, "--n-samples", 1, "--stop-nodes", "--wait", 100)
    assert result.token_ids == [list(reference("Who are you?", 4))]
    assert cluster[0].wait() == 0, cluster[0].story()
    assert "Traceback" not in cluster[0].err
