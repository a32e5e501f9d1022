"""A block in torch, as its BlockSpec says. Its parameters have the names in which weights are stored.

Rows come as (N, width). Where they stand, and what they see, an object of `mdi.stages.torch_attention` knows: `Batch` of a
frame's rows and their caches, or `Texts` of whole texts without caches, through which gradients go.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn as nn
import torch.nn.functional as F

from mdi.model.spec import (
    Attention,
    BlockSpec,
    DeltaNet,
    Dense,
    Experts,
    Gated,
    LatentAttention,
    Mixer,
    Norm,
    Rotary,
)

# One row costs little more in a tile of eight, and 64 rows of a prompt read the weights eight times, not sixteen.
TILE = 8
GLU_FACTOR = 1.702  # of gpt-oss, in the sigmoid of its gates

_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class Rows(Protocol):
    """The rows that a block computes, see the module."""

    def tables(self, of: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the rows' positions, as `rotate_` needs them."""

    def attend(
        self, of: Attention | LatentAttention, layer: int, q: torch.Tensor, k: torch.Tensor | None,
        v: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of all rows.

        Args:
            layer: place of the block in its stage.
            q: (N, n_head, k_size). k: (N, G, k_size); None: keys and values are in the cache. v: (N, G, v_size); None, with
                keys: their first numbers are the values.
            sinks: (n_head)

        Returns:
            (N, n_head, v_size)
        """

    def recur(self, of: DeltaNet, layer: int, taps: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """What the states of a delta net give.

        Args:
            layer: place of the block in its stage.
            taps: (n_channels, n_taps)
            kept: float32 (N, n_channels + 2 * n_head): what goes into the convolution; b and e^g of each head.

        Returns:
            float32 (N, n_head, v_size)
        """


class Block(nn.Module):
    """See the module.

    Args:
        width: of its rows.
        layer: its place in its stage.
    """

    def __init__(self, of: BlockSpec, width: int, layer: int = 0) -> None:
        super().__init__()
        self.of = of
        self.norm_1 = norm_of(of.norm_1, width)
        self._mixer = "delta" if isinstance(of.mixer, DeltaNet) else "attn"
        self.add_module(self._mixer, mixer_of(of.mixer, width, layer))
        self.post_attention_norm = norm_of(of.post_attention_norm, width)
        self.norm_2 = norm_of(of.norm_2, width)
        self.mlp = Chosen(of.mlp, width) if isinstance(of.mlp, Experts) else Mlp(of.mlp, width)
        self.post_mlp_norm = norm_of(of.post_mlp_norm, width)
        if of.gated is not None:
            self.gated = Addition(of.gated, width)
        if of.has_scalar:
            self.scalar = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, rows: Rows, column: torch.Tensor | None = None) -> torch.Tensor:
        """(N, width) -> (N, width)

        Args:
            column: (N, numbers of `Gated.column`)
        """
        normed = self.norm_1(x)
        attended = self.get_submodule(self._mixer)(normed, rows)
        if self.of.residual == "behind":
            x = self.post_attention_norm(attended + x)
            behind: torch.Tensor = self.post_mlp_norm(self.mlp(self.norm_2(x)) + x)
            return behind
        before, x = x, self.post_attention_norm(attended) + x
        if not self.of.norm_is_shared:
            normed = self.norm_2(before if self.of.residual == "parallel" else x)
        added = self.mlp(normed, x) if isinstance(self.mlp, Chosen) else self.mlp(normed)  # x: what norm_2 reads
        found: torch.Tensor = self.post_mlp_norm(added) + x
        if self.of.gated is not None:
            found = found + self.gated(found, column)
        return found * self.scalar if self.of.has_scalar else found


class Addition(nn.Module):
    """See `mdi.model.spec.Gated`."""

    def __init__(self, of: Gated, width: int) -> None:
        super().__init__()
        self._function = _FUNCTIONS[of.activation]
        self.fc = nn.Linear(width, of.width, bias=False)
        self.proj = nn.Linear(of.width, width, bias=False)
        self.norm = norm_of(of.norm, width)

    def forward(self, x: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """(N, width) and (N, numbers of the column) -> (N, width)"""
        found: torch.Tensor = self.norm(self.proj(self._function(self.fc(x)) * column))
        return found


def mixer_of(of: Mixer, width: int, layer: int) -> nn.Module:
    if isinstance(of, DeltaNet):
        return Delta(of, width, layer)
    return Latents(of, width, layer) if isinstance(of, LatentAttention) else Heads(of, width, layer)


class UnitRms(nn.Module):
    """An RMSNorm to whose weights one is added."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, 1 + self.weight.float(), self._eps).to(x.dtype)


def norm_of(norm: Norm | None, size: int) -> nn.Module:
    """The norm of rows of so many numbers; what changes nothing for None."""
    if norm is None:
        return nn.Identity()
    if norm.kind == "layer":
        return nn.LayerNorm(size, norm.eps, elementwise_affine=norm.has_weight, bias=norm.has_bias)
    return UnitRms(size, norm.eps) if norm.unit_offset else nn.RMSNorm(size, norm.eps, norm.has_weight)


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
    """Rotary positions, in place.

    Args:
        x: (N, heads, size), memory of the caller's own.
        cos, sin: (N, 1, size) for the positions of the rows; of the sine, the first half is negated, and not that half of x
            (with an odd size, it is the larger one).
        interleaved: whether the two numbers of a pair lie beside each other, and not half a head apart; they are then brought
            into the order that is half a head apart.
    """
    if not interleaved and x.dtype == cos.dtype:
        turned = x.roll(-(x.size(-1) // 2), -1)
        x.mul_(cos).addcmul_(turned, sin)
        return
    apart = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if interleaved else x
    x.copy_(apart * cos + apart.roll(-(x.size(-1) // 2), -1) * sin)  # rounded once, at the end


class Heads(nn.Module):
    """Multi-head, grouped-query or multi-query attention."""

    def __init__(self, of: Attention, width: int, layer: int) -> None:
        super().__init__()
        self.of, self.layer = of, layer
        self.qkv = nn.Linear(width, sum(of.made) * of.head_size, bias=of.qkv_bias)
        self.proj = nn.Linear(of.n_head * of.head_size, width, bias=of.bias)
        if of.has_gate:
            self.out_gate = nn.Linear(width, of.n_head * of.head_size, bias=False)
        if of.qk_norm is not None:
            n_q, n_k = (of.n_head, of.n_groups) if of.qk_norm_over_all else (1, 1)
            self.norm_q = norm_of(of.qk_norm, n_q * of.head_size)
            if of.makes != "nothing":
                self.norm_k = norm_of(of.qk_norm, n_k * of.head_size)
        self.norm_v = norm_of(of.v_norm, of.head_size)
        self.sinks = nn.Parameter(torch.empty(of.n_head)) if of.has_sinks else None

    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        """(N, width) -> (N, width)"""
        of = self.of
        heads = self.qkv(x).view(len(x), -1, of.head_size)
        if of.makes == "keys":
            heads = torch.cat((heads, heads[:, of.n_head :]), dim=1)
        n_kept = 0 if of.makes == "nothing" else of.n_groups
        if of.qk_norm is not None:
            heads = self._normed(heads, n_kept)
        if isinstance(of.positions, Rotary) and of.positions.n_elem:
            turned = heads[:, : of.n_head + n_kept]  # queries and keys are adjacent, and are rotated together
            if of.positions.n_elem != of.head_size:
                turned = turned[..., : of.positions.n_elem]
            rotate_(turned, *rows.tables(of.positions), of.positions.interleaved)
        q, k, v = heads.split([of.n_head, n_kept, n_kept], dim=1)
        own = (k, v) if n_kept else (None, None)
        attended = rows.attend(of, self.layer, q, own[0], own[1], self.sinks).flatten(1)
        if of.has_gate:
            attended = attended * torch.sigmoid(self.out_gate(x))
        found: torch.Tensor = self.proj(attended)
        return found

    def _normed(self, heads: torch.Tensor, n_kept: int) -> torch.Tensor:
        """(N, n_head + 2 * n_kept, head_size), with the norms of queries, keys and values."""
        of = self.of
        q, k, v = heads.split([of.n_head, n_kept, n_kept], dim=1)
        if not n_kept:
            normed: torch.Tensor = self.norm_q(q)
            return normed
        if of.qk_norm_over_all:
            q, k = self.norm_q(q.flatten(1)).view_as(q), self.norm_k(k.flatten(1)).view_as(k)
        else:
            q, k = self.norm_q(q), self.norm_k(k)
        return torch.cat((q, k, self.norm_v(v)), dim=1)


class Latents(nn.Module):
    """Multi-head latent attention (DeepSeek V2/V3), whose cache has the latent rows, not the heads.

    The up-projections of keys and values are absorbed into the query and the output (DeepSeek-V2 paper, section 2.1.2):
    per position the cache holds kv_rank + rope_size values, shared by all heads, as if there were one group.
    A key bias would add the same to all scores of a query and drops out of the softmax; a value bias is added at the end.

    Attributes:
        is_tiled: whether its products take TILE rows at a time, see `keep_rows_apart`.
    """

    def __init__(self, of: LatentAttention, width: int, layer: int) -> None:
        super().__init__()
        self.of, self.layer, self.is_tiled = of, layer, False
        norm = Norm("rms", of.norm_eps)
        n_queries = of.n_head * (of.nope_size + of.rope_size)
        if of.q_rank is None:
            self.q_proj = nn.Linear(width, n_queries, bias=of.bias)
        else:
            self.q_a_proj = nn.Linear(width, of.q_rank, bias=of.a_bias)
            self.q_a_norm = norm_of(norm, of.q_rank)
            self.q_b_proj = nn.Linear(of.q_rank, n_queries, bias=of.bias)
        self.kv_a_proj_with_mqa = nn.Linear(width, of.kv_rank + of.rope_size, bias=of.a_bias)
        self.kv_a_norm = norm_of(norm, of.kv_rank)
        self.kv_b_proj = nn.Linear(of.kv_rank, of.n_head * (of.nope_size + of.value_size), bias=of.bias)
        self.proj = nn.Linear(of.n_head * of.value_size, width, bias=of.bias)

    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        """(N, width) -> (N, width)"""
        of, n = self.of, len(x)
        up = self.kv_b_proj.weight.view(of.n_head, of.nope_size + of.value_size, of.kv_rank)
        up_k, up_v = up.split([of.nope_size, of.value_size], dim=1)
        q = self.q_proj(x) if of.q_rank is None else self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        q = q.view(n, of.n_head, of.nope_size + of.rope_size)
        down = self.kv_a_proj_with_mqa(x)
        q_rot, k_rot = q[..., of.nope_size :], down[:, None, of.kv_rank :]
        for turned in (q_rot, k_rot):
            rotate_(turned, *rows.tables(of.positions), of.positions.interleaved)
        q = torch.cat((self.multiply(q[..., : of.nope_size].transpose(0, 1), up_k).transpose(0, 1), q_rot), dim=-1)
        k = torch.cat((self.kv_a_norm(down[:, : of.kv_rank])[:, None], k_rot), dim=-1)
        y = rows.attend(of, self.layer, q, k)  # (N, n_head, kv_rank)
        heads = self.multiply(y.transpose(0, 1), up_v.mT).transpose(0, 1)  # (N, n_head, value_size)
        if self.kv_b_proj.bias is not None:
            heads = heads + self.kv_b_proj.bias.view(of.n_head, -1)[:, of.nope_size :]
        found: torch.Tensor = self.proj(heads.flatten(1))
        return found

    def multiply(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """torch.bmm: (B, N, K) and (B, K, M) -> (B, N, M)"""
        if not self.is_tiled:
            return torch.bmm(a, b)
        return torch.cat([torch.bmm(tile, b) for tile in _tiles(a, 1)], dim=1)[:, : a.size(1)]


class Delta(nn.Module):
    """A gated delta net; its states and what goes into them are float32.

    Attributes:
        is_tiled: whether the product of its gates takes TILE rows at a time, see `keep_rows_apart`.
    """

    def __init__(self, of: DeltaNet, width: int, layer: int) -> None:
        super().__init__()
        self.of, self.layer, self.is_tiled = of, layer, False
        n_values = of.n_head * of.v_size
        self.qkv = nn.Linear(width, of.n_channels, bias=False)
        self.out_gate = nn.Linear(width, n_values, bias=False)
        self.gates = nn.Linear(width, 2 * of.n_head, bias=False)
        self.conv = nn.Conv1d(of.n_channels, of.n_channels, of.n_taps, groups=of.n_channels, bias=False)
        self.dt_bias, self.A_log = (nn.Parameter(torch.empty(of.n_head)) for _ in range(2))
        self.norm = norm_of(of.norm, of.v_size)
        self.proj = nn.Linear(n_values, width, bias=False)

    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        """(N, width) -> (N, width)"""
        b, a = self._gates(x).float().chunk(2, dim=1)
        decay = torch.exp(-self.A_log.float().exp() * F.softplus(a + self.dt_bias.float()))
        kept = torch.cat([self.qkv(x).float(), b.sigmoid(), decay], dim=1)
        given = self.norm(rows.recur(self.of, self.layer, self.conv.weight.flatten(1).float(), kept))
        found: torch.Tensor = self.proj((given.flatten(1) * F.silu(self.out_gate(x).float())).to(x.dtype))
        return found

    def _gates(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_tiled:
            found: torch.Tensor = self.gates(x)
            return found
        return torch.cat([self.gates(tile) for tile in _tiles(x, 0)])[: len(x)]


class Mlp(nn.Module):
    """An MLP that all rows go through, or one expert."""

    fc: nn.Module
    fc_1: nn.Module
    fc_2: nn.Module
    gate: nn.Module  # of a shared expert, where it has one

    def __init__(self, of: Dense, width: int) -> None:
        super().__init__()
        self.of = of
        for name in ("fc_1", "fc_2") if of.is_gated else ("fc",):
            self.add_module(name, nn.Linear(width, of.width, bias=of.bias))
        self.proj = nn.Linear(of.width, width, bias=of.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, width) -> (N, width)"""
        of = self.of
        if not of.is_gated:
            y = _FUNCTIONS[of.activation](self.fc(x))
        elif of.activation == "clamped_glu":
            gate, up = self.fc_1(x).clamp(max=of.limit), self.fc_2(x).clamp(-(of.limit or 0), of.limit)
            y = (up + 1) * (gate * torch.sigmoid(gate * GLU_FACTOR))
        else:
            y = _FUNCTIONS[of.activation](self.fc_1(x)) * self.fc_2(x)
        found: torch.Tensor = self.proj(y)
        return found


class Gate(nn.Linear):
    """Chooses the experts of each row, and what their results are multiplied with.

    Attributes:
        is_tiled: whether it takes TILE rows at a time, see `keep_rows_apart`.
    """

    e_score_correction_bias: torch.Tensor

    def __init__(self, of: Experts, width: int) -> None:
        super().__init__(width, of.n, bias=of.router.has_bias)
        self.of, self.is_tiled = of, False
        if of.router.has_expert_scales:
            self.expert_scales = nn.Parameter(torch.ones(of.n))
        if of.router.has_correction:
            self.register_buffer("e_score_correction_bias", torch.zeros(of.n))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """(N, width) -> factors and numbers of the experts, each (N, n_used)"""
        if not self.is_tiled:
            return self._choose(x)
        factors, experts = zip(*map(self._choose, _tiles(x, 0)), strict=True)
        return torch.cat(factors)[: len(x)], torch.cat(experts)[: len(x)]

    def _choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        router = self.of.router
        if router.kind == "softmax":
            best, experts = torch.topk(super().forward(x), self.of.n_used)
            factors = best.softmax(dim=1, dtype=torch.float32).to(x.dtype)
        else:
            bias = None if self.bias is None else self.bias.float()
            scores = F.linear(x.float(), self.weight.float(), bias).sigmoid()
            experts = torch.topk(self._corrected(scores.detach()), self.of.n_used, sorted=False).indices
            factors = scores.gather(1, experts)
            if router.is_normed:
                factors = factors / (factors.sum(dim=-1, keepdim=True) + 1e-20)
        if router.has_expert_scales:
            factors = factors * self.expert_scales[experts]
        return (factors if router.scale == 1 else factors * router.scale), experts

    def _corrected(self, scores: torch.Tensor) -> torch.Tensor:
        """What experts are chosen by: (N, n), minus infinity outside the groups that are used."""
        router, corrected = self.of.router, scores + self.e_score_correction_bias
        if router.n_groups == 1:
            return corrected
        grouped = corrected.unflatten(1, (router.n_groups, -1))
        of_groups = grouped.topk(router.n_scores_per_group, dim=-1).values.sum(dim=-1)
        used = torch.topk(of_groups, router.n_used_groups, sorted=False).indices
        is_used = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(1, used, True)
        return grouped.masked_fill(~is_used[..., None], float("-inf")).flatten(1)


class Chosen(nn.Module):
    """Experts, and perhaps one that all rows use."""

    def __init__(self, of: Experts, width: int) -> None:
        super().__init__()
        self.of = of
        self.gate = Gate(of, width)
        self.experts = nn.ModuleList(Mlp(of.expert, width) for _ in range(of.n))
        if of.shared is not None:
            self.shared_experts = Mlp(of.shared, width)
            if of.has_shared_gate:
                self.shared_experts.gate = nn.Linear(width, 1, bias=False)
        self.norm_gate, self.norm_experts, self.norm_post_experts, self.norm_post_shared = (
            norm_of(of.own_norm, width) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
        """(N, width) -> (N, width)

        Args:
            before: (N, width), of which the norm in front made x; None: what experts read, too.
        """
        own = x if before is None or self.of.own_norm is None else before
        scored = self.norm_gate(own)
        factors, chosen = self.gate(scored if self.of.own_norm is None else scored * x.size(1) ** -0.5)
        own, y = self.norm_experts(own), torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows, places = torch.where(chosen == expert)
            y[rows] += factors[rows, places, None] * self.experts[expert](own[rows])
        y = self.norm_post_experts(y)
        if self.of.shared is None:
            return y
        shared = self.norm_post_shared(self.shared_experts(x))
        if not self.of.has_shared_gate:
            return y + shared
        gate = self.shared_experts.gate
        assert isinstance(gate, nn.Linear)
        if self.gate.is_tiled:  # a product with one row of weights has other bits by where in memory its rows lie
            found = torch.cat([(tile * gate.weight).sum(-1, keepdim=True) for tile in _tiles(x, 0)])[: len(x)]
        else:
            found = gate(x)
        return y + torch.sigmoid(found) * shared


def keep_rows_apart(root: nn.Module) -> None:
    """Let routers, gates and latent attention below `root` compute in tiles: a row's bits do not depend on their number."""
    for module in root.modules():
        if isinstance(module, Gate | Latents | Delta):
            module.is_tiled = True


def _tiles(x: torch.Tensor, dim: int) -> list[torch.Tensor]:
    """`x` in pieces of TILE along `dim`, each in memory of its own, because some kernels depend on the alignment."""
    after = x.dim() - dim - 1
    padded = F.pad(x, (*(0, 0) * after, 0, -x.size(dim) % TILE))
    return [tile.clone(memory_format=torch.contiguous_format) for tile in padded.split(TILE, dim)]
