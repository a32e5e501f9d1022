#!/usr/bin/env python3
"""Launcher: `mdi serve`."""

from mdi.cli import launch, leave

if __name__ == "__main__":
    leave(launch("serve"))
