"""Loads torch if a node needs it. Torch is large, and a node with all blocks in the kernels does without."""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import sys
from pathlib import Path

from mdi.errors import INSTALL_ALL, UsageError
from mdi.host.processor import warn_of_processor
from mdi.host.threads import tell_torch

# Of drivers of NVIDIA, NVIDIA's Jetson, AMD, and of Windows under WSL.
_DRIVERS = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/kfd", "/dev/dxg")

logger = logging.getLogger("mdi")


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
        import litgpt  # noqa: F401
        import torch  # noqa: F401
    except ModuleNotFoundError as e:
        if e.name not in ("torch", "litgpt"):
            raise
        raise UsageError(f"{why} needs {e.name}, which is not installed here: {INSTALL_ALL}") from None
    tell_torch()
    if is_new:
        warn_of_processor()
