"""Attention of one block over a ragged batch in torch; each sequence has its own cache.

litgpt's own attention knows one position for a whole batch and copies the cache on every grouped-query step. These
modules take over its projections and norms (so the parameter names stay litgpt's) and replace what is between them.
litgpt's `Block` calls them with the Batch in the place of its mask: the rows of one frame, their sequences and positions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from litgpt.config import Config
from litgpt.model import (
    CausalSelfAttention,
    LLaMAMoE,
    MultiheadLatentAttention,
    do_softcapping,
)

from mdi.kernels.pages import PageTable
from mdi.kernels.slices import Slices
from mdi.model.caches import PAGE
from mdi.stages.torch_cache import Memory, Selection, TorchCaches

# Pages up to which sequences that decode in the same frame attend together: then calls cost more than the arithmetic does, and
# the gathered memory is small.
LARGEST_TOGETHER = 8


@dataclass(frozen=True)
class Rows:
    """Rows [first_row, first_row + n_rows) of a batch: positions from `start` on of one sequence.

    Attributes:
        tables: of the sequence, for each class.
    """

    first_row: int
    n_rows: int
    start: int
    tables: list[PageTable]

    @property
    def span(self) -> slice:
        return slice(self.first_row, self.first_row + self.n_rows)

    @property
    def end(self) -> int:
        return self.start + self.n_rows


@dataclass(frozen=True)
class Alone:
    """One sequence's rows, and the positions that they see.

    Attributes:
        first: position of the first key that any of them sees; the keys end at the last row's position.
        pages: pages of these keys.
    """

    rows: Rows
    first: int
    pages: Selection

    def seen(self, gathered: torch.Tensor) -> torch.Tensor:
        """Of what its pages have, (positions, G, size), what can be seen: (1, G, n_keys, size)."""
        skipped = self.first % PAGE
        return gathered[skipped : skipped + self.rows.end - self.first].transpose(0, 1)[None]


class Together:
    """Sequences that bring one row each and have as many pages: a block attends to all of them at once.

    All positions of their pages are read, those beyond a sequence's end under a mask: a sequence's result depends on its own
    position and never on the other sequences.

    Attributes:
        index: the rows' places in the batch; None if they are the whole batch.
        pages: of all of them, those of the first sequence before those of the next.
    """

    def __init__(
        self, starts: Sequence[int], index: torch.Tensor | None, pages: Selection, device: torch.device
    ) -> None:
        self.index, self.pages = index, pages
        self._n = len(starts)
        self._starts = torch.tensor(starts, device=device)
        self._masks: dict[tuple[torch.dtype, int, int], torch.Tensor] = {}

    def seen(self, gathered: torch.Tensor) -> torch.Tensor:
        """(positions of all, G, size) -> (n, G, positions of each, size)"""
        return gathered.view(self._n, -1, *gathered.shape[1:]).transpose(1, 2)

    def mask(self, dtype: torch.dtype, n_groups: int, n_repeat: int) -> torch.Tensor:
        """Numbers to add to the scores: nothing up to a sequence's own position, minus infinity beyond.

        Returns:
            (n, G, n_repeat, positions of each), the same object for every block.
        """
        key = dtype, n_groups, n_repeat
        if key not in self._masks:
            device, length = self._starts.device, self.pages.n // self._n * PAGE
            beyond = torch.arange(length, device=device) > self._starts[:, None]
            zeros = torch.zeros(self._n, length, dtype=dtype, device=device)
            mask = zeros.masked_fill_(beyond, float("-inf"))[:, None, None]
            self._masks[key] = mask.expand(-1, n_groups, n_repeat, -1)
        return self._masks[key]


class Batch:
    """A ragged batch; the caches have pages for all of its rows.

    Args:
        caches: the stage's.

    Raises:
        EngineError: a slice that does not fit its sequence's cache, or memory that has run out.
    """

    def __init__(self, slices: Slices, caches: TorchCaches) -> None:
        self.caches = caches
        self.memory = Memory(caches.device)
        self.rows: list[Rows] = []
        n = 0
        for seq_id, start, n_rows, *_ in slices:
            self.rows.append(Rows(n, n_rows, start, caches.extend(seq_id, start, n_rows)))
            n += n_rows
        ranges = [np.arange(rows.start, rows.end) for rows in self.rows]
        self._numbers = np.concatenate([np.zeros(0, dtype=np.int64), *ranges])
        self._places: dict[int, Selection] = {}
        self._alone: dict[tuple[int, int], Alone] = {}
        self._parts: dict[int, tuple[list[Together], list[Alone]]] = {}
        self._masks: dict[tuple[int, int, int, int | None], torch.Tensor] = {}

    @functools.cached_property
    def positions(self) -> torch.Tensor:
        """(N,)"""
        return torch.from_numpy(self._numbers).to(self.caches.device)

    def places(self, cache_class: int) -> Selection:
        """Where the keys and values of all rows are written."""
        if cache_class not in self._places:
            ids = [np.zeros(0, dtype=np.int32)]
            for rows in self.rows:
                table = rows.tables[cache_class]
                ids.append(table.ids[np.arange(rows.start, rows.end) // PAGE - table.first])
            self._places[cache_class] = self.caches.select(cache_class, np.concatenate(ids), self._numbers % PAGE)
        return self._places[cache_class]

    def parts(self, cache_class: int) -> tuple[list[Together], list[Alone]]:
        """Sequences that blocks of this class compute together, and those that they compute one by one.

        The position of a row alone decides to which of the two it belongs, so other rows change nothing.
        """
        if cache_class not in self._parts:
            window = self.caches.classes[cache_class].window
            together: dict[int, list[Rows]] = {}
            alone: list[Alone] = []
            for rows in self.rows:
                n_pages = -(-rows.end // PAGE)
                if rows.n_rows == 1 and n_pages <= LARGEST_TOGETHER and (window is None or rows.end <= window):
                    together.setdefault(n_pages, []).append(rows)
                else:
                    alone.append(self.alone(rows, cache_class))
            self._parts[cache_class] = [self._together(each, cache_class) for each in together.values()], alone
        return self._parts[cache_class]

    def alone(self, rows: Rows, cache_class: int) -> Alone:
        """The keys that these rows see."""
        key = rows.first_row, cache_class
        if key not in self._alone:
            table, window = rows.tables[cache_class], self.caches.classes[cache_class].window
            first = 0 if window is None else max(0, rows.start - window + 1)
            ids = table.ids[first // PAGE - table.first : -(-rows.end // PAGE) - table.first]
            self._alone[key] = Alone(rows, first, self.caches.select(cache_class, ids))
        return self._alone[key]

    def _together(self, members: list[Rows], cache_class: int) -> Together:
        pages = np.concatenate([rows.tables[cache_class].ids for rows in members])
        device = self.caches.device
        is_all = len(members) == len(self._numbers)
        index = None if is_all else torch.tensor([rows.first_row for rows in members], device=device)
        return Together([rows.start for rows in members], index, self.caches.select(cache_class, pages), device)

    def seen(self, part: Alone | Together, layer: int, half: int, dtype: torch.dtype) -> torch.Tensor:
        """Keys (0) or values (1) of one block that these rows may see, (n, G, n_keys, size), as `dtype`."""
        found = part.seen(self.caches.blocks[layer].gather(half, part.pages, self.memory))
        if found.dtype == dtype:
            return found
        return self.memory.of(f"half {half} as {dtype}", found.shape, dtype).copy_(found)

    def mask(self, part: Alone, window: int | None, n_repeat: int) -> torch.Tensor | None:
        """The keys that each row may see; None if all may see all.

        Args:
            window: how many positions back a row sees, itself included; None is all of them.
            n_repeat: how often the rows are repeated (the query heads of a group).

        Returns:
            (n_repeat * n_rows, n_keys) boolean, the same object for every block that asks the same.
        """
        rows = part.rows
        if rows.n_rows == 1:  # a single row may see every key
            return None
        key = (rows.first_row, part.first, n_repeat, window)
        if key not in self._masks:
            queries = torch.arange(rows.start, rows.end, device=self.caches.device)[:, None]
            keys = torch.arange(part.first, rows.end, device=self.caches.device)[None, :]
            mask = keys <= queries
            if window is not None:
                mask &= keys > queries - window
            self._masks[key] = mask.repeat(n_repeat, 1)
        return self._masks[key]


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
        self.multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.bmm  # or tiled_bmm: keep_rows_apart

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
