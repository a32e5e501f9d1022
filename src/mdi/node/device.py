"""Which device, number format and threads a node computes with."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mdi.blocks import block_span
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.weights import own_packing
from mdi.config import check_device, check_dtype
from mdi.engine.tensors import DTYPES
from mdi.errors import UsageError
from mdi.kernels import library
from mdi.kernels.blocks import why_not_in_kernels
from mdi.kernels.layout import LAYOUTS
from mdi.model.kernel_stage import TensorStage
from mdi.model.stage import Stage
from mdi.node.machine import fair_threads
from mdi.node.processor import warn_of_processor
from mdi.node.resources import device_free_bytes
from mdi.partition.formats import weight_format

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # with which a user chooses for all programs


@dataclass(frozen=True)
class Computing:
    """What a node computes with: device, numbers, what its caches hold, weight format of its blocks, CPU threads.

    `threads` None leaves them as they are. `packing` is what weights are brought into for the kernels; None: torch computes.
    """

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    quantize: str | None
    threads: int | None = None
    packing: Packing | None = None


def choose_device(wanted: str | None) -> torch.device:
    """The device that was asked for, else a GPU if there is one (cuda, mps), else the CPU.

    Raises:
        UsageError: this machine does not have it.
    """
    if wanted is None or wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    check_device(wanted)
    device = torch.device(wanted)
    if device.type == "cuda":
        n_devices = torch.cuda.device_count()
        if (device.index or 0) >= n_devices:
            raise UsageError(f"device {wanted!r}: this machine has {n_devices} CUDA devices that torch can use")
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise UsageError(f"device {wanted!r}: torch finds no Apple GPU on this machine")
    return device


def devices() -> list[str]:
    """All that a node on this machine can compute on."""
    found = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    return [*found, "mps"] if torch.backends.mps.is_available() else found


def choose_dtype(wanted: str | None, stored: str, device: torch.device, is_quantized: bool = False) -> torch.dtype:
    """The number format to compute in.

    Without a wish: on a GPU what the checkpoint is stored in; on a CPU, bfloat16 where the checkpoint is bfloat16 and the
    processor multiplies it natively, else float32, which loses nothing and, where float16 is emulated, is faster.

    Raises:
        UsageError: unknown, or the device cannot compute in it.
    """
    name = check_dtype(wanted)
    if name is None:
        if device.type == "cpu":
            # The kernels of the weight formats take and give float32.
            native = stored == "bfloat16" and not is_quantized and cpu_multiplies_bfloat16()
            return torch.bfloat16 if native else torch.float32
        if (
            stored == "bfloat16"
            and device.type == "cuda"
            and not torch.cuda.is_bf16_supported(including_emulation=False)
        ):
            return torch.float16
        return DTYPES.get(stored, torch.float32)
    if name == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise UsageError(f"the device {device} cannot compute in bfloat16: use float16 or float32")
    return DTYPES[name]


def check_format(name: str | None, device: torch.device) -> None:
    """Raises UsageError if a weight format is unknown or not for this device."""
    if name is None:
        return
    if name not in LAYOUTS:
        raise UsageError(f"unknown weight format {name!r}: expected one of {', '.join(LAYOUTS)}")
    if device.type != "cpu":
        raise UsageError(f"the weight format {name} needs the CPU's kernels; on {device} use --dtype instead")


def choose_packing(
    config: Mapping[str, Any] | None, device: torch.device, dtype: str | None, stored: str, blocks: str | None,
    head: str | None,
) -> Packing | None:  # fmt: skip
    """What the kernels are to read; None if torch computes.

    Args:
        config: litgpt's Config as a plain dict; None for a model that is none of litgpt's.
        dtype: what the user wants to compute in; the kernels compute in float32.
        stored: type of the checkpoint's weights.
        blocks, head: formats that were asked for; None takes those that lose nothing.
    """
    if config is None or device.type != "cpu" or check_dtype(dtype) not in (None, "float32"):
        return None
    if why_not_in_kernels(config) is not None or library.load() is None:
        return None
    own = own_packing(stored)
    return Packing(blocks or own.blocks, head or own.head)


def choose_kv_dtype(wanted: str, computed: torch.dtype, device: torch.device) -> torch.dtype:
    """The number format that caches hold: with "auto" what the node computes in.

    Raises:
        UsageError: unknown, or the device does not have it.
    """
    return computed if wanted == "auto" else choose_dtype(wanted, "float32", device)


def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has bfloat16 matrix instructions that torch uses (AVX512-BF16, AMX, Arm BF16)."""
    check = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    if check is not None and check():
        return True
    arm = getattr(torch.cpu, "_is_arm_bf16_supported", None)  # absent in some releases
    return bool(arm is not None and arm())


