#!/usr/bin/env python3
"""Launcher: `mdi local-ring`."""

import sys

from mdi.cli import launch

if __name__ == "__main__":
    sys.exit(launch("local-ring"))
