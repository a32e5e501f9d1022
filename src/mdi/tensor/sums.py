"""The sum of an array over all nodes of a group, in four ways, in float32 or rounded. All nodes get the same bits.

star      all send to the first node, which sums and sends the sum back (as TPI-LLM does)
exchange  all send to all, and each sums: one delay instead of two, more bytes
ring      pieces go round the ring and are summed on the way, then the sums go round
tree      pairs of nodes, pairs of pairs ..., then back down

Star and exchange add in the order of ranks, and agree to the bit. Ring and tree add in other orders, which the number of nodes
alone decides.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator

import numpy as np

from mdi.engine.rows import ENCODERS
from mdi.kernels import library
from mdi.kernels.exchange import MdiMesh
from mdi.net.wire import REDUCE_DTYPES as REDUCE_DTYPES
from mdi.spec.options import DEFAULT_SUM
from mdi.tensor.mesh import Mesh

Floats = np.ndarray


class Numbers:
    """One of REDUCE_DTYPES: arrays (n_rows, n_cols) as bytes, and back."""

    def __init__(self, name: str) -> None:
        self._encoder = ENCODERS.get(name)
        self.is_exact = self._encoder is None

    def n_bytes(self, n_rows: int, n_cols: int) -> int:
        if self._encoder is None:
            return 4 * n_rows * n_cols
        return self._encoder.payload_type.n_bytes(n_rows, n_cols)

    def encode(self, x: Floats) -> memoryview:
        """float32 (n_rows, n_cols), contiguous -> bytes; in float32 the memory of `x` itself."""
        if self._encoder is None:
            return x.reshape(-1).view(np.uint8).data
        return self._encoder.encode(x).data

    def decode(self, data: memoryview, n_rows: int, n_cols: int) -> Floats:
        """-> float32 (n_rows, n_cols); in float32 the memory of `data` itself."""
        if self._encoder is None:
            return np.frombuffer(data, dtype=np.float32).reshape(n_rows, n_cols)
        return self._encoder.decode(np.frombuffer(data, dtype=np.uint8), n_rows, n_cols)


EXACT = Numbers("float32")


class AllReduce:
    """Sums over a mesh. The kernels do an exchange of float32 that is not encrypted, all others are done here.

    Args:
        algorithm: one of spec.options.SUM_CHOICES.
        numbers: what partial sums travel as.
    """

    def __init__(self, mesh: Mesh, algorithm: str, numbers: Numbers) -> None:
        self.mesh, self._numbers = mesh, numbers
        self._add = _WAYS[DEFAULT_SUM if algorithm == "auto" else algorithm]
        is_plain = self._add is _exchange and numbers.is_exact and not mesh.is_sealed
        self._kernels = library.load() if is_plain else None

    def reduce(self, x: Floats) -> None:
        """float32 (n_rows, n_cols), contiguous: becomes the sum over all nodes, which call this in the same order.

        Raises:
            RingError: a node is lost.
        """
        if self.mesh.size == 1:
            return
        if self._kernels is not None:
            with self.mesh.lent(x.nbytes) as mesh:
                if self._kernels.mdi_exchange(
                    ctypes.byref(mesh), ctypes.c_void_p(x.ctypes.data), ctypes.c_int64(x.size)
                ):
                    return
        self.end(x)

    @contextlib.contextmanager
    def lent(self, n_bytes: int) -> Iterator[MdiMesh | None]:
        """The exchange for sums of so many bytes in the kernels; None if they cannot do them. `end` ends one they gave up."""
        if self._kernels is None:
            yield None
        else:
            with self.mesh.lent(n_bytes) as mesh:
                yield mesh

    def end(self, x: Floats) -> None:
        """`reduce`, or what is left of it if the kernels have begun it."""
        if self.mesh.is_in_sum:
            own = EXACT.encode(x)
            return _add_up(x, own, self.mesh.end_sum(), self.mesh.rank, EXACT)
        begin = time.perf_counter()
        self.mesh.next_sum()
        try:
            self._sum(x)
        finally:  # the run may end in the last sum of a node, whose part of it others have: it counts on all nodes
            self.mesh.tally.count(begin, time.perf_counter())

    def _sum(self, x: Floats) -> None:
        # Sums of squares are few, and all other numbers are divided by them: they are never rounded.
        self._add(self.mesh, x, self._numbers if x.shape[1] > 2 else EXACT)


def _star(mesh: Mesh, x: Floats, numbers: Numbers) -> None:
    others = range(1, mesh.size)
    if mesh.rank != 0:
        total = mesh.swap([(0, numbers.encode(x))], [(0, x.nbytes)])
        x[:] = EXACT.decode(total[0], *x.shape)
        return
    own = numbers.encode(x)
    parts = mesh.swap([], [(rank, len(own)) for rank in others])
    _add_up(x, own, parts, 0, numbers)
    whole = EXACT.encode(x)
    mesh.swap([(rank, whole) for rank in others], [])


def _exchange(mesh: Mesh, x: Floats, numbers: Numbers) -> None:
    others = [rank for rank in range(mesh.size) if rank != mesh.rank]
    own = numbers.encode(x)
    parts = mesh.swap([(rank, own) for rank in others], [(rank, len(own)) for rank in others])
    _add_up(x, own, parts, mesh.rank, numbers)


def _add_up(x: Floats, own: memoryview, parts: dict[int, memoryview], rank: int, numbers: Numbers) -> None:
    """x becomes the sum of all parts in the order of ranks; `own`, this node's, is what `x` was encoded as."""
    if numbers.is_exact and len(parts) == 1:  # a sum of two is the same in either order
        x += numbers.decode(next(iter(parts.values())), *x.shape)
        return
    arrays = [numbers.decode(own if r == rank else parts[r], *x.shape) for r in range(len(parts) + 1)]
    total = np.add(arrays[0], arrays[1])
    for array in arrays[2:]:
        total += array
    x[:] = total


