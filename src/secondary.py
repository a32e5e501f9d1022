#!/usr/bin/env python3
"""Launcher: `mdi secondary`."""

from mdi.cli import launch, leave

if __name__ == "__main__":
    leave(launch("secondary"))
