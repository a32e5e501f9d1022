"""How far two computations of the same numbers may be apart: from the precision of their types and the number of terms."""

from __future__ import annotations

import torch
from litgpt.config import Config

from families import CONTEXT


def n_terms(config: Config, n_layer: int | None = None) -> int:
    """The most additions that follow each other on the way from an embedding to a logit, for texts of CONTEXT tokens."""
    heads, width = config.n_head * config.head_size, config.moe_intermediate_size or config.intermediate_size
    norms, projections = 2 * config.n_embd, 2 * config.n_embd + heads + width
    attention = config.head_size + 2 * CONTEXT  # scores, their softmax, and the sum of values
    return (config.n_layer if n_layer is None else n_layer) * (norms + projections + attention) + 2 * config.n_embd


def allowed(config: Config, reference: torch.Tensor, kept: torch.dtype = torch.float32) -> float:
    """The largest difference of two results in float32, for numbers as large as those of `reference`.

    A sum of n terms is wrong by n units of roundoff at most, relative to its terms (Higham, Accuracy and Stability of Numerical
    Algorithms, 4.2); both results are, and a type's eps is two of these units. A number that is kept in a smaller type may be
    rounded to one of two neighbours, which are an eps of that type apart, in each block.

    Args:
        kept: type of the caches.
    """
    size = float(reference.float().square().mean().sqrt())
    flips = 0.0 if kept == torch.float32 else config.n_layer * torch.finfo(kept).eps
    return size * (n_terms(config) * torch.finfo(torch.float32).eps + flips)


def assert_alike(
    found: torch.Tensor, expected: torch.Tensor, config: Config, kept: torch.dtype = torch.float32
) -> None:
    """Rows or logits of a model, see `allowed`."""
    torch.testing.assert_close(found, expected, atol=allowed(config, expected, kept), rtol=0)
