"""Rows behind the final norm that are made one: litgpt's hidden rows, whatever the ring, and whatever else it computes."""

from __future__ import annotations

import json
import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from litgpt.model import GPT

from families import CONTEXT as SHORT
from families import NAMED, config_of, random_gpt
from gguf_files import byte_level_tokens, write_gguf
from mdi.checkpoint.convert import make_ready
from mdi.checkpoint.download import choose_files
from mdi.checkpoint.ggufsource import gguf_directory
from mdi.checkpoint.pooling import pooling_of, write_pooling
from mdi.engine.pooling import Pool
from mdi.engine.sequence import SamplingParams
from mdi.errors import CheckpointError, UsageError
from mdi.kernels import library
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import standalone
from mdi.spec.options import POOLINGS, ParallelOptions
from mdi.text.texts import TextCodec
from mdi.text.tokenizer import FileTokenizer
from secondaries import cluster_of, secondaries
from test_finetune import side_of
from test_score import made
from tiny_checkpoint import CONTEXT, TEXT, VOCAB, encode, reference, tiny_config, tiny_gpt, tokenizer, write_checkpoint

TEXTS = [encode(TEXT * 6)[:CONTEXT], encode("Who are you?"), [5], encode(TEXT)[:66]]
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "in torch": (1, {}),
    "three nodes": (3, {}),
    "a shared head": (2, {"parallel": ParallelOptions("tensor", is_head_shared=True)}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MDI_STORE", str(tmp_path / "store"))


def expected(gpt: GPT, ids: list[int], pooling: str) -> np.ndarray:
    """By litgpt's model without a cache, of length 1."""
    seen: list[torch.Tensor] = []
    with torch.no_grad():
        hook = gpt.lm_head.register_forward_pre_hook(lambda module, given: seen.append(given[0][0]))
        gpt(torch.tensor([ids]))
        hook.remove()
    row = seen[0].mean(0) if pooling == "mean" else seen[0][-1]
    found: np.ndarray = (row / row.norm()).numpy()
    return found


def pooled(run: Run, ids: list[int], pooling: str, adapter: str = "") -> np.ndarray:
    request = run.engine.submit_pooled(ids, pooling, adapter=adapter)
    assert [event.finish_reason for event in request] == ["length"] and request.pooled is not None
    return request.pooled.vector


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_rows_are_those_of_the_reference_beside_texts_that_are_written(
    name: str,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n_nodes, options = RUNS[name]
    if name == "in torch":
        monkeypatch.setattr(library, "load", lambda: None)
    with secondaries(n_nodes - 1, tmp_path) as nodes:
        ring = GivenNodes(cluster_of(nodes) if nodes else standalone())
        with Run(ring, made(checkpoint, tmp_path, **options), CONTEXT, n_texts=6) as run:
            came: Any = queue.SimpleQueue()
            writing = run.engine.submit(encode("The ring"), SamplingParams(40, temperature=0))
            requests = {
                (i, pooling): run.engine.submit_pooled(ids, pooling, came)
                for i, ids in enumerate(TEXTS)
                for pooling in POOLINGS
            }
            ends = [came.get(timeout=60) for _ in requests]
            written = [token for event in writing for token in event.tokens]
    assert {event.seq_id for event in ends} == {request.seq_id for request in requests.values()}
    for (i, pooling), request in requests.items():
        assert request.pooled is not None
        np.testing.assert_allclose(request.pooled.vector, expected(tiny_gpt(), TEXTS[i], pooling), atol=1e-5)
    assert written == list(reference("The ring", 40))


@pytest.mark.parametrize("name", ["pythia-14m", "Gemma-2-9b", "OLMo-1B-hf", "OLMo-2-1124-7B"])
def test_the_final_norm_is_the_familys(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean that is taken off, a bias, weights less one, no weights at all."""
    gpt = random_gpt(config_of(name, **NAMED[name]), 3)
    folder, ids = write_checkpoint(tmp_path / "model", gpt=gpt), [3, 96, 41, 5, 5, 60]
    for _ in ("the kernels", "torch"):
        with Run(GivenNodes(standalone()), made(folder, tmp_path), SHORT, n_texts=1) as run:
            for pooling in POOLINGS:
                np.testing.assert_allclose(pooled(run, ids, pooling), expected(gpt, ids, pooling), atol=1e-5)
        monkeypatch.setattr(library, "load", lambda: None)


def test_with_a_side_network_its_rows_are_pooled(checkpoint: Path, tmp_path: Path) -> None:
    side_of(checkpoint, tmp_path / "side")
    options = made(checkpoint, tmp_path, adapter=(f"learned={tmp_path / 'side'}",))
    ids = encode("Who are you?")
    with Run(GivenNodes(standalone()), options, 40, n_texts=2) as run:
        plain, own = pooled(run, ids, "last"), pooled(run, ids, "last", "learned")
        best = next(iter(run.engine.submit(ids, SamplingParams(1, temperature=0), adapter="learned"))).tokens[0]
        with pytest.raises(UsageError):
            run.engine.submit_pooled([], "last")
    np.testing.assert_allclose(plain, expected(tiny_gpt(), ids, "last"), atol=1e-5)
    logits = [row @ tiny_gpt().lm_head.weight.detach().numpy().T for row in (plain, own)]
    assert logits[1].argmax() == best != logits[0].argmax(), "the head makes of it what is drawn"


def test_a_text_of_zeros_has_no_direction() -> None:
    pool = Pool("mean", 2)
    pool.take(np.zeros((2, 4), dtype=np.float32))
    assert pool.vector.tolist() == [0.0] * 4


MODES = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")


def said(folder: Path, *chosen: str, modules: tuple[str, ...] = ("Transformer", "Pooling", "Normalize")) -> Path:
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    modes = {f"pooling_mode_{mode}": mode in chosen for mode in MODES}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 8, **modes}))
    named = [{"idx": i, "type": f"sentence_transformers.models.{name}"} for i, name in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(named))
    return folder


def test_the_folder_says_how(tmp_path: Path) -> None:
    assert pooling_of(tmp_path) is None
    assert pooling_of(said(tmp_path, "mean_tokens")) == "mean"
    assert pooling_of(said(tmp_path, "lasttoken", modules=("Transformer", "Pooling"))) == "last"
    for modes, modules in ((("cls_token",), ("Pooling",)), (MODES[1::2], ("Pooling",)), (("lasttoken",), ("Dense",))):
        with pytest.raises(CheckpointError):
            pooling_of(said(tmp_path, *modes, modules=modules))
    (said(tmp_path, "lasttoken") / "modules.json").write_text("{")
    with pytest.raises(CheckpointError):
        pooling_of(tmp_path)


def test_what_says_how_is_fetched_and_converted_with_the_model(tmp_path: Path) -> None:
    make_ready(tmp_path / "to", said(tmp_path / "from", "lasttoken"))
    assert pooling_of(tmp_path / "to") == "last"
    own = ["model.safetensors", "config.json", "modules.json", "1_Pooling/config.json"]
    assert choose_files([*own, "2_Normalize/x", "onnx/model.onnx"]) == sorted(own)


@pytest.mark.parametrize(("number", "found"), [(0, None), (1, "mean"), (3, "last"), (None, None)])
def test_a_gguf_file_says_how_and_whether_texts_have_an_end(
    number: int | None, found: str | None, tmp_path: Path
) -> None:
    own = {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.add_eos_token": number == 3}
    tokens = byte_level_tokens(json.loads(tokenizer().to_str()), **own)
    fields = {} if number is None else {"llama.pooling_type": number}
    state = tiny_gpt().state_dict()
    path = write_gguf(tmp_path / "a.gguf", "Llama-3.1-8B", tiny_config(), state, tokens=tokens, changes=fields)
    folder = gguf_directory(path, tmp_path)
    assert pooling_of(folder) == found
    codec = TextCodec.from_checkpoint(folder, "none")
    ids = FileTokenizer(folder, codec.facts()).embedded_ids("The ring")
    assert ids == [*encode("The ring"), *([0] if number == 3 else [])]
    assert FileTokenizer(folder, codec.facts()).embedded_ids("The ring<|end|>") == [*encode("The ring"), 0]


def test_a_gguf_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    write_pooling(tmp_path, 2)
    with pytest.raises(CheckpointError, match="cls"):
        pooling_of(tmp_path)


def test_a_text_that_does_not_fit_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with Run(GivenNodes(standalone()), made(checkpoint, tmp_path), 40, n_texts=1) as run, pytest.raises(UsageError):
        run.engine.submit_pooled([VOCAB - 1] * 41, "mean")
