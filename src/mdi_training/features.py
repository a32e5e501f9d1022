"""Outputs of blocks on the disk: what the ring has computed once of each example, readable by the user alone.

features.json   what they are of: examples, model, blocks, number format
features.bin    for each row of each example, in order, the outputs of all taps and of the last block
logits.bin      for each row what the model's own head says, if it is kept: float16
*.done          of such a file, for each example 8 bytes: 0, or 2 ** 32 + the CRC32 of its rows
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from mdi.checkpoint.disk_space import check_disk
from mdi.engine.rows import ENCODERS
from mdi.errors import Code, UsageError
from mdi.files import replacing
from mdi.spec.decode import decode_text
from mdi_training.examples import Example

WIRES = {"16": "fp16", "8": "int8"}  # names of ENCODERS
ADVICE = "choose fewer blocks (--taps), --feature-bits 8, no --keep-logits, or another --out"


@dataclass(frozen=True)
class FeatureKind:
    """What features are of.

    Attributes:
        examples: their hash.
        identity: of the run, see mdi.run.identity.
        n_parts: taps, and one for the last block.
        bits: of a number, a key of WIRES.
        n_logits: of a row; 0 if they are not kept.
    """

    examples: str
    identity: str
    taps: tuple[int, ...]
    n_embd: int
    bits: str
    n_logits: int = 0

    @property
    def n_parts(self) -> int:
        return len(self.taps) + 1

    @property
    def row_bytes(self) -> int:
        """Of the blocks' outputs of one row."""
        return ENCODERS[WIRES[self.bits]].payload_type.n_bytes(self.n_parts, self.n_embd)

    @property
    def stored_bytes(self) -> int:
        """All that is stored of one row."""
        return self.row_bytes + 2 * self.n_logits


class StoredRows:
    """Rows of bytes of each example in a file, with a checksum of each example in another one.

    Args:
        first: for each example, and behind the last one, the number of its first row.

    Raises:
        OSError, ValueError: the files cannot be used. ValueError: they have another length.
    """

    def __init__(self, folder: Path, name: str, first: Sequence[int], row_bytes: int, is_new: bool) -> None:
        self._first, n_examples = first, len(first) - 1
        rows, done = folder / f"{name}.bin", folder / f"{name}.done"
        if is_new:
            _allocate(rows, first[-1] * row_bytes)
            _allocate(done, 8 * n_examples)
        self._rows = np.memmap(rows, dtype=np.uint8, mode="r+", shape=(first[-1], row_bytes))
        self._done = np.memmap(done, dtype="<u8", mode="r+", shape=(n_examples,))
        self._crcs: dict[int, int] = {}  # of examples of which some rows are there

    def missing(self) -> list[int]:
        """Examples whose rows are not here as a whole. Those that are damaged are missing, too."""
        found = []
        for index in range(len(self._done)):
            done = int(self._done[index])
            if not done or done != (1 << 32) + zlib.crc32(self._of(index).data):
                self._done[index] = 0
                found.append(index)
        return found

    def _of(self, index: int) -> np.ndarray:
        return np.ascontiguousarray(self._rows[self._first[index] : self._first[index + 1]])

    def read(self, indices: Sequence[int], at: slice = slice(None)) -> np.ndarray:
        """The rows of some examples, one example after the other; of all these only those of `at`."""
        numbers = np.concatenate([np.arange(self._first[index], self._first[index + 1]) for index in indices])
        found: np.ndarray = self._rows[numbers[at]]
        return found

    def add(self, index: int, n_before: int, rows: np.ndarray) -> None:
        """The next rows of an example, in order; `n_before` of it are there."""
        at = self._first[index] + n_before
        self._rows[at : at + len(rows)] = rows
        self._crcs[index] = zlib.crc32(np.ascontiguousarray(rows).data, self._crcs.get(index, 0))

    def finish(self, index: int) -> None:
        """All rows of an example have come."""
        self._done[index] = (1 << 32) + self._crcs.pop(index)

    def flush(self) -> None:
        self._rows.flush()
        self._done.flush()