def check_room(
    name: str, stage: Stage | TensorStage, max_length: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Raises UsageError if not even one sequence of full length fits into the memory that node `name` has left."""
    needed = stage.run_bytes(max_length, dtype)
    available = device_free_bytes(device)
    if needed > available:
        raise UsageError(
            f"a sequence of {max_length} tokens needs {needed / 1e9:.1f} GB of caches and tables for "
            f"{block_span(stage.start, stage.stop)} on {name}, but {available / 1e9:.1f} GB are left there: ask for fewer "
            "tokens, or a smaller --sequence-length"
        )


def held_bytes(
    parts: Sequence[int], stored: str, dtype: torch.dtype, quantize: str | None, stored_format: str | None = None
) -> int:
    """Memory that parts take once they are loaded, and while the last of them is.

    Args:
        parts: bytes of each, as stored: in a type, or packed (checkpoint.packing) if `stored_format` names how.
    """
    stored_bits = LAYOUTS[stored_format].bits if stored_format else 8 * DTYPES.get(stored, torch.float32).itemsize
    bits = weight_format(quantize).bits_per_weight if quantize is not None else 8 * dtype.itemsize
    # Where nothing changes the weights are mapped as they are; else the plain ones of one part stand beside the others.
    is_mapped = quantize is None and stored_format is None and bits == stored_bits
    extra = 0 if is_mapped else max(parts, default=0) * 8 * (4 if stored_format else dtype.itemsize) / stored_bits
    return int(sum(parts) * bits / stored_bits + extra)


def set_threads(n_threads: int | None, cores: Sequence[int] | None = None, beside: Sequence[int | None] = ()) -> None:
    """Limit torch to `n_threads` and to `cores`; and let the ring's threads in quickly while Python computes.

    Without a number of threads: as many as cores; without those, what OMP_NUM_THREADS or MKL_NUM_THREADS say; else this
    node's share of its machine.

    Args:
        beside: threads of the other nodes on this machine, see `mdi.node.machine`.

    Raises:
        UsageError: a core that this process does not have, or a system that cannot pin.
    """
    if cores is not None:
        pin_to_cores(cores)
        n_threads = n_threads or len(cores)
    if n_threads is None and not any(os.environ.get(name) for name in THREAD_VARIABLES):
        n_threads = fair_threads(beside)
    if n_threads is not None:
        torch.set_num_threads(n_threads)
    warn_of_processor()
    # The default of 5 ms is what a ring thread would wait for the interpreter each time.
    sys.setswitchinterval(0.0005)


@contextlib.contextmanager
def computing_threads(n_threads: int | None) -> Iterator[None]:
    """Compute with so many threads on the calling thread meanwhile; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def pin_to_cores(cores: Sequence[int]) -> None:
    """Keep this process on `cores`: the threads that there are, and those that they start; UsageError if that cannot be."""
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError(f"this system ({sys.platform}) has no way to keep a process on some cores: leave --cores out")
    allowed = os.sched_getaffinity(0)
    strange = sorted(set(cores) - allowed)
    if strange:
        raise UsageError(
            f"this process cannot run on core {strange[0]} (--cores, or `cores` in the nodes file); it may use "
            f"{', '.join(map(str, sorted(allowed)))}"
        )
    tasks = Path("/proc/self/task")
    threads = [int(task.name) for task in tasks.iterdir()] if tasks.is_dir() else []
    os.sched_setaffinity(0, cores)
    for thread in threads:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            os.sched_setaffinity(thread, cores)
