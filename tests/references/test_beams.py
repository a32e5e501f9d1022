"""Beam search finds the texts that transformers' finds, over one to three nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mdi.engine.cohort import Beams
from mdi.engine.sequence import SamplingParams
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import ClusterConfig, standalone
from mdi.spec.options import StarterOptions
from references.test_references import MODELS, converted
from references.write_beams import FAMILIES, KINDS, N_BEAMS, N_TOKENS, version
from secondaries import cluster_of, secondaries


def _answers() -> dict[str, Any]:
    path = MODELS / "beams.json"
    if not path.is_file():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    families: dict[str, Any] = found.get("families", {}) if found.get("version") == version(MODELS) else {}
    return families


ANSWERS = _answers()
pytestmark = pytest.mark.skipif(not ANSWERS, reason="no texts of transformers: make references")


def found_by(cluster: ClusterConfig, checkpoint: Path, prompt: list[int], cases: list[dict[str, Any]]) -> list[Any]:
    """Ids of the best texts of all cases, which run at the same time."""
    options = StarterOptions(ckpt=checkpoint, prompt_style="none", device="cpu", dtype="float32", placement="even")
    with Run(GivenNodes(cluster), options, len(prompt) + N_TOKENS, n_texts=N_BEAMS * len(cases)) as run:
        codec, samples = run.model.codec, []
        for case in cases:
            settings = case["settings"]
            codec.eos_ids = frozenset(settings.get("eos_token_id", ()))
            params = SamplingParams(N_TOKENS, repetition_penalty=settings.get("repetition_penalty", 1.0))
            beams = Beams(N_BEAMS, settings["length_penalty"], settings["early_stopping"])
            samples.append(run.submit_beams("", prompt, params, beams, on_texts=[None] * N_BEAMS))
        run.read()
        return [[sample.token_ids for sample in best] for best in samples]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_beams_find_the_texts_of_transformers(name: str, tmp_path: Path) -> None:
    checkpoint, expected = converted(name, tmp_path)
    cases = ANSWERS[name]
    wanted = [case["ids"] for case in cases]
    assert found_by(standalone(), checkpoint, expected["prompt"], cases) == wanted
    with secondaries(2, tmp_path) as nodes:
        for n in (1, 2):
            assert found_by(cluster_of(nodes[:n]), checkpoint, expected["prompt"], cases) == wanted


def test_the_three_kinds_of_early_stopping_differ() -> None:
    """Else the texts would not pin them: somewhere each kind finds other texts with the same settings."""
    found: dict[str, set[str]] = {}
    for name, cases in ANSWERS.items():
        for case in cases:
            settings = {**case["settings"], "early_stopping": name}
            found.setdefault(json.dumps(settings), set()).add(json.dumps(case["ids"]))
    assert max(map(len, found.values())) == len(KINDS)
