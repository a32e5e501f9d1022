#!/usr/bin/env python3
"""Launcher: `mdi mem-monitor`."""

import sys

from mdi.cli import launch

if __name__ == "__main__":
    sys.exit(launch("mem-monitor"))
