"""Attention of one block over a ragged batch; each sequence has its own cache.

litgpt's own attention knows one position for a whole batch and copies the cache on every grouped-query step. These
modules take over its projections and norms (so the parameter names stay litgpt's) and replace what is between them.
Called by litgpt's `Block` with the Batch in the place of its mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from litgpt.config import Config
from litgpt.model import (
    CausalSelfAttention,
    MultiheadLatentAttention,
    do_softcapping,
)

from mdi.model.batch import Alone, Batch, Together


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, softcap: float | None
) -> torch.Tensor:
    """Attention of query rows folded into their groups, so that keys and values are read once per group, in place.

    Args:
        q: (B, G, R, k_size), R = query heads of the group times rows.
        k: (B, G, L, k_size). v: (B, G, L, v_size).
        mask: (R, L) boolean, or (B, G, R, L) that is added to the scores. None lets all see all.

    Returns:
        (B, G, R, v_size)
    """
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = do_softcapping((q @ k.mT) * scale, softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype) @ v


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
    """Rotary positions, in place.

    Args:
        x: (N, heads, size), memory of the caller's own.
        cos, sin: (N, 1, size) for the positions of the rows; of the sine, the first half is negated (litgpt negates that half
            of x instead; with an odd size, it is the larger one).
        interleaved: whether the two numbers of a pair lie beside each other, and not half a head apart; they are then brought
            into the order that is half a head apart, as litgpt does.
    """
    if not interleaved and x.dtype == cos.dtype:
        turned = x.roll(-(x.size(-1) // 2), -1)
        x.mul_(cos).addcmul_(turned, sin)
        return
    apart = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if interleaved else x
    x.copy_(apart * cos + apart.roll(-(x.size(-1) // 2), -1) * sin)  # rounded once, at the end


class CachedAttention(nn.Module):
    """Multi-head, grouped-query or multi-query attention with per-sequence caches.

    Args:
        attn: litgpt's module, whose parameters are taken over.
        layer: place of the block in its stage.
    """

    def __init__(self, attn: CausalSelfAttention, layer: int) -> None:
        super().__init__()
        self.qkv, self.proj = attn.qkv, attn.proj
        self.norm_q, self.norm_k = attn.norm_q, attn.norm_k
        config: Config = attn.config
        self.config = config
        self.layer = layer
        self.window = config.sliding_window_size if attn.apply_sliding_window_attention else None
        self.scale = attn.mscale**2 / math.sqrt(config.attention_scores_scalar or config.head_size)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: Batch, *_: Any) -> torch.Tensor:
        """(1, N, C) -> (1, N, C); cos and sin (N, 1, rope_n_elem) are those of the rows' positions."""
        c = self.config
        heads = self._project(x[0], cos, sin)
        cache = batch.caches.blocks[self.layer]
        cache.write(batch.places(cache.cache_class), *heads[:, c.n_head :].split(c.n_query_groups, dim=1))
        q = heads[:, : c.n_head]
        groups, alone = batch.parts(cache.cache_class)
        if not alone and len(groups) == 1:
            return self.proj(self._attend_together(q, groups[0], batch))[None]
        y = heads.new_empty(heads.size(0), c.n_head * c.head_size)
        for group in groups:
            y[group.index] = self._attend_together(q[group.index], group, batch)
        for part in alone:
            y[part.rows.span] = self._attend(q[part.rows.span], part, batch)
        return self.proj(y)[None]

    def _project(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """(N, C) -> (N, n_head + 2 * G, head_size): queries, keys and values, with positions and norms applied."""
        c = self.config
        heads = self.qkv(x).view(x.size(0), -1, c.head_size)
        if c.norm_qk:
            heads = self._normed(heads)
        turned = heads[:, : -c.n_query_groups]  # queries and keys are adjacent, and are rotated together
        if c.rope_n_elem != c.head_size:
            turned = turned[..., : c.rope_n_elem]
        rotate_(turned, cos, sin, c.rope_interleave)
        return heads

    def _normed(self, heads: torch.Tensor) -> torch.Tensor:
        """(N, n_head + 2 * G, head_size), with the norms of queries and keys."""
        c = self.config
        q, k, v = heads.split([c.n_head, c.n_query_groups, c.n_query_groups], dim=1)
        if c.norm_qk_type == "olmo2":  # one norm over all heads
            q, k = self.norm_q(q.flatten(1)).view_as(q), self.norm_k(k.flatten(1)).view_as(k)
        else:
            q, k = self.norm_q(q), self.norm_k(k)
        return torch.cat((q, k, v), dim=1)

    def _attend_together(self, q: torch.Tensor, group: Together, batch: Batch) -> torch.Tensor:
        """(n, n_head, head_size) of sequences that decode one row each -> (n, n_head * head_size)"""
        c = self.config
        n, n_groups = q.size(0), c.n_query_groups
        keys, values = (batch.seen(group, self.layer, half, q.dtype) for half in (0, 1))
        mask = group.mask(q.dtype, n_groups, c.n_head // n_groups)
        folded = q.reshape(n, n_groups, -1, c.head_size)  # (n, G, R, head_size)
        y = attend(folded, keys, values, mask, self.scale, c.attention_logit_softcapping)
        return y.reshape(n, c.n_head * c.head_size)

    def _attend(self, q: torch.Tensor, part: Alone, batch: Batch) -> torch.Tensor:
        """(n, n_head, head_size) of one sequence -> (n, n_head * head_size)"""
        c = self.config
        n, n_repeat = q.size(0), c.n_head // c.n_query_groups
        keys, values = (batch.seen(part, self.layer, half, q.dtype) for half in (0, 1))
        mask = batch.mask(part, self.window, n_repeat)
        folded = q.transpose(0, 1).reshape(1, c.n_query_groups, n_repeat * n, c.head_size)
        y = attend(folded, keys, values, mask, self.scale, c.attention_logit_softcapping)
        return y.view(c.n_head, n, c.head_size).transpose(0, 1).reshape(n, c.n_head * c.head_size)


class CachedLatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek V2/V3) that caches the latent, not the heads.

    The up-projections of keys and values are absorbed into the query and the output (DeepSeek-V2 paper, section 2.1.2):
    per position the cache holds kv_lora_rank + qk_rope_head_dim values, shared by all heads, as if there were one group.
    A key bias would add the same to all scores of a query and drops out of the softmax; a value bias is added at the end.
    """

    def __init__(self, attn: MultiheadLatentAttention, layer: int) -> None:
        super().__init__()
        self.q_a_proj, self.q_a_norm, self.q_b_proj = attn.q_a_proj, attn.q_a_norm, attn.q_b_proj
        self.kv_a_proj_with_mqa, self.kv_a_norm = attn.kv_a_proj_with_mqa, attn.kv_a_norm
        self.kv_b_proj, self.proj = attn.kv_b_proj, attn.proj
        config: Config = attn.config
        self.config = config
        self.layer = layer
        self.scale = attn.mscale**2 / math.sqrt(config.attention_scores_scalar or config.qk_head_dim)
        self.multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.bmm  # or mdi.model.tiles'

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: Batch, *_: Any) -> torch.Tensor:
        """(1, N, C) -> (1, N, C); cos and sin (N, 1, qk_rope_head_dim) are those of the rows' positions."""
        c = self.config
        n = x.size(1)
        up = self.kv_b_proj.weight.view(c.n_head, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
        up_k, up_v = up.split([c.qk_nope_head_dim, c.v_head_dim], dim=1)
        q = self.q_b_proj(self.q_a_norm(self.q_a_proj(x[0]))).view(n, c.n_head, c.qk_head_dim)
        q_pass, q_rot = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        latent, k_rot = self.kv_a_proj_with_mqa(x[0]).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        rotate_(q_rot, cos, sin, c.rope_interleave)
        rotate_(k_rot[:, None], cos, sin, c.rope_interleave)
        # (n_head, N, kv_lora_rank + qk_rope_head_dim): queries that look at latents
        q = torch.cat((self.multiply(q_pass.transpose(0, 1), up_k), q_rot.transpose(0, 1)), dim=-1)
        cache = batch.caches.blocks[self.layer]
        cache.write(batch.places(cache.cache_class), torch.cat((self.kv_a_norm(latent), k_rot), dim=-1)[:, None])
        y = q.new_empty(c.n_head, n, c.kv_lora_rank)
        for rows in batch.rows:
            y[:, rows.span] = self._attend(q[:, rows.span], batch.alone(rows, cache.cache_class), batch)
        heads = self.multiply(y, up_v.mT)  # (n_head, N, v_head_dim)
        if self.kv_b_proj.bias is not None:
            heads = heads + self.kv_b_proj.bias.view(c.n_head, 1, -1)[..., c.qk_nope_head_dim :]
        return self.proj(heads.transpose(0, 1).reshape(1, n, c.n_head * c.v_head_dim))

    def _attend(self, q: torch.Tensor, part: Alone, batch: Batch) -> torch.Tensor:
        """(n_head, n, d) of one sequence -> (n_head, n, kv_lora_rank)"""
        n_head, n, size = q.shape
        keys = batch.seen(part, self.layer, 0, q.dtype)  # (1, 1, L, d)
        mask = batch.mask(part, None, n_head)
        values = keys[..., : self.config.kv_lora_rank]
        y = attend(
            q.reshape(1, 1, n_head * n, size), keys, values, mask, self.scale, self.config.attention_logit_softcapping
        )
        return y.view(n_head, n, self.config.kv_lora_rank)


def cached(attn: nn.Module, layer: int) -> CachedAttention | CachedLatentAttention:
    """The cached attention that stands in for litgpt's `attn`."""
    if isinstance(attn, MultiheadLatentAttention):
        return CachedLatentAttention(attn, layer)
    return CachedAttention(attn, layer)
