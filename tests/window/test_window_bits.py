"""A stage with a window computes the bits of one that holds all its weights, whatever the window."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from windows import FRAMES, checkpoint, chunks, run, same, whole, windowed

from families import FAMILIES, config_of
from mdi.checkpoint.packing import Packing
from mdi.kernels import library
from mdi.kernels.blocks import why_not_in_kernels
from mdi.kernels.layout import LAYOUTS
from mdi.kernels.slices import Slice
from mdi.model.plain import ModelConfig
from mdi.spec.window import WindowOptions

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")

KNOWN = [family for family in FAMILIES if why_not_in_kernels(ModelConfig.from_litgpt(config_of(family))) is None]


def test_every_window_and_retention(tmp_path: Path) -> None:
    (chunk,) = chunks(tmp_path)
    expected = run(whole(chunk, 0, 5))
    for units in (1, 2, 3, 4, 5, 7, 10, 11, 50):
        for retain in (None, 1, 2, 3, 5, 9):
            stage = windowed(chunk, 0, 5, WindowOptions(units, retain))
            try:
                assert same(run(stage), expected), (units, retain)
            finally:
                stage.close()


@pytest.mark.parametrize("form", LAYOUTS)
def test_every_format(tmp_path: Path, form: str) -> None:
    starter, secondary = chunks(tmp_path, form=form, n_starter=2)
    for source, start, stop in ((starter, 0, 2), (secondary, 2, 5)):
        stage = windowed(source, start, stop, WindowOptions(2, 2))
        try:
            assert same(run(stage), run(whole(source, start, stop)))
        finally:
            stage.close()


@pytest.mark.parametrize("family", KNOWN)
def test_every_family(tmp_path: Path, family: str) -> None:
    (chunk,) = chunks(tmp_path, family, n_starter=9)
    n_layer = chunk.config.n_layer
    stage = windowed(chunk, 0, n_layer, WindowOptions(2, 3))
    try:
        assert same(run(stage), run(whole(chunk, 0, n_layer)))
    finally:
        stage.close()


@pytest.mark.parametrize("form", ["float32", "int8"])
def test_weights_that_lie_nowhere_packed_are_packed_first(tmp_path: Path, form: str) -> None:
    source = checkpoint(tmp_path)
    packing = Packing(form, form)
    stage = windowed(source, 0, 5, WindowOptions(2), packing, tmp_path / "spill")
    try:
        assert same(run(stage), run(whole(source, 0, 5, packing)))
        assert list((tmp_path / "spill").iterdir()) == [], "the file has no name, and goes with the process"
    finally:
        stage.close()


def test_several_texts_in_one_frame_are_one_pass(tmp_path: Path) -> None:
    (chunk,) = chunks(tmp_path)
    stage, reference = windowed(chunk, 0, 5, WindowOptions(2)), whole(chunk, 0, 5)
    try:
        ids = np.arange(24)
        slices = [Slice(i, 0, 3) for i in range(8)]
        assert np.array_equal(stage(stage.embed(ids), slices), reference(reference.embed(ids), slices))
        rows = stage.embed(ids[:8])
        steps = [Slice(i, 3, 1) for i in range(8)]
        found, expected = stage(rows, steps), reference(rows, steps)
        assert np.array_equal(stage.head(found), reference.head(expected))
        assert stage.n_finished == reference.n_finished == 10
    finally:
        stage.close()


def test_halves_in_another_order_than_expected_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    """Prompts in pieces: blocks, and blocks again, without the head between them."""
    (chunk,) = chunks(tmp_path)
    stage, reference = windowed(chunk, 0, 5, WindowOptions(3)), whole(chunk, 0, 5)
    try:
        position = 0
        for n_rows in FRAMES:
            x = reference.embed(np.arange(n_rows))
            y = stage(x, [Slice(0, position, n_rows)])
            assert np.array_equal(y, reference(x, [Slice(0, position, n_rows)]))
            position += n_rows
        assert np.array_equal(stage.head(y), reference.head(y))
        assert np.array_equal(stage.head(y), reference.head(y))
    finally:
        stage.close()
