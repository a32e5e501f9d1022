"""lm-eval's `local-completions` finds over the API what litgpt's model gives: in an environment of its own, `make lm-eval`."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import ROOT, Server
from tiny_checkpoint import TEXT, encode, reference, tiny_gpt, tokenizer, write_checkpoint

PYTHON = ROOT / ".venv-lm-eval" / "bin" / "python"
PROGRAM = Path(__file__).with_name("ask_as_lm_eval.py")
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="no lm-eval: make lm-eval")
CHOICES = [" a cache", " ring is closed", " all the time", "?"]
DOCUMENTS = [
    {"question": TEXT[:n], "choices": CHOICES[: 2 + n % 3], "answer": n % 2, "text": TEXT[: 300 + n]}
    for n in (8, 40, 77, 120, 33)
]


def log_likelihood(before: list[int], ids: list[int]) -> tuple[float, bool]:
    """Of some ids behind others, and whether they are what the model finds most probable."""
    with torch.no_grad():
        found = tiny_gpt()(torch.tensor([before + ids]))[0][len(before) - 1 : -1].log_softmax(dim=1)
    return float(found.gather(1, torch.tensor(ids)[:, None]).sum()), found.argmax(1).tolist() == ids


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What lm-eval found, by task."""
    folder = tmp_path_factory.mktemp("lm-eval")
    model = write_checkpoint(folder / "tiny")
    (folder / "documents.jsonl").write_text("\n".join(map(json.dumps, DOCUMENTS)))
    own = Server(folder, "--ckpt", model, "--quantize", "float32", "--nodes", 2, "--sequence-length", 400)
    env = {
        **os.environ, "MDI_URL": f"http://127.0.0.1:{own.port}", "MDI_TOKENIZER": str(model), "MDI_MODEL": "tiny",
        "MDI_DOCUMENTS": str(folder / "documents.jsonl"), "HF_HOME": str(folder / "hub"),
    }  # fmt: skip
    try:
        own.wait()
        done = subprocess.run([PYTHON, PROGRAM], capture_output=True, text=True, timeout=400, env=env, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        yield json.loads(done.stdout.splitlines()[-1])
    finally:
        own.end()


def test_choices(told: dict[str, Any]) -> None:
    n_right = 0
    for document, found in zip(DOCUMENTS, told["choices"]["responses"], strict=True):
        question, answers = document["question"], []
        for (value, is_best), choice in zip((one for (one,) in found), document["choices"], strict=True):
            before = encode(question.rstrip())  # lm-eval gives the space to what follows
            expected, expected_best = log_likelihood(before, encode(question + choice)[len(before) :])
            assert value == pytest.approx(expected, abs=1e-3) and is_best == expected_best, choice
            answers.append(expected)
        n_right += answers.index(max(answers)) == document["answer"]
    assert told["choices"]["results"]["acc,none"] == pytest.approx(n_right / len(DOCUMENTS))


def test_whole_texts_in_windows(told: dict[str, Any]) -> None:
    """Each window but the first begins with the last token of the one before, as lm-eval has them."""
    first, total = tokenizer().token_to_id("<|end|>"), 0.0
    for document, ((value,),) in zip(DOCUMENTS, told["rolling"]["responses"], strict=True):
        ids = encode(document["text"])
        assert len(ids) < 199
        expected, _ = log_likelihood([first], ids)
        assert value == pytest.approx(expected, abs=1e-3)
        total += expected
    n_bytes = sum(len(document["text"].encode()) for document in DOCUMENTS)
    assert told["rolling"]["results"]["bits_per_byte,none"] == pytest.approx(-total / n_bytes / math.log(2), rel=1e-5)


def test_written_texts(told: dict[str, Any]) -> None:
    for document, ((text,),) in zip(DOCUMENTS, told["writing"]["responses"], strict=True):
        written = tokenizer().decode(list(reference(document["question"], 12)))
        assert text.strip() == written.split("\n\n")[0].strip()
