#!/usr/bin/env python3
"""Launcher: `mdi plot-tok-time`."""

from mdi.cli import launch, leave

if __name__ == "__main__":
    leave(launch("plot-tok-time"))
