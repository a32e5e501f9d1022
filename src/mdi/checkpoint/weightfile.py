"""One file of weights, read tensor by tensor without executing anything in it: .safetensors, .pth or .bin.

Knows nothing of models: names are the file's own. Files are mapped where that serves: the system loads pages when they are
touched, and processes share them.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct
import sys
import warnings
import weakref
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mdi.checkpoint.parts import PIECE_BYTES
from mdi.checkpoint.safetensors_layout import HEADER_LIMIT_BYTES, TYPES, TensorSpec, read_header
from mdi.errors import INSTALL_ALL, CheckpointError, Code, MemoryShortError
from mdi.files import lock_file
from mdi.spec.cluster import nearest_existing
from mdi.units import size

if TYPE_CHECKING:
    import torch


def map_bytes(path: Path, start: int, stop: int, *, is_writable: bool = False) -> np.ndarray:
    """Bytes [start, stop) of a file, (stop - start) of uint8; the mapping goes with the last array that looks into it.

    Args:
        is_writable: writes stay in memory and never reach the file; for code that cannot use read-only memory.

    Raises:
        CheckpointError: the file cannot be opened, or is shorter.
        MemoryShortError: there is not enough memory.
    """
    if start == stop:
        return np.empty(0, dtype=np.uint8)
    first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno()).st_size
            if found < stop:
                raise CheckpointError(f"{path} was cut short: {found} bytes, {stop} expected at least")
            access = mmap.ACCESS_COPY if is_writable else mmap.ACCESS_READ
            mapped = mmap.mmap(file.fileno(), stop - first, access=access, offset=first)
            if sys.platform != "win32":  # which removes no mapped files
                with contextlib.suppress(OSError):
                    lock_file(
                        file.fileno(), is_shared=True
                    )  # for the mapping, so that no cleaning of a cache removes it
    except OSError as e:
        if e.errno == errno.ENOMEM:
            raise MemoryShortError(
                f"there is too little memory to map {size(stop - first)} of {path}: free some, or raise the limit "
                "of this process (ulimit -v)"
            ) from None
        raise CheckpointError(f"cannot map {path} into memory: {e.strerror or e}") from None
    return np.frombuffer(mapped, dtype=np.uint8, count=stop - start, offset=start - first)


class WeightFile(Protocol):
    """Attributes:
    path: of the file.
    specs: type and shape of each tensor in it.
    stays_mapped: whether a tensor that was asked for is mapped until `release`; else until nobody has it.
    """

    stays_mapped: bool

    path: Path
    specs: dict[str, TensorSpec]

    def array(self, name: str, rows: slice | None = None) -> np.ndarray:
        """A tensor as it is stored, mapped from the file where possible; see layout.TYPES for types that numpy lacks.

        Args:
            rows: only these, along the first dimension; with bounds within it, and without a step.
        """

    def is_same(self, name: str, other: str) -> bool:
        """Whether two tensors are the same bytes of the file."""

    def release(self) -> None:
        """Unmap the file, so that its pages do not count as ours; `array` maps it again."""


def open_weight_file(path: Path) -> WeightFile:
    """Open by suffix.

    Raises:
        CheckpointError: the file is missing, cut short or damaged, or has something else than tensors.
    """
    return SafetensorsFile(path) if path.suffix == ".safetensors" else PickledFile(path)


class SafetensorsFile:
    """See `WeightFile`.

    Args:
        limit_bytes: that its head may have.
    """

    stays_mapped = False

    def __init__(self, path: Path, limit_bytes: int = HEADER_LIMIT_BYTES) -> None:
        self.path = path
        header = read_header(path, limit_bytes)
        self.metadata = header.metadata
        self.specs = header.specs
        self._offsets = header.offsets
        self._whole: weakref.ref[np.ndarray] | None = None

    def array(self, name: str, rows: slice | None = None) -> np.ndarray:
        """A tensor, or some rows of it, in a mapping of its own, which is freed with it."""
        spec, (start, stop) = self.specs[name], self._offsets[name]
        shape = spec.shape
        if rows is not None:
            row_bytes = (stop - start) // max(1, shape[0])
            shape = (rows.stop - rows.start, *shape[1:])
            start, stop = start + rows.start * row_bytes, start + rows.stop * row_bytes
        data = map_bytes(self.path, start, stop, is_writable=True)
        return data.view(TYPES[spec.dtype].numpy).reshape(shape)

    def view(self, name: str) -> np.ndarray:
        """A tensor in a read-only mapping of the whole file, which is freed with the last view."""
        spec, (start, stop) = self.specs[name], self._offsets[name]
        return self._mapped()[start:stop].view(TYPES[spec.dtype].numpy).reshape(spec.shape)

    def extent(self, name: str) -> tuple[int, int]:
        """The bytes [start, stop) of a tensor in the file."""
        return self._offsets[name]

    def is_same(self, name: str, other: str) -> bool:
        return self._offsets[name] == self._offsets[other]

    def pieces(self, name: str) -> Iterator[memoryview]:
        """The bytes of a tensor, read in pieces of at most 4 MiB, so that none of them counts as memory of this process.

        Raises:
            CheckpointError: the file was cut short, or cannot be read.
        """
        start, stop = self._offsets[name]
        buffer = memoryview(bytearray(min(PIECE_BYTES, stop - start)))
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(start)
                while start < stop:
                    n_bytes = file.readinto(buffer[: stop - start])
                    if not n_bytes:
                        raise CheckpointError(
                            f"{self.path} was cut short: it ends at byte {start}, {stop} expected at least"
                        )
                    yield buffer[:n_bytes]
                    start += n_bytes
        except OSError as e:
            raise CheckpointError(f"cannot read {self.path}: {e.strerror or e}") from None

    def _mapped(self) -> np.ndarray:
        whole = self._whole() if self._whole is not None else None
        if whole is None:
            whole = map_bytes(self.path, 0, max(stop for _, stop in self._offsets.values()))
            self._whole = weakref.ref(whole)
        return whole

    def release(self) -> None:
        """Mappings go with the arrays that look into them."""


class PickledFile:
    """torch.save's format, with torch's restricted unpickler, which builds tensors and containers only.

    It maps tensors without a look at their checksums: here each is compared when the tensor is read for the first time.
    """

    stays_mapped = True

    def __init__(self, path: Path) -> None:
        try:
            from mdi.checkpoint.torch_tensors import tensor_spec
        except ModuleNotFoundError as e:
            raise CheckpointError(
                f"{path} is a pickle, which only {e.name} reads, and that is not installed: {INSTALL_ALL}; "
                "safetensors and GGUF files need none",
                code=Code.LIBRARY,
            ) from None
        self.path = path
        self._tensors: dict[str, torch.Tensor] | None = None
        self.specs = {name: tensor_spec(tensor) for name, tensor in self._load().items()}
        self._checksums = _checksums(path)
        self._checked: set[str] = set()

    def array(self, name: str, rows: slice | None = None) -> np.ndarray:
        """As `WeightFile.array`. Raises CheckpointError if bits of the tensor have changed since the file was written."""
        from mdi.checkpoint.torch_tensors import as_array, storage_bytes

        tensor = self._load()[name]
        if self._checksums and name not in self._checked:
            data = storage_bytes(tensor)
            if (data.nbytes, zlib.crc32(data.data)) not in self._checksums:
                raise CheckpointError(
                    f"{self.path} is damaged: {name} does not have its checksum; convert or download the model again"
                )
            self._checked.add(name)
        return as_array(tensor if rows is None else tensor[rows])

    def is_same(self, name: str, other: str) -> bool:
        return self._load()[name].data_ptr() == self._load()[other].data_ptr()

    def release(self) -> None:
        self._tensors = None

    def _load(self) -> dict[str, torch.Tensor]:
        tensors = self._tensors  # a variable of our own: another thread may release it meanwhile
        if tensors is None:
            tensors = self._tensors = self._plain(_torch_load(self.path))
        return tensors

    def _plain(self, state: Any) -> dict[str, torch.Tensor]:
        if isinstance(state, dict) and isinstance(state.get("model"), dict):  # litgpt's pretraining nests it
            state = state["model"]
        if not isinstance(state, dict) or not state:
            raise CheckpointError(f"{self.path} has no state dict but a {type(state).__name__}")
        import torch

        for name, value in state.items():
            if not isinstance(name, str) or not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                raise CheckpointError(f"{self.path}: {name!r} is not a plain tensor but a {type(value).__name__}")
        return state


def _checksums(path: Path) -> set[tuple[int, int]]:
    """Size and CRC-32 of everything in a file of torch.save; nothing if it is no zip file, or was written without them.

    Torch does not tell which of them is a tensor's own. That it is one of them is enough: a changed bit makes another CRC-32,
    and it is hardly ever that of another tensor.

    Raises:
        CheckpointError: the file is damaged.
    """
    if not zipfile.is_zipfile(path):  # torch has read it: it is of the older format
        return set()
    try:
        with zipfile.ZipFile(path) as archive:
            found = {(entry.file_size, entry.CRC) for entry in archive.infolist()}
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error) as e:
        raise CheckpointError(f"{path} cannot be read; it is damaged or cut short: {e}") from None
    return found if any(crc for _, crc in found) else set()


def _torch_load(path: Path) -> Any:
    # A pickle that torch did not write is refused, or read, but in either case not worth a warning. This holds for good: the
    # end of a `catch_warnings` takes back what other threads have set meanwhile, such as `requests` while it is imported.
    warnings.filterwarnings("ignore", message="Detected pickle protocol")
    try:
        return _mapped_if_possible(path)
    except FileNotFoundError:
        raise CheckpointError(f"no such file: {path} (the nearest that exists is {nearest_existing(path)})") from None
    except MemoryError:
        raise MemoryShortError(f"there is too little memory to read {path}") from None
    except Exception as e:  # torch raises many undocumented types for a file that is not a checkpoint
        reason = (str(e).splitlines() or [type(e).__name__])[0][:200]
        if type(e).__name__ == "UnpicklingError":  # torch's own words advise to read it without the restriction
            raise CheckpointError(
                f"{path} is refused: it is damaged, or holds more than weights, which could run code"
            ) from None
        map_bytes(path, 0, path.stat().st_size)  # torch tells a lack of memory in words only; this by its type
        raise CheckpointError(f"{path} cannot be read; it is damaged or cut short: {reason}") from None


def _mapped_if_possible(path: Path) -> Any:
    import torch

    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except RuntimeError as e:
        if "mmap can only be used" not in str(e):
            raise
        return torch.load(path, map_location="cpu", weights_only=True)  # the format of torch before 1.6
