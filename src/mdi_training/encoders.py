"""Encoding many pieces of text in order, by this process or by several."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np

from mdi.errors import UsageError
from mdi_training.vocabulary import Vocabulary, vocabulary_of

_PIECES_AHEAD = 2  # per process: enough that none waits, few enough that a text larger than the memory goes through

_vocabulary: Vocabulary | None = None  # of a process that encodes


def encoded(
    pieces: Iterable[str], vocabulary: Vocabulary, dtype: np.dtype, n_workers: int
) -> Iterator[tuple[int, bytes]]:
    """(characters, ids as bytes) of each piece, in the order of the pieces, whoever encodes them.

    Raises:
        UsageError: a process was ended from outside, for example because the memory ran out.
    """
    if n_workers == 1:
        for piece in pieces:
            yield len(piece), np.asarray(vocabulary.encode(piece), dtype=dtype).tobytes()
        return
    # spawned, because this process has threads that a fork would not take along
    context = multiprocessing.get_context("spawn")
    waiting: deque[tuple[int, Future[bytes]]] = deque()
    with ProcessPoolExecutor(n_workers, context, _begin, (vocabulary.files(),)) as pool:
        try:
            for piece in pieces:
                waiting.append((len(piece), pool.submit(_encode, piece, dtype.str)))
                if len(waiting) > _PIECES_AHEAD * n_workers:
                    n_chars, future = waiting.popleft()
                    yield n_chars, future.result()
            while waiting:
                n_chars, future = waiting.popleft()
                yield n_chars, future.result()
        except BrokenProcessPool:
            raise UsageError("a process that encodes was ended from outside: give fewer --workers") from None
        finally:
            pool.shutdown(cancel_futures=True)


def _begin(files: dict[str, bytes]) -> None:
    global _vocabulary
    _vocabulary = vocabulary_of(files)


def _encode(piece: str, dtype: str) -> bytes:
    assert _vocabulary is not None
    return np.asarray(_vocabulary.encode(piece), dtype=dtype).tobytes()
