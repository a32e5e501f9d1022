"""`mdi doctor --model`: a model here beside what another program computes of the same file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from families import greedy
from gguf_files import byte_level_tokens, write_gguf
from mdi.cli import launch
from mdi.run.comparing import CLOSE, N_NEW, TEXTS, Comparison, Difference, other_of
from tiny_checkpoint import tiny_config, tiny_gpt, tokenizer, write_checkpoint

# What llama-cpp-python has of names that are used. It knows what litgpt computes of the tests' own model.
STAND_IN = """
import json, os
from pathlib import Path
import numpy as np

__version__ = "0.0.1"
FAULT = os.environ["FAULT"]
HERE = Path(__file__).parent

class Llama:
    def __init__(self, path, n_ctx, n_batch, n_ubatch, logits_all, verbose, n_gpu_layers, type_k, type_v):
        assert path.endswith("tiny.gguf") and logits_all and not verbose
        if FAULT == "refuses":
            raise ValueError("Failed to load model from file")
        if FAULT == "dies":
            os.abort()

    def tokenize(self, text, add_bos, special):
        assert add_bos and not special
        prompts = json.loads((HERE / "prompts.json").read_text())
        number = list(prompts).index(text.decode())
        self.ids, self.logits = prompts[text.decode()], np.load(HERE / f"{number}.npy")
        return self.ids[1:] if FAULT == "ids" else self.ids

    def reset(self):
        self.n = 0

    def eval(self, ids):
        self.n += len(ids)
        self.scores = self.logits[: self.n, :: -1 if FAULT == "logits" else 1]
"""


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in, and litgpt's logits of greedy texts."""
    folder = tmp_path_factory.mktemp("other") / "llama_cpp"
    folder.mkdir()
    (folder / "__init__.py").write_text(STAND_IN)
    prompts = {text: tokenizer().encode(text).ids for text in TEXTS}
    (folder / "prompts.json").write_text(json.dumps(prompts))
    for number, ids in enumerate(prompts.values()):
        text = [*ids, *greedy(tiny_gpt(), ids, N_NEW)]
        with torch.no_grad():
            np.save(folder / f"{number}.npy", tiny_gpt()(torch.tensor([text]))[0].numpy())
    return folder.parent


@pytest.fixture
def file(tmp_path: Path, known: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MDI_STORE", str(tmp_path / "checkpoints"))
    monkeypatch.setenv("PYTHONPATH", str(known))
    monkeypatch.setenv("FAULT", "")
    tokens = byte_level_tokens(json.loads(tokenizer().to_str()), **{"tokenizer.ggml.eos_token_id": 0})
    return write_gguf(tmp_path / "tiny.gguf", "Llama-3.1-8B", tiny_config(), tiny_gpt().state_dict(), tokens=tokens)


@pytest.fixture
def other(file: Path, known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(known))


@pytest.mark.usefixtures("other")
def test_the_same_model(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("doctor", ["--model", str(file)]) == 0
    told = capsys.readouterr().out
    assert "beside llama-cpp-python 0.0.1" in told and "No problems found" in told
    assert f"equal in {len(TEXTS)} of {len(TEXTS)} texts" in told


@pytest.mark.usefixtures("other")
@pytest.mark.parametrize("fault", ["ids", "logits"])
def test_what_differs_is_printed(
    file: Path, fault: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", fault)
    assert launch("doctor", ["--model", str(file)]) == 1
    told = capsys.readouterr().out
    assert "They compute different models or texts" in told and "No problems" not in told
    assert (f"equal in {len(TEXTS)} of {len(TEXTS)} texts" in told) == (fault == "logits")
    assert ("ids here" in told) == (fault == "ids") and "more than rounding explains" in told


@pytest.mark.usefixtures("other")
def test_as_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("doctor", ["--model", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["differences"] == [] and found["other_ids"] == [] and 0 < found["most_apart"] < 1e-3
    assert found["n_positions"] > 50


@pytest.mark.usefixtures("other")
@pytest.mark.parametrize(("fault", "said"), [("refuses", "Failed to load model"), ("dies", "signal SIGABRT")])
def test_a_program_that_fails_is_one_line(
    file: Path, fault: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", fault)
    assert launch("doctor", ["--model", str(file)]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: llama.cpp cannot compute with tiny.gguf") and said in error


def test_it_says_how_the_other_program_is_installed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("doctor", ["--model", str(file)]) == 2
    error = capsys.readouterr().err
    assert "-m pip install llama-cpp-python" in error and error.count("\n") == 1


def test_only_gguf_files(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path / "tiny")
    assert launch("doctor", ["--model", str(folder)]) == 2
    assert "--export gguf" in capsys.readouterr().err
    for other in ("--nodes-config", "--ckpt"):
        assert launch("doctor", ["--model", str(file), other, "nodes.json"]) == 2
        assert f"leave {other} out" in capsys.readouterr().err


def test_what_rounding_explains() -> None:
    def found(gap: float, apart: float) -> Comparison:
        return Comparison("other", 1, {}, [Difference(0, 3, (1, -0.5), (2, -0.6), gap)], [apart, 0.0])

    assert found(0.9 * CLOSE, 0.1).is_ok and not found(1.1 * CLOSE, 0.1).is_ok
    assert not found(0.1, 1.0).is_ok and not found(0.1, float("inf")).is_ok


@pytest.mark.usefixtures("other")
def test_each_position_has_its_best_tokens(file: Path) -> None:
    (name, (text,)) = other_of(file, TEXTS[:1])
    assert name.endswith("0.0.1") and len(text.best) == len(text.ids) > text.n_prompt
    assert text.ids[text.n_prompt :] == [best[0][0] for best in text.best[text.n_prompt - 1 : -1]]
