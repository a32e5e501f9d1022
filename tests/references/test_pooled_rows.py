"""A model that embeds texts, as such ones are published, without a head and a prefix of names: transformers' pooled rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mdi.checkpoint.convert import convert, make_ready
from mdi.checkpoint.folder import is_readable_hf
from mdi.checkpoint.pooling import pooling_of
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import standalone
from mdi.spec.options import StarterOptions
from references.test_references import MODELS, pytestmark
from secondaries import cluster_of, secondaries
from tiny_checkpoint import tokenizer

__all__ = ["pytestmark"]
IDS = [[3, 41, 60, 5, 5, 90, 12] * 5, [7], [64, 2, 9]]
PROGRAM = """
import json, sys, torch, transformers
source, target, ids = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model = transformers.AutoModel.from_pretrained(source, dtype=torch.float32).eval()
model.save_pretrained(target)
found = {"mean": [], "last": []}
with torch.no_grad():
    for one in ids:
        rows = model(torch.tensor([one])).last_hidden_state[0]
        for name, row in (("mean", rows.mean(0)), ("last", rows[-1])):
            found[name].append((row / row.norm()).tolist())
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma2"])
def test_rows_are_those_of_transformers(name: str, tmp_path: Path, transformers: Callable[..., str]) -> None:
    folder = tmp_path / "embedding"
    expected = json.loads(transformers(PROGRAM, MODELS / name, folder, json.dumps(IDS)).splitlines()[-1])
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true, "include_prompt": true}')
    assert is_readable_hf(folder) and pooling_of(folder) == "last"
    converted = tmp_path / "converted"
    make_ready(converted, folder)
    convert(folder, target=converted)
    assert pooling_of(converted) == "last"
    for checkpoint, n_nodes in ((folder, 1), (folder, 3), (converted, 1)):
        options = StarterOptions(
            ckpt=checkpoint, cache_dir=tmp_path, prompt_style="none", device="cpu", dtype="float32", placement="even"
        )
        with secondaries(n_nodes - 1, tmp_path / f"{n_nodes}") as nodes:
            ring = GivenNodes(cluster_of(nodes) if nodes else standalone())
            with Run(ring, options, 60, n_texts=3) as run:
                for pooling, rows in expected.items():
                    requests = [run.engine.submit_pooled(ids, pooling) for ids in IDS]
                    for request, row in zip(requests, rows, strict=True):
                        assert [event.finish_reason for event in request] == ["length"] and request.pooled is not None
                        np.testing.assert_allclose(request.pooled.vector, row, atol=1e-5)
