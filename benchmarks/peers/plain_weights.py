"""A litgpt checkpoint's plain weights on a device; random ones where it is a configuration without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def weights_of(folder: Path, config: Any, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """By litgpt's names."""
    from litgpt.model import GPT

    path = folder / "lit_model.pth"
    if path.is_file():
        weights = torch.load(path, weights_only=True, mmap=True)
        return {name: t.to(device=device, dtype=dtype) for name, t in weights.items()}
    with torch.device("meta"):
        shapes = {name: t.shape for name, t in GPT(config).state_dict().items()}
    weights = {name: torch.ones(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
    for tensor in weights.values():
        if tensor.dim() > 1:
            tensor.normal_(0, 0.02)
    return weights
