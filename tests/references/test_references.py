"""Folders that transformers 5 wrote give its own tokens and probabilities, over one node and over three.

transformers needs another huggingface_hub than litgpt, so `make references` makes it an environment of its own.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mdi.checkpoint.convert import convert
from mdi.engine.sequence import Event, SamplingParams
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import ClusterConfig, standalone
from mdi.spec.options import StarterOptions
from references.write_models import FAMILIES, version
from secondaries import cluster_of, secondaries
from tiny_checkpoint import tokenizer

MODELS = Path(__file__).parents[2] / ".venv-references" / "models"
TOLERANCE = 2e-4  # of log probabilities: float32 sums of a hundred terms, in another order


def _is_written() -> bool:
    written = MODELS / "version.txt"
    return written.is_file() and written.read_text(encoding="utf-8") == version()


pytestmark = pytest.mark.skipif(not _is_written(), reason="no models of transformers: make references")


def converted(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The family's model, ready for a run, and what transformers computes with it."""
    shutil.copytree(MODELS / name, folder / name)
    tokenizer().save(str(folder / name / "tokenizer.json"))
    expected = json.loads((folder / name / "reference.json").read_text(encoding="utf-8"))
    assert min(expected["leads"]) > 4 * TOLERANCE, "a close second best: ids must not depend on rounding"
    return convert(folder / name, progress=False), expected


def generated(
    cluster: ClusterConfig, checkpoint: Path, prompt: list[int], n_tokens: int
) -> tuple[list[int], list[float]]:
    """Ids of a greedy text, and the log probability of each."""
    options = StarterOptions(ckpt=checkpoint, prompt_style="none", device="cpu", dtype="float32", placement="even")
    logprobs: list[float] = []
    with Run(GivenNodes(cluster), options, len(prompt) + n_tokens, n_texts=1) as starter:
        sample = starter.submit("", prompt, SamplingParams(n_tokens, temperature=0, n_logprobs=0))
        take = sample.take

        def kept(event: Event) -> None:
            logprobs.extend(own for own, _ in event.logprobs)
            take(event)

        sample.take = kept  # type: ignore[method-assign]
        starter.read()
        starter.close()
    return sample.token_ids, logprobs


def check(cluster: ClusterConfig, checkpoint: Path, expected: dict[str, Any]) -> None:
    ids, logprobs = generated(cluster, checkpoint, expected["prompt"], len(expected["ids"]))
    assert ids == expected["ids"]
    assert logprobs == pytest.approx(expected["logprobs"], abs=TOLERANCE, rel=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_that_transformers_wrote_gives_its_tokens(name: str, tmp_path: Path) -> None:
    checkpoint, expected = converted(name, tmp_path)
    check(standalone(), checkpoint, expected)
    with secondaries(2, tmp_path) as nodes:
        check(cluster_of(nodes), checkpoint, expected)
