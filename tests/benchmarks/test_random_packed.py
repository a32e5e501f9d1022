"""Weights that are made up in packed form have the sizes and the spread of real ones."""

import numpy as np
import pytest

from mdi.checkpoint.packing import plain
from mdi.kernels.weight_formats import LAYOUTS
from mdi.model.plain import ModelConfig
from mdi.model.tensors import EMBEDDING
from random_checkpoint import config_of
from random_packed import RandomPacked


@pytest.mark.parametrize("form", LAYOUTS)
def test_made_up_weights_exist_in_every_format(form):
    source = RandomPacked(ModelConfig.from_litgpt(config_of("tiny-3m")), form)
    table = plain(source.weights("embedding", source.packing))[EMBEDDING]
    assert table.shape == (32000, 256) and 0.015 < np.std(table) < 0.025
    assert all(len(source.array(name)) == spec.shape[0] for name, spec in source.specs.items())
