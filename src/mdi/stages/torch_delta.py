"""Gated delta nets in torch, row by row (`model.spec.DeltaNet` has the formula), and their states in caches."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mdi.kernels.states import StateEntry
from mdi.model.spec import DeltaNet

LENGTH_EPS = 1e-6  # added to the squares of a query's or key's length


def net(
    of: DeltaNet, taps: torch.Tensor, rows: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Take rows in.

    Args:
        taps: of the convolution, (n_channels, n_taps).
        rows: (n_taps - 1 + n, n_channels + 2 * n_head), see `torch_block.Rows.recur`; the first ones were taken in before.
        state: (n_head, k_size, v_size); it stays as it is.

    Returns:
        What the heads give, (n, n_head, v_size), and the state behind the last row.
    """
    n, n_keys = len(rows) - of.n_taps + 1, of.n_groups * of.k_size
    into, b, decay = rows[:, : of.n_channels], *rows[of.n_taps - 1 :, of.n_channels :].chunk(2, dim=1)
    seen = into[:n] * taps[:, 0]
    for i in range(1, of.n_taps):
        seen = seen + into[i : i + n] * taps[:, i]
    seen = F.silu(seen)
    q, k = (
        _for_each_head(of, _of_length_one(seen[:, i * n_keys : (i + 1) * n_keys].view(n, of.n_groups, of.k_size)))
        for i in range(2)
    )
    q = q * of.k_size**-0.5
    v = seen[:, 2 * n_keys :].view(n, of.n_head, 1, of.v_size)
    given = []
    for i in range(n):
        state = state * decay[i, :, None, None]
        change = b[i, :, None, None] * (v[i] - k[i] @ state)
        state = torch.baddbmm(state, k[i].mT, change)
        given.append(q[i] @ state)
    return torch.cat(given, dim=1).transpose(0, 1), state


def _of_length_one(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + LENGTH_EPS)


def _for_each_head(of: DeltaNet, x: torch.Tensor) -> torch.Tensor:
    """(n, n_groups, size) -> (n, n_head, 1, size)"""
    n_each = of.n_head // of.n_groups
    return (x.repeat(1, n_each, 1) if of.is_in_turn else x.repeat_interleave(n_each, dim=1))[:, :, None]


def brought_up(
    entry: StateEntry, number: int, of: DeltaNet, taps: torch.Tensor, start: int, new: torch.Tensor
) -> torch.Tensor:
    """Take new rows into the states of a block of a sequence, of which only the rows before `start` count.

    Args:
        entry: of the sequence; the first state goes on to its `first`, and its memory has room for the new rows.
        number: of the block in its class.
        taps: of the convolution, (n_channels, n_taps).
        start: position of the first new row.
        new: (n, row_size), as `net` takes them.

    Returns:
        (n, n_head, v_size)
    """
    memory = entry.memory
    before, behind, rows = memory.block(number)
    first, at = memory.places[number].tolist()
    n_taps_before = of.n_taps - 1

    def taken_in(state: torch.Tensor, at: int, stop: int) -> torch.Tensor:
        """The state behind the kept rows [at, stop)."""
        return net(of, taps, rows[at - first : stop - first + n_taps_before], state)[1] if stop > at else state

    if not first <= at <= start:  # the sequence was cut
        behind.copy_(before)
        at = first
    behind.copy_(taken_in(behind, at, start))
    if first < entry.first:
        before.copy_(taken_in(before, first, entry.first))
        n_left = start - entry.first + n_taps_before
        rows[:n_left] = rows[entry.first - first :][:n_left].clone()
        first = entry.first
    at_new = start - first + n_taps_before
    rows[at_new : at_new + len(new)] = new
    given, state = net(of, taps, rows[at_new - n_taps_before : at_new + len(new)], behind)
    behind.copy_(state)
    memory.places[number] = first, start + len(new)
    return given
