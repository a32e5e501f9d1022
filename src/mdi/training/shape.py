"""A checkpoint folder as training sees it: the shape to read, the weights to write.

Knows litgpt's files and its GPT; knows nothing of data or optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
import yaml
from litgpt.config import Config
from litgpt.model import GPT

from mdi.checkpoint.files import replacing
from mdi.errors import CheckpointError
from mdi.training.storage import missing

WEIGHTS_NAME = "lit_model.pth"


def load_shape(folder: Path) -> Config:
    """The litgpt Config in model_config.yaml.

    Raises:
        CheckpointError: the folder or the file is missing or does not describe a model.
    """
    if not folder.is_dir():
        raise CheckpointError(missing(folder, "the checkpoint folder"))
    path = folder / "model_config.yaml"
    if not path.is_file():
        raise CheckpointError(f"{folder} holds no model_config.yaml; it has to give the shape of the model to train")
    try:
        return Config.from_file(path)
    except (yaml.YAMLError, TypeError, ValueError, AssertionError, AttributeError, OSError) as err:
        raise CheckpointError(f"{path} does not describe a litgpt model: {type(err).__name__}: {err}") from err


def new_model(config: Config, seed: int) -> GPT:
    """A GPT with random float32 weights on the CPU; the same seed gives the same weights.

    Normal with deviation 0.02; what writes into the residual stream is smaller by sqrt(2 n_layer), so that the
    stream's size does not grow with depth (GPT-2's way).
    """
    generator_state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = GPT(config)
        model.apply(model._init_weights)
        for name, weight in model.named_parameters():
            if name.endswith(("attn.proj.weight", "mlp.proj.weight")):
                torch.nn.init.normal_(weight, std=0.02 / math.sqrt(2 * config.n_layer))
    finally:
        torch.random.set_rng_state(generator_state)
    return model


def save_checkpoint(model: GPT, folder: Path, dtype: torch.dtype, tokenizer: Mapping[str, bytes]) -> Path:
    """Writes the tokenizer's files and lit_model.pth: a state dict with litgpt's names, floating point as `dtype`.

    Each file is replaced whole: an interrupted save leaves the one that was there.

    Returns:
        the path of the weights.

    Raises:
        CheckpointError: a file cannot be written.
    """
    for name, content in tokenizer.items():
        with replacing(folder / name) as handle:
            handle.write(content)
    state = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in model.state_dict().items()
    }
    path = folder / WEIGHTS_NAME
    with replacing(path) as handle:
        torch.save(state, handle)
    return path
