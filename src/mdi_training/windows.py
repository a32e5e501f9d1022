"""Windows of token ids, in an order that depends on the seed and the position alone.

So a run can start again at any step without a saved random state, and several processes can each take their share.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mdi.errors import Code, UsageError

if TYPE_CHECKING:
    import torch


class Windows:
    """Cuts a token file into windows of `length` ids, each with the id that follows it.

    An epoch is one shuffled pass over windows that do not overlap; each epoch cuts at another offset.

    Raises:
        UsageError: there are fewer than length + 1 tokens.
    """

    def __init__(
        self, ids: npt.NDArray[np.unsignedinteger[Any]], length: int, seed: int, name: str = "the data set"
    ) -> None:
        if len(ids) < length + 1:
            raise UsageError(
                f"{name} has {len(ids)} tokens, too few for one window of {length} and the token after it; "
                "give more text or a smaller --sequence-length",
                code=Code.SHORT,
            )
        self._ids = ids
        self._length = length
        self._seed = seed
        self.n_per_epoch = max(1, (len(ids) - length) // length)
        self._epoch = -1
        self._starts: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def start(self, index: int) -> int:
        """Where the window with this number (counted over all epochs) starts in the file."""
        epoch, i = divmod(index, self.n_per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng([self._seed, epoch])
            room = len(self._ids) - 1 - self.n_per_epoch * self._length
            offset = int(rng.integers(0, min(self._length - 1, room) + 1))
            self._starts = offset + self._length * rng.permutation(self.n_per_epoch)
            self._epoch = epoch
        return int(self._starts[i])

    def batch(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of windows first .. first + count, each of shape (count, length), int64, on the CPU."""
        return self._gather([self.start(first + i) for i in range(count)])

    def in_order(self, batch_size: int, n_batches: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """At most n_batches * batch_size windows, spread evenly over the file: the same ones at every call."""
        n_all = (len(self._ids) - 1) // self._length
        count = min(n_all, batch_size * n_batches)
        starts = [i * n_all // count * self._length for i in range(count)]
        for i in range(0, count, batch_size):
            yield self._gather(starts[i : i + batch_size])

    def _gather(self, starts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        rows = np.stack([self._ids[s : s + self._length + 1] for s in starts]).astype(np.int64)
        both = torch.from_numpy(rows)
        return both[:, :-1], both[:, 1:]
