"""Attention of one block over a ragged batch, each sequence against its own cache.

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

from mdi.model.batch import Batch, Rows
from mdi.model.cache import CacheShape
from mdi.model.shelf import DecodeGroup


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, softcap: float | None
) -> torch.Tensor:
    """Attention of query rows folded into their groups, so that keys and values are read once per group, as they lie.

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
        layer: place of the block in its stage: index into the caches of a sequence.
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

    @property
    def cache_shape(self) -> CacheShape:
        return _heads_shape(self.config, self.window)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: Batch, *_: Any) -> torch.Tensor:
        """(1, N, C) -> (1, N, C); cos and sin (N, 1, rope_n_elem) are those of the rows' positions."""
        c = self.config
        heads = self._project(x[0], cos, sin)
        groups, alone = batch.parts(self.window)
        if not alone and len(groups) == 1:
            return self.proj(self._attend_group(heads, groups[0], batch))[None]
        y = heads.new_empty(heads.size(0), c.n_head * c.head_size)
        for group in groups:
            y[group.index] = self._attend_group(heads[group.index], group, batch)
        for rows in alone:
            y[rows.span] = self._attend(heads[rows.span], rows, batch)
        return self.proj(y)[None]

    def _project(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """(N, C) -> (N, n_head + 2 * G, head_size): queries, keys and values, with positions and norms applied."""
        c = self.config
        heads = self.qkv(x).view(x.size(0), -1, c.head_size)
        if c.norm_qk:
            heads = self._normed(heads)
        turned = heads[:, : -c.n_query_groups]  # queries and keys lie side by side, and are turned together
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

    def _attend_group(self, heads: torch.Tensor, group: DecodeGroup, batch: Batch) -> torch.Tensor:
        """(n, n_head + 2 * G, head_size) of sequences that decode one row each -> (n, n_head * head_size)"""
        c = self.config
        n, n_groups = heads.size(0), c.n_query_groups
        shelf = group.shelf(self.layer)
        shelf.write(group.places(n_groups), heads[:, c.n_head :])
        q = heads[:, : c.n_head].view(n, n_groups, -1, c.head_size)  # (n, G, R, head_size)
        keys = batch.converted("keys", shelf.keys, q.dtype)
        values = batch.converted("values", shelf.values, q.dtype)
        mask = group.mask(q.dtype, n_groups, c.n_head // n_groups)
        y = attend(q, keys, values, mask, self.scale, c.attention_logit_softcapping)
        return y.reshape(n, c.n_head * c.head_size)

    def _attend(self, heads: torch.Tensor, rows: Rows, batch: Batch) -> torch.Tensor:
        """(n, n_head + 2 * G, head_size) of one sequence -> (n, n_head * head_size)"""
        c = self.config
        n = heads.size(0)
        q, k, v = heads.transpose(0, 1).split([c.n_head, c.n_query_groups, c.n_query_groups])
        keys, values, first = rows.caches[self.layer].append(rows.start, k, v)
        n_repeat = c.n_head // c.n_query_groups
        folded = q.reshape(1, c.n_query_groups, n_repeat * n, c.head_size)
        mask = batch.mask(rows, first, self.window, n_repeat)
        keys = batch.converted("keys", keys[None], q.dtype)
        values = batch.converted("values", values[None], q.dtype)
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

    @property
    def cache_shape(self) -> CacheShape:
        return _latent_shape(self.config)

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
        k = torch.cat((self.kv_a_norm(latent), k_rot), dim=-1)[None]  # (1, N, same)
        y = q.new_empty(c.n_head, n, c.kv_lora_rank)
        for rows in batch.rows:
            y[:, rows.span] = self._attend(q[:, rows.span], k[:, rows.span], rows, batch)
        heads = self.multiply(y, up_v.mT)  # (n_head, N, v_head_dim)
        if self.kv_b_proj.bias is not None:
            heads = heads + self.kv_b_proj.bias.view(c.n_head, 1, -1)[..., c.qk_nope_head_dim :]
        return self.proj(heads.transpose(0, 1).reshape(1, n, c.n_head * c.v_head_dim))

    def _attend(self, q: torch.Tensor, k: torch.Tensor, rows: Rows, batch: Batch) -> torch.Tensor:
        """q (n_head, n, d), k (1, n, d) of one sequence -> (n_head, n, kv_lora_rank)."""
        n_head, n, size = q.shape
        keys, _, first = rows.caches[self.layer].append(rows.start, k, k[..., :0])
        keys = batch.converted("keys", keys[None], q.dtype)  # (1, 1, L, d)
        mask = batch.mask(rows, first, None, n_head)
        values = keys[..., : self.config.kv_lora_rank]
        y = attend(
            q.reshape(1, 1, n_head * n, size), keys, values, mask, self.scale, self.config.attention_logit_softcapping
        )
        return y.view(n_head, n, self.config.kv_lora_rank)


def cache_shape_of(config: Config, index: int) -> CacheShape:
    """What block `index` of a model keeps of a position, known without building the block."""
    if config.latent_attention:
        return _latent_shape(config)
    is_windowed = config.sliding_window_indices is not None and config.sliding_window_indices[index]
    return _heads_shape(config, config.sliding_window_size if is_windowed else None)


def _heads_shape(config: Config, window: int | None) -> CacheShape:
    return CacheShape(config.n_query_groups, config.head_size, config.head_size, window)


def _latent_shape(config: Config) -> CacheShape:
    return CacheShape(1, config.kv_lora_rank + config.qk_rope_head_dim, 0)


def cached(attn: nn.Module, layer: int) -> CachedAttention | CachedLatentAttention:
    """The cached attention that stands in for litgpt's `attn`."""
    if isinstance(attn, MultiheadLatentAttention):
        return CachedLatentAttention(attn, layer)
    return CachedAttention(attn, layer)
