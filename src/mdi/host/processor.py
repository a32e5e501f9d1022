"""Whether this build of torch runs on this processor: some builds for ARM use instructions that small boards lack."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

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
