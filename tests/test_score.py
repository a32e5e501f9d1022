"""`mdi score`: log probabilities of a text are those of litgpt's model, whatever the ring, the windows and the text."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mdi.cli import launch
from mdi.engine.sequence import SamplingParams
from mdi.errors import EngineError, UsageError
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.run.scoring import cut, score_ids, score_text
from mdi.spec.cluster import standalone
from mdi.spec.options import ParallelOptions, StarterOptions
from secondaries import cluster_of, secondaries
from test_finetune import side_of
from tiny_checkpoint import CONTEXT, TEXT, VOCAB, encode, tiny_gpt, tokenizer, write_checkpoint

LONG = TEXT * 6 + "Grüße, 日本 🎉! Who are you?"
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "three nodes": (3, {}),
    "a shared head": (2, {"parallel": ParallelOptions("tensor", is_head_shared=True)}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the test's own, which remembers the model that was used last: other tests expect that there was none."""
    monkeypatch.setenv("MDI_STORE", str(tmp_path / "store"))


def expected(ids: list[int]) -> np.ndarray:
    """By litgpt's model without a cache: of all tokens but the first."""
    with torch.no_grad():
        logits = tiny_gpt()(torch.tensor([ids]))[0]
    found: np.ndarray = logits[:-1].log_softmax(dim=1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
    return found


def made(checkpoint: Path, folder: Path, **changes: Any) -> StarterOptions:
    fields = {"prompt_style": "none", "device": "cpu", "dtype": "float32", "placement": "even", **changes}
    return StarterOptions(ckpt=checkpoint, cache_dir=folder, **fields)


@pytest.mark.parametrize("name", RUNS)
def test_log_probabilities_are_those_of_the_reference(name: str, checkpoint: Path, tmp_path: Path) -> None:
    n_nodes, options = RUNS[name]
    with secondaries(n_nodes - 1, tmp_path) as nodes:
        ring = GivenNodes(cluster_of(nodes) if nodes else standalone())
        with Run(ring, made(checkpoint, tmp_path, **options), CONTEXT, n_texts=3) as run:
            found = score_text(run, LONG, 200)
            whole = score_ids(run, [encode(LONG)[:CONTEXT], [5], encode("Who are you?")])
    ids = encode(LONG)
    assert found.windows == [ids[i : i + 200] for i in range(0, len(ids), 200)]
    assert len(found.windows) > 2 and len(found.windows[-1]) < 200
    for window, log_probs_of_window in zip(found.windows, found.log_probs, strict=True):
        np.testing.assert_allclose(log_probs_of_window, expected(window), atol=2e-4)
    for own, found_there in zip((ids[:CONTEXT], encode("Who are you?")), (whole[0], whole[2]), strict=True):
        np.testing.assert_allclose(found_there, expected(own), atol=2e-4)
    assert len(whole[1]) == 0

    assert not found.has_bos and found.n_tokens == len(ids) - len(found.windows)
    assert found.log_probability == pytest.approx(sum(expected(window).sum() for window in found.windows), rel=1e-4)
    assert found.perplexity == pytest.approx(math.exp(-found.log_probability / found.n_tokens))
    assert [token.id for token in found.tokens] == ids
    unscored = [i for i, token in enumerate(found.tokens) if token.log_probability is None]
    assert unscored == list(range(0, len(ids), 200))
    assert "".join(token.text for token in found.tokens) == LONG
    assert found.n_bytes == len(LONG.encode()) - sum(len(found.tokens[i].text.encode()) for i in unscored)
    bits = -found.log_probability / math.log(2)
    assert found.bits_per_byte == pytest.approx(bits / found.n_bytes)
    assert found.bits_per_token == pytest.approx(bits / found.n_tokens)


def test_with_a_first_token_each_window_begins_with_it_and_all_of_the_text_is_scored(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|end|>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    bos, ids = tokenizer().token_to_id("<|end|>"), encode(TEXT)
    with Run(GivenNodes(standalone()), made(folder, tmp_path), 50, n_texts=3) as run:
        found = score_text(run, TEXT)
        one = score_text(run, "a")
    assert found.has_bos and found.n_tokens == len(ids) and found.n_bytes == len(TEXT.encode())
    assert found.windows == [[bos, *ids[i : i + 49]] for i in range(0, len(ids), 49)]
    for window, log_probs_of_window in zip(found.windows, found.log_probs, strict=True):
        np.testing.assert_allclose(log_probs_of_window, expected(window), atol=2e-4)
    assert one.n_tokens == 1 and one.n_bytes == 1


def test_scores_are_the_log_probabilities_with_which_the_tokens_were_drawn(checkpoint: Path, tmp_path: Path) -> None:
    """With a side network, which changes the rows of its texts alone."""
    side_of(checkpoint, tmp_path / "side")
    options = made(checkpoint, tmp_path, adapter=(f"learned={tmp_path / 'side'}",))
    prompt = encode("The ring is closed")
    with Run(GivenNodes(standalone()), options, 40, n_texts=2) as run:
        for adapter in ("", "learned"):
            params = SamplingParams(30, temperature=0, n_logprobs=0)
            events = list(run.engine.submit(prompt, params, adapter=adapter))
            written = [token for event in events for token in event.tokens]
            drawn = [own for event in events for own, _ in event.logprobs]
            for n_best in (0, 3):
                request = run.engine.submit_scores(prompt + written, adapter=adapter, n_best=n_best)
                events = list(request)
                assert [event.finish_reason for event in events if event.finish_reason] == ["length"]
                assert not any(event.tokens for event in events)
                found = [one for event in events for one in event.logprobs]
                assert len(found) == len(prompt + written) - 1
                np.testing.assert_allclose([own for own, _ in found][len(prompt) - 1 :], drawn, atol=1e-5)
                assert all(len(best) == n_best for _, best in found)
            for (own, best), token in zip(found[len(prompt) - 1 :], written, strict=True):  # the best was drawn
                assert best[0] == (token, own) and best[0][1] >= best[1][1] >= best[2][1]


def test_windows() -> None:
    assert cut([1, 2, 3, 4, 5], 2, None) == [[1, 2], [3, 4], [5]]
    assert cut([1, 2, 3, 4], 3, 9) == [[9, 1, 2], [9, 3, 4]]
    assert cut([1], 8, 9) == [[9, 1]]
    for ids, length, first in (([1], 8, None), ([], 8, 9), ([1, 2], 1, None)):
        with pytest.raises(UsageError):
            cut(ids, length, first)


def test_a_text_of_one_token_cannot_be_submitted(checkpoint: Path, tmp_path: Path) -> None:
    with Run(GivenNodes(standalone()), made(checkpoint, tmp_path), 40, n_texts=1) as run:
        with pytest.raises(UsageError):
            run.submit_scores([5])
        with pytest.raises(UsageError):
            run.submit_scores([5, VOCAB + 900])


def test_few_logits_are_in_memory_and_damaged_ones_end_the_run(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        pytest.raises(EngineError, match="--dtype"),
        Run(GivenNodes(standalone()), made(checkpoint, tmp_path), 300) as run,
    ):
        head, sizes = run.engine.stage.head, []

        def counted(x: np.ndarray) -> np.ndarray:
            sizes.append(len(x))
            return head(x)

        monkeypatch.setattr(run.engine.stage, "head", counted)
        score_ids(run, [encode(LONG)[:300]])
        assert max(sizes) <= 64 and sum(sizes) == 299
        monkeypatch.setattr(run.engine.stage, "head", lambda x: head(x) * np.float32(np.nan))
        score_ids(run, [encode(LONG)[:300]])


# The command


def test_the_command(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    path, ids = tmp_path / "text.txt", encode(LONG)
    path.write_bytes(LONG.encode())
    flags = ["--dtype", "float32", "--sequence-length", "64", "--json"]
    assert launch("score", [str(checkpoint), str(path), "--tokens", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    whole = np.concatenate([expected(ids[i : i + 64]) for i in range(0, len(ids), 64)])
    assert found["n_windows"] == math.ceil(len(ids) / 64) and found["window"] == 64 and found["n_nodes"] == 1
    assert found["perplexity"] == pytest.approx(math.exp(-whole.mean(dtype=np.float64)), rel=1e-4)
    assert (found["n_tokens"], found["n_text_tokens"]) == (len(whole), len(ids))
    assert found["n_text_bytes"] == len(LONG.encode()) > found["n_bytes"]
    assert [token["id"] for token in found["tokens"]] == ids and found["tokens"][64]["log_probability"] is None
    assert "".join(token["text"] for token in found["tokens"]) == LONG
    assert found["format"] == "float32" and found["has_bos"] is False

    for argv, data in (([str(checkpoint), "-"], LONG), (["--ckpt", str(checkpoint), "--text", LONG], "")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data.encode())))
        assert launch("score", [*argv, *flags]) == 0
        again = json.loads(capsys.readouterr().out)
        assert again["log_probability"] == found["log_probability"] and "tokens" not in again

    assert launch("score", ["--ckpt", str(checkpoint), str(path), *flags[:-1], "--tokens"]) == 0
    shown = capsys.readouterr().out
    assert f"{found['perplexity']:.4f}" in shown and f"{found['bits_per_byte']:.4f}" in shown
    assert "'🎉'" in shown


def test_over_processes(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--nodes", "2", "--dtype", "float32", "--sequence-length", "64", "--json"]
    assert launch("score", [str(checkpoint), "--text", TEXT, *flags]) == 0
    found, ids = json.loads(capsys.readouterr().out), encode(TEXT)
    assert found["n_nodes"] == 2
    whole = np.concatenate([expected(ids[i : i + 64]) for i in range(0, len(ids), 64)])
    assert found["log_probability"] == pytest.approx(float(whole.sum()), rel=1e-4)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--text", ""], "empty"),
        (["--text", "a"], "one token"),
        ([], "--text"),
        (["-", "--text", "both"], "--text"),
        (["there-is-none.txt"], "there-is-none.txt"),
        (["--text", "Who?", "--sequence-length", str(CONTEXT + 1)], str(CONTEXT)),
        (["--text", "Who are you?", "--sequence-length", "1"], "two"),
        (["--text", "Who?", "--nodes", "2", "--nodes-config", "x.json"], "--nodes-config"),
    ],
)
def test_mistakes_are_one_line(
    argv: list[str], told: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch("score", [str(checkpoint), *argv]) == 2
    printed = capsys.readouterr()
    (line,) = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert told in line and not printed.out
    assert launch("score", [str(checkpoint), *argv, "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {"error": line.removeprefix("error: ")}


def test_a_file_that_is_no_text(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "damaged.txt"
    path.write_bytes(b"The ring\xff")
    assert launch("score", [str(checkpoint), str(path)]) == 2
    assert "byte 8 is not UTF-8" in capsys.readouterr().err
