"""Adapters that peft wrote give peft's logits at every position, beside each other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mdi.checkpoint.adapters import AdapterName, AdapterSource
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.source import open_source
from mdi.checkpoint.virtual_adapters import open_adapter
from mdi.kernels import library
from mdi.kernels.slices import Slice, with_adapter
from mdi.model.plain import spec_of
from mdi.stages.kernel_stage import KernelStage, Resident

ADAPTERS = Path(__file__).parents[2] / ".venv-references" / "adapters"
NAMES = ("attention", "all")

pytestmark = [
    pytest.mark.skipif(not (ADAPTERS / "version.txt").is_file(), reason="no adapters of peft: make references"),
    pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}"),
]


def test_logits_are_those_of_peft() -> None:
    source = open_source(ADAPTERS / "model")
    adapters = [
        open_adapter(AdapterName(name, ADAPTERS / name), number, source.config, lambda: None)
        for number, name in enumerate(NAMES, 1)
    ]
    of = AdapterSource(adapters, lambda part: source)
    weights = Resident(source.part_names(), lambda part: source.weights(part, Packing("float32", "float32")))
    added = {part: of.weights(part) for part in of.part_names()}
    stage = KernelStage(spec_of(source.config), 0, source.config.n_layer, weights, adapters=added)
    stage.prepare(160)
    ids = json.loads((ADAPTERS / "ids.json").read_text(encoding="utf-8"))
    slices = [Slice(with_adapter(number, number), 0, len(ids)) for number in (1, 2)]
    logits = stage.head(stage(stage.embed(np.array(ids + ids), slices), slices))
    expected = [np.load(ADAPTERS / f"{name}.npy") for name in NAMES]
    assert np.abs(expected[0] - expected[1]).max() > 1
    for name, found, wanted in zip(NAMES, np.split(logits, 2), expected, strict=True):
        assert np.abs(found - wanted).max() < 2e-4 * max(1, np.abs(wanted).max()), name
