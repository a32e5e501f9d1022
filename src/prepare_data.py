#!/usr/bin/env python3
"""Launcher: `mdi prepare-data`."""

from mdi.cli import launch, leave

if __name__ == "__main__":
    leave(launch("prepare-data"))
