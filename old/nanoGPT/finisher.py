#!/usr/bin/env python3
"""Launcher: the finisher of a NanoGPT ring."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "old")]

from mdi.cli import launch, leave  # noqa: E402

if __name__ == "__main__":
    leave(launch("finisher", module_name="gpt.commands.nano_finisher"))
