"""The perplexity of a fixed English text: in float32 transformers', and nearly so in int8."""

from __future__ import annotations

from pathlib import Path

import pytest

from mdi.checkpoint.ggufsource import gguf_directory
from mdi.kernels import library
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.run.scoring import Score, score_text
from mdi.spec.cluster import standalone
from mdi.spec.options import StarterOptions
from real.answers import expected, published
from real.cases import N_SCORED_CHARACTERS, WINDOW
from real.published import MODELS, TEXT

pytestmark = [
    pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}"),
    pytest.mark.timeout(600),
]

FLOAT32, INT8, OWN, Q4_K = 0.002, 0.003, 0.003, 0.053  # of transformers', and of float32's


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_directory(published(f"models/{name}.gguf"), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def in_float32(checkpoint: Path) -> Score:
    return score(checkpoint, "float32")


def score(checkpoint: Path, form: str) -> Score:
    options = StarterOptions(
        ckpt=checkpoint, prompt_style="none", device="cpu", dtype="float32", quantize=form, quantize_head=form,
        placement="even",
    )  # fmt: skip
    text = published(TEXT).read_text(encoding="utf-8")[:N_SCORED_CHARACTERS]
    with Run(GivenNodes(standalone()), options, WINDOW, n_texts=8) as run:
        found = score_text(run, text, WINDOW)
        run.close()
    return found


def test_a_text_is_as_likely_as_in_transformers(name: str, in_float32: Score) -> None:
    right = expected(name)
    assert in_float32.windows == right["windows"] and in_float32.n_tokens > 3000
    assert in_float32.perplexity == pytest.approx(right["perplexity"], rel=FLOAT32)


def test_a_file_at_its_own_bits_is_nearly_as_good_as_its_exact_numbers(checkpoint: Path, in_float32: Score) -> None:
    assert score(checkpoint, "own").perplexity < (1 + OWN) * in_float32.perplexity


def test_q4_k_costs_less_than_int4(name: str, checkpoint: Path, in_float32: Score) -> None:
    if not name.startswith("SmolLM2"):
        pytest.skip("the bound is for this model")
    assert score(checkpoint, "q4_k").perplexity < (1 + Q4_K) * in_float32.perplexity


def test_int8_makes_it_hardly_less_likely(checkpoint: Path, in_float32: Score) -> None:
    assert score(checkpoint, "int8").perplexity == pytest.approx(in_float32.perplexity, rel=INT8)
