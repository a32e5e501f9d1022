"""Products in plain numbers whose rows do not depend on the number of rows.

A matrix product adds up in another order for one row than for eight, which changes the last bits. Where the next layer
rounds its input to 8 bits, or an expert is chosen by the result, the last bits become visible: logits of mixtures of experts
differed by 0.03 between a sequence alone and one in a batch. So routers and the products of latent attention always take TILE
rows, of which those beyond the end are zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from litgpt.model import LLaMAMoE

from mdi.model.attention import CachedLatentAttention

# One row costs little more in a tile of eight, and 64 rows of a prompt read the weights eight times, not sixteen.
TILE = 8

Results = tuple[torch.Tensor, ...]


def keep_rows_apart(root: nn.Module) -> None:
    """Let routers and latent attention below `root` compute in tiles; harmless if repeated."""
    for module in root.modules():
        if isinstance(module, LLaMAMoE):
            _tile_router(module.gate)
        elif isinstance(module, CachedLatentAttention):
            module.multiply = tiled_bmm


def tiled_bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """torch.bmm: (B, N, K) and (B, K, M) -> (B, N, M)"""
    return torch.cat([torch.bmm(tile, b) for tile in _tiles(a, 1)], dim=1)[:, : a.size(1)]


def _tile_router(gate: nn.Module) -> None:
    """In place, because the names of its weights must stay."""
    if "forward" in vars(gate):
        return
    whole: Callable[[torch.Tensor], torch.Tensor | Results] = gate.forward

    def forward(x: torch.Tensor) -> torch.Tensor | Results:
        """(N, n_embd) -> the router's results for N rows"""
        results = [whole(tile) for tile in _tiles(x, 0)]
        if isinstance(results[0], torch.Tensor):
            return torch.cat(results)[: x.size(0)]  # type: ignore[arg-type]
        return tuple(torch.cat(parts)[: x.size(0)] for parts in zip(*results, strict=True))

    gate.forward = forward


def _tiles(x: torch.Tensor, dim: int) -> list[torch.Tensor]:
    """`x` in pieces of TILE along `dim`, each in memory of its own, because some kernels depend on the alignment."""
    after = x.dim() - dim - 1
    padded = F.pad(x, (*(0, 0) * after, 0, -x.size(dim) % TILE))
    return [tile.clone(memory_format=torch.contiguous_format) for tile in padded.split(TILE, dim)]
