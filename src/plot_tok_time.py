#!/usr/bin/env python3
"""Launcher: `mdi plot-tok-time`."""

import sys

from mdi.cli import launch

if __name__ == "__main__":
    sys.exit(launch("plot-tok-time"))
