"""Chooses a node's device and number formats. Names are those of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from mdi.checkpoint.packing import Packing
from mdi.checkpoint.weights import own_packing
from mdi.errors import MdiError, UsageError
from mdi.host.torch_use import load_torch, may_have_gpu
from mdi.kernels import library
from mdi.kernels.blocks import why_not_in_kernels
from mdi.kernels.page_sizes import cache_type_named
from mdi.kernels.weight_formats import ROUNDED, check_packed
from mdi.spec.cluster import DTYPES, check_device, check_dtype


def check_format(name: str | None, device: str) -> None:
    """Raises UsageError if a weight format is unknown or not for this device."""
    check_packed(name)
    if name is None or stays_packed(name, device):
        return
    if name in ROUNDED:
        raise UsageError(
            f"the weight format {name} is for the CPU and for GPUs of NVIDIA; on {device} use --dtype instead"
        )
    raise UsageError(f"the weight format {name} is for the CPU's kernels; on {device} use --dtype instead")


def stays_packed(name: str | None, device: str) -> bool:
    """Whether weights stay in a format on this device; otherwise they are unpacked while they are loaded."""
    return device == "cpu" or (name in ROUNDED and device.startswith("cuda"))


def choose_device(wanted: str | None) -> str:
    """The requested device, else a GPU if there is one (cuda, mps), else the CPU.

    Raises:
        UsageError: this machine does not have it.
    """
    if wanted is None or wanted == "auto":
        return _best_device() if may_have_gpu() else "cpu"
    check_device(wanted)
    name, _, index = wanted.partition(":")
    if name == "cpu":
        return name
    load_torch(f"the device {wanted!r}")
    import torch

    if name == "cuda":
        n_devices = torch.cuda.device_count()
        if int(index or 0) >= n_devices:
            raise UsageError(f"device {wanted!r}: this machine has {n_devices} CUDA devices that torch can use")
    elif not torch.backends.mps.is_available():
        raise UsageError(f"device {wanted!r}: torch finds no Apple GPU on this machine")
    return wanted


def _best_device() -> str:
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def devices() -> list[str]:
    """All that a node on this machine can compute on."""
    if not may_have_gpu():
        return ["cpu"]
    import torch

    found = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    return [*found, "mps"] if torch.backends.mps.is_available() else found


def load_kernels() -> None:
    """Compile the kernels if they are new, and look for GPUs; this may take long. Errors are reported when a run needs them."""
    with contextlib.suppress(MdiError):
        library.load()
    devices()


def choose_dtype(wanted: str | None, stored: str, device: str, is_quantized: bool = False) -> str:
    """The number format to compute in.

    Without a wish: on a GPU what the checkpoint is stored in; on a CPU, bfloat16 where the checkpoint is bfloat16 and the
    processor multiplies it natively, else float32, which loses nothing and, where float16 is emulated, is faster.

    Args:
        is_quantized: whether weights are in a format whose kernels take and give float32.

    Raises:
        UsageError: unknown, or the device cannot compute in it.
    """
    name = check_dtype(wanted)
    if device == "cpu":
        if name is None and stored == "bfloat16" and not is_quantized and cpu_multiplies_bfloat16():
            return "bfloat16"
        return name or "float32"
    import torch

    is_cuda = device.startswith("cuda")
    if name is None:
        if stored == "bfloat16" and is_cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
            return "float16"
        return stored if stored in DTYPES else "float32"
    if name == "bfloat16" and is_cuda and not torch.cuda.is_bf16_supported():
        raise UsageError(f"the device {device} cannot compute in bfloat16: use float16 or float32")
    return name


def why_torch(config: Mapping[str, Any] | None, device: str, dtype: str | None) -> str | None:
    """Why this node does not compute blocks in the kernels; None if it does. The arguments are those of `why_not_kernels`."""
    if (reason := why_not_kernels(config, device, dtype)) is not None:
        return reason
    return None if library.load() is not None else f"a node without kernels ({library.why_not()})"


def why_not_kernels(config: Mapping[str, Any] | None, device: str, dtype: str | None) -> str | None:
    """Why no node whatsoever computes blocks so in the kernels; None if those that have kernels do.

    Args:
        config: litgpt's Config as a plain dict; None for a model that is none of litgpt's.
        dtype: the user's choice; the kernels compute in float32.
    """
    if config is None:
        return "a model that is not litgpt's"
    if device != "cpu":
        return f"the device {device}"
    if check_dtype(dtype) not in (None, "float32"):
        return f"--dtype {dtype}"
    return why_not_in_kernels(config)


def choose_packing(stored: str, blocks: str | None, head: str | None, clips: bool = False) -> Packing:
    """Choose the packed formats that the kernels read.

    Args:
        stored: type of the checkpoint's weights.
        blocks, head: formats that were asked for; None takes those that lose nothing.
        clips: see Packing.
    """
    own = own_packing(stored)
    return Packing(blocks or own.blocks, head or own.head, clips)


def choose_kv_dtype(wanted: str, computed: str, device: str, why_torch: str | None) -> str:
    """Number type of caches (kernels.page_sizes.CACHE_TYPES): with "auto", the type that the node computes in.

    Args:
        why_torch: why the kernels do not compute, see `why_torch`; None if they do.

    Raises:
        UsageError: unknown, or the device does not have it, or torch computes, which has no caches in int8.
    """
    if wanted == "auto":
        return cache_type_named(computed)
    if wanted == "int8":
        if why_torch is not None:
            raise UsageError(f"--kv-dtype int8 is for the kernels, which do not compute {why_torch}: use bf16 or fp16")
        return wanted
    return cache_type_named(choose_dtype(wanted, "float32", device))


def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has bfloat16 matrix instructions that torch uses (AVX512-BF16, AMX, Arm BF16)."""
    load_torch("--dtype auto")
    import torch

    check = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    if check is not None and check():
        return True
    arm = getattr(torch.cpu, "_is_arm_bf16_supported", None)  # absent in some releases
    return bool(arm is not None and arm())