def _ring(mesh: Mesh, x: Floats, numbers: Numbers) -> None:
    pieces, size, rank = _pieces(x, mesh.size), mesh.size, mesh.rank
    following, previous = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        out, into = pieces[(rank - step) % size], pieces[(rank - step - 1) % size]
        data = _pass_on(mesh, following, numbers.encode(out), previous, numbers.n_bytes(*into.shape))
        into += numbers.decode(data, *into.shape)
    done = numbers.encode(pieces[(rank + 1) % size])
    if not numbers.is_exact:  # the other nodes get it rounded
        pieces[(rank + 1) % size][:] = numbers.decode(done, *pieces[(rank + 1) % size].shape)
    for step in range(size - 1):
        into = pieces[(rank - step) % size]
        done = memoryview(bytes(_pass_on(mesh, following, done, previous, numbers.n_bytes(*into.shape))))
        into[:] = numbers.decode(done, *into.shape)


def _pass_on(mesh: Mesh, following: int, data: memoryview | bytearray, previous: int, n_bytes: int) -> memoryview:
    """Send to one neighbour and receive from the other, which in a group of two are the same node."""
    return mesh.swap([(following, data)], [(previous, n_bytes)])[previous]


def _tree(mesh: Mesh, x: Floats, numbers: Numbers) -> None:
    n_bytes, children, step = numbers.n_bytes(*x.shape), [], 1
    while step < mesh.size and mesh.rank % (2 * step) == 0:
        child = mesh.rank + step
        if child < mesh.size:
            data = mesh.swap([], [(child, n_bytes)])[child]
            x += numbers.decode(data, *x.shape)
            children.append(child)
        step *= 2
    if mesh.rank == 0:
        total = numbers.encode(x)
    else:
        parent = mesh.rank - step
        mesh.swap([(parent, numbers.encode(x))], [])
        total = memoryview(bytes(mesh.swap([], [(parent, n_bytes)])[parent]))
    if mesh.rank != 0 or not numbers.is_exact:
        x[:] = numbers.decode(total, *x.shape)
    for child in reversed(children):
        mesh.swap([(child, total)], [])


def _pieces(x: Floats, n: int) -> list[Floats]:
    """n contiguous pieces of x as views: whole rows if there are enough, else parts of the flat array."""
    if len(x) >= n:
        return [x[len(x) * i // n : len(x) * (i + 1) // n] for i in range(n)]
    flat = x.reshape(1, -1)
    bounds = [flat.size * i // n for i in range(n + 1)]
    return [flat[:, a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


_WAYS: dict[str, Callable[[Mesh, Floats, Numbers], None]] = {
    "star": _star,
    "exchange": _exchange,
    "ring": _ring,
    "tree": _tree,
}
