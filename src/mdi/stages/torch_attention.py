"""Attention in torch: over the rows of a frame, each sequence with its own cache, or over whole texts, with gradients.

Both are the `rows` of the blocks in `mdi.stages.torch_block`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from mdi.kernels.positions import rope_tables, score_bias
from mdi.kernels.slices import Slices
from mdi.kernels.states import StateEntry
from mdi.model.caches import PAGE
from mdi.model.spec import Alibi, Attention, DeltaNet, LatentAttention, Rotary
from mdi.stages.torch_cache import Memory, Selection, TorchCaches
from mdi.stages.torch_delta import brought_up, net

Heads = Attention | LatentAttention

# Pages up to which sequences that decode in the same frame attend together: then calls cost more than the arithmetic does, and
# the gathered memory is small.
LARGEST_TOGETHER = 8


class Positions:
    """What blocks compute from positions: tables for all positions of a run, made when they are first asked for."""

    def __init__(self, max_length: int, device: torch.device) -> None:
        self.max_length, self.device = max_length, device
        self._rotary: dict[Rotary, tuple[torch.Tensor, torch.Tensor]] = {}
        self._terms: dict[tuple[Alibi, int, int], torch.Tensor] = {}

    def rotary(self, of: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines (max_length, n_elem); of the sines the first half is negated, see `torch_block.rotate_`."""
        if of not in self._rotary:
            cos, sin = rope_tables(of, self.max_length)
            sin[:, : of.n_elem - of.n_elem // 2] *= -1
            self._rotary[of] = torch.from_numpy(cos).to(self.device), torch.from_numpy(sin).to(self.device)
        return self._rotary[of]

    def terms(self, of: Heads) -> torch.Tensor | None:
        """Of the scores of the key at each position: (n_head, max_length or more); None for nothing."""
        if isinstance(of, LatentAttention) or not isinstance(of.positions, Alibi):
            return None
        key = of.positions, of.n_head, of.head_size
        if key not in self._terms:
            bias = score_bias(of, self.max_length)
            assert bias is not None
            self._terms[key] = torch.from_numpy(bias).to(self.device)
        return self._terms[key]


@dataclass(frozen=True)
class Span:
    """Rows [first_row, first_row + n_rows) of a batch: positions from `start` on of one sequence.

    Attributes:
        tables: of the sequence, for each class: pages, or a state.
    """

    first_row: int
    n_rows: int
    start: int
    tables: list[Any]

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

    rows: Span
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
        starts: the rows' positions.
    """

    def __init__(
        self, starts: Sequence[int], index: torch.Tensor | None, pages: Selection, device: torch.device
    ) -> None:
        self.index, self.pages = index, pages
        self.n = len(starts)
        self.starts = torch.tensor(starts, device=device)
        self.keys = torch.arange(pages.n // self.n * PAGE, device=device)

    def seen(self, gathered: torch.Tensor) -> torch.Tensor:
        """(positions of all, G, size) -> (n, G, positions of each, size)"""
        return gathered.view(self.n, -1, *gathered.shape[1:]).transpose(1, 2)


class Batch:
    """A ragged batch; the caches have pages for all of its rows.

    Args:
        caches, positions: the stage's.
        has_room: whether the caches have room for the rows already.

    Raises:
        EngineError: a slice that does not fit its sequence's cache, or memory that has run out.
    """

    def __init__(
        self, slices: Slices, caches: TorchCaches, positions: Positions, has_room: bool = False
    ) -> None:  # fmt: skip
        self.caches, self._positions = caches, positions
        self.memory = Memory(caches.device)
        self.rows: list[Span] = []
        n = 0
        for seq_id, start, n_rows, *_ in slices:
            tables = caches.entries(seq_id) if has_room else caches.extend(seq_id, start, n_rows)
            self.rows.append(Span(n, n_rows, start, tables))
            n += n_rows
        ranges = [np.arange(rows.start, rows.end) for rows in self.rows]
        self._numbers = np.concatenate([np.zeros(0, dtype=np.int64), *ranges])
        self._places: dict[int, Selection] = {}
        self._alone: dict[tuple[int, int], Alone] = {}
        self._parts: dict[int, tuple[list[Together], list[Alone]]] = {}
        self._tables: dict[Rotary, tuple[torch.Tensor, torch.Tensor]] = {}
        self._masks: dict[tuple[object, ...], torch.Tensor | None] = {}

    @functools.cached_property
    def positions(self) -> torch.Tensor:
        """(N,)"""
        return torch.from_numpy(self._numbers).to(self.caches.device)

    def tables(self, of: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        if of not in self._tables:
            cos, sin = self._positions.rotary(of)
            self._tables[of] = cos[self.positions, None], sin[self.positions, None]
        return self._tables[of]

    def attend(
        self, of: Heads, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See `torch_block.Rows`; keys and values go to the caches."""
        cache = self.caches.paged(layer)
        if k is not None:
            cache.write(self.places(cache.cache_class), *((k,) if v is None else (k, v)))
        together, alone = self.parts(cache.cache_class)
        if not alone and len(together) == 1 and together[0].index is None:
            return self._attend(together[0], of, layer, q, sinks)
        found = q.new_empty(*q.shape[:2], value_size(of))
        for group in together:
            found[group.index] = self._attend(group, of, layer, q[group.index], sinks)
        for part in alone:
            found[part.rows.span] = self._attend(part, of, layer, q[part.rows.span], sinks)
        return found

    def recur(self, of: DeltaNet, layer: int, taps: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """See `torch_block.Rows`."""
        cache_class, number = self.caches.places[layer]
        found = kept.new_empty(len(kept), of.n_head, of.v_size)
        for rows in self.rows:
            entry = rows.tables[cache_class]
            assert isinstance(entry, StateEntry)
            found[rows.span] = brought_up(entry, number, of, taps, rows.start, kept[rows.span])
        return found

    def _attend(
        self, part: Alone | Together, of: Heads, layer: int, q: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """(n, n_head, k_size) of some sequences -> (n, n_head, v_size)"""
        keys = self.seen(part, layer, 0, q.dtype)
        is_latent = isinstance(of, LatentAttention)
        values = keys[..., : value_size(of)] if is_latent else self.seen(part, layer, 1, q.dtype)
        n, n_texts = len(q), len(keys)
        mask = self._mask(part, of, q.dtype, keys.size(1))
        return unfolded(attend(folded(q, n_texts, keys.size(1)), keys, values, mask, of, sinks), n)

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
            window = self.caches.window(cache_class)
            together: dict[int, list[Span]] = {}
            alone: list[Alone] = []
            for rows in self.rows:
                n_pages = -(-rows.end // PAGE)
                if rows.n_rows == 1 and n_pages <= LARGEST_TOGETHER and (window is None or rows.end <= window):
                    together.setdefault(n_pages, []).append(rows)
                else:
                    alone.append(self.alone(rows, cache_class))
            self._parts[cache_class] = [self._together(each, cache_class) for each in together.values()], alone
        return self._parts[cache_class]

    def alone(self, rows: Span, cache_class: int) -> Alone:
        """The keys that these rows see."""
        key = rows.first_row, cache_class
        if key not in self._alone:
            table, window = rows.tables[cache_class], self.caches.window(cache_class)
            first = 0 if window is None else max(0, rows.start - window + 1)
            ids = table.ids[first // PAGE - table.first : -(-rows.end // PAGE) - table.first]
            self._alone[key] = Alone(rows, first, self.caches.select(cache_class, ids))
        return self._alone[key]

    def _together(self, members: list[Span], cache_class: int) -> Together:
        pages = np.concatenate([rows.tables[cache_class].ids for rows in members])
        device = self.caches.device
        is_all = len(members) == len(self._numbers)
        index = None if is_all else torch.tensor([rows.first_row for rows in members], device=device)
        return Together([rows.start for rows in members], index, self.caches.select(cache_class, pages), device)

    def seen(self, part: Alone | Together, layer: int, half: int, dtype: torch.dtype) -> torch.Tensor:
        """Keys (0) or values (1) of one block that these rows may see, (n, G, n_keys, size), as `dtype`."""
        found = part.seen(self.caches.paged(layer).gather(half, part.pages, self.memory))
        if found.dtype == dtype:
            return found
        return self.memory.of(f"half {half} as {dtype}", found.shape, dtype).copy_(found)

    def _mask(self, part: Alone | Together, of: Heads, dtype: torch.dtype, n_groups: int) -> torch.Tensor | None:
        """What `attend` takes, the same object for every block that asks the same; None if all rows may see all keys."""
        terms, n_repeat = self._positions.terms(of), of.n_head // n_groups
        key = id(part), of.window, n_groups, n_repeat, dtype, None if terms is None else id(terms)
        if key not in self._masks:
            self._masks[key] = self._new_mask(part, of, dtype, n_groups, n_repeat, terms)
        return self._masks[key]

    def _new_mask(
        self, part: Alone | Together, of: Heads, dtype: torch.dtype, n_groups: int, n_repeat: int,
        terms: torch.Tensor | None,
    ) -> torch.Tensor | None:  # fmt: skip
        if isinstance(part, Together):
            found = added(part.starts, part.keys, terms, None, dtype).expand(of.n_head, -1, -1)
            return found.transpose(0, 1).unflatten(1, (n_groups, n_repeat))
        rows = part.rows
        keys = torch.arange(part.first, rows.end, device=self.caches.device)
        if terms is None and rows.n_rows == 1:  # a single row may see every key
            return None
        return mask_of(self.positions[rows.span], keys, of, terms, n_groups, dtype)


class Texts:
    """Whole texts of as many tokens each, one after the other, and no caches: the rows of a block with gradients.

    Args:
        positions: for all of their rows, and those before them.
        prefix: keys and values (n, G * size) that all rows see, as if they stood before the first one.
    """

    def __init__(self, n_texts: int, n_tokens: int, positions: Positions, prefix: Sequence[torch.Tensor] = ()) -> None:
        self._n_texts, self._positions, self._prefix = n_texts, positions, prefix
        self._n_before = len(prefix[0]) if prefix else 0
        self._numbers = torch.arange(self._n_before, self._n_before + n_tokens, device=positions.device)

    def tables(self, of: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = (table[self._numbers].repeat(self._n_texts, 1)[:, None] for table in self._positions.rotary(of))
        return cos, sin

    def attend(
        self, of: Heads, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See `torch_block.Rows`."""
        assert k is not None, "blocks that read the cache of another one have no gradients"
        n_groups, n_keys = k.size(1), self._n_before + len(self._numbers)
        keys, *values = (self._with_prefix(i, rows) for i, rows in enumerate((k,) if v is None else (k, v)))
        mask = mask_of(
            self._numbers, torch.arange(n_keys, device=q.device), of, self._positions.terms(of), n_groups, q.dtype
        )
        value = values[0] if values else keys[..., : value_size(of)]
        found = attend(folded(q, self._n_texts, n_groups), keys, value, mask, of, sinks)
        return unfolded(found, len(q))

    def recur(self, of: DeltaNet, layer: int, taps: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """See `torch_block.Rows`."""
        state = kept.new_zeros(of.n_head, of.k_size, of.v_size)
        texts = [F.pad(text, (0, 0, of.n_taps - 1, 0)) for text in kept.chunk(self._n_texts)]
        return torch.cat([net(of, taps, text, state)[0] for text in texts])

    def _with_prefix(self, which: int, rows: torch.Tensor) -> torch.Tensor:
        """(N, G, size) -> (texts, G, keys, size)"""
        own = rows.view(self._n_texts, -1, *rows.shape[1:]).transpose(1, 2)
        if not self._prefix:
            return own
        before = self._prefix[which].view(self._n_before, *rows.shape[1:]).transpose(0, 1)
        return torch.cat([before.expand(self._n_texts, -1, -1, -1), own], dim=2)


def value_size(of: Heads) -> int:
    """Numbers of a head's value, as they come from `attend`."""
    return of.kv_rank if isinstance(of, LatentAttention) else of.head_size


def folded(q: torch.Tensor, n_texts: int, n_groups: int) -> torch.Tensor:
    """(N, n_head, size) -> (texts, G, R, size), R = query heads of a group times rows of a text."""
    return q.view(n_texts, -1, *q.shape[1:]).transpose(1, 2).reshape(n_texts, n_groups, -1, q.size(2))


def unfolded(y: torch.Tensor, n: int) -> torch.Tensor:
    """(texts, G, R, size) -> (N, n_head, size)"""
    n_texts, size = y.size(0), y.size(3)
    return y.reshape(n_texts, -1, n // n_texts, size).transpose(1, 2).reshape(n, -1, size)


def mask_of(
    queries: torch.Tensor, keys: torch.Tensor, of: Heads, terms: torch.Tensor | None, n_groups: int, dtype: torch.dtype
) -> torch.Tensor:
    """What rows at these positions see of keys at those: (R, L) boolean; with terms (G, R, L), to be added."""
    n_repeat = of.n_head // n_groups
    if terms is not None:
        return added(queries, keys, terms, of.window, dtype).view(n_groups, -1, len(keys))
    return ~_hidden(queries, keys, of.window).repeat(n_repeat, 1)


def added(
    queries: torch.Tensor, keys: torch.Tensor, terms: torch.Tensor | None, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """Numbers to add to the scores of rows at these positions: minus infinity for keys that they do not see.

    Terms of ALiBi are counted from the row's own, which makes no difference to a softmax: near keys get small numbers, of which
    a type of few bits loses little.

    Returns:
        (n_head, n, L); of one head, if there are no terms.
    """
    hidden = _hidden(queries, keys, window)
    if terms is None:
        scores = torch.zeros(1, *hidden.shape, device=hidden.device)
    else:
        scores = terms[:, None, keys] - terms[:, queries, None]
    return scores.masked_fill_(hidden, float("-inf")).to(dtype)


def _hidden(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    """(n, L)"""
    found = keys > queries[:, None]
    return found if window is None else found | (keys <= queries[:, None] - window)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, of: Heads,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of query rows folded into their groups, so that keys and values are read once per group, in place.

    Args:
        q: (B, G, R, k_size), R = query heads of the group times rows.
        k: (B, G, L, k_size). v: (B, G, L, v_size).
        mask: (R, L) boolean, or (B, G, R, L) that is added to the scores. None lets all see all.
        sinks: (n_head)

    Returns:
        (B, G, R, v_size)
    """
    size = v.size(-1)
    if sinks is not None:
        q, k, v = with_sinks(q, k, v, sinks / of.scale)
        mask = None if mask is None else F.pad(mask, (0, 1), value=mask.dtype == torch.bool)
    if of.softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=of.scale)[..., :size]
    scores = of.softcap * torch.tanh((q @ k.mT) * of.scale / of.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return (F.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype) @ v)[..., :size]


SINK_NUMBERS = 8  # more in a row, so that its size still suits vectors


def with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values with one more key, whose products with the queries are the sinks, and whose value is zero."""
    n_texts, n_groups, n_rows, size = q.shape
    own = sinks.to(q.dtype).view(1, n_groups, -1, 1, 1)
    own = own.expand(n_texts, -1, -1, n_groups * n_rows // sinks.numel(), -1).reshape(n_texts, n_groups, n_rows, 1)
    q = F.pad(torch.cat((q, own), dim=-1), (0, SINK_NUMBERS - 1))
    k, v = (F.pad(x, (0, SINK_NUMBERS, 0, 1)) for x in (k, v))
    k[:, :, -1, size] = 1
    return q, k, v
