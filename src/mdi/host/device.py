"""Chooses a node's device and number formats, and loads torch if that needs it. Names are those of torch."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import platform
import sys
from pathlib import Path

from mdi.checkpoint.packing import Packing
from mdi.checkpoint.weights import own_packing
from mdi.errors import INSTALL_ALL, MdiError, UsageError
from mdi.host.threads import tell_torch
from mdi.kernels import library
from mdi.kernels.blocks import why_not_in_kernels
from mdi.kernels.format_maps import with_table
from mdi.kernels.weight_formats import PACKED, ROUNDED, check_packed, is_tied
from mdi.model.caches import cache_type_named
from mdi.model.plain import ModelConfig
from mdi.spec.cluster import DTYPES, check_device, check_dtype
from mdi.spec.combinations import TORCH, refuse

logger = logging.getLogger("mdi")

CPUINFO = Path("/proc/cpuinfo")


def warn_of_processor() -> None:
    """Say so before a matrix product ends the process without a word."""
    import torch

    try:
        cpuinfo = CPUINFO.read_text(encoding="utf-8", errors="replace") if sys.platform == "linux" else ""
    except OSError:
        return
    if (notice := processor_notice(cpuinfo, torch.__config__.show(), torch.__version__)) is not None:
        logger.warning("%s", notice)


def processor_notice(cpuinfo: str, build: str, version: str) -> str | None:
    """A warning for the user; None if nothing is known against this processor.

    NVIDIA's NVPL, the BLAS of PyPI's ARM builds since 2.11, needs the atomic instructions of ARMv8.1, which a
    Raspberry Pi 4 and every older board are without.

    Args:
        cpuinfo: the text of /proc/cpuinfo.
        build: of torch.__config__.show().
    """
    features = [line.split() for line in cpuinfo.splitlines() if line.startswith("Features")]
    lacks_atomics = bool(features) and any("asimd" in f and "atomics" not in f for f in features)
    if not lacks_atomics or "BLAS_INFO=nvpl" not in build:
        return None
    return (
        f'torch {version} is built for ARM servers: on this processor matrix products may end with "Illegal instruction". '
        "Install the build that runs here: pip install -r requirements.txt (see docs/setup-edge.md)"
    )


# Of drivers of NVIDIA, NVIDIA's Jetson, AMD, and of Windows under WSL.
_DRIVERS = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/kfd", "/dev/dxg")


def has_torch() -> bool:
    """Whether torch is installed; it is not loaded."""
    try:
        return "torch" in sys.modules or importlib.util.find_spec("torch") is not None
    except ImportError:
        return False


def may_have_gpu() -> bool:
    """Whether it is worth loading torch to look for a GPU."""
    if not has_torch():
        return False
    if "torch" in sys.modules or sys.platform == "win32" or os.environ.get("CUDA_VISIBLE_DEVICES"):
        return True
    if sys.platform == "darwin":
        return platform.machine() == "arm64"
    return any(Path(driver).exists() for driver in _DRIVERS)


def load_torch(why: str) -> None:
    """Load torch, and have it compute with this node's threads.

    Args:
        why: what needs it, for the message: "the device cuda", ...

    Raises:
        UsageError: it is not installed.
    """
    is_new = "torch" not in sys.modules
    if is_new:
        logger.info("loading PyTorch: %s", why)  # which takes seconds
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as e:
        if e.name != "torch":
            raise
        raise UsageError(f"{why} needs torch, which is not installed here: {INSTALL_ALL}") from None
    tell_torch()
    if is_new:
        warn_of_processor()


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


def stays_packed(name: str | None, device: str, in_torch: bool = False) -> bool:
    """Whether weights stay in a format on this device; otherwise they are unpacked while they are loaded.

    Args:
        in_torch: whether torch computes, which has no mixtures and no types of GGUF files.
    """
    if name is not None and is_tied(name):
        name = with_table(name, None)
    if in_torch and name not in (None, *PACKED):
        return False
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


def why_torch(config: ModelConfig | None, device: str, dtype: str | None) -> str | None:
    """Why this node does not compute blocks in the kernels; None if it does. The arguments are those of `why_not_kernels`."""
    if (reason := why_not_kernels(config, device, dtype)) is not None:
        return reason
    return None if library.load() is not None else f"a node without kernels ({library.why_not()})"


def why_not_kernels(config: ModelConfig | None, device: str, dtype: str | None) -> str | None:
    """Why no node whatsoever computes blocks so in the kernels; None if those that have kernels do.

    Args:
        config: of the model; None for one that the kernels do not have.
        dtype: the user's choice; the kernels compute in float32.
    """
    if config is None:
        return "a model that is not litgpt's"
    if device != "cpu":
        return f"the device {device}"
    if check_dtype(dtype) not in (None, "float32"):
        return f"--dtype {dtype}"
    return why_not_in_kernels(config)


def choose_packing(
    stored: str, blocks: str | None, head: str | None, clips: bool = False, folds: bool = True
) -> Packing:  # fmt: skip
    """Choose the packed formats that the kernels read.

    Args:
        stored: type of the checkpoint's weights.
        blocks, head: formats that were asked for; None takes those that lose nothing.
        clips, folds: see Packing.
    """
    own = own_packing(stored)
    return Packing(blocks or own.blocks, head or own.head, clips, folds=folds)


def choose_kv_dtype(wanted: str, computed: str, device: str, why_torch: str | None) -> str:
    """Number type of caches (model.caches.CACHE_TYPES): with "auto", the type that the node computes in.

    Args:
        why_torch: why the kernels do not compute, see `why_torch`; None if they do.

    Raises:
        UsageError: unknown, or the device does not have it, or torch computes, which has no caches in int8.
    """
    if wanted == "auto":
        return cache_type_named(computed)
    if wanted == "int8":
        if why_torch is not None:
            refuse({"--kv-dtype int8": "--kv-dtype int8", TORCH: f"this node computes {why_torch}"})
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
