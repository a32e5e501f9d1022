"""Imported first by scripts of this folder: the program and its tests are found from a bare interpreter, too."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "old", "benchmarks", "tests", "tests/discovery", "tests/faults", "tests/placement")

sys.path[:0] = [path for name in FOLDERS if (path := str(ROOT / name)) not in sys.path]
