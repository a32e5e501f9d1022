#!/usr/bin/env python3
"""Launcher: `mdi local-ring`."""

from mdi.cli import launch, leave

if __name__ == "__main__":
    leave(launch("local-ring"))