class Features:
    """Made for one run, or found as an earlier one has left them.

    Args:
        folder: is made, with all files, if they are not there.

    Attributes:
        logits: of all rows, as `FrozenHead.kept` gives them; None if they are not kept.

    Raises:
        UsageError: there is not enough space, or the folder has other features.
    """

    def __init__(self, folder: Path, kind: FeatureKind, examples: Sequence[Example]) -> None:
        self.folder, self.kind, self._examples = folder, kind, examples
        self._encoder = ENCODERS[WIRES[kind.bits]]
        self._first = [0, *accumulate(example.n_rows for example in examples)]
        self._open_files()

    def _open_files(self) -> None:
        folder, kind = self.folder, self.kind
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
            is_new = not (folder / "features.json").exists()
            if is_new:
                n_bytes = self._first[-1] * kind.stored_bytes + 16 * len(self._examples)
                check_disk(folder, n_bytes, "the blocks' outputs", UsageError, ADVICE)
            else:
                told = (folder / "features.json").read_text("utf-8")
                if decode_text(FeatureKind, told, f"{folder}/features.json", UsageError) != kind:
                    raise UsageError(
                        f"{folder} has outputs for other examples, another model or other flags: give another --out, or "
                        "remove it",
                        code=Code.EXISTS,
                    )
            self._outputs = StoredRows(folder, "features", self._first, kind.row_bytes, is_new)
            self.logits = (
                StoredRows(folder, "logits", self._first, 2 * kind.n_logits, is_new) if kind.n_logits else None
            )
            if is_new:
                with replacing(folder / "features.json") as file:
                    os.fchmod(file.fileno(), 0o600)
                    file.write(json.dumps(asdict(kind)).encode())
        except (OSError, ValueError) as e:  # ValueError: a file of another length
            raise UsageError(f"{folder} cannot be used for the blocks' outputs: {e}", code=Code.UNWRITABLE) from e

    def missing(self) -> list[int]:
        """Examples whose outputs are not here as a whole."""
        return self._outputs.missing()

    def add(self, index: int, first: int, rows: np.ndarray) -> None:
        """The next rows of an example, in order.

        Args:
            first: position of the first one in the text.
            rows: float32 (1 + taps, n, n_embd), those of the last block first.
        """
        n_parts, n, n_embd = rows.shape
        packed = self._encoder.encode(np.ascontiguousarray(rows.transpose(1, 0, 2)).reshape(n * n_parts, n_embd))
        split = n * n_parts * self._encoder.payload_type.n_scales(n_embd) * self._encoder.payload_type.scale_bytes
        joined = np.concatenate([packed[:split].reshape(n, -1), packed[split:].reshape(n, -1)], axis=1)
        self._outputs.add(index, first - self._examples[index].read_from, joined)

    def finish(self, index: int) -> None:
        """All rows of an example have come."""
        self._outputs.finish(index)

    def read(self, indices: Sequence[int]) -> np.ndarray:
        """The rows of some examples, one example after the other: float32 (1 + taps, rows, n_embd)."""
        n_parts, n_embd = self.kind.n_parts, self.kind.n_embd
        stored = self._outputs.read(indices)
        form = self._encoder.payload_type
        split = n_parts * form.n_scales(n_embd) * form.scale_bytes
        packed = np.concatenate([stored[:, :split].reshape(-1), stored[:, split:].reshape(-1)])
        rows = self._encoder.decode(packed, len(stored) * n_parts, n_embd)
        return np.ascontiguousarray(rows.reshape(len(stored), n_parts, n_embd).transpose(1, 0, 2))

    def close(self) -> None:
        """Write what is in memory. Nothing is added or read any more."""
        self._outputs.flush()
        if self.logits is not None:
            self.logits.flush()

    def remove(self) -> None:
        """Remove the whole folder."""
        del self._outputs, self.logits
        with contextlib.suppress(OSError):
            shutil.rmtree(self.folder)


def _allocate(path: Path, n_bytes: int) -> None:
    """A file of so many bytes, all of which the disk has from now on."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, n_bytes)
        else:
            os.truncate(file, n_bytes)
    finally:
        os.close(file)
