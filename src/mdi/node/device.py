"""Which device, number format and threads a node computes with."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from mdi.engine.tensors import DTYPES
from mdi.errors import UsageError
from mdi.model.stage import Stage
from mdi.node.memory import available_bytes

_ALIASES = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "32": "float32"}


def choose_device(wanted: str | None) -> torch.device:
    """The device that was asked for, else a GPU if there is one (cuda, mps), else the CPU.

    Raises:
        UsageError: this machine does not have it.
    """
    if wanted is None or wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise UsageError(f"unknown device {wanted!r}: expected cpu, cuda, cuda:<n> or mps") from None
    if device.type == "cuda":
        n_devices = torch.cuda.device_count()
        if (device.index or 0) >= n_devices:
            raise UsageError(f"device {wanted!r}: this machine has {n_devices} CUDA devices that torch can use")
    elif device.type == "mps":
        if not torch.backends.mps.is_available():
            raise UsageError(f"device {wanted!r}: torch finds no Apple GPU on this machine")
    elif device.type != "cpu":
        raise UsageError(f"device {wanted!r} is not supported: expected cpu, cuda, cuda:<n> or mps")
    return device


def choose_dtype(wanted: str | None, stored: str, device: torch.device, is_quantized: bool = False) -> torch.dtype:
    """The number format to compute in.

    Without a wish: on a GPU what the checkpoint is stored in; on a CPU, bfloat16 where the checkpoint is bfloat16 and the
    processor multiplies it natively, else float32, which loses nothing and, where float16 is emulated, is faster.

    Raises:
        UsageError: unknown, or the device cannot compute in it.
    """
    if wanted is None or wanted == "auto":
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
    name = _ALIASES.get(wanted.lower(), wanted.lower())
    if name not in DTYPES or name == "float64":
        raise UsageError(f"unknown dtype {wanted!r}: expected float32, float16 or bfloat16")
    if name == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise UsageError(f"the device {device} cannot compute in bfloat16: use float16 or float32")
    return DTYPES[name]


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


def check_room(stage: Stage, max_length: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raises UsageError if not even one sequence of full length fits into the memory that is left."""
    needed = stage.run_bytes(max_length, dtype)
    available = available_bytes(device)
    if needed > available:
        raise UsageError(
            f"a sequence of {max_length} tokens needs {needed / 1e9:.1f} GB of caches and tables for blocks [{stage.start}, "
            f"{stage.stop}), but {available / 1e9:.1f} GB are left: ask for fewer tokens, or a smaller --sequence-length"
        )


def set_threads(n_threads: int | None, cores: Sequence[int] | None = None) -> None:
    """Limit torch to `n_threads` and to `cores`; and let the ring's threads in quickly while Python computes.

    With cores and no number of threads, as many threads as cores.

    Raises:
        UsageError: a core that this process does not have, or a system that cannot pin.
    """
    if cores is not None:
        pin_to_cores(cores)
        n_threads = n_threads or len(cores)
    if n_threads is not None:
        torch.set_num_threads(n_threads)
    # The default of 5 ms is what a ring thread would wait for the interpreter each time.
    sys.setswitchinterval(0.0005)


def pin_to_cores(cores: Sequence[int]) -> None:
    """Keep this process on `cores`: the threads that there are, and those that they start; UsageError if that cannot be."""
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError(f"this system ({sys.platform}) has no way to keep a process on some cores: leave --cores out")
    allowed = os.sched_getaffinity(0)
    strange = sorted(set(cores) - allowed)
    if strange:
        raise UsageError(
            f"--cores: this process cannot run on core {strange[0]}; it may use {', '.join(map(str, sorted(allowed)))}"
        )
    tasks = Path("/proc/self/task")
    threads = [int(task.name) for task in tasks.iterdir()] if tasks.is_dir() else []
    os.sched_setaffinity(0, cores)
    for thread in threads:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            os.sched_setaffinity(thread, cores)
