"""Attention of one block over a ragged batch, each sequence against its own cache.

litgpt's own attention knows one position for a whole batch and copies the cache on every grouped-query step. These
modules take over its projections and norms (so the parameter names stay litgpt's) and replace what is between them.
Called by litgpt's `Block` with the Batch in the place of its mask.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from litgpt.config import Config
from litgpt.model import (
    CausalSelfAttention,
    MultiheadLatentAttention,
    apply_rope,
    apply_rope_interleave,
    do_softcapping,
)

from mdi.model.batch import Batch, Rows
from mdi.model.cache import CacheShape


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, softcap: float | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of query rows folded into their groups, so that keys and values are read once per group, as they lie.

    Args:
        q: (G, R, k_size), R = query heads of the group times rows; scaled already.
        k: (G, L, k_size). v: (G, L, v_size).
        mask: (R, L) boolean, or None.
        out: where the result is to stand, if that is not to be new memory.

    Returns:
        (G, R, v_size)
    """
    if softcap is None and (mask is not None or q.device.type != "cpu"):
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=1.0)[0]
        return y if out is None else out.copy_(y)
    scores = torch.bmm(q, k.mT)
    if softcap is not None:
        scores = do_softcapping(scores, softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.bmm(F.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype), v, out=out)


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
        self.rope = apply_rope_interleave if config.rope_interleave else apply_rope

    @property
    def cache_shape(self) -> CacheShape:
        c = self.config
        return CacheShape(c.n_query_groups, c.head_size, c.head_size, self.window)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: Batch, *_: Any) -> torch.Tensor:
        """(1, N, C) -> (1, N, C); cos and sin (1, N, rope_n_elem) are those of the rows' positions."""
        q, k, v = self._project(x, cos, sin)
        q = q * self.scale
        n_head, n, head_size = q.shape
        y = q.new_empty(n, n_head * head_size)
        for rows in batch.rows:
            if rows.n_rows == 1:
                self._attend_one(q, k, v, rows, y)
            else:
                y[rows.span] = self._attend(q[:, rows.span], k[:, rows.span], v[:, rows.span], rows, batch)
        return self.proj(y[None])

    def _project(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(1, N, C) -> q (n_head, N, hs), k and v (G, N, hs), positions and norms applied."""
        c = self.config
        n = x.size(1)
        qkv = self.qkv(x)
        if not c.norm_qk:  # queries and keys lie side by side, and are turned together
            heads = qkv.view(1, n, c.n_head + 2 * c.n_query_groups, c.head_size).transpose(1, 2)
            turned = self._rotate(heads[:, : -c.n_query_groups], cos, sin)[0]
            return turned[: c.n_head], turned[c.n_head :], heads[0, -c.n_query_groups :]
        q, k, v = qkv.split([c.n_head * c.head_size] + [c.n_query_groups * c.head_size] * 2, dim=-1)
        if c.norm_qk_type == "olmo2":
            q, k = self.norm_q(q), self.norm_k(k)
        q = q.view(1, n, c.n_head, c.head_size).transpose(1, 2)
        k = k.view(1, n, c.n_query_groups, c.head_size).transpose(1, 2)
        v = v.view(n, c.n_query_groups, c.head_size).transpose(0, 1)
        if c.norm_qk_type == "default":
            q, k = self.norm_q(q), self.norm_k(k)
        return self._rotate(q, cos, sin)[0], self._rotate(k, cos, sin)[0], v

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        n_elem = self.config.rope_n_elem
        if n_elem == x.size(-1):
            return self.rope(x, cos, sin)
        return torch.cat((self.rope(x[..., :n_elem], cos, sin), x[..., n_elem:]), dim=-1)

    def _attend_one(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, y: torch.Tensor) -> None:
        """One decoding row of (n_head, N, hs) and (G, N, hs) into its place in y (N, n_head * hs).

        The same as `_attend` with fewer operations: with many sequences in a frame, this is called for each of them, and a
        short cache costs less than the calls.
        """
        row = rows.first_row
        keys, values, _ = rows.caches[self.layer].append(rows.start, k[:, row : row + 1], v[:, row : row + 1])
        if keys.dtype != q.dtype:
            keys, values = keys.to(q.dtype), values.to(q.dtype)
        n_groups = keys.size(0)
        out = y[row].view(n_groups, -1, self.config.head_size)
        attend(
            q[:, row].view(n_groups, -1, self.config.head_size), keys, values, None,
            self.config.attention_logit_softcapping, out,
        )  # fmt: skip

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, batch: Batch) -> torch.Tensor:
        """q (n_head, n, hs), k and v (G, n, hs) of one sequence -> (n, n_head * hs)."""
        n_head, n, head_size = q.shape
        keys, values, first = rows.caches[self.layer].append(rows.start, k, v)
        if keys.dtype != q.dtype:
            keys, values = keys.to(q.dtype), values.to(q.dtype)
        n_repeat = n_head // k.size(0)
        folded = q.reshape(k.size(0), n_repeat * n, head_size)
        mask = batch.mask(rows, first, self.window, n_repeat)
        y = attend(folded, keys, values, mask, self.config.attention_logit_softcapping)
        return y.view(n_head, n, head_size).transpose(0, 1).reshape(n, n_head * head_size)


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
        self.rope = apply_rope_interleave if config.rope_interleave else apply_rope

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape(1, self.config.kv_lora_rank + self.config.qk_rope_head_dim, 0)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: Batch, *_: Any) -> torch.Tensor:
        """(1, N, C) -> (1, N, C); cos and sin (1, N, qk_rope_head_dim) are those of the rows' positions."""
        c = self.config
        n = x.size(1)
        up = self.kv_b_proj.weight.view(c.n_head, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
        up_k, up_v = up.split([c.qk_nope_head_dim, c.v_head_dim], dim=1)
        q = self.q_b_proj(self.q_a_norm(self.q_a_proj(x))).view(1, n, c.n_head, c.qk_head_dim).transpose(1, 2)
        q_pass, q_rot = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        latent, k_rot = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        # (n_head, N, kv_lora_rank + qk_rope_head_dim): queries that look at latents
        q = torch.cat((torch.bmm(q_pass[0], up_k), self.rope(q_rot, cos, sin)[0]), dim=-1) * self.scale
        k = torch.cat((self.kv_a_norm(latent), self.rope(k_rot[:, None], cos, sin)[:, 0]), dim=-1)  # (1, N, same)
        y = q.new_empty(c.n_head, n, c.kv_lora_rank)
        for rows in batch.rows:
            y[:, rows.span] = self._attend(q[:, rows.span], k[:, rows.span], rows, batch)
        heads = torch.bmm(y, up_v.mT)  # (n_head, N, v_head_dim)
        if self.kv_b_proj.bias is not None:
            heads = heads + self.kv_b_proj.bias.view(c.n_head, 1, -1)[..., c.qk_nope_head_dim :]
        return self.proj(heads.transpose(0, 1).reshape(1, n, c.n_head * c.v_head_dim))

    def _attend(self, q: torch.Tensor, k: torch.Tensor, rows: Rows, batch: Batch) -> torch.Tensor:
        """q (n_head, n, d), k (1, n, d) of one sequence -> (n_head, n, kv_lora_rank)."""
        n_head, n, size = q.shape
        keys, _, first = rows.caches[self.layer].append(rows.start, k, k[..., :0])
        keys = keys.to(q.dtype)
        mask = batch.mask(rows, first, None, n_head)
        values = keys[..., : self.config.kv_lora_rank]
        y = attend(q.reshape(1, n_head * n, size), keys, values, mask, self.config.attention_logit_softcapping)
        return y.view(n_head, n, self.config.kv_lora_rank)


def cached(attn: nn.Module, layer: int) -> CachedAttention | CachedLatentAttention:
    """The cached attention that stands in for litgpt's `attn`."""
    if isinstance(attn, MultiheadLatentAttention):
        return CachedLatentAttention(attn, layer)
    return CachedAttention(attn, layer)
