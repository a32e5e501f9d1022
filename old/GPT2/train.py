#!/usr/bin/env python3
"""Launcher: train a GPT-2."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "old")]

from mdi.cli import launch, leave  # noqa: E402

if __name__ == "__main__":
    leave(launch("train", module_name="gpt.commands.gpt2_train"))
