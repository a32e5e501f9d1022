"""Tokens that a model's generation_config.json says it is not to write: in commands, in searches and behind the server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from own_server import SEEDS, TEXT, right, run, server

from mdi.cli import launch
from tiny_checkpoint import encode, tiny_gpt, tokenizer, write_checkpoint

N_TOKENS = 8


def without(suppressed: set[int]) -> list[int]:
    """litgpt's greedy tokens behind the text, but for these."""
    ids, gpt = encode(TEXT), tiny_gpt(SEEDS["one"])
    for _ in range(N_TOKENS):
        with torch.no_grad():
            order = gpt(torch.tensor([ids]))[0, -1].argsort(descending=True).tolist()
        ids.append(next(token for token in order if token not in suppressed))
    return ids[-N_TOKENS:]


@pytest.fixture
def suppressed(tmp_path: Path) -> list[int]:
    """What the model would write, in the file of a checkpoint of its seed."""
    wanted = right("one", N_TOKENS)[:3]
    folder = write_checkpoint(tmp_path / "one", SEEDS["one"])
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": wanted}))
    return wanted


def test_commands(tmp_path: Path, suppressed: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--prompt", TEXT, "--n-tokens", str(N_TOKENS), "--temperature", "0", "--dtype", "float32", "--json"]
    expected = without(set(suppressed))
    for more in ([], ["--draft", "none"], ["--beams", "1"]):
        assert launch("sample", ["--ckpt", str(tmp_path / "one"), "--prompt-style", "none", *flags, *more]) == 0
        (sample,) = json.loads(capsys.readouterr().out)["samples"]
        assert sample["text"].removeprefix(TEXT) == tokenizer().decode(encode(TEXT) + expected).removeprefix(TEXT)


def test_the_server(tmp_path: Path, suppressed: list[int]) -> None:
    async def scenario() -> None:
        async with server(tmp_path, []) as made:
            assert await made.write("one", N_TOKENS) == without(set(suppressed))

    run(scenario())
