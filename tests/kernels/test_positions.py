"""Scaled rotary positions are those of transformers: numbers that its ROPE_INIT_FUNCTIONS gave, and where lengths
end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdi.checkpoint.hfconfig import derive_config
from mdi.kernels.positions import rope_tables
from mdi.model.plain import ModelConfig, spec_of
from mdi.model.spec import Rotary

LLAMA: dict[str, Any] = {
    "model_type": "llama", "rms_norm_eps": 1e-6, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
    "intermediate_size": 64, "vocab_size": 320, "max_position_embeddings": 160, "head_dim": 16,
}  # fmt: skip
SIZES: dict[str, Any] = {"n_embd": 64, "n_head": 4, "rotary_percentage": 1.0}
# fmt: off
# rope_parameters of config.json, the base, the length of the text; cosines and sines at position 37, of transformers 5.23
RECORDED: list[tuple[dict[str, Any], float, int, list[float], list[float]]] = [
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 10000.0, 160,
     [0.871523, -0.906818, -0.313795, 1.090264, 1.133762, 1.138142, 1.138581, 1.138625],
     [-0.732751, 0.688592, 1.094536, 0.328332, 0.105173, 0.033301, 0.010532, 0.003331]),
    ({"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 40, "truncate": False, "beta_fast":
     32.0, "beta_slow": 1.0}, 150000.0, 160,
     [1.030686, -0.354676, 1.34425, 1.346456, 1.346568, 1.346573, 1.346574, 1.346574],
     [-0.866571, 1.299025, 0.07907, 0.017833, 0.00402, 0.000906, 0.000204, 4.6e-05]),
    ({"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim":
     0.7, "beta_fast": 16, "beta_slow": 2}, 10000.0, 160,
     [0.832736, 1.043542, 1.083304, 1.087489, 1.087908, 1.08795, 1.087954, 1.087955],
     [-0.70014, -0.307678, 0.100492, 0.031819, 0.010063, 0.003182, 0.001006, 0.000318]),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.8}, 10000.0,
     160,
     [0.612331, -0.637129, -0.220472, 0.766018, 0.79658, 0.799658, 0.799966, 0.799997],
     [-0.514831, 0.483804, 0.76902, 0.230686, 0.073895, 0.023398, 0.0074, 0.00234]),
    ({"rope_type": "longrope", "original_max_position_embeddings": 64, "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5,
     1.6, 1.7000000000000002], "long_factor": [1.5, 2.4, 3.3, 4.2, 5.1, 6.0, 6.9, 7.8]}, 10000.0, 50,
     [0.845539, -0.387934, -1.102807, 0.686653, 1.066326, 1.101323, 1.104386, 1.104656],
     [-0.710905, -1.034325, 0.064321, 0.865349, 0.288565, 0.086081, 0.025543, 0.007603]),
    ({"rope_type": "longrope", "original_max_position_embeddings": 64, "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5,
     1.6, 1.7000000000000002], "long_factor": [1.5, 2.4, 3.3, 4.2, 5.1, 6.0, 6.9, 7.8]}, 10000.0, 160,
     [0.986856, 0.179037, 0.480085, 1.062092, 1.101776, 1.104472, 1.104666, 1.10468],
     [-0.496424, -1.090077, 0.994907, 0.303779, 0.080073, 0.021541, 0.005924, 0.001657]),
    ({"rope_type": "dynamic", "factor": 4.0}, 10000.0, 160,
     [0.765414, 0.647922, -0.8481, 0.390112, 0.932327, 0.993163, 0.999316, 0.999932],
     [-0.643538, -0.761707, -0.529836, 0.920767, 0.361615, 0.116737, 0.036992, 0.0117]),
    ({"rope_type": "dynamic", "factor": 4.0}, 10000.0, 300,
     [0.765414, -0.999911, -0.742451, 0.817281, 0.987755, 0.999202, 0.999948, 0.999997],
     [-0.643538, -0.013345, 0.6699, 0.57624, 0.156013, 0.039949, 0.010193, 0.0026]),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 40}, 10000.0, 160,
     [0.765414, 0.206238, 0.89494, 0.989324, 0.998931, 0.999893, 0.999989, 0.999999],
     [-0.643538, -0.978502, 0.446187, 0.145734, 0.046234, 0.014625, 0.004625, 0.001463]),
    ({"rope_type": "linear", "factor": 3.0}, 10000.0, 160,
     [0.97297, -0.725834, 0.331094, 0.924904, 0.992404, 0.99924, 0.999924, 0.999992],
     [-0.230933, -0.68787, 0.943598, 0.380202, 0.123021, 0.038992, 0.012333, 0.0039]),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 10000.0, 160,
     [0.871523, 0.737743, -0.965672, 0.444193, 1.061575, 1.133488, 1.138325, 1.138615],
     [-0.732751, -0.867302, -0.603287, 1.048413, 0.411746, 0.108082, 0.026328, 0.005829]),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "beta_fast": 4.0}, 10000.0, 160,
     [0.871523, 0.737743, -0.965672, 0.444193, 1.095069, 1.136682, 1.138581, 1.138625],
     [-0.732751, -0.867302, -0.603287, 1.048413, 0.31193, 0.066574, 0.010532, 0.003331]),
]
# fmt: on


def tables(scaling: dict[str, Any], base: float, length: int) -> tuple[np.ndarray, np.ndarray]:
    config = derive_config(
        {**LLAMA, "rope_parameters": {**scaling, "rope_theta": base}}, "my-model", Path("config.json")
    )
    rotary = spec_of(config).blocks[0].mixer.positions
    assert isinstance(rotary, Rotary)
    return rope_tables(rotary, length)


@pytest.mark.parametrize(("scaling", "base", "length", "cos", "sin"), RECORDED)
def test_tables_are_those_of_transformers(
    scaling: dict[str, Any], base: float, length: int, cos: list[float], sin: list[float]
) -> None:
    found = tables(scaling, base, length)
    for table, expected in zip(found, (cos, sin), strict=True):
        assert table.shape == (length, 16) and np.array_equal(table[:, :8], table[:, 8:])
        assert np.abs(table[37, :8] - expected).max() < 2e-6


@pytest.mark.parametrize(("kind", "end"), [("longrope", 64), ("dynamic", 160)])
def test_a_run_as_long_as_the_original_length_is_not_scaled_further(kind: str, end: int) -> None:
    scaling = next(scaling for scaling, *_ in RECORDED if scaling["rope_type"] == kind)
    short, within, beyond = (tables(scaling, 10000.0, n)[0] for n in (10, end, end + 1))
    assert np.array_equal(within[:10], short) and not np.array_equal(beyond[:10], short)


@pytest.mark.parametrize(
    "change",
    [
        {"factor": 0.0}, {"factor": float("nan")}, {"factor": "4"}, {"factor": True}, {"beta_fast": -1.0},
        {"original_max_position_embeddings": [1]},
    ],
)  # fmt: skip
def test_settings_of_which_no_table_can_be_made_are_refused(change: dict[str, Any]) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert ModelConfig(**SIZES, rope_adjustments=yarn)
    with pytest.raises(ValueError):
        ModelConfig(**SIZES, rope_adjustments={**yarn, **change})
